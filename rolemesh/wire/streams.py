"""Sends and receives batches as messages of a gRPC stream, for servicers and clients.

Methods that carry `stream Frame` are registered with bytes in and bytes out, because frame.py serializes and
parses frames by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from rolemesh import threads
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.wire.carrier import Carrier, FrameCarrier, ReceiveConditions
from rolemesh.wire.codec import decode, encode
from rolemesh.wire.header import Header

# Batches of this size or more are encoded and decoded in a thread, so that the process's other calls continue.
# The size counts everything that the work grows with: header, region and unpacked tensors.
LARGE_BYTES = 1 << 20
CELL_BYTES = 256  # estimate for a non-tensor cell before it is encoded
CARRIER: Carrier = FrameCarrier()
ANY = ReceiveConditions()


async def send(batch: DataProto) -> AsyncIterator[bytes]:
    """Yield the batch as frames of about 1 MiB; a small batch is a single frame.

    Raises:
        InvalidBatch: a column, cell or meta value cannot be sent.
    """
    work = sum(tensor.nbytes for tensor in batch.tensors.values())
    work += CELL_BYTES * len(batch) * len(batch.non_tensors)
    encoded = await asyncio.to_thread(encode, batch) if work >= LARGE_BYTES else encode(batch)
    for message in CARRIER.send(encoded):
        yield message


async def receive(frames: AsyncIterator[bytes], conditions: ReceiveConditions = ANY) -> DataProto:
    """Receive the only batch of a stream. It is decoded once the stream has ended.

    Raises:
        InvalidBatch: the stream holds no batch, ends within it, continues after it, or its batch violates the
            conditions.
        RoleBusy: there is no memory for it.
    """
    messages = aiter(frames)
    try:
        return await _one_batch(messages, conditions)
    finally:
        if isinstance(messages, AsyncGenerator):  # left open, it would keep the last message
            await messages.aclose()


async def receive_batches(
    frames: AsyncIterator[bytes], conditions: ReceiveConditions = ANY
) -> AsyncIterator[DataProto]:
    """Yield the batches of a stream, each as soon as it is whole.

    Raises:
        InvalidBatch: the stream ends within a batch, or holds something else, or a batch violates the
            conditions.
    """
    async for header, region in CARRIER.receive(frames, conditions):
        yield await _decoded(header, region)


async def _one_batch(messages: AsyncIterator[bytes], conditions: ReceiveConditions) -> DataProto:
    whole: tuple[Header, memoryview] | None = None
    async for arrived in CARRIER.receive(messages, conditions):
        whole = arrived
        async for _ in messages:
            raise InvalidBatch("the stream continues after its batch; expected one batch")
    if whole is None:
        raise InvalidBatch("the stream ended before a batch began")
    return await _decoded(*whole)


async def _decoded(header: Header, region: memoryview) -> DataProto:
    large = header.work_bytes >= LARGE_BYTES
    return await threads.run_on(None, decode, header, region) if large else decode(header, region)
