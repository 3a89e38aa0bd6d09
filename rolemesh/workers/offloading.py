"""Move a role's tensors off the device and back while another role of its group computes.

On CUDA the tensors are kept in pinned host memory. On a CPU, where device and host share memory, they are kept
in an unnamed file. The tensor objects stay the same, and tied tensors stay tied: only their storages are
emptied and refilled.

Pinned memory keeps its copy while the tensors are on the device. Tensors that have not changed since then are
not copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedRandom
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

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


class Offloader:
    """Moves the tensors of one role off one device and back.

    Do not compute with the tensors between `offload` and `reload`. Call both on the thread that computes. Every
    tensor that shares memory with one of the tensors must be among them.

    Args:
        tensors: called at each `offload`, because e.g. an optimizer has no state before its first step. Those
            on another device, e.g. offloaded weights, stay as they are. A write that torch does not count in a
            tensor's version must be counted by hand, as Optimizer does.
        device: the device of the tensors.
        directory: for the file, created if absent. It must be on a disk: a directory in memory would release no
            memory.
        buffer: where the bytes are kept; None: in pinned memory on CUDA, in the file on a CPU.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        directory: Path,
        *,
        buffer: OffloadBuffer | None = None,
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._buffer: OffloadBuffer = buffer or (HostBuffer() if device.type == "cuda" else _File(directory))
        self._offloaded: list[tuple[UntypedStorage, int]] = []
        self._kept: dict[int, _Copy] = {}  # by their place in the buffer

    def offload(self) -> int:
        """Move the tensors off the device and release their memory.

        Returns:
            bytes copied; 0 if they are offloaded already.

        Raises:
            OSError: the file could not be written. The tensors are unchanged.
            RuntimeError: there is not enough memory for the move. The tensors are unchanged.
        """
        if self._offloaded:
            return 0
        shared = _by_storage(t for t in self._tensors() if t.device.type == self._device.type)
        if not shared:
            return 0
        # Allocate all memory before the first tensor is moved: its new storage is empty until `take`.
        own = [storage if storage.resizable() else _like(storage) for storage, _ in shared]
        places = [*accumulate((storage.nbytes() for storage, _ in shared), initial=0)]
        changed = self._changed(places, shared)
        self._kept = {}  # until all is copied
        self._buffer.put(changed, places[-1])
        for place, (storage, tensors), mine in zip(places, shared, own, strict=False):
            if mine is not storage:
                _move(tensors, mine)
            self._offloaded.append((mine, storage.nbytes()))
            if self._buffer.keeps:
                self._kept[place] = _Copy.of(mine, tensors)
        self._release()
        return sum(len(source) for _, source in changed)

    def _changed(
        self, places: Sequence[int], shared: Sequence[tuple[UntypedStorage, list[Tensor]]]
    ) -> list[tuple[int, Tensor]]:
        """Return the storages of which the buffer has no current copy, each with its place."""
        return [
            (place, _bytes(storage))
            for place, (storage, tensors) in zip(places, shared, strict=False)
            if self._kept.get(place) != _Copy.of(storage, tensors)
        ]

    def reload(self) -> int:
        """Allocate memory and restore the tensors, bit for bit.

        Returns:
            bytes copied; 0 if they are not offloaded.

        Raises:
            RuntimeError: there is not enough memory. The tensors stay offloaded, and the call may be retried.
        """
        if not self._offloaded:
            return 0
        try:
            for storage, num_bytes in self._offloaded:
                storage.resize_(num_bytes)
            self._buffer.take([_bytes(storage) for storage, _ in self._offloaded])  # in order, from place 0
        except BaseException:
            self._release()
            raise
        moved = sum(num_bytes for _, num_bytes in self._offloaded)
        self._offloaded = []
        return moved

    def _release(self) -> None:
        for storage, _ in self._offloaded:
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


@dataclass(frozen=True)
class _Copy:
    """Identifies the storage and the state of which the buffer has a copy.

    Args:
        storage: a weak reference. While it is alive, no other storage has the same identity.
        num_bytes: of the storage.
        versions: torch's counts of the writes to each of its tensors.
    """

    storage: StorageWeakRef
    num_bytes: int
    versions: tuple[int, ...]

    @classmethod
    def of(cls, storage: UntypedStorage, tensors: Sequence[Tensor]) -> _Copy:
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return cls(reference, storage.nbytes(), tuple(tensor._version for tensor in tensors))


class OffloadBuffer(Protocol):
    """Holds the bytes of offloaded tensors, end to end.

    Attributes:
        keeps: whether it still has them after `take`.
    """

    keeps: bool

    def put(self, sources: Sequence[tuple[int, Tensor]], num_bytes: int) -> None:
        """Copy tensors in, each uint8 of one dimension, to its place; there are `num_bytes` in all."""
        ...

    def take(self, targets: Sequence[Tensor]) -> None:
        """Copy all bytes out, in the order of their places."""
        ...


class HostBuffer:
    """Host memory. It is kept for reuse, because pinning costs more than copying.

    Args:
        pinned: for copies from and to CUDA.
    """

    keeps = True

    def __init__(self, pinned: bool = True) -> None:
        self._pieces: list[Tensor] = []
        self._pinned = pinned

    def put(self, sources: Sequence[tuple[int, Tensor]], num_bytes: int) -> None:
        missing = -(-num_bytes // PIECE_BYTES) - len(self._pieces)
        pinned = self._pinned
        self._pieces += [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(missing)]
        for place, source in sources:
            for part, piece in self._pairs(place, source):
                piece.copy_(part, non_blocking=True)
        self._finish()

    def take(self, targets: Sequence[Tensor]) -> None:
        place = 0
        for target in targets:
            for part, piece in self._pairs(place, target):
                part.copy_(piece, non_blocking=True)
            place += len(target)
        self._finish()

    def _finish(self) -> None:
        if self._pinned:
            torch.cuda.current_stream().synchronize()

    def _pairs(self, place: int, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of a tensor with the memory of each part."""
        start = 0
        while start < len(tensor):
            piece, offset = divmod(place + start, PIECE_BYTES)
            size = min(len(tensor) - start, PIECE_BYTES - offset)
            yield tensor[start : start + size], self._pieces[piece][offset : offset + size]
            start += size


class _File:
    """An unnamed file, which the system removes however the process ends.

    It is closed after each use, so data that has not reached the disk by then is never written.
    """

    keeps = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BufferedRandom | None = None

    def put(self, sources: Sequence[tuple[int, Tensor]], num_bytes: int) -> None:
        assert sum(len(source) for _, source in sources) == num_bytes, "a file that keeps nothing gets all"
        self._directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as unless_whole:
            file = unless_whole.enter_context(TemporaryFile(dir=self._directory, buffering=BUFFER_BYTES))
            for _, source in sources:
                file.write(memory_of(source))
            file.flush()
            unless_whole.pop_all()
        self._file = cast(BufferedRandom, file)

    def take(self, targets: Sequence[Tensor]) -> None:
        assert self._file is not None, "nothing was put"
        self._file.seek(0)
        for target in targets:
            read = self._file.readinto(memory_of(target))
            assert read == len(target), (
                f"the file of offloaded tensors ends after {read} of {len(target)} bytes"
            )
        self._file.close()
        self._file = None
