"""A limit for the requests of services that are not ours, health and reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rolemesh.rpc.limits import MAX_FOREIGN_BYTES

Handler = Any  # grpc.RpcMethodHandler, of which the stubs know less than there is


class SmallRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses larger messages before they are parsed, which would hold up the event loop. Methods without a
    deserializer read, and so bound, their requests themselves."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        return _bounded(handler)


def _bounded(handler: Handler) -> Handler:
    read = handler.request_deserializer

    async def message(request: bytes, context: Any) -> Any:
        problem = f"a request of {len(request)} bytes; at most {MAX_FOREIGN_BYTES} are read"
        if len(request) <= MAX_FOREIGN_BYTES:
            try:
                return read(request)
            except DecodeError as error:
                problem = f"not a request: {error}"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

    async def messages(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield await message(request, context)

    async def unary_unary(request: bytes, context: Any) -> Any:
        return await handler.unary_unary(await message(request, context), context)

    async def unary_stream(request: bytes, context: Any) -> None:
        await handler.unary_stream(await message(request, context), context)

    async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for answer in handler.stream_stream(messages(requests, context), context):
            yield answer

    behaviours = {"unary_unary": unary_unary, "unary_stream": unary_stream, "stream_stream": stream_stream}
    bounded = {kind: behaviour for kind, behaviour in behaviours.items() if getattr(handler, kind) is not None}
    return handler._replace(request_deserializer=None, **bounded)
