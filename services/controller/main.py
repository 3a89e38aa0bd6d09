"""Implements `rolemesh control`: one run with roles that are already served, and the controller's service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.base import absolute_path, resolved
from rolemesh.errors import WRONG_INPUT, InvalidConfig
from rolemesh.fingerprint import Fingerprint, fingerprint
from rolemesh.kubernetes import KubernetesApi
from rolemesh.models.fetching import pinned
from rolemesh.models.loading import load_tokenizer, vocabulary_in
from rolemesh.roles import Roles
from rolemesh.rpc.calling.discovery import Dns, Members
from rolemesh.services.controller.display.curves import draw_curves
from rolemesh.services.controller.display.progress import Display
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.job_warnings import (
    warn_of_no_checkpoint,
    warn_of_stale_rows,
    warn_of_untrained_actor,
    warn_of_unused_keys,
)
from rolemesh.services.controller.pages.choice import check_step
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.controller.run.attempts import Attempts, NoProgress
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import AnotherRun, address_shown, held, new_term
from rolemesh.services.controller.scale_down import Workload, refuse_scaled_down, scale_down, scale_up
from rolemesh.services.controller.service.controller_server import ControllerServer, serving
from rolemesh.services.controller.service.status import RunStatus
from rolemesh.services.controller.stop_on_signal import StopOnSignal
from rolemesh.wire.allocator import tune

log = logging.getLogger(__name__)

Addresses = Mapping[str, Sequence[str] | Members]


async def control(
    job: JobConfig,
    addresses: Addresses,
    server: ControllerServer,
    *,
    scraped: str | None = None,
    scaled_down: Sequence[Workload] = (),
    scales_up: bool = False,
    needed: Sequence[Workload] = (),
    roles_of: Path | None = None,
    max_attempts: int = 0,
    attempts_of: str = "",
    begun: Callable[[], None] = lambda: None,
) -> None:
    """Train with roles that are already served.

    Args:
        job: the job.
        addresses: of the replicas of each of the job's roles.
        server: the controller's server, already started.
        scraped: address of /metrics; None: it is not served.
        scaled_down: workloads to scale to zero once the run has ended or was stopped.
        scales_up: before the run, scale up those with fewer pods than their annotation says. What the end of an
            earlier run has paused goes on in any case.
        needed: the roles' workloads; the run is refused if one of them is scaled to zero.
        roles_of: run directory of the job with which the roles were started; None: the job's own. The run
            takes the lock and its term there, so that it is refused while the roles have a controller.
        max_attempts: starts of the run without a new checkpoint, after which it has failed; 0: no limit.
        attempts_of: names what is counted; starts of another name are forgotten.
        begun: called once this start is counted in the run directory, or need not be: another run has locked
            it, or max_attempts have been made.

    Raises:
        InvalidConfig: the job or an address cannot be used; or scaled_down or needed is given outside of a pod.
        NoProgress: max_attempts starts have reached no new checkpoint.
        RolemeshError: a step failed.
    """
    roles_of = absolute_path(roles_of) if roles_of else None
    tune()
    warn_of_unused_keys(job)
    warn_of_stale_rows(job)
    if not roles_of:  # a trial has nothing to keep
        warn_of_no_checkpoint(job)
    cluster = KubernetesApi.in_pod() if scaled_down else None
    attempts = Attempts(job.run_dir, max_attempts, attempts_of)
    try:
        with ExitStack() as locks:
            try:
                # Once each, however they are spelled: a second lock would be refused as another run's.
                locked = {resolved(each): each for each in (roles_of or job.run_dir, job.run_dir)}
                for _, directory in sorted(locked.items()):
                    locks.enter_context(held(directory))
                locks.enter_context(attempts.forgiven_at_sigterm())  # until signals are handled
                locks.enter_context(attempts.counted())
                begun()
            except (AnotherRun, NoProgress) as error:
                begun()  # neither is a failure of this start
                if isinstance(error, NoProgress):
                    if cluster:
                        await scale_down(scaled_down, cluster)
                    attempts.forget_unnamed()  # not before: a start after a kill would wait for lost roles
                raise
            if needed:  # not before: a run that cannot go on has scaled them down, and says why
                await refuse_scaled_down(needed, KubernetesApi.in_pod())
            # Before names at the Hub become commits, which roles do not see.
            expected = {role: fingerprint(job, role) for role in job.roles}
            if roles_of:  # a trial may have data and a length of its own
                expected = {role: each.without("data", "trainer") for role, each in expected.items()}
            job = pinned(job)
            await check_step(job)
            # In a thread, so that the server answers meanwhile: prompts may be many.
            run = await asyncio.to_thread(new_run, job, server.status)
            with StopOnSignal(run, attempts.forgive, leave_scale_down_to_next_start=bool(cluster)) as stop:
                # If the controller was killed between the end of the run and the scale-down, roles may be gone.
                finished = run.finished()
                if cluster and not finished:
                    await scale_up(scaled_down, cluster, sets_replicas=scales_up)
                summary = finished or await train(
                    run, addresses, server, scraped, roles_of=roles_of, expected=expected, attempts=attempts
                )
                stop.end(summary)
    except WRONG_INPUT:  # a retry would not help, so the controller is not restarted
        if cluster:
            await scale_down(scaled_down, cluster)
        raise
    if cluster:
        await scale_down(scaled_down, cluster)


async def checked_run(job: JobConfig) -> Run:
    """Make a run, after checks that need no role: of the page, the policy's tokenizer and config, and the data.

    Raises:
        RolemeshError: something cannot be used; the message says what and where.
    """
    await check_step(job)
    return new_run(job)


def new_run(job: JobConfig, status: RunStatus | None = None) -> Run:
    """Make a run with its tokenizer and data.

    Args:
        job: the job.
        status: holds the run's progress; None: a new one.

    Raises:
        RolemeshError: tokenizer or data cannot be used, or the policy's config.json has no vocabulary size.
    """
    vocabulary_in(job.actor.model, "actor")  # fails early; a rollout's client needs it later
    return Run(job, load_tokenizer(job.actor.model), Display(), status)


async def drive(run: Run, addresses: Addresses, listen: str, scraped: str | None) -> Summary:
    """Run `train` with a new controller server at `listen`."""
    async with serving(run.status, run.job.roles, listen) as server:
        return await train(run, addresses, server, scraped)


async def train(
    run: Run,
    addresses: Addresses,
    server: ControllerServer,
    scraped: str | None,
    *,
    roles_of: Path | None = None,
    expected: Mapping[str, Fingerprint] = MappingProxyType({}),
    attempts: Attempts | None = None,
) -> Summary:
    """Train with clients of these addresses.

    It waits until every replica is ready; for a role with discovered replicas, until one is. A replica that was
    started with another job, or with another version of Rolemesh, is not ready.

    Args:
        run: the run.
        addresses: of the replicas of each role.
        server: the controller's server.
        scraped: address of /metrics, to display.
        roles_of: absolute run directory of the roles' job; None: the run's own.
        expected: fingerprints that replicas must have, by role; by default those of the run's job.
        attempts: does not count this start while a role has no pod; None: starts are not counted.
    """
    job = run.job
    if not roles_of:  # a trial has a length of its own
        warn_of_untrained_actor(job)
    if missing := [role for role in job.roles if not addresses.get(role)]:
        raise InvalidConfig(f"the job has roles {list(job.roles)}, but no address was given for {missing}")
    async with AsyncExitStack() as stack:
        term = new_term(roles_of or job.run_dir)
        clients = {role: new_client(role, addresses[role], job, term, expected.get(role)) for role in job.roles}
        server.show(clients)
        stack.enter_context(address_shown(job.run_dir, server.address, server.life))
        run.display.console.print(
            f"controller at {server.address}, metrics at {scraped or 'no port'}", style="dim"
        )

        for client in clients.values():
            await stack.enter_async_context(client)

        def pods(role: str) -> set[str]:
            """A name may go on having the address of a pod whose node is lost, so there a pod has to answer."""
            is_by_name = isinstance(addresses[role], Dns)
            return {each.address for each in clients[role].pool.replicas if each.life or not is_by_name}

        with attempts.waiting(lambda: all(map(pods, clients))) if attempts else nullcontext():
            await until_ready(clients.values(), job.trainer.ready_timeout_s)
        trained = {role: pods(role) for role in clients if ROLES[role].trained}

        def kept_pods() -> bool:
            """Another pod of a trained role is new, however soon it came. One of another role does as well."""
            return all(pods(role) & trained.get(role, pods(role)) for role in clients)

        try:
            with attempts.training(kept_pods) if attempts else nullcontext():
                return await run.train(Roles.of(job, clients))
        finally:
            draw_curves(run.status.records, job.run_dir / "curves.png", run.status.job)
