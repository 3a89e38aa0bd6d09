"""One call to one replica."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.message import Message

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, RoleFailed, RoleTimeout
from rolemesh.rpc.calling.deadlines import Deadline
from rolemesh.rpc.calling.replica import Replica
from rolemesh.rpc.contract import Rpc, serializer
from rolemesh.rpc.metadata import CALL_KEY, FINGERPRINT_KEY, JOB_KEY, LIFE_KEY, STEP_KEY, TIMELINE_KEY
from rolemesh.rpc.status_codes import from_status
from rolemesh.rpc.unary_answers import read_answer
from rolemesh.telemetry import context as origin
from rolemesh.telemetry import metrics, timeline
from rolemesh.wire.streams import send


class Caller:
    """Calls methods of one role, each call at one replica.

    Args:
        role: the role's name.
        trained: True if the role has state that a restart of its server loses. Then an answer after a restart
            is an error.
    """

    def __init__(self, role: str, *, trained: bool) -> None:
        self._role = role
        self._trained = trained
        self._life = ""
        self.metadata: dict[str, str] = {}  # sent with every call, in addition to job, step and id

    async def message(self, rpc: Rpc, replica: Replica, call: Any) -> Message:
        """Wait for an answer that is one message. Raises RoleFailed of the replica if it is invalid."""
        with self.blamed(rpc, replica):
            return await read_answer(rpc, await call)

    @contextmanager
    def blamed(self, rpc: Rpc, replica: Replica) -> Iterator[None]:
        """Turn the error of an invalid answer into RoleFailed of the replica: the request is not at fault."""
        try:
            yield
        except (InvalidBatch, RoleFailed) as error:
            raise RoleFailed(f"{self.where(rpc, replica)}: {error}") from error

    @asynccontextmanager
    async def call(
        self,
        rpc: Rpc,
        replica: Replica,
        request: DataProto | Message,
        deadline: Deadline,
        *,
        sends_deadline: bool = False,
    ) -> AsyncIterator[Any]:
        """Make a call, and cancel it at the deadline. Every error names role, method, address and step.

        Args:
            rpc: the called method.
            replica: where it is called.
            request: the batch or message.
            deadline: of the call; it may move.
            sends_deadline: True if the server gets the deadline as it is now, which then cannot move (gRPC's
                own).

        Raises:
            RoleTimeout: there was no answer within the deadline.
            RoleFailed: a trained role was restarted.
            RolemeshError: the server answered with an error (from_status).
        """
        make: Any = getattr(replica.channel, _arity(rpc))
        start = make(
            rpc.path, serializer(rpc.request)
        )  # without a deserializer: answers are parsed by the caller
        broken: list[Exception] = []
        code = grpc.StatusCode.CANCELLED
        where = self.where(rpc, replica)
        with timeline.recorded(f"{self._role} {replica.address}", self.method(rpc), request) as seen:
            call = start(
                _frames(request, broken) if isinstance(request, DataProto) else request,
                timeout=deadline.left_s if sends_deadline else None,
                metadata=self._metadata(replica),
            )
            try:
                async with deadline.limit():
                    yield call
                    code = grpc.StatusCode.OK
                    if self._trained or timeline.calls.get() is not None:
                        trailing = dict(await call.trailing_metadata() or ())
                        self._check_life(trailing, where)
                        if TIMELINE_KEY in trailing:
                            seen.heard(trailing[TIMELINE_KEY])
            except grpc.aio.AioRpcError as error:
                code = error.code()
                raise from_status(error, where) from error
            except TimeoutError as error:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                late = f"{where}: no answer within the deadline of {deadline.timeout_s:g} s"
                raise RoleTimeout(late) from error
            except asyncio.CancelledError:
                if broken:  # gRPC cancels a call whose request stream fails; raise the cause
                    raise broken[0] from None
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The channel was closed. A CancelledError would end this task as if its rows were not wanted.
                raise RoleFailed(f"{where}: the client was closed during the call") from None
            finally:
                call.cancel()
                metrics.CLIENT_REQUESTS.labels(self._role, rpc.name, code.name).inc()

    def _check_life(self, trailing: Mapping[str, str], where: str) -> None:
        life = trailing.get(LIFE_KEY, "")
        self._life = self._life or life
        if self._trained and life != self._life:
            raise RoleFailed(
                f"{where}: the role was restarted, and its updates since the last checkpoint are lost; "
                "run the same command again to resume from that checkpoint"
            )

    def method(self, rpc: Rpc) -> str:
        """Return the method's name in timelines, as its worker names it."""
        return f"{self._role}.{rpc.method}"

    def where(self, rpc: Rpc, replica: Replica) -> str:
        return f"{self._role}.{rpc.name} at {replica.address}, step {origin.step.get()}"

    def _metadata(self, replica: Replica) -> tuple[tuple[str, str], ...]:
        sent = {
            JOB_KEY: quote(origin.job.get()),
            STEP_KEY: str(origin.step.get()),
            CALL_KEY: uuid.uuid4().hex[:16],
        }
        if timeline.calls.get() is not None:
            sent[TIMELINE_KEY] = "1"
        if replica.call_digest:
            sent[FINGERPRINT_KEY] = replica.call_digest
        return tuple({**sent, **self.metadata}.items())


def _arity(rpc: Rpc) -> str:
    return "_".join("stream" if is_stream else "unary" for is_stream in rpc.streams)


async def _frames(batch: DataProto, broken: list[Exception]) -> AsyncIterator[bytes]:
    try:
        async for frame in send(batch):
            yield frame
    except Exception as error:
        broken.append(error)
        raise
