"""Carriers move a batch's header and region from one process to another.

A carrier turns them into messages on a gRPC call's stream, and back. `FrameCarrier`, the only one so far, puts
all bytes into those messages. A faster carrier (shared memory, RDMA) would send only where to fetch the region.
Header and region stay the same, and so do codec, servicers and clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolemesh import threads
from rolemesh.errors import InvalidBatch
from rolemesh.wire.allocator import LARGE_COPY, GrowingBuffer
from rolemesh.wire.codec import Encoded
from rolemesh.wire.frame import join_frame, split_frame
from rolemesh.wire.header import Header, read_header
from rolemesh.wire.limits import MAX_REGION_BYTES

FRAME_BYTES = 1 << 20  # the fastest size for gRPC in Python: docs/wire.md


@dataclass(frozen=True)
class ReceiveConditions:
    """Conditions under which a receiver accepts batches.

    Args:
        max_bytes: the largest region accepted.
        check: raises InvalidBatch if the header's batch is unwanted; nothing more of that batch is kept then.
        reserve: called with the bytes that the receiver holds, before they are allocated; raises RoleBusy if
            there is no memory for them.
    """

    max_bytes: int = MAX_REGION_BYTES
    check: Callable[[Header], None] = lambda header: None
    reserve: Callable[[int], None] = lambda num_bytes: None


class Carrier(Protocol):
    """Moves batches over the messages of one direction of a call."""

    def send(self, batch: Encoded) -> Iterator[bytes]:
        """Yield the messages to write, in order."""
        ...

    def receive(
        self, messages: AsyncIterator[bytes], conditions: ReceiveConditions
    ) -> AsyncIterator[tuple[Header, memoryview]]:
        """Yield header and region of each batch. Memory for a region is allocated as its bytes arrive.

        Raises:
            InvalidBatch: the messages are malformed, end within a batch, exceed a limit
                (rolemesh/wire/limits.py), or violate the conditions.
            RoleBusy: the receiver has no memory for them.
        """
        ...


class FrameCarrier:
    """Carries the region's bytes inside the gRPC messages, in frames of about 1 MiB."""

    def send(self, batch: Encoded) -> Iterator[bytes]:
        header: bytes | None = batch.header
        for pieces, num_bytes in _pieces(batch.buffers, FRAME_BYTES):
            yield join_frame(header, pieces, num_bytes)
            header = None
        if header is not None:
            yield join_frame(header, (), 0)

    async def receive(
        self, messages: AsyncIterator[bytes], conditions: ReceiveConditions
    ) -> AsyncIterator[tuple[Header, memoryview]]:
        header: Header | None = None
        region: GrowingBuffer | None = None
        async for message in messages:
            first, payload = split_frame(message)
            if (first is None) != (region is not None):
                raise InvalidBatch(
                    "a batch should begin with a header; its first frame has none"
                    if first is None
                    else "a header came in the middle of a batch"
                )
            if first is not None:
                header = read_header(first)
                conditions.check(header)
                region = GrowingBuffer(header.region_bytes, conditions.max_bytes)
            elif not payload.nbytes:
                raise InvalidBatch("a frame has neither header nor payload")
            assert header is not None
            assert region is not None
            conditions.reserve(region.memory_for(payload))
            # A long copy runs in a thread, so that the process's other calls continue.
            if region.moves_for(payload) > LARGE_COPY:
                await threads.run_on(None, region.write, payload)
            else:
                region.write(payload)
            # Release the frame (up to 64 MiB) before waiting for the next one or decoding the batch.
            del message, first, payload
            if region.is_whole:
                whole = region.whole()
                region = None
                conditions.reserve(header.region_bytes + header.unpacked_bytes)
                yield header, whole
        if region is not None:
            region.whole()


def _pieces(buffers: Sequence[memoryview], size: int) -> Iterator[tuple[list[memoryview], int]]:
    """Yield the buffers' bytes in order, as groups of slices; each group but the last totals `size` bytes."""
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
                pieces = []
                held = 0
    if held:
        yield pieces, held
