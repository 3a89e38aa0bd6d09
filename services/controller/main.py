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
from rolemesh.errors import WRONG_INPUT, InvalidConfig, RoleUnavailable
from rolemesh.kubernetes import Cluster
from rolemesh.models.loading import load_tokenizer, vocabulary_in
from rolemesh.roles import Roles, methods
from rolemesh.rpc.calling.clients import (
    ActorClient,
    CriticClient,
    ReferenceClient,
    RewardClient,
    RoleClient,
    RolloutClient,
)
from rolemesh.rpc.calling.discovery import Members
from rolemesh.services.controller.display.progress import Display
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.pages.choice import check_step
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import address_shown, held
from rolemesh.services.controller.scale_down import Workload, refuse_scaled_down, scale_down, unpause
from rolemesh.services.controller.service.server import ControllerServer, serving
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.tasks import gather
from rolemesh.wire.allocator import tune

log = logging.getLogger(__name__)

Addresses = Mapping[str, Sequence[str] | Members]

CLIENTS: dict[str, type[RoleClient]] = {
    "actor": ActorClient,
    "rollout": RolloutClient,
    "reference": ReferenceClient,
    "critic": CriticClient,
    "reward": RewardClient,
}


async def control(
    job: JobConfig,
    addresses: Addresses,
    server: ControllerServer,
    *,
    scraped: str | None = None,
    scaled_down: Sequence[Workload] = (),
    needed: Sequence[Workload] = (),
) -> None:
    """Trains with roles that are already served.

    Args:
        job: what to do.
        addresses: of the replicas of each role that the job has.
        server: it answers already.
        scraped: where /metrics is; None: nowhere.
        scaled_down: what is scaled to zero once the run has come to its end, or was told to stop.
        needed: workloads of the roles; refused where one of them has been scaled to zero.

    Raises:
        InvalidConfig: the job or an address cannot be used; scaled_down or needed, and this is not a pod.
        RolemeshError: a step failed.
    """
    tune()
    warn_of_idle_keys(job)
    if needed:
        await refuse_scaled_down(needed, Cluster.in_pod())
    cluster = Cluster.in_pod() if scaled_down else None
    try:
        await check_step(job)
        # In a thread, so that the server answers meanwhile: prompts may be many.
        run = await asyncio.to_thread(new_run, job, server.status)
        if cluster:
            await unpause(scaled_down, cluster)
        with Brakes(run) as brakes, held(job.run_dir):
            # One that was killed between the end of the run and the scale-down has no roles to wait for.
            summary = run.finished() or await train(run, addresses, server, scraped)
            brakes.end(summary)
    except WRONG_INPUT:  # nobody makes another attempt
        if cluster:
            await scale_down(scaled_down, cluster)
        raise
    if cluster:
        await scale_down(scaled_down, cluster)


def warn_of_idle_keys(job: JobConfig) -> None:
    """A line for each key that the job file sets and that changes nothing."""
    for idle in job.idle_keys():
        if idle.is_set:
            log.warning("%s has no effect: %s", idle.key, idle.reason)


async def prepare(job: JobConfig) -> Run:
    """Everything that can be known to be wrong before a role is asked: the page, tokenizer and configuration of
    the policy, the data.

    Raises:
        RolemeshError: what is wrong, and where.
    """
    await check_step(job)
    return new_run(job)


def new_run(job: JobConfig, status: RunStatus | None = None) -> Run:
    """A run with its tokenizer and data; `status` is where it is told, None: one of its own.

    Raises:
        RolemeshError: they cannot be used, or the policy's config.json does not tell its vocabulary.
    """
    vocabulary_in(job.actor.model, "actor")  # a rollout's client will ask
    return Run(job, load_tokenizer(job.actor.model), Display(), status)


async def drive(run: Run, addresses: Addresses, listen: str, scraped: str | None) -> Summary:
    """`train` with a server of its own at `listen`."""
    async with serving(run.status, run.job.roles, listen) as server:
        return await train(run, addresses, server, scraped)


async def train(run: Run, addresses: Addresses, server: ControllerServer, scraped: str | None) -> Summary:
    """Makes the run with clients of these addresses, once every replica is ready, or one of each role where
    they come and go; /metrics is at `scraped`."""
    job = run.job
    if missing := [role for role in job.roles if not addresses.get(role)]:
        raise InvalidConfig(f"the job has roles {list(job.roles)}; no address was given for {missing}")
    async with AsyncExitStack() as stack:
        clients = {role: new_client(role, addresses[role], job) for role in job.roles}
        server.show(clients)
        stack.enter_context(address_shown(job.run_dir, server.address))
        run.display.console.print(
            f"controller at {server.address}, metrics at {scraped or 'no port'}", style="dim"
        )

        for client in clients.values():
            await stack.enter_async_context(client)
        await until_ready(clients.values(), job.trainer.ready_timeout_s)
        return await run.train(Roles.of(job, clients))


def new_client(role: str, addresses: Sequence[str] | Members, job: JobConfig) -> RoleClient:
    """A client as the job wants it, not yet entered."""
    options: dict[str, Any] = {"timeout_s": job.trainer.rpc_timeout_s}
    [group] = (members for members in job.groups.values() if role in members)
    stateless = all(CLIENTS[member].has_replicas for member in group)
    if not isinstance(addresses, Sequence) and stateless:
        # A replica that is gone is replaced, and nothing was in it alone: worth waiting until the new one has
        # loaded. A group with a trained role has one pod, and with that the run is over.
        options |= {"may_grow": True, "patience_s": job.trainer.ready_timeout_s}
    if role == "rollout":
        options |= {"sync_timeout_s": job.trainer.weight_sync_timeout_s, "rows_at_once": rows_at_once(job)}
        options["vocabulary"] = vocabulary_in(job.actor.model, "actor")  # no other role answers with token ids
    return CLIENTS[role](addresses, methods(job), **options)


def rows_at_once(job: JobConfig) -> int:
    """How many rows a rollout decodes at once."""
    engines = len(job.rollout.openai.urls) if job.rollout.name == "openai" else 1
    return job.rollout.max_num_seqs * engines


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
