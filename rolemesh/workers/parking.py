"""Off the device and back: what a role does with its tensors while another one of its group computes.

On CUDA they wait in pinned host memory; on the CPU, where device and host are the same memory, in a file
without a name. Tensors stay the objects that they are, tied ones tied: it is their storages that are emptied
and filled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import BufferedRandom
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol, cast

import torch
from torch import Tensor, UntypedStorage, nn

from rolemesh.wire.allocator import give_back_free_memory

PIECE_BYTES = 16 << 20  # of pinned memory, of which torch takes powers of two
BUFFER_BYTES = 256 << 10  # in which small tensors are gathered for the file; a larger one passes it by


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, gradients and buffers."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


class Parking:
    """The tensors of one role on one device.

    Nobody may compute with them between `park` and `unpark`; both belong on the thread that does. A tensor that
    shares memory with one of them is to be one of them.

    Args:
        tensors: asked at each `park`; an optimizer has no state before its first step.
        device: where they are.
        directory: for the file, made if absent. On a disk: a directory in memory would release nothing.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, directory: Path) -> None:
        self._tensors, self._device = tensors, device
        self._shelf: _Shelf = _Pinned() if device.type == "cuda" else _File(directory)
        self._parked: list[tuple[UntypedStorage, int]] = []

    def park(self) -> int:
        """Moves the tensors away and releases their memory.

        Returns:
            bytes moved; 0 where they were away already.

        Raises:
            OSError: the file could not be written. Every tensor is where it was.
            RuntimeError: there is no memory to begin with. Every tensor is where it was.
        """
        if self._parked:
            return 0
        shared = _by_storage(self._tensors())
        # All memory before the first tensor moves: a tensor that has moved holds nothing yet.
        own = [storage if storage.resizable() else _like(storage) for storage, _ in shared]
        self._shelf.put([_bytes(storage) for storage, _ in shared])
        for (storage, tensors), mine in zip(shared, own, strict=True):
            if mine is not storage:
                _move(tensors, mine)
            self._parked.append((mine, storage.nbytes()))
        self._release()
        return sum(num_bytes for _, num_bytes in self._parked)

    def unpark(self) -> int:
        """Takes memory again and brings the tensors back, bit for bit.

        Returns:
            bytes moved; 0 where they were here already.

        Raises:
            RuntimeError: there is no memory. Every tensor is still away, and it may be tried again.
        """
        try:
            for storage, num_bytes in self._parked:
                storage.resize_(num_bytes)
            self._shelf.take([_bytes(storage) for storage, _ in self._parked])
        except BaseException:
            self._release()
            raise
        moved = sum(num_bytes for _, num_bytes in self._parked)
        self._parked = []
        return moved

    def _release(self) -> None:
        for storage, _ in self._parked:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            give_back_free_memory()


def _by_storage(tensors: Iterable[Tensor]) -> list[tuple[UntypedStorage, list[Tensor]]]:
    """What holds the tensors' bytes, each once, and which tensors it holds."""
    found: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), (storage, []))[1].append(tensor)
    return list(found.values())


def _like(storage: UntypedStorage) -> UntypedStorage:
    """As much memory, still to be filled, that can be resized. What a file is mapped to cannot be, as of a
    model that was just loaded, nor what numpy has seen."""
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()


def _move(tensors: Sequence[Tensor], storage: UntypedStorage) -> None:
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(flat: Tensor) -> memoryview:
    """The bytes themselves. Not by way of numpy: a storage that numpy has seen can never be resized."""
    return memoryview((ctypes.c_ubyte * len(flat)).from_address(flat.data_ptr())).cast("B")


class _Shelf(Protocol):
    """Holds the bytes of what is parked."""

    def put(self, sources: Sequence[Tensor]) -> None:
        """Copies them in; uint8, of one dimension."""
        ...

    def take(self, targets: Sequence[Tensor]) -> None:
        """Copies them out, in the same order and sizes."""
        ...


class _Pinned:
    """Pinned host memory, kept for the next time: to pin it costs more than to copy into it."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def put(self, sources: Sequence[Tensor]) -> None:
        missing = -(-sum(len(source) for source in sources) // PIECE_BYTES) - len(self._pieces)
        self._pieces += [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(missing)]
        for part, piece in self._pairs(sources):
            piece.copy_(part, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def take(self, targets: Sequence[Tensor]) -> None:
        for part, piece in self._pairs(targets):
            part.copy_(piece, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def _pairs(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the tensors, laid end to end, with the pinned bytes that belong to them."""
        at = 0
        for tensor in tensors:
            start = 0
            while start < len(tensor):
                piece, offset = divmod(at, PIECE_BYTES)
                size = min(len(tensor) - start, PIECE_BYTES - offset)
                yield tensor[start : start + size], self._pieces[piece][offset : offset + size]
                start, at = start + size, at + size


class _File:
    """A file without a name, which the system removes however the process ends. It is let go after each use:
    what the disk has not got by then, it need never get."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BufferedRandom | None = None

    def put(self, sources: Sequence[Tensor]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as unless_whole:
            file = unless_whole.enter_context(TemporaryFile(dir=self._directory, buffering=BUFFER_BYTES))
            for source in sources:
                file.write(_memory(source))
            file.flush()
            unless_whole.pop_all()
        self._file = cast(BufferedRandom, file)

    def take(self, targets: Sequence[Tensor]) -> None:
        if self._file is None:  # nothing was put
            assert not targets
            return
        self._file.seek(0)
        for target in targets:
            read = self._file.readinto(_memory(target))
            assert read == len(target), f"the file of parked tensors ended after {read} of {len(target)} bytes"
        self._file.close()
        self._file = None
