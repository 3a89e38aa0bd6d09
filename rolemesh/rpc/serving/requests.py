"""Reads a call's metadata and its one message before the method runs (batches.py reads a batch).

gRPC passes on every request as bytes. So an unreadable request ends like any other invalid one: with a status
from our table, and with the names of role and method.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from rolemesh.errors import InvalidBatch, NotPermitted, RoleUnavailable
from rolemesh.rpc.contract import Rpc
from rolemesh.rpc.metadata import CALL_KEY, FINGERPRINT_KEY, JOB_KEY, STEP_KEY, TIMELINE_KEY
from rolemesh.telemetry import context as origin
from rolemesh.telemetry import timeline
from rolemesh.wire.limits import MAX_REQUEST_BYTES

MAX_STEP_DIGITS = 18  # always fits in an int64


def enter_context(role: str, rpc: Rpc, metadata: Any, own_job: str = "", own_digest: str | None = None) -> str:
    """Set job, role and step in the context, for logs and workers; return the call's id, or "-".

    Each call runs in its own task, hence in its own context, so nothing has to be reset.

    Args:
        role: the called role.
        rpc: the method's description.
        metadata: of the call.
        own_job: name of the server's job; empty: calls of any job are served.
        own_digest: digest of the role's fingerprint (call_digest); None: it has none.

    Raises:
        InvalidBatch: the step is not a number of at most MAX_STEP_DIGITS digits.
        NotPermitted: the call names another job.
        RoleUnavailable: the caller has seen another fingerprint of this server.
    """
    sent = {key: value for key, value in metadata or () if isinstance(value, str)}
    origin.role.set(role)
    if job := unquote(sent.get(JOB_KEY, "")):  # metadata is ASCII, so the job's name comes percent-encoded
        if own_job not in ("", job):
            raise NotPermitted(f"{role}.{rpc.name}: the role is of job {own_job!r}, the call of job {job!r}")
        origin.job.set(job)
    if own_digest and sent.get(FINGERPRINT_KEY, own_digest) != own_digest:
        raise RoleUnavailable(
            f"{role}.{rpc.name}: the server was started anew, with another job or version than the caller "
            "has seen"
        )
    timeline.calls.set([] if TIMELINE_KEY in sent else None)
    if (step := sent.get(STEP_KEY)) is not None:
        if not step.isdecimal() or len(step) > MAX_STEP_DIGITS:
            raise InvalidBatch(
                f"{role}.{rpc.name}: metadata {STEP_KEY} must be a number of at most {MAX_STEP_DIGITS} digits; "
                f"got {step[:40]!r} of {len(step)} characters"
            )
        origin.step.set(int(step))
    return sent.get(CALL_KEY, "-")


def message_of(role: str, rpc: Rpc, request: bytes) -> Message:
    """Parse the one message of a request.

    Args:
        role: the called role, for errors.
        rpc: the method's description.
        request: the message as bytes.

    Raises:
        InvalidBatch: more than MAX_REQUEST_BYTES, or not a message of the rpc's type.
    """
    if len(request) > MAX_REQUEST_BYTES:
        raise InvalidBatch(
            f"{role}.{rpc.name}: a {rpc.request.name} has at most {MAX_REQUEST_BYTES} bytes; got {len(request)}"
        )
    try:
        message: Message = message_factory.GetMessageClass(rpc.request).FromString(request)
    except DecodeError as error:
        raise InvalidBatch(f"{role}.{rpc.name}: not a {rpc.request.full_name}: {error}") from None
    return message
