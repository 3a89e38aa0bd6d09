"""Limits the memory that any call can take at a server, also a call of health or reflection."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rolemesh.rpc.serving.handlers import Around, Context, Method
from rolemesh.wire.limits import MAX_FOREIGN_BYTES


class Bounded(Around):
    """Refuses large requests to services whose messages gRPC parses, and frees the memory of failed calls.

    gRPC keeps the error that ended a call until the next garbage collection. Its traceback's frames would keep
    messages or a batch alive, so they are cleared.
    """

    reads = False

    def around(self, path: str, handler: grpc.RpcMethodHandler[Any, Any], method: Method) -> Method:
        read = handler.request_deserializer

        async def bounded(request: Any, context: Context) -> Any:
            try:
                if read is not None and handler.request_streaming:
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


async def _read(read: Callable[[bytes], Any], request: bytes, context: Context) -> Any:
    problem = f"a request of {len(request)} bytes; at most {MAX_FOREIGN_BYTES} are accepted"
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
