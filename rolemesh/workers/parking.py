"""Move a role's tensors off the device and back while another role of its group computes.

On CUDA the tensors are kept in pinned host memory. On a CPU, where device and host share memory, they are kept
in an unnamed file. The tensor objects stay the same, and tied tensors stay tied: only their storages are
emptied and refilled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import BufferedRandom
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol, cast

import torch
from torch import Tensor, UntypedStorage, nn

from rolemesh.ranks.sharding import local, memory_of, reshard
from rolemesh.wire.allocator import give_back_free_memory

PIECE_BYTES = 16 << 20  # of pinned memory; a power of two, because torch allocates powers of two
BUFFER_BYTES = 256 << 10  # the file's write buffer, for small tensors; larger ones bypass it


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield a model's parameters, gradients and buffers; of a sharded one this rank's parts, after resharding.

    Args:
        model: the Root of one that may be sharded.
    """
    reshard(model)
    for parameter in model.parameters():
        yield local(parameter)
        if parameter.grad is not None:
            yield local(parameter.grad)
    yield from model.buffers()


class Parking:
    """Parks the tensors of one role on one device.

    Do not compute with the tensors between `park` and `unpark`. Call both on the thread that computes. Every
    tensor that shares memory with one of the tensors must be among them.

    Args:
        tensors: called at each `park`, because e.g. an optimizer has no state before its first step. Those on
            another device, e.g. offloaded weights, stay as they are.
        device: the device of the tensors.
        directory: for the file, created if absent. It must be on a disk: a directory in memory would release no
            memory.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, directory: Path) -> None:
        self._tensors, self._device = tensors, device
        self._shelf: _Shelf = _Pinned() if device.type == "cuda" else _File(directory)
        self._parked: list[tuple[UntypedStorage, int]] = []

    def park(self) -> int:
        """Move the tensors off the device and release their memory.

        Returns:
            bytes moved; 0 if they are parked already.

        Raises:
            OSError: the file could not be written. The tensors are unchanged.
            RuntimeError: there is not enough memory for the move. The tensors are unchanged.
        """
        if self._parked:
            return 0
        shared = _by_storage(t for t in self._tensors() if t.device.type == self._device.type)
        # Allocate all memory before the first tensor is moved: its new storage is empty until `take`.
        own = [storage if storage.resizable() else _like(storage) for storage, _ in shared]
        self._shelf.put([_bytes(storage) for storage, _ in shared])
        for (storage, tensors), mine in zip(shared, own, strict=True):
            if mine is not storage:
                _move(tensors, mine)
            self._parked.append((mine, storage.nbytes()))
        self._release()
        return sum(num_bytes for _, num_bytes in self._parked)

    def unpark(self) -> int:
        """Allocate memory and restore the tensors, bit for bit.

        Returns:
            bytes moved; 0 if they are not parked.

        Raises:
            RuntimeError: there is not enough memory. The tensors stay parked, and the call may be retried.
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
    """List each storage of the tensors once, with the tensors that it holds."""
    found: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), (storage, []))[1].append(tensor)
    return list(found.values())


def _like(storage: UntypedStorage) -> UntypedStorage:
    """Allocate a resizable storage of the same size, with undefined content.

    A storage cannot be resized if it is memory-mapped from a file (a model that was just loaded), or if numpy
    has accessed it.
    """
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()


def _move(tensors: Sequence[Tensor], storage: UntypedStorage) -> None:
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Shelf(Protocol):
    """Holds the bytes of parked tensors."""

    def put(self, sources: Sequence[Tensor]) -> None:
        """Copy tensors in; each is uint8 of one dimension."""
        ...

    def take(self, targets: Sequence[Tensor]) -> None:
        """Copy the bytes out, in the same order and sizes."""
        ...


class _Pinned:
    """Pinned host memory. It is kept for reuse, because pinning costs more than copying."""

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
        """Yield parts of the tensors, laid end to end, with the pinned bytes of each part."""
        at = 0
        for tensor in tensors:
            start = 0
            while start < len(tensor):
                piece, offset = divmod(at, PIECE_BYTES)
                size = min(len(tensor) - start, PIECE_BYTES - offset)
                yield tensor[start : start + size], self._pieces[piece][offset : offset + size]
                start, at = start + size, at + size


class _File:
    """An unnamed file, which the system removes however the process ends.

    It is closed after each use, so data that has not reached the disk by then is never written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BufferedRandom | None = None

    def put(self, sources: Sequence[Tensor]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as unless_whole:
            file = unless_whole.enter_context(TemporaryFile(dir=self._directory, buffering=BUFFER_BYTES))
            for source in sources:
                file.write(memory_of(source))
            file.flush()
            unless_whole.pop_all()
        self._file = cast(BufferedRandom, file)

    def take(self, targets: Sequence[Tensor]) -> None:
        if self._file is None:  # nothing was put
            assert not targets
            return
        self._file.seek(0)
        for target in targets:
            read = self._file.readinto(memory_of(target))
            assert read == len(target), f"the file of parked tensors ended after {read} of {len(target)} bytes"
        self._file.close()
        self._file = None
