"""What servicers and clients call: a batch to messages of a gRPC stream, and back.

The methods that carry `stream Frame` are registered with bytes in and bytes out, since frames are written and
read by hand (frame.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.rpc.allocator import MAX_REGION_BYTES
from rolemesh.rpc.carrier import Carrier, FrameCarrier
from rolemesh.rpc.codec import decode, encode

LARGE_BYTES = 8 << 20  # from here on the codec works in a thread, so that other calls of the process go on
CARRIER: Carrier = FrameCarrier()


async def send(batch: DataProto) -> AsyncIterator[bytes]:
    """The batch as frames of about 1 MiB; a small one is a single frame.

    Raises:
        InvalidBatch: a column, cell or meta value has no place on the wire.
    """
    large = sum(tensor.nbytes for tensor in batch.tensors.values()) >= LARGE_BYTES
    encoded = await asyncio.to_thread(encode, batch) if large else encode(batch)
    for message in CARRIER.send(encoded):
        yield message


async def receive(frames: AsyncIterator[bytes], max_bytes: int = MAX_REGION_BYTES) -> DataProto:
    """The one batch of a stream.

    Raises:
        InvalidBatch: the stream holds none, ends within it, goes on after it, or is no batch.
    """
    batches = [batch async for batch in receive_batches(frames, max_bytes, limit=1)]
    if not batches:
        raise InvalidBatch("the stream ended before a batch began")
    return batches[0]


async def receive_batches(
    frames: AsyncIterator[bytes], max_bytes: int = MAX_REGION_BYTES, limit: int | None = None
) -> AsyncIterator[DataProto]:
    """The batches of a stream, each as soon as it is whole.

    Args:
        max_bytes: the largest region accepted.
        limit: the most batches accepted.

    Raises:
        InvalidBatch: the stream ends within a batch, holds more than `limit`, or is no batch.
    """
    count = 0
    async for header, region in CARRIER.receive(frames, max_bytes):
        count += 1
        if limit is not None and count > limit:
            raise InvalidBatch(f"the stream goes on after {limit} batch")
        large = region.nbytes >= LARGE_BYTES
        yield await asyncio.to_thread(decode, header, region) if large else decode(header, region)
