"""What surrounds every call that a server answers: job and step into the context, metrics, a log line, and
the error's status. One guard for all methods of all services."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from rolemesh import context as origin
from rolemesh import metrics, timeline
from rolemesh.errors import RolemeshError
from rolemesh.rpc import tls
from rolemesh.rpc.contract import Rpc
from rolemesh.rpc.errors import to_status

log = logging.getLogger(__name__)

# The metadata of a call: for which job and step it is made, its id, and the weights that it counts on.
JOB_KEY, STEP_KEY, CALL_KEY = "rolemesh-job", "rolemesh-step", "rolemesh-call"
VERSION_KEY = "rolemesh-weights-version"
# Asks for what the server did when, which comes with the answer's trailing metadata under the same name.
TIMELINE_KEY = "rolemesh-timeline"
# Of the answer: which life of the server made it. A role that is trained begins anew when it is restarted.
LIFE_KEY = "rolemesh-life"

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]


class Guard:
    """Wraps the methods of one process's services, and knows how many calls are running."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._running = 0
        self._life = uuid.uuid4().hex

    def wrap(self, role: str, rpc: Rpc, behaviour: Behaviour) -> Behaviour:
        """The role's method, guarded. A streaming answer is written from here and not yielded, so that a
        cancelled call is counted out at once and not when its generator happens to be collected."""

        async def unary(request: Any, context: Context) -> Any:
            async with self._call(role, rpc, context) as count:
                return count("out", await behaviour(_counted(request, rpc.streams[0], count), context))

        async def stream(request: Any, context: Context) -> None:
            async with (
                self._call(role, rpc, context) as count,
                aclosing(behaviour(_counted(request, rpc.streams[0], count), context)) as responses,
            ):
                async for response in responses:
                    await context.write(count("out", response))

        return stream if rpc.streams[1] else unary

    @asynccontextmanager
    async def _call(self, role: str, rpc: Rpc, context: Context) -> AsyncIterator[Callable[[str, Any], Any]]:
        call = _enter_context(role, context)
        context.set_trailing_metadata(((LIFE_KEY, self._life),))
        labels = (role, rpc.name)
        received = {way: metrics.SERVER_BYTES.labels(*labels, way) for way in ("in", "out")}
        size = {"in": 0, "out": 0}

        def count(way: str, message: Any) -> Any:
            num_bytes = len(message) if isinstance(message, bytes) else message.ByteSize()
            received[way].inc(num_bytes)
            size[way] += num_bytes
            return message

        started, code = time.perf_counter(), grpc.StatusCode.OK
        self._running += 1
        self.idle.clear()
        metrics.SERVER_IN_FLIGHT.labels(*labels).inc()
        try:
            if problem := tls.stranger(context):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{role} is {problem}")
            yield count
            if (written := timeline.calls.get()) is not None:
                told = (TIMELINE_KEY, timeline.told(written, started))
                context.set_trailing_metadata(((LIFE_KEY, self._life), told))
        except grpc.aio.AbortError:  # the method itself chose a status
            code = _as_code(context.code())
            raise
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            code, details, trailing = to_status(error)
            # What a caller can cause is told to the caller; a traceback is for what nobody foresaw.
            log.error("%s failed: %s", rpc.name, details, exc_info=not isinstance(error, RolemeshError))
            await context.abort(code, details, trailing)
        finally:
            seconds = time.perf_counter() - started
            metrics.SERVER_IN_FLIGHT.labels(*labels).dec()
            metrics.SERVER_REQUESTS.labels(*labels, code.name).inc()
            metrics.SERVER_SECONDS.labels(*labels).observe(seconds)
            text = "%s %s in %.3f s, %d bytes in, %d out, call %s"
            log.info(text, rpc.name, code.name, seconds, size["in"], size["out"], call)
            self._running -= 1
            if not self._running:
                self.idle.set()


def _enter_context(role: str, context: Context) -> str:
    """Puts job, role and step where logs and workers find them; returns the call's id. The call has a task,
    and so a context, of its own: nothing is to be put back."""
    metadata: Any = context.invocation_metadata() or ()
    sent = {key: value for key, value in metadata if isinstance(value, str)}
    origin.role.set(role)
    if job := sent.get(JOB_KEY):
        origin.job.set(unquote(job))  # metadata are ASCII
    timeline.calls.set([] if TIMELINE_KEY in sent else None)
    if (step := sent.get(STEP_KEY, "")).isdecimal():
        origin.step.set(int(step))
    return sent.get(CALL_KEY, "-")


def _counted(request: Any, is_stream: bool, count: Callable[[str, Any], Any]) -> Any:
    return _counted_stream(request, count) if is_stream else count("in", request)


async def _counted_stream(requests: AsyncIterator[Any], count: Callable[[str, Any], Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield count("in", request)


def _as_code(code: Any) -> grpc.StatusCode:
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
