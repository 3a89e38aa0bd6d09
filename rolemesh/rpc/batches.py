"""Checks a call's batches against their method's declaration: requests for the guard, answers for a client.

This is not in serving/requests.py because it imports torch. The controller's server has no batches, and starts
without torch.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from rolemesh import threads
from rolemesh.batch_validation import BatchValidator
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, RoleFailed
from rolemesh.rpc.contract import Rpc
from rolemesh.wire.carrier import ReceiveConditions
from rolemesh.wire.header import Header
from rolemesh.wire.limits import MAX_ANSWER_ROW_BYTES
from rolemesh.wire.streams import LARGE_BYTES, receive

R = TypeVar("R")

LARGE_ROWS = 10_000  # batches of this many rows, or of LARGE_BYTES, are checked in a thread


async def batch_of(
    rpc: Rpc,
    frames: AsyncIterator[bytes],
    validator: BatchValidator,
    *,
    max_bytes: int,
    reserve: Callable[[int], None],
) -> DataProto:
    """Receive the one batch of a request, and reduce it to the columns that its method declares.

    Args:
        rpc: the method's description.
        frames: the request.
        validator: checks batches against the role's declarations.
        max_bytes: this process's memory for batches.
        reserve: called with the bytes that the call holds, before they are allocated.

    Raises:
        InvalidBatch: the frames are not a batch, the method does not accept it, or it exceeds max_bytes.
        RoleBusy: there is no memory for it now.
    """

    def check(header: Header) -> None:
        unpacked = header.unpacked_bytes
        if header.region_bytes + unpacked > max_bytes:
            raise InvalidBatch(
                f"a batch of {header.region_bytes} bytes that unpacks to {unpacked} more; this process has "
                f"room for {max_bytes}. Send fewer rows at once, or give the role more memory"
            )
        tensors = {column.name: (column.dtype, column.shape) for column in header.tensors}
        validator.check_header(rpc.name, header.message.num_rows, tensors)

    try:
        batch = await receive(frames, ReceiveConditions(check=check, reserve=reserve))
    except InvalidBatch as error:
        method = validator.methods[rpc.name]
        raise InvalidBatch(f"{method.role}.{method.name}: {error}") from error
    return await _run_check(batch, partial(validator.check_request, rpc.name, batch))


def answer_conditions(rpc: Rpc, validator: BatchValidator, request: DataProto) -> ReceiveConditions:
    """Return the conditions for answers to a request: the header may name only what the method declares.

    So an answer takes no more memory than its declaration: of its tensors, and MAX_ANSWER_ROW_BYTES for the
    other columns of a row.

    Args:
        rpc: the method's description.
        validator: checks batches against the role's declarations.
        request: the request.
    """

    def check(header: Header) -> None:
        tensors = {column.name: (column.dtype, column.shape) for column in header.tensors}
        num_rows = header.message.num_rows
        validator.check_answer_header(rpc.name, num_rows, tensors, request)
        unpacked = sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values())
        # A tensor's span of a row is smaller than the row. The first MiB has gaps, and Arrow's description.
        most = 2 * unpacked + MAX_ANSWER_ROW_BYTES * (1 + num_rows)
        if header.region_bytes > most:
            raise RoleFailed(
                f"an answer of {header.region_bytes} bytes, whose tensors unpack to {unpacked}; at most {most} "
                f"are received: the other columns of a row may take {MAX_ANSWER_ROW_BYTES} bytes"
            )

    return ReceiveConditions(check=check)


async def check_answer(rpc: Rpc, answer: DataProto, validator: BatchValidator, request: DataProto) -> None:
    """Raise RoleFailed unless the batch is a valid answer to the request (BatchValidator.check_answer)."""
    await _run_check(answer, partial(validator.check_answer, rpc.name, answer, request))


async def _run_check(batch: DataProto, check: Callable[[], R]) -> R:
    large = len(batch) >= LARGE_ROWS or sum(t.nbytes for t in batch.tensors.values()) >= LARGE_BYTES
    return await threads.run_on(None, check) if large else check()
