"""Batches of a call, held against their method's declaration: requests for the guard, answers for a client.
Apart from requests.py, as it imports torch: a server without batches, the controller's, starts without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from rolemesh import threads
from rolemesh.dataproto import DataProto
from rolemesh.door import Door
from rolemesh.errors import InvalidBatch
from rolemesh.rpc.contract import Rpc
from rolemesh.wire.carrier import Terms
from rolemesh.wire.header import Header
from rolemesh.wire.room import Stay
from rolemesh.wire.streams import LARGE_BYTES, receive

R = TypeVar("R")

LARGE_ROWS = 10_000  # from here on, as from LARGE_BYTES, a batch is looked through in a thread


async def batch_of(rpc: Rpc, frames: AsyncIterator[bytes], door: Door, stay: Stay) -> DataProto:
    """The one batch of a request, as its method declares it.

    Args:
        stay: the call's memory.

    Raises:
        InvalidBatch: the frames are no batch, or not one that the method takes, or one that never has room.
        RoleBusy: there is no memory for it.
    """

    def check(header: Header) -> None:
        unpacked, most = header.unpacked_bytes, stay.room.total_bytes
        if header.region_bytes + unpacked > most:
            raise InvalidBatch(
                f"a batch of {header.region_bytes} bytes that unpacks to {unpacked} more; this process has "
                f"room for {most}. Send fewer rows at once, or give the role more memory"
            )
        tensors = {column.name: (column.dtype, column.shape) for column in header.tensors}
        door.check_claim(rpc.name, header.message.num_rows, tensors)

    try:
        batch = await receive(frames, Terms(check=check, stay=stay))
    except InvalidBatch as error:
        method = door.methods[rpc.name]
        raise InvalidBatch(f"{method.role}.{method.name}: {error}") from error
    return await _looked_through(batch, partial(door.admit, rpc.name, batch))


async def check_answer(rpc: Rpc, answer: DataProto, door: Door, request: DataProto) -> None:
    """Raises RoleFailed unless a batch is what the method answers to the request (Door.check_answer)."""
    await _looked_through(answer, partial(door.check_answer, rpc.name, answer, request))


async def _looked_through(batch: DataProto, check: Callable[[], R]) -> R:
    large = len(batch) >= LARGE_ROWS or sum(t.nbytes for t in batch.tensors.values()) >= LARGE_BYTES
    return await threads.run_on(None, check) if large else check()
