"""How a header and a region get from one process to another.

A carrier turns them into messages on a gRPC call's stream and back. `FrameCarrier`, the one there is, puts all
bytes into those messages. A faster one (shared memory, RDMA) sends in them only where the region is to be
fetched; header and region, and so codec, servicers and clients, stay as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolemesh import threads
from rolemesh.errors import InvalidBatch
from rolemesh.wire.allocator import LARGE_COPY, Region
from rolemesh.wire.codec import Encoded
from rolemesh.wire.frame import join_frame, split_frame
from rolemesh.wire.header import Header, read_header
from rolemesh.wire.limits import MAX_REGION_BYTES
from rolemesh.wire.room import Stay

FRAME_BYTES = 1 << 20  # the fastest size for gRPC in Python: docs/wire.md


@dataclass(frozen=True)
class Terms:
    """On which a receiver takes batches.

    Args:
        max_bytes: the largest region accepted.
        check: raises InvalidBatch where a header is not of a batch that is wanted; no more of it is taken then.
        stay: counts the memory; None: nobody does.
    """

    max_bytes: int = MAX_REGION_BYTES
    check: Callable[[Header], None] = lambda header: None
    stay: Stay | None = None


class Carrier(Protocol):
    """Moves batches over the messages of one direction of a call."""

    def send(self, batch: Encoded) -> Iterator[bytes]:
        """The messages to write, in order."""
        ...

    def receive(self, messages: AsyncIterator[bytes], terms: Terms) -> AsyncIterator[tuple[Header, memoryview]]:
        """Header and region of each batch. Memory for a region is taken as its bytes arrive.

        Raises:
            InvalidBatch: the messages are not what `send` makes, end within a batch, go beyond a limit
                (rolemesh/wire/limits.py), or do not meet the terms.
            RoleBusy: the receiver has no memory for them.
        """
        ...


class FrameCarrier:
    """Frames of about 1 MiB: the region's bytes within the gRPC messages themselves."""

    def send(self, batch: Encoded) -> Iterator[bytes]:
        header: bytes | None = batch.header
        for pieces, num_bytes in _pieces(batch.buffers, FRAME_BYTES):
            yield join_frame(header, pieces, num_bytes)
            header = None
        if header is not None:
            yield join_frame(header, (), 0)

    async def receive(
        self, messages: AsyncIterator[bytes], terms: Terms
    ) -> AsyncIterator[tuple[Header, memoryview]]:
        header: Header | None = None
        region: Region | None = None
        async for message in messages:
            first, payload = split_frame(message)
            if (first is None) != (region is not None):
                raise InvalidBatch("a frame of no batch" if first is None else "a batch within a batch")
            if first is not None:
                header = read_header(first)
                terms.check(header)
                region = Region(header.region_bytes, terms.max_bytes)
            elif not payload.nbytes:
                raise InvalidBatch("an empty frame")
            assert header is not None
            assert region is not None
            if terms.stay is not None:
                terms.stay.resize(region.memory_for(payload))
            # In a thread where it takes long, so that other calls of the process go on.
            if region.moves_for(payload) > LARGE_COPY:
                await threads.run_on(None, region.write, payload)
            else:
                region.write(payload)
            # A frame of 64 MiB is not to be held while the next is waited for, or its batch is decoded.
            del message, first, payload
            if region.is_whole:
                whole, region = region.whole(), None
                if terms.stay is not None:
                    terms.stay.resize(header.region_bytes + header.unpacked_bytes)
                yield header, whole
        if region is not None:
            region.whole()


def _pieces(buffers: Sequence[memoryview], size: int) -> Iterator[tuple[list[memoryview], int]]:
    """The buffers' bytes in order, in lists of slices of `size` bytes together; the last may be shorter."""
    pieces: list[memoryview] = []
    held = 0
    for buffer in buffers:
        at = 0
        while at < buffer.nbytes:
            piece = buffer[at : at + size - held]
            pieces.append(piece)
            at += piece.nbytes
            held += piece.nbytes
            if held == size:
                yield pieces, held
                pieces, held = [], 0
    if held:
        yield pieces, held
