"""The replicas of one role, as a client sees them: who is there, who is busy, who is gone for now."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rolemesh import metrics
from rolemesh.errors import InvalidConfig, RolemeshError, RoleUnavailable
from rolemesh.rpc.carrier import CHANNEL_OPTIONS

log = logging.getLogger(__name__)

CLIENT_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # roles are reached directly, whatever the shell's http_proxy says
    # A machine that vanishes sends no reset: pings find out, also while a call computes and nothing flows.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
# One piece computes while the next is on its way; more would take choice away from the balancing. Where there
# is no choice there is no limit: a role that shares a device should see all that waits for its turn.
MAX_IN_FLIGHT = 2
CHECK_TIMEOUT_S = 2.0
MAX_BACKOFF_S = 2.0


class Replica:
    """One server of the role. The channel is made at first use, in the event loop that uses it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.outstanding_rows = 0
        self.in_flight = 0
        self.last_turn = 0
        self.live = True
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=CLIENT_OPTIONS)
        return self._channel

    async def health(self, role: str) -> str:
        """ "" when it serves as this role, else what is the matter."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=role), timeout=CHECK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return wrong_role(role)
            return error.details() or error.code().name
        serving: bool = answer.status == health_pb2.HealthCheckResponse.SERVING
        return "" if serving else "it answers, but is not ready (still loading, or draining)"

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None


def wrong_role(role: str) -> str:
    """What is the matter with a server that serves, but not as this role."""
    return f"another role answers there: it is no {role}"


class ReplicaPool:
    """Gives out replicas: the live one with the least outstanding rows first.

    Args:
        role: whose health says that a replica is ready.
        addresses: host:port of each replica.
        patience_s: how long a call waits while every replica is gone, before it fails.
    """

    def __init__(self, role: str, addresses: Sequence[str], *, patience_s: float) -> None:
        self.role = role
        self.replicas = [Replica(address) for address in addresses]
        self.on_return: Callable[[Replica], Awaitable[None]] | None = None
        self._patience_s = patience_s
        self._changed = asyncio.Condition()
        self._revivals: set[asyncio.Task[None]] = set()
        self._turns = 0
        metrics.REPLICAS_LIVE.labels(role).set(len(self.replicas))

    @property
    def live(self) -> list[Replica]:
        """Those that are not known to be gone."""
        return [replica for replica in self.replicas if replica.live]

    @property
    def addresses(self) -> str:
        return ", ".join(replica.address for replica in self.replicas)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when every replica serves.

        Raises:
            RoleUnavailable: which did not, since when, and what it last said.
            InvalidConfig: an address is another role's, which no waiting mends.
        """
        since = datetime.now().strftime("%H:%M:%S")
        deadline = time.monotonic() + timeout_s
        problems = await asyncio.gather(*(self._problem_until(replica, deadline) for replica in self.replicas))
        late = [f"at {r.address}: {p}" for r, p in zip(self.replicas, problems, strict=True) if p]
        if late:
            raise RoleUnavailable(
                f"{self.role} was not ready within {timeout_s:g} s (asked since {since}): " + "; ".join(late)
            )

    async def _problem_until(self, replica: Replica, deadline: float) -> str:
        backoff_s = 0.02
        while problem := await self._try_return(replica):
            if problem == wrong_role(self.role):
                raise InvalidConfig(f"{self.role} at {replica.address}: {problem}")
            if time.monotonic() + backoff_s >= deadline:
                return problem
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, 0.5)
        return ""

    async def acquire(self, rows: int) -> Replica:
        """A live replica for `rows` rows of work, as soon as one has room. Give it back with `release`.

        Raises:
            RoleUnavailable: every replica has been gone for `patience_s`.
        """
        most = MAX_IN_FLIGHT if len(self.replicas) > 1 else math.inf
        async with self._changed:
            while not (free := [r for r in self.replicas if r.live and r.in_flight < most]):
                if any(replica.live for replica in self.replicas):
                    await self._changed.wait()
                else:
                    await self._one_returns()
            # Ties go to the one whose turn is longest ago.
            chosen = min(free, key=lambda replica: (replica.outstanding_rows, replica.last_turn))
            self._turns += 1
            chosen.last_turn = self._turns
            chosen.in_flight += 1
            self._count_rows(chosen, rows)
            return chosen

    async def release(self, replica: Replica, rows: int) -> None:
        """The work is done, or has failed."""
        replica.in_flight -= 1
        self._count_rows(replica, -rows)
        await self._notify()

    async def wait_for_live(self) -> None:
        """Returns when a replica is live. Raises RoleUnavailable after `patience_s`."""
        async with self._changed:
            await self._one_returns()

    async def _one_returns(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._changed.wait_for(lambda: any(replica.live for replica in self.replicas))
        except TimeoutError:
            raise RoleUnavailable(
                f"{self.role}: no replica answers, since {self._patience_s:g} s (at {self.addresses})"
            ) from None

    def _count_rows(self, replica: Replica, rows: int) -> None:
        replica.outstanding_rows += rows
        metrics.CLIENT_OUTSTANDING_ROWS.labels(self.role, replica.address).set(replica.outstanding_rows)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def suspect(self, replica: Replica, problem: str) -> None:
        """Avoids a replica until it is healthy again."""
        if not replica.live:
            return
        log.warning("%s at %s is avoided until it is healthy: %s", self.role, replica.address, problem)
        self._set_live(replica, False)
        task = asyncio.create_task(self._revive(replica))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, replica: Replica) -> None:
        backoff_s = 0.05
        while not replica.live and (problem := await self._try_return(replica)):
            log.debug("%s at %s is still gone: %s", self.role, replica.address, problem)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _try_return(self, replica: Replica) -> str:
        """Makes a healthy replica live; else says what is the matter."""
        if problem := await replica.health(self.role):
            return problem
        if not replica.live:
            done: Callable[[Replica], Awaitable[None]] | None = None
            while (bring := self.on_return) is not None and bring is not done:  # meanwhile there may be news
                try:
                    await bring(replica)
                    done = bring
                except RolemeshError as error:
                    return str(error)
            log.warning("%s at %s is back", self.role, replica.address)
            self._set_live(replica, True)
            await self._notify()
        return ""

    def _set_live(self, replica: Replica, live: bool) -> None:
        replica.live = live
        metrics.REPLICAS_LIVE.labels(self.role).set(sum(r.live for r in self.replicas))

    async def close(self) -> None:
        """Closes every channel; calls that run are cancelled."""
        for task in self._revivals:
            task.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self.replicas))
