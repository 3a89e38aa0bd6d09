"""Wraps every call of our services. All methods have the same guard.

It sets job and step in the context, reads the request and checks it against its declaration, records metrics
and a log line, and turns an error into a status.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from rolemesh import threads
from rolemesh.errors import InvalidBatch, RoleBusy, RolemeshError, RoleUnavailable
from rolemesh.rpc.contract import Rpc
from rolemesh.rpc.metadata import LIFE_KEY, TIMELINE_KEY, call_digest
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.memory_budget import CallReservation, MemoryBudget
from rolemesh.rpc.serving.requests import enter_context, message_of
from rolemesh.rpc.status_codes import to_status
from rolemesh.telemetry import metrics, timeline

if TYPE_CHECKING:
    from rolemesh.batch_validation import BatchValidator

log = logging.getLogger(__name__)

Behaviour = Callable[[Any, Context], Any]


class Guard:
    """Wraps the methods of one process's services, and counts running calls.

    Args:
        budget: the process's memory for batches.
        job: name of the job whose calls are answered; empty: of any.
        fingerprints: role to its fingerprint's metadata; calls that name another fingerprint are refused.
    """

    def __init__(
        self, budget: MemoryBudget, job: str = "", fingerprints: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._budget = budget
        self._job = job
        self._digests = {role: call_digest(metadata) for role, metadata in fingerprints.items()}
        self.idle = asyncio.Event()
        self.idle.set()
        self._running = 0
        self.life = uuid.uuid4().hex

    def wrap(self, role: str, rpc: Rpc, behaviour: Behaviour, validator: BatchValidator | None) -> Behaviour:
        """Return the role's method with the guard around it: bytes in, bytes or a message out.

        Args:
            role: the role, for metrics and errors.
            rpc: the method's description.
            behaviour: takes the rpc's message, or the batch if the request is `stream Frame`. It returns a
                message, or yields messages or batches if the response is a stream.
            validator: of the role; None: the rpc takes no batch.
        """

        async def read(
            request: Any, context: Context, count: Callable[[str, Any], Any], reservation: CallReservation
        ) -> Any:
            if validator is None:
                return message_of(role, rpc, count("in", request))
            from rolemesh.rpc.batches import batch_of

            try:
                return await batch_of(
                    rpc,
                    _counted(reservation.frames(request), count),
                    validator,
                    max_bytes=reservation.budget.total_bytes,
                    reserve=reservation.resize,
                )
            except (InvalidBatch, RoleBusy) as error:
                traceback.clear_frames(error.__traceback__)  # they hold the part of the batch that has arrived
                await reservation.drop_rest(context.read)
                raise

        async def unary(request: Any, context: Context) -> Any:
            async with self._call(role, rpc, context) as (count, reservation):
                parsed = await read(request, context, count, reservation)
                with _busy_as_unavailable():
                    return count("out", await behaviour(parsed, context))

        # Writes instead of yielding, so that a cancelled call stops counting at once. A generator would keep it
        # counted until garbage collection.
        async def stream(request: Any, context: Context) -> None:
            async with (
                self._call(role, rpc, context) as (count, reservation),
                aclosing(behaviour(await read(request, context, count, reservation), context)) as answers,
            ):
                with _busy_as_unavailable():
                    async for answer in answers:
                        async for message in _messages(answer):
                            await context.write(count("out", message))

        return stream if rpc.streams[1] else unary

    @asynccontextmanager
    async def _call(
        self, role: str, rpc: Rpc, context: Context
    ) -> AsyncIterator[tuple[Callable[[str, Any], Any], CallReservation]]:
        call = "-"
        context.set_trailing_metadata(((LIFE_KEY, self.life),))
        labels = (role, rpc.name)
        received = {way: metrics.SERVER_BYTES.labels(*labels, way) for way in ("in", "out")}
        size = {"in": 0, "out": 0}

        def count(way: str, message: Any) -> Any:
            num_bytes = len(message) if isinstance(message, bytes) else message.ByteSize()
            received[way].inc(num_bytes)
            size[way] += num_bytes
            return message

        started = time.perf_counter()
        code = grpc.StatusCode.OK
        self._running += 1
        self.idle.clear()
        metrics.SERVER_IN_FLIGHT.labels(*labels).inc()
        try:
            call = enter_context(role, rpc, context.invocation_metadata(), self._job, self._digests.get(role))
            with self._budget.reserve() as reservation:  # until the call ends: its batch is in use until then
                threads.watch.set(reservation.watch)
                yield count, reservation
            if (written := timeline.calls.get()) is not None:
                report = (TIMELINE_KEY, timeline.report_of(written, started))
                context.set_trailing_metadata(((LIFE_KEY, self.life), report))
        except grpc.aio.AbortError:  # the method itself chose a status
            code = _as_code(context.code())
            raise
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            code, details, trailing = to_status(error)
            # The caller gets the message of every error. Only an unexpected one has a traceback in the log.
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


@contextmanager
def _busy_as_unavailable() -> Iterator[None]:
    """Turn a RoleBusy that the method itself raises into RoleUnavailable.

    RoleBusy tells a caller that the method has not begun and may be retried. Here it has begun, and the error
    comes from another role that it called.
    """
    try:
        yield
    except RoleBusy as error:
        raise RoleUnavailable(str(error)) from error


async def _counted(frames: Any, count: Callable[[str, Any], Any]) -> AsyncIterator[bytes]:
    async with aclosing(aiter(frames)) as messages:  # left open, it would keep the last frame
        async for frame in messages:
            yield count("in", frame)
            del frame


async def _messages(answer: Any) -> AsyncIterator[Any]:
    """Yield the messages to write for an answer: a batch as frames, anything else unchanged."""
    if isinstance(answer, Message | bytes):
        yield answer
        return
    from rolemesh.wire.streams import send

    async for frame in send(answer):
        yield frame


def _as_code(code: Any) -> grpc.StatusCode:
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
