"""Serves the stripes of a version that a follower's machine holds (stripes.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rolemesh.errors import InvalidConfig
from rolemesh.ranks.rendezvous import Rendezvous, is_loopback, join_address
from rolemesh.rpc.contract import WEIGHTS
from rolemesh.rpc.serving.server import RoleServer, split_address
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore

log = logging.getLogger(__name__)


class StripeServer:
    """Holds a follower's part of the version that its group has published, and serves it.

    It serves WeightsService as a role does: with this process's keys, to the callers of weights.proto. It
    listens on the address with which this machine reaches rank 0, and only if the version is striped. Use it on
    a computing thread.

    Args:
        rendezvous: of the ranks.
        listen: host:port of rank 0. The port is taken here, too, if it is free; else any other.
        loop: the process's event loop.
    """

    def __init__(self, rendezvous: Rendezvous, listen: str, loop: asyncio.AbstractEventLoop) -> None:
        self._rendezvous = rendezvous
        self._loop = loop
        host, self._port = split_address(listen)
        # Where ranks meet on the loopback interface, and rank 0 serves others too, these could not reach us.
        self._is_reachable = is_loopback(host) or not rendezvous.is_on_one_machine
        self._store = WeightStore()
        self._address = ""
        self._server: RoleServer | None = None
        self._published: PublishedWeights | None = None

    @property
    def serve(self) -> Callable[[], str] | None:
        """Starts the server, unless it runs, and returns host:port; None: rollouts could not reach it.

        It raises RoleUnavailable or InvalidConfig if there is no address that can be bound.
        """
        return self._serve if self._is_reachable else None

    def _serve(self) -> str:
        if not self._address:
            self._address = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self._address

    async def _start(self) -> str:
        host = self._rendezvous.own_host
        try:
            return await self._start_on(join_address(host, self._port))
        except InvalidConfig as error:  # another process of this machine has the port
            address = await self._start_on(join_address(host, 0))
            log.warning("weights are served at %s, which a network policy may close: %s", address, error)
            return address

    async def _start_on(self, listen: str) -> str:
        server = RoleServer({"actor": [WEIGHTS]})
        address = await server.start(listen)
        await server.ready({WEIGHTS: WeightsServicer(self._store)})
        self._server = server
        return address

    async def close(self) -> None:
        """Stop the server, if it runs; its calls are cancelled."""
        if self._server:
            await self._server.drain(0)

    def put(self, published: PublishedWeights) -> None:
        """Hold this rank's part of a version, and release the one before. Only stripes are served."""
        self._published = published
        if published.has_part and published.is_striped:
            self._loop.call_soon_threadsafe(self._store.put, published.holding)

    def clear(self, why: str) -> None:
        """Release the version held; its readers get the reason."""
        self._published = None
        self._loop.call_soon_threadsafe(self._store.clear, why)
