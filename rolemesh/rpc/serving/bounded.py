"""What no call may cost a server, whatever it calls: its own services, health, reflection."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rolemesh.rpc.serving.handlers import Context, Method, surrounded
from rolemesh.wire.limits import MAX_FOREIGN_BYTES


class Bounded(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses large requests of services that gRPC reads them for, and keeps nothing of a call that fails.

    gRPC holds on to the error that ends a call until the garbage collector comes by, and with it to all that
    its frames hold: messages, a batch. Those frames are emptied.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, bounded; None: there is no such method."""
        found = await continuation(handler_call_details)
        if found is None:
            return None
        read = found.request_deserializer

        def around(method: Method) -> Method:
            async def bounded(request: Any, context: Context) -> Any:
                try:
                    if read is not None and found.request_streaming:
                        request = _read_all(read, request, context)
                    elif read is not None:
                        request = await _read(read, request, context)
                    return await method(request, context)
                except grpc.aio.AbortError as error:
                    traceback.clear_frames(error.__traceback__)
                    error.__context__ = None
                    raise
                finally:
                    del request

            return bounded

        return surrounded(found, around, reads=False)


async def _read(read: Callable[[bytes], Any], request: bytes, context: Context) -> Any:
    problem = f"a request of {len(request)} bytes; at most {MAX_FOREIGN_BYTES} are read"
    if len(request) <= MAX_FOREIGN_BYTES:
        try:
            return read(request)
        except DecodeError as error:
            problem = f"not a request of this method: {error}"
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)


async def _read_all(read: Callable[[bytes], Any], requests: Any, context: Context) -> AsyncIterator[Any]:
    async with aclosing(aiter(requests)) as messages:
        async for request in messages:
            yield await _read(read, request, context)
