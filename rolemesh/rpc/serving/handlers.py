"""What an interceptor puts around a method, whichever of gRPC's four kinds it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from inspect import isasyncgen
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
# Of a request and its context: the answer, or None where its parts are written to the context.
Method = Callable[[Any, Context], Any]


def surrounded(
    handler: grpc.RpcMethodHandler[Any, Any], around: Callable[[Method], Method], *, reads: bool = True
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind with something around its method.

    Args:
        handler: as a server would have it.
        around: makes another method of it, which awaits it, whether its answer is a stream or not.
        reads: gRPC still makes requests of bytes; False: `around` does.
    """
    ways = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if way else "unary" for way in ways)
    behaviour = getattr(handler, kind)

    async def method(request: Any, context: Context) -> Any:
        answer = behaviour(request, context)
        if not isasyncgen(answer):
            return await answer
        async with aclosing(answer):
            async for part in answer:
                await context.write(part)

    make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
    made: grpc.RpcMethodHandler[Any, Any] = make(
        around(method), handler.request_deserializer if reads else None, handler.response_serializer
    )
    return made
