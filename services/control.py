"""What `rolemesh control` does: one run with roles that are served somewhere, and the controller's own
service beside it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.metrics import CONTROLLER
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import NoCritic, NoReference, Roles, methods
from rolemesh.rpc.allocator import tune
from rolemesh.rpc.clients import (
    ActorClient,
    CriticClient,
    ReferenceClient,
    RewardClient,
    RoleClient,
    RolloutClient,
)
from rolemesh.rpc.server import RoleServer, serve_metrics
from services.controller.experience import gather
from services.controller.loop import Run
from services.controller.pages import check_step
from services.controller.progress import Display
from services.controller.servicer import SERVICE, ControllerServicer
from services.controller.status import State
from services.controller.summary import Summary

log = logging.getLogger(__name__)

Addresses = Mapping[str, Sequence[str]]

CLIENTS: dict[str, type[RoleClient]] = {
    "actor": ActorClient,
    "rollout": RolloutClient,
    "reference": ReferenceClient,
    "critic": CriticClient,
    "reward": RewardClient,
}


async def control(
    job: JobConfig, addresses: Addresses, *, listen: str, metrics_listen: str | None = None
) -> None:
    """Trains with roles that are already served.

    Args:
        job: what to do.
        addresses: host:port of each replica of each role that the job has.
        listen: host:port of ControllerService.
        metrics_listen: host:port of /metrics; None: no metrics.

    Raises:
        RolemeshError: the job cannot be run, or a step failed.
    """
    tune()
    run = await prepare(job)
    with Brakes(run) as brakes:
        scraped = serve_metrics(metrics_listen, CONTROLLER) if metrics_listen else None
        brakes.end(await drive(run, addresses, listen, scraped))


async def prepare(job: JobConfig) -> Run:
    """Everything that can be known to be wrong before a role is asked: the page, the tokenizer, the data.

    Raises:
        RolemeshError: what is wrong, and where.
    """
    await check_step(job)
    return Run(job, load_tokenizer(job.actor.model), Display())


async def drive(run: Run, addresses: Addresses, listen: str, scraped: str | None) -> Summary:
    """Makes the run with clients of these addresses, once every replica is ready; /metrics is at `scraped`."""
    job = run.job
    if missing := [role for role in job.roles if not addresses.get(role)]:
        raise InvalidConfig(f"the job has roles {list(job.roles)}; no address was given for {missing}")
    async with AsyncExitStack() as stack:
        server = RoleServer({"controller": [SERVICE]})
        stack.push_async_callback(server.drain, 1.0)
        address = await server.start(listen)
        await server.ready({SERVICE: ControllerServicer(run.status)})
        run.display.console.print(f"controller at {address}, metrics at {scraped or 'no port'}", style="dim")

        clients: dict[str, Any] = {}
        for role in job.roles:
            timeouts = {"timeout_s": job.trainer.rpc_timeout_s}
            if role == "rollout":
                timeouts["sync_timeout_s"] = job.trainer.weight_sync_timeout_s
            client = CLIENTS[role](addresses[role], methods(job), **timeouts)
            clients[role] = await stack.enter_async_context(client)
        await until_ready(clients.values(), job.trainer.ready_timeout_s)
        return await run.train(Roles(**{"critic": NoCritic(), "reference": NoReference(), **clients}))


async def until_ready(clients: Iterable[RoleClient], timeout_s: float) -> None:
    """Returns when every replica of every role serves. Raises RoleUnavailable: all that do not, and why."""
    late: list[str] = []

    async def wait(client: RoleClient) -> None:
        try:
            await client.wait_until_ready(timeout_s)
        except RoleUnavailable as error:  # told with the others; any other error ends the waiting at once
            late.append(str(error))

    await gather(*(wait(client) for client in clients))
    if late:
        raise RoleUnavailable("\n".join(late))


class Brakes:
    """SIGINT and SIGTERM: the first lets the running step end (while roles still start: ends at once), the
    second ends at once. Checkpoints stay whole either way."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._signal: signal.Signals | None = None

    def __enter__(self) -> Brakes:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)
        self._run.display.close()
        if self._signal and exception[0] is asyncio.CancelledError:
            self._say("ended at once; the last checkpoint, if there is one, is whole")
            raise SystemExit(128 + self._signal)

    def end(self, summary: Summary) -> None:
        """The last words of a run."""
        self._run.display.summary(summary)
        if self._signal and summary.step < summary.total_steps:
            self._say(
                f"stopped after step {summary.step}; the same command goes on from {_where(summary.checkpoint)}"
            )
            raise SystemExit(128 + self._signal)

    def _on_signal(self, number: signal.Signals) -> None:
        assert self._task is not None
        if self._signal or self._run.status.state is State.STARTING:
            self._signal = number
            self._task.cancel()
            return
        self._signal = number
        self._say(f"{number.name}: the run ends after this step (again: at once)")
        self._run.request_stop()

    def _say(self, words: str) -> None:
        self._run.display.console.print(words, style="yellow", highlight=False)


def _where(checkpoint: Path | None) -> str:
    return (
        str(checkpoint) if checkpoint else "the beginning, since no checkpoint was written (trainer.save_freq)"
    )
