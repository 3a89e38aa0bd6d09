"""What surrounds every call that a server answers: job and step into the context, the request read and held
against its declaration, metrics, a log line, and the error's status. One guard for all methods."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from rolemesh import threads
from rolemesh.errors import InvalidBatch, RoleBusy, RolemeshError, RoleUnavailable
from rolemesh.rpc.contract import Rpc
from rolemesh.rpc.errors import to_status
from rolemesh.rpc.metadata import LIFE_KEY, TIMELINE_KEY
from rolemesh.rpc.serving.requests import enter_context, message_of
from rolemesh.telemetry import metrics, timeline
from rolemesh.wire.room import Room, Stay

if TYPE_CHECKING:
    from rolemesh.door import Door

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]


class Guard:
    """Wraps the methods of one process's services, and knows how many calls are running.

    Args:
        room: the process's memory for batches.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self.idle = asyncio.Event()
        self.idle.set()
        self._running = 0
        self._life = uuid.uuid4().hex

    def wrap(self, role: str, rpc: Rpc, behaviour: Behaviour, door: Door | None) -> Behaviour:
        """The role's method, guarded: bytes in, bytes or a message out.

        Args:
            behaviour: takes the rpc's message, or where that is `stream Frame` the batch. It returns a message;
                or yields, where the answer is a stream, messages or batches.
            door: of the role; None: the rpc takes no batch.
        """

        async def taken(request: Any, context: Context, count: Callable[[str, Any], Any], stay: Stay) -> Any:
            if door is None:
                return message_of(role, rpc, count("in", request))
            from rolemesh.rpc.batches import batch_of

            try:
                return await batch_of(rpc, _counted(stay.frames(request), count), door, stay)
            except (InvalidBatch, RoleBusy) as error:
                traceback.clear_frames(error.__traceback__)  # they hold what has come of the batch
                await stay.drop_rest(context.read)
                raise

        async def unary(request: Any, context: Context) -> Any:
            async with self._call(role, rpc, context) as (count, stay):
                taken_in = await taken(request, context, count, stay)
                with _begun():
                    return count("out", await behaviour(taken_in, context))

        # Written from here and not yielded, so that a cancelled call is counted out at once and not when its
        # generator happens to be collected.
        async def stream(request: Any, context: Context) -> None:
            async with (
                self._call(role, rpc, context) as (count, stay),
                aclosing(behaviour(await taken(request, context, count, stay), context)) as answers,
            ):
                with _begun():
                    async for answer in answers:
                        async for message in _messages(answer):
                            await context.write(count("out", message))

        return stream if rpc.streams[1] else unary

    @asynccontextmanager
    async def _call(
        self, role: str, rpc: Rpc, context: Context
    ) -> AsyncIterator[tuple[Callable[[str, Any], Any], Stay]]:
        call = "-"
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
            call = enter_context(role, rpc, context.invocation_metadata())
            with self._room.stay() as stay:  # to the end of the call: until then its batch is worked on
                threads.watch.set(stay.watch)
                yield count, stay
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


@contextmanager
def _begun() -> Iterator[None]:
    """Around the method itself. RoleBusy tells a caller that the method was not begun and may be asked again.
    So another role's, which this method would pass on, becomes RoleUnavailable."""
    try:
        yield
    except RoleBusy as error:
        raise RoleUnavailable(str(error)) from error


async def _counted(frames: Any, count: Callable[[str, Any], Any]) -> AsyncIterator[bytes]:
    async with aclosing(aiter(frames)) as messages:  # left open it would hold the last frame
        async for frame in messages:
            yield count("in", frame)
            del frame


async def _messages(answer: Any) -> AsyncIterator[Any]:
    """An answer as it is written: a batch as frames, anything else as it is."""
    if isinstance(answer, Message | bytes):
        yield answer
        return
    from rolemesh.wire.streams import send

    async for frame in send(answer):
        yield frame


def _as_code(code: Any) -> grpc.StatusCode:
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
