"""One server of a role, as a client sees it."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from rolemesh.errors import InvalidBatch
from rolemesh.rpc import tls
from rolemesh.rpc.answers import read_answer
from rolemesh.rpc.channels import Line
from rolemesh.rpc.contract import rpcs, serializer

CHECK_TIMEOUT_S = 2.0
[HEALTH] = [rpc for rpc in rpcs(health_pb2.DESCRIPTOR.services_by_name["Health"]) if rpc.name == "Check"]


class Replica:
    """One server of the role.

    Args:
        address: host:port.
        role: what is served there.
        live: it may be given work, until it is found to be gone.
    """

    def __init__(self, address: str, role: str, live: bool = True) -> None:
        self.address, self._role = address, role
        self.outstanding_rows = 0
        self.in_flight = 0
        self.last_turn = 0
        self.live = live
        self.problem = ""
        self._line = Line(address, role)

    @property
    def channel(self) -> grpc.aio.Channel:
        """For one call: where to make it changes with the process's keys."""
        return self._line.channel

    async def health(self) -> str:
        """ "" when it serves as its role, else what is the matter."""
        check: Any = self.channel.unary_unary(HEALTH.path, serializer(HEALTH.request), None)
        try:
            request = health_pb2.HealthCheckRequest(service=self._role)
            answer: Any = await read_answer(HEALTH, await check(request, timeout=CHECK_TIMEOUT_S))
        except InvalidBatch as error:
            return f"its health is no answer: {error}"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return wrong_role(self._role)
            return tls.explain(error.details() or error.code().name)
        serving: bool = answer.status == health_pb2.HealthCheckResponse.SERVING
        return "" if serving else "it answers, but is not ready (still loading, or draining)"

    async def close(self) -> None:
        await self._line.close()


def wrong_role(role: str) -> str:
    """What is the matter with a server that serves, but not as this role."""
    return f"another role answers there: it is no {role}"
