"""The controller's own server: status and control of the run, and each role's load at /metrics.

It answers from the process's first second, while the models' libraries are imported and the data is read. So
this module must not import those libraries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.controller.service.role_load import RoleLoads
from rolemesh.services.controller.service.servicer import SERVICE, ControllerServicer
from rolemesh.services.controller.service.status import RunStatus

if TYPE_CHECKING:
    from rolemesh.rpc.calling.clients import RoleClient

GRACE_S = 1.0


class ControllerServer:
    """Serves ControllerService for one run.

    Args:
        status: the run's status.
        roles: the roles of the job.
    """

    def __init__(self, status: RunStatus, roles: Iterable[str]) -> None:
        self.status = status
        self.address = ""
        self._clients: dict[str, RoleClient] = {}
        self._loads = RoleLoads(roles)
        self._server = RoleServer({"controller": [SERVICE]})
        status.on_step = self._loads.step_began
        status.on_pause = self._loads.paused

    async def start(self, listen: str, health_listen: str | None = None) -> None:
        """Start to answer. The run is starting, and no rows are pending.

        Args:
            listen: host:port.
            health_listen: host:port that serves only health, never with TLS; None: no such port.

        Raises:
            InvalidConfig: not an address, or one that cannot be bound.
        """
        if health_listen:
            await self._server.start_health(health_listen)
        self.address = await self._server.start(listen)
        await self._server.ready({SERVICE: ControllerServicer(self.status, self._clients)})

    @property
    def life(self) -> str:
        """The server's life, which its answers have in their trailing metadata."""
        return self._server.life

    def show(self, clients: Mapping[str, RoleClient]) -> None:
        """Report these clients' replicas and pending rows from now on. Call it before entering the clients."""
        self._clients |= clients
        for role, client in clients.items():
            client.pool.waiting = self._loads.pending[role]

    async def stop(self) -> None:
        """Refuse new calls, and give running ones GRACE_S to finish."""
        await self._server.drain(GRACE_S)


@asynccontextmanager
async def serving(
    status: RunStatus, roles: Iterable[str], listen: str, health_listen: str | None = None
) -> AsyncIterator[ControllerServer]:
    """Run a ControllerServer during the block; arguments and errors are those of ControllerServer."""
    server = ControllerServer(status, roles)
    try:
        await server.start(listen, health_listen)
        yield server
    finally:
        await server.stop()
