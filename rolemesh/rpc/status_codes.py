"""Maps domain errors to gRPC status and back, with one table (documented in docs/errors.md).

The status tells any gRPC client the kind of failure. The trailing metadata `rolemesh-error` names the class, so
that our own client raises the same one.
"""

from __future__ import annotations

from typing import Any

import grpc

from rolemesh import errors
from rolemesh.errors import RolemeshError
from rolemesh.rpc import tls

ERROR_KEY = "rolemesh-error"
# HTTP/2 headers are limited (8 KiB by default), and gRPC's percent-encoding triples non-ASCII bytes.
MAX_DETAIL_BYTES = 2000

STATUS: dict[type[RolemeshError], grpc.StatusCode] = {
    errors.InvalidBatch: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidConfig: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidData: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownAgent: grpc.StatusCode.NOT_FOUND,
    errors.EpisodeLost: grpc.StatusCode.NOT_FOUND,
    errors.EnvironmentFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RewardFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CheckpointFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UpdateFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WeightsUnavailable: grpc.StatusCode.NOT_FOUND,
    errors.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    errors.RoleTaken: grpc.StatusCode.ABORTED,
    errors.RoleBusy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RoleTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RoleUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.HubUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.RoleFailed: grpc.StatusCode.INTERNAL,
}
BY_NAME = {cls.__name__: cls for cls in STATUS}

# Classes for a status without `rolemesh-error`: from gRPC itself, or from a foreign server.
BARE: dict[grpc.StatusCode, type[RolemeshError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.RoleUnavailable,
    grpc.StatusCode.CANCELLED: errors.RoleUnavailable,  # the server shut down during the call
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.RoleTimeout,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidBatch,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.PERMISSION_DENIED: errors.NotPermitted,
}

# grpc.aio reports this, with INTERNAL, if a call ends (refused, server gone) while its request is being written
# and the failed write is noticed before the call's status. Our servers never send it.
ENDED_WHILE_WRITING = "Internal error from Core"


def to_status(error: BaseException) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return the code, details and trailing metadata with which a server ends a call."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls], _shortened(_text(error)), ((ERROR_KEY, cls.__name__),)
    details = _shortened(f"{type(error).__name__}: {_text(error)}")
    return grpc.StatusCode.INTERNAL, details, ((ERROR_KEY, errors.RoleFailed.__name__),)


def from_status(error: grpc.aio.AioRpcError, where: str) -> RolemeshError:
    """Return the domain error that a client raises.

    Args:
        error: gRPC's error for the call.
        where: role, method, address and step; the message begins with it.
    """
    trailing: Any = error.trailing_metadata() or ()
    named = {key: value for key, value in trailing if key == ERROR_KEY}
    cls = BY_NAME.get(named.get(ERROR_KEY, "")) or BARE.get(error.code(), errors.RoleFailed)
    details = error.details() or error.code().name
    if details == ENDED_WHILE_WRITING:
        cls = errors.RoleUnavailable
        details = "the call ended while its request was being sent"
    raised = cls(f"{where}: {tls.explain(details)}")
    if isinstance(raised, errors.RoleFailed) and not named:
        raised.status = error.code()
    return raised


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"its message cannot be formatted ({type(another).__name__})"


def _shortened(text: str) -> str:
    """Cut the text to MAX_DETAIL_BYTES of UTF-8, and escape lone surrogates, which foreign text may contain."""
    encoded = text[: MAX_DETAIL_BYTES + 1].encode(errors="backslashreplace")
    if len(encoded) <= MAX_DETAIL_BYTES:
        return encoded.decode()
    return encoded[:MAX_DETAIL_BYTES].decode(errors="ignore") + " … (the role's log has the rest)"
