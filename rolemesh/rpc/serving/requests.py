"""What a call brings, read before its method is asked: metadata, and one message (batches.py: or one batch).

gRPC hands over bytes for every request. So what cannot be read ends as any other wrong request does: with a
status of the table, and with the names of role and method.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from rolemesh.errors import InvalidBatch
from rolemesh.rpc.contract import Rpc
from rolemesh.rpc.metadata import CALL_KEY, JOB_KEY, STEP_KEY, TIMELINE_KEY
from rolemesh.telemetry import context as origin
from rolemesh.telemetry import timeline
from rolemesh.wire.limits import MAX_REQUEST_BYTES

MAX_STEP_DIGITS = 18  # what an int64 has room for


def enter_context(role: str, rpc: Rpc, metadata: Any) -> str:
    """Puts job, role and step where logs and workers find them; returns the call's id. The call has a task,
    and so a context, of its own: nothing is to be put back.

    Raises:
        InvalidBatch: the step is no number.
    """
    sent = {key: value for key, value in metadata or () if isinstance(value, str)}
    origin.role.set(role)
    if job := sent.get(JOB_KEY):
        origin.job.set(unquote(job))  # metadata are ASCII
    timeline.calls.set([] if TIMELINE_KEY in sent else None)
    if (step := sent.get(STEP_KEY)) is not None:
        if not step.isdecimal() or len(step) > MAX_STEP_DIGITS:
            raise InvalidBatch(
                f"{role}.{rpc.name}: metadata {STEP_KEY} is a number of at most {MAX_STEP_DIGITS} digits; got "
                f"{step[:40]!r} of {len(step)} characters"
            )
        origin.step.set(int(step))
    return sent.get(CALL_KEY, "-")


def message_of(role: str, rpc: Rpc, request: bytes) -> Message:
    """The one message of a request.

    Raises:
        InvalidBatch: more than MAX_REQUEST_BYTES, or no message of the rpc's type.
    """
    if len(request) > MAX_REQUEST_BYTES:
        raise InvalidBatch(
            f"{role}.{rpc.name}: a {rpc.request.name} has at most {MAX_REQUEST_BYTES} bytes; got {len(request)}"
        )
    try:
        message: Message = message_factory.GetMessageClass(rpc.request).FromString(request)
    except DecodeError as error:
        raise InvalidBatch(f"{role}.{rpc.name}: no {rpc.request.full_name}: {error}") from None
    return message
