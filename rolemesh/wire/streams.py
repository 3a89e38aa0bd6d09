"""What servicers and clients call: a batch to messages of a gRPC stream, and back.

The methods that carry `stream Frame` are registered with bytes in and bytes out, since frames are written and
read by hand (frame.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from rolemesh import threads
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.wire.carrier import Carrier, FrameCarrier, Terms
from rolemesh.wire.codec import decode, encode
from rolemesh.wire.header import Header

# From here on the codec works in a thread, so that other calls of the process go on. All that the work grows
# with is counted: header, region, and what the tensors unpack to.
LARGE_BYTES = 1 << 20
CELL_BYTES = 256  # that a cell is taken for before it is encoded
CARRIER: Carrier = FrameCarrier()
ANY = Terms()


async def send(batch: DataProto) -> AsyncIterator[bytes]:
    """The batch as frames of about 1 MiB; a small one is a single frame.

    Raises:
        InvalidBatch: a column, cell or meta value has no place on the wire.
    """
    work = sum(tensor.nbytes for tensor in batch.tensors.values())
    work += CELL_BYTES * len(batch) * len(batch.non_tensors)
    encoded = await asyncio.to_thread(encode, batch) if work >= LARGE_BYTES else encode(batch)
    for message in CARRIER.send(encoded):
        yield message


async def receive(frames: AsyncIterator[bytes], terms: Terms = ANY) -> DataProto:
    """The one batch of a stream, which is decoded when the stream has ended.

    Raises:
        InvalidBatch: the stream holds none, ends within it, goes on after it, or is no batch that the terms
            allow.
        RoleBusy: there is no memory for it.
    """
    messages = aiter(frames)
    try:
        return await _one_batch(messages, terms)
    finally:
        if isinstance(messages, AsyncGenerator):  # it would hold the last message
            await messages.aclose()


async def receive_batches(frames: AsyncIterator[bytes]) -> AsyncIterator[DataProto]:
    """The batches of a stream, each as soon as it is whole.

    Raises:
        InvalidBatch: the stream ends within a batch, or is no batch.
    """
    async for header, region in CARRIER.receive(frames, ANY):
        yield await _decoded(header, region)


async def _one_batch(messages: AsyncIterator[bytes], terms: Terms) -> DataProto:
    whole: tuple[Header, memoryview] | None = None
    async for arrived in CARRIER.receive(messages, terms):
        whole = arrived
        async for _ in messages:
            raise InvalidBatch("the stream goes on after its batch")
    if whole is None:
        raise InvalidBatch("the stream ended before a batch began")
    return await _decoded(*whole)


async def _decoded(header: Header, region: memoryview) -> DataProto:
    large = header.work_bytes >= LARGE_BYTES
    return await threads.run_on(None, decode, header, region) if large else decode(header, region)
