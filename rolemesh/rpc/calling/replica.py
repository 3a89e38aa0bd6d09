"""A client's view of one server of a role: its channel, load and health."""

from __future__ import annotations

import logging
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from rolemesh.errors import InvalidBatch
from rolemesh.fingerprint import Fingerprint
from rolemesh.rpc import tls
from rolemesh.rpc.channels import RoleChannel
from rolemesh.rpc.contract import rpcs, serializer
from rolemesh.rpc.metadata import FINGERPRINT_KEY, LIFE_KEY, WHY_KEY, call_digest
from rolemesh.rpc.unary_answers import read_answer
from rolemesh.telemetry.logs import printable

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 2.0
MAX_WHY = 500  # characters of the reason that a server or gRPC gives for not being ready
[HEALTH] = [rpc for rpc in rpcs(health_pb2.DESCRIPTOR.services_by_name["Health"]) if rpc.name == "Check"]


class Replica:
    """One server of a role.

    Args:
        address: host:port.
        role: the role that it serves.
        live: True if it may get work.
        expected: the fingerprint that it must have; None: any.
    """

    def __init__(
        self, address: str, role: str, *, live: bool = True, expected: Fingerprint | None = None
    ) -> None:
        self.address = address
        self._role = role
        self._expected = expected
        self.outstanding_rows = 0
        self.in_flight = 0
        self.last_turn = 0
        self.live = live
        self.problem = ""
        self.mismatch = ""  # how its fingerprint differs from the expected one
        self.call_digest = ""  # of its fingerprint, for calls; only if one is expected
        self._has_no_fingerprint = False
        self.life = ""  # of its server, at its last health check; "": it has not answered yet
        self._channel = RoleChannel(address, role)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for one call. Do not keep it: it is replaced when the process's TLS keys change."""
        return self._channel.channel

    async def health(self) -> str:
        """Check health. Return "" if it serves its role with the expected fingerprint, else the problem."""
        problem, life, fingerprint = await self._check()
        self.life = life or self.life
        if self._expected and (life or fingerprint or not problem):  # it has answered
            self._compare(life, fingerprint, self._expected)
            return self.mismatch or problem
        return problem

    def _compare(self, life: str, fingerprint: str, expected: Fingerprint) -> None:
        """Compare its fingerprint with the expected one. Log a difference when it is new."""
        before = self.mismatch
        self.mismatch = ""
        try:
            if fingerprint:
                self.mismatch = expected.difference(Fingerprint.of_metadata(fingerprint))
                self.call_digest = call_digest(fingerprint)
            elif life:
                self.mismatch = "it runs an older version of Rolemesh, which does not say of which job it is"
            elif not self._has_no_fingerprint:
                log.warning("%s at %s does not say of which job it is; it is used as it is", *self._named)
                self._has_no_fingerprint = True
        except InvalidBatch as error:
            self.mismatch = str(error)
        if self.mismatch and self.mismatch != before:
            log.warning("%s at %s is not used until it is restarted: %s", *self._named, self.mismatch)

    @property
    def _named(self) -> tuple[str, str]:
        return self._role, self.address

    async def is_another_server(self, other: Replica) -> bool:
        """Find out whether the two addresses are two servers; False if one does not answer.

        A restart changes the life of a server. So different lives prove two servers only if the life here is
        the same before and after the other address answers.
        """
        if not (self.life and other.life) or self.life == other.life:
            return False
        (_, before, _), (_, there, _), (_, after, _) = [await each._check() for each in (self, other, self)]
        return before == after != there and bool(before and there)

    async def _check(self) -> tuple[str, str, str]:
        """Check health. Return the problem, the server's life and the role's fingerprint, or "" for each."""
        check: Any = self.channel.unary_unary(HEALTH.path, serializer(HEALTH.request), None)
        try:
            call = check(health_pb2.HealthCheckRequest(service=self._role), timeout=CHECK_TIMEOUT_S)
            answer: Any = await read_answer(HEALTH, await call)
            trailing = dict(await call.trailing_metadata())
        except InvalidBatch as error:
            return f"its answer to a health check is invalid: {error}", "", ""
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return wrong_role(self._role), "", ""
            problem = tls.explain(error.details() or error.code().name)
            return printable(problem)[:MAX_WHY], "", ""
        serving: bool = answer.status == health_pb2.HealthCheckResponse.SERVING
        why = str(trailing.get(WHY_KEY, ""))[:MAX_WHY]
        why = why if why.isprintable() and why else "still loading, or draining"
        problem = "" if serving else f"it answers, but is not ready ({why})"
        return problem, str(trailing.get(LIFE_KEY, "")), str(trailing.get(FINGERPRINT_KEY, ""))

    async def close(self) -> None:
        await self._channel.close()


def wrong_role(role: str) -> str:
    """Return the problem of a server that serves another role."""
    return f"another role serves there, not {role}"
