"""The controller's own server: the run's status and the brakes; and each role's load, at /metrics.

It answers from the process's first second, while the models' libraries are imported and the data is read:
nothing here imports them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.controller.service.load import RoleLoads
from rolemesh.services.controller.service.servicer import SERVICE, ControllerServicer
from rolemesh.services.controller.service.status import RunStatus

if TYPE_CHECKING:
    from rolemesh.rpc.calling.clients import RoleClient

GRACE_S = 1.0


class ControllerServer:
    """ControllerService of one run.

    Args:
        status: the run's.
        roles: those that the job has.
    """

    def __init__(self, status: RunStatus, roles: Iterable[str]) -> None:
        self.status = status
        self.address = ""
        self._clients: dict[str, RoleClient] = {}
        self._loads = RoleLoads(roles)
        self._server = RoleServer({"controller": [SERVICE]})
        status.on_step, status.on_pause = self._loads.step_began, self._loads.paused

    async def start(self, listen: str, health_listen: str | None = None) -> None:
        """Begins to answer. The run is starting, and nothing waits for a role.

        Args:
            listen: host:port.
            health_listen: host:port of health alone, always plain; None: only beside the services.

        Raises:
            InvalidConfig: not an address, or one that cannot be had.
        """
        if health_listen:
            await self._server.start_health(health_listen)
        self.address = await self._server.start(listen)
        await self._server.ready({SERVICE: ControllerServicer(self.status, self._clients)})

    def show(self, clients: Mapping[str, RoleClient]) -> None:
        """Tells of these clients' replicas and pending rows from now on; they are not yet entered."""
        self._clients |= clients
        for role, client in clients.items():
            client.pool.waiting = self._loads.pending[role]

    async def stop(self) -> None:
        """Refuses new calls, and lets running ones end for GRACE_S."""
        await self._server.drain(GRACE_S)


@asynccontextmanager
async def serving(
    status: RunStatus, roles: Iterable[str], listen: str, health_listen: str | None = None
) -> AsyncIterator[ControllerServer]:
    """A server that answers while it is entered; arguments and errors are its own."""
    server = ControllerServer(status, roles)
    try:
        await server.start(listen, health_listen)
        yield server
    finally:
        await server.stop()
