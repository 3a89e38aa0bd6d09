"""The base of a server's interceptors. It wraps every method, whichever of gRPC's four kinds it has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from inspect import isasyncgen
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
# Takes a request and its context; returns the answer, or None if it writes the answer's parts to the context.
Method = Callable[[Any, Context], Any]


class Around(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """An interceptor that wraps every method of a server. A subclass implements `around`.

    Attributes:
        reads: True if gRPC parses requests from bytes; False if the method of `around` does.
    """

    reads = True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler with its method wrapped; None: there is no such method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        around = partial(self.around, str(handler_call_details.method), handler)
        return _wrapped(handler, around, reads=self.reads)

    def around(self, path: str, handler: grpc.RpcMethodHandler[Any, Any], method: Method) -> Method:
        """Return a method that wraps this one, and awaits it, whether or not its answer is a stream.

        Args:
            path: of the rpc, e.g. /rolemesh.v1.RewardService/ComputeScores.
            handler: gRPC's handler of the method.
            method: takes a request and its context.
        """
        raise NotImplementedError


def _wrapped(
    handler: grpc.RpcMethodHandler[Any, Any], around: Callable[[Method], Method], *, reads: bool
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind with its method wrapped."""
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
