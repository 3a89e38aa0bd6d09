"""Implements `rolemesh control`: one run with roles that are already served, and the controller's service."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rolemesh.catalog.catalog import load
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.base import absolute_path, resolved
from rolemesh.errors import WRONG_INPUT, InvalidConfig, RoleUnavailable
from rolemesh.fingerprint import Fingerprint, fingerprint
from rolemesh.kubernetes import KubernetesApi
from rolemesh.models.fetching import pinned
from rolemesh.models.loading import load_tokenizer, vocabulary_in
from rolemesh.roles import Roles, methods
from rolemesh.rpc.calling.clients import RoleClient
from rolemesh.rpc.calling.discovery import Dns, Members
from rolemesh.rpc.term import Term
from rolemesh.services.controller.display.curves import draw_curves
from rolemesh.services.controller.display.progress import Display
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.pages.choice import check_step
from rolemesh.services.controller.run.attempts import Attempts, NoProgress
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import AnotherRun, address_shown, held, new_term
from rolemesh.services.controller.scale_down import Workload, refuse_scaled_down, scale_down, scale_up
from rolemesh.services.controller.service.controller_server import ControllerServer, serving
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.tasks import gather
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
    warn_of_idle_keys(job)
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
            except AnotherRun:
                begun()  # no failure of this one, which waits for the other's end by being restarted
                raise
            except NoProgress:
                begun()  # the run's own end: nothing else may count it, and so have it retried
                if cluster:
                    await scale_down(scaled_down, cluster)
                attempts.forget_unnamed()  # not before: a start after a kill would wait for roles that are gone
                raise
            begun()
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


def warn_of_idle_keys(job: JobConfig) -> None:
    """Log a warning for each key that the job file sets without effect."""
    for idle in job.idle_keys():
        if idle.is_set:
            log.warning("%s has no effect: %s", idle.key, idle.reason)


def warn_of_no_checkpoint(job: JobConfig) -> None:
    """Log a warning if the run trains and saves nothing, so that the trained model ends with the run."""
    trainer = job.trainer
    if trainer.save_freq < 1 and not trainer.save_best and not trainer.val_only:
        log.warning(
            "no checkpoint will be written, and the trained model is lost at the end, as trainer.save_freq is "
            "%d; set it to N to save every N steps and after the last",
            trainer.save_freq,
        )


def warn_of_untrained_actor(job: JobConfig) -> None:
    """Log a warning if every step of the run is one of trainer.critic_warmup.

    Args:
        job: with its number of steps.
    """
    warmup = job.trainer.critic_warmup
    steps = job.trainer.total_training_steps
    if steps is not None and warmup >= steps and not job.trainer.val_only:
        log.warning(
            "trainer.critic_warmup is %d, and the run has %d steps, so none of them trains the actor; make "
            "critic_warmup smaller, or the run longer",
            warmup,
            steps,
        )


def warn_of_stale_rows(job: JobConfig) -> None:
    """Log a warning if generation runs ahead, and the loss neither clips nor weighs tokens of older weights.

    Log another one if the job does not say how far ahead: a job of verl has mode async, and means a server.
    """
    if job.steps_ahead and "max_staleness" not in job.trainer.model_fields_set:
        log.warning(
            "rollout.mode is async, so rows are generated ahead of training, with older weights (in verl the "
            "word names a server, and the weights are the newest); set rollout.mode to sync, or "
            "trainer.max_staleness (%d) to say how many steps ahead",
            job.steps_ahead,
        )
    correction = job.algorithm.rollout_correction
    loss = job.policy_loss
    weighs = loss.has_ratio and not (loss.corrects and correction.is_plain_reinforce)
    if job.steps_ahead and not weighs and correction.rollout_is is None:
        log.warning(
            "rollout.mode is async, so tokens are of weights up to %d step%s older than those that learn from "
            "them, but the policy loss (%s) has neither a clip nor an importance weight; set "
            "algorithm.rollout_correction.rollout_is to token, or trainer.max_staleness to 0",
            job.steps_ahead,
            "s" * (job.steps_ahead > 1),
            loss.name,
        )


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


def new_client(
    role: str,
    addresses: Sequence[str] | Members,
    job: JobConfig,
    term: Term | None = None,
    expected: Fingerprint | None = None,
) -> RoleClient:
    """Make a role's client with the job's settings, not yet entered.

    Args:
        role: its name.
        addresses: of its replicas.
        job: the job.
        term: of a controller; trained roles then answer nobody else.
        expected: the fingerprint that replicas must have; None: the job's.
    """
    expected = expected or fingerprint(job, role)
    for key in expected.unreadable:
        log.warning("cannot read the file of %s; replicas of %s may have another one", key, role)
    options: dict[str, Any] = {"timeout_s": job.trainer.rpc_timeout_s, "expected": expected}
    [group] = (members for members in job.groups.values() if role in members)
    stateless = not any(ROLES[member].trained for member in group)
    if not isinstance(addresses, Sequence) and stateless:
        # A lost replica is replaced and had no state of its own, so wait until the new one has loaded. A group
        # with a trained role has one pod; if that is lost, the run is over.
        options |= {"may_grow": True, "patience_s": job.trainer.ready_timeout_s}
    if role == "rollout":
        options |= {
            "sync_timeout_s": job.trainer.weight_sync_timeout_s,
            "rows_at_once": job.rows_at_once,
        }
        options["vocabulary"] = vocabulary_in(job.actor.model, "actor")  # only rollouts answer with token ids
    if ROLES[role].trained:
        options["term"] = term
    if role == "environment":
        options["call_timeout_s"] = job.rollout.multi_turn.call_timeout_s
    client: RoleClient = load(ROLES[role].client)(addresses, methods(job), **options)
    return client


async def until_ready(clients: Iterable[RoleClient], timeout_s: float) -> None:
    """Wait until every client is ready. Raise RoleUnavailable with the problem of each that is not in time."""
    late: list[str] = []

    async def wait(client: RoleClient) -> None:
        try:
            await client.wait_until_ready(timeout_s)
        except RoleUnavailable as error:  # raised together below; any other error is raised at once
            late.append(str(error))

    await gather(*(wait(client) for client in clients))
    if late:
        raise RoleUnavailable("\n".join(late))


class StopOnSignal:
    """Handles SIGINT and SIGTERM.

    The first signal stops the run after the current step, or at once while roles start. The second ends it at
    once. Checkpoints stay intact either way.

    Args:
        run: the run.
        on_signal: called at each signal, before anything else.
        leave_scale_down_to_next_start: after a signal, leave the end of the run to the next start, which scales
            the roles down. An upgrade may have replaced this controller by one that makes more steps.
    """

    def __init__(
        self,
        run: Run,
        on_signal: Callable[[], None] = lambda: None,
        leave_scale_down_to_next_start: bool = False,
    ) -> None:
        self._run = run
        self._at_signal = on_signal
        self._leaves_end = leave_scale_down_to_next_start
        self._signal: signal.Signals | None = None

    def __enter__(self) -> StopOnSignal:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)
        self._run.display.close()
        if self._signal and exception[0] is asyncio.CancelledError:
            self._say("ended at once; the last checkpoint, if any, is intact")
            raise SystemExit(128 + self._signal)
        if self._signal and self._leaves_end and isinstance(exception[1], WRONG_INPUT):
            log.error("%s. Its roles are left to the next start, as this one was asked to end", exception[1])
            raise SystemExit(128 + self._signal)

    def end(self, summary: Summary) -> None:
        """Display a run's summary. Exit with the signal's code if it was stopped, or leaves the run's end."""
        self._run.display.summary(summary)
        if self._signal and summary.step < summary.total_steps:
            self._say(
                f"stopped after step {summary.step}; the same command resumes from {_where(summary.checkpoint)}"
            )
            raise SystemExit(128 + self._signal)
        if self._signal and self._leaves_end:
            self._say("the run has ended; its roles are left to the next start, as this one was asked to end")
            raise SystemExit(128 + self._signal)

    def _on_signal(self, number: signal.Signals) -> None:
        assert self._task is not None
        self._at_signal()
        is_first = self._signal is None
        self._signal = number
        if not is_first or self._run.status.state is State.STARTING:
            self._task.cancel()
            return
        self._run.request_stop()
        self._say(f"{number.name}: stopping after this step (send it again to stop at once)")

    def _say(self, words: str) -> None:
        self._run.display.console.print(words, style="yellow", highlight=False)


def _where(checkpoint: Path | None) -> str:
    return str(checkpoint) if checkpoint else "the start, because no checkpoint was written (trainer.save_freq)"
