"""What `rolemesh serve ROLES` does: binds at once, loads, serves, drains."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from google.protobuf.descriptor import ServiceDescriptor

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, RoleFailed, RolemeshError
from rolemesh.rpc import tls
from rolemesh.rpc.contract import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, WEIGHTS
from rolemesh.rpc.serving.server import RoleServer, serve_metrics
from rolemesh.telemetry import context, metrics
from rolemesh.telemetry.logs import LogFormat, setup_logging
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.wire.allocator import tune
from rolemesh.workers.lease import Lease
from rolemesh.workers.local import ComputingThread, LocalWorker
from rolemesh.workers.traces import Traces

log = logging.getLogger(__name__)

DRAIN_S = 25.0  # for running calls; Kubernetes kills 30 s after SIGTERM
ORPHAN_DRAIN_S = 1.0  # nobody waits for the answers any more
LAST_WORDS_S = 4.0  # a thread that computes cannot be stopped: the process ends all the same

Servicers = Mapping[ServiceDescriptor, Any]


# Each imports its role's modules when it is called, so that a reward service does not load an engine.


def _actor(job: JobConfig, store: WeightStore) -> tuple[LocalWorker, Servicers]:
    from rolemesh.services.actor.servicer import ActorServicer
    from rolemesh.services.actor.worker import ActorWorker

    worker = ActorWorker(job)
    return worker, {ACTOR: ActorServicer(worker, store), WEIGHTS: WeightsServicer(store)}


def _reference(job: JobConfig, store: WeightStore) -> tuple[LocalWorker, Servicers]:
    from rolemesh.services.actor.servicer import ReferenceServicer
    from rolemesh.services.actor.worker import ReferenceWorker

    worker = ReferenceWorker(job)
    return worker, {REFERENCE: ReferenceServicer(worker)}


def _critic(job: JobConfig, store: WeightStore) -> tuple[LocalWorker, Servicers]:
    from rolemesh.services.critic.servicer import CriticServicer
    from rolemesh.services.critic.worker import CriticWorker

    worker = CriticWorker(job)
    return worker, {CRITIC: CriticServicer(worker)}


def _reward(job: JobConfig, store: WeightStore) -> tuple[LocalWorker, Servicers]:
    from rolemesh.services.reward.servicer import RewardServicer
    from rolemesh.services.reward.worker import RewardWorker

    worker = RewardWorker(job)
    return worker, {REWARD: RewardServicer(worker)}


def _rollout(job: JobConfig, store: WeightStore) -> tuple[LocalWorker, Servicers]:
    from rolemesh.services.rollout.servicer import RolloutServicer
    from rolemesh.services.rollout.worker import RolloutWorker

    worker = RolloutWorker(job)
    return worker, {ROLLOUT: RolloutServicer(worker, store), WEIGHTS: WeightsServicer(store)}


@dataclass(frozen=True)
class Served:
    """What a role's server serves, and how it is loaded (which blocks until the model is there). Roles of one
    process share a store of weights."""

    services: tuple[ServiceDescriptor, ...]
    load: Callable[[JobConfig, WeightStore], tuple[LocalWorker, Servicers]]


ROLES: dict[str, Served] = {
    "actor": Served((ACTOR, WEIGHTS), _actor),
    "reference": Served((REFERENCE,), _reference),
    "critic": Served((CRITIC,), _critic),
    "reward": Served((REWARD,), _reward),
    "rollout": Served((ROLLOUT, WEIGHTS), _rollout),
}


def group_server(roles: Sequence[str]) -> RoleServer:
    """The server of a group, not yet bound.

    Raises:
        InvalidConfig: an unknown role, or one that is named twice.
    """
    unknown = [role for role in roles if role not in ROLES]
    if unknown or not roles or len(set(roles)) < len(roles):
        raise InvalidConfig(f"a group is of different roles out of {', '.join(ROLES)}; got {', '.join(roles)}")
    return RoleServer({role: ROLES[role].services for role in roles})


async def load_group(roles: Sequence[str], job: JobConfig) -> tuple[list[LocalWorker], Servicers]:
    """The workers of a group's roles, and their servicers. Those that share the device are loaded one after
    another, each asleep before the next comes, so that the device never holds two.

    Raises:
        RolemeshError: a role could not be loaded.
    """
    lease, store = Lease(), WeightStore()
    sharing = [role for role in roles if job.on_device(role)]
    workers: list[LocalWorker] = []
    servicers: dict[ServiceDescriptor, Any] = {}
    for role in roles:
        shares = len(sharing) > 1 and role in sharing
        if shares:
            await lease.vacate()
        worker, its_servicers = await _load(role, job, store)
        worker.traces = Traces.of(job, role)
        if shares:
            lease.seat(worker)
            worker.lease = lease
        workers.append(worker)
        servicers.update(its_servicers)
    return workers, servicers


async def _load(role: str, job: JobConfig, store: WeightStore) -> tuple[LocalWorker, Servicers]:
    started, thread = time.perf_counter(), ComputingThread(role)
    load = partial(contextvars.copy_context().run, ROLES[role].load, job, store)
    try:
        worker, servicers = await asyncio.get_running_loop().run_in_executor(thread, load)
    except RolemeshError as error:  # the user's to mend: a line, no traceback
        log.error("%s could not load: %s", role, error)
        raise
    except Exception as error:
        log.exception("%s could not load", role)
        raise RoleFailed(f"{role} could not load: {type(error).__name__}: {error}") from error
    metrics.ROLE_LOAD_SECONDS.labels(role).set(time.perf_counter() - started)
    worker.thread = thread
    return worker, servicers


async def serve(
    roles: Sequence[str],
    job: JobConfig,
    listen: str,
    *,
    metrics_listen: str | None = None,
    health_listen: str | None = None,
    tls_dir: Path | None = None,
    address_file: Path | None = None,
    exit_with_parent: bool = False,
    log_format: LogFormat = "text",
) -> None:
    """Serves a role, or a group's roles, until SIGTERM or SIGINT; a second signal ends the process at once.

    Args:
        roles: keys of ROLES; they take turns on the device.
        listen: host:port; port 0 takes a free one.
        metrics_listen: host:port of /metrics; None: no metrics.
        health_listen: host:port of health alone, always plain; None: only beside the roles.
        tls_dir: the keys, with which all is TLS; None: plain.
        address_file: gets {"address", "metrics", "health", "pid"} as JSON once all are bound.
        exit_with_parent: also end when standard input closes, which a launcher's death does.
        log_format: of the lines on standard error.

    Raises:
        InvalidConfig: no such group, no usable keys, or an address that cannot be had.
        RolemeshError: a role could not be loaded.
    """
    tune()
    torch.manual_seed(0)  # nothing should draw from it; what does is the same in every process
    setup_logging(log_format)
    server = group_server(roles)
    tls.use_keys(tls_dir, *roles)
    context.role.set(",".join(roles))
    context.job.set(job.trainer.experiment_name)
    ending = _Ending(exit_with_parent)
    metrics_address = serve_metrics(metrics_listen) if metrics_listen else None
    metrics.DEVICE_BYTES.set_function(torch.cuda.memory_reserved)  # 0 until something is on a GPU
    health_address = await server.start_health(health_listen) if health_listen else None
    address = await server.start(listen)
    if address_file is not None:
        bound = {"address": address, "metrics": metrics_address, "health": health_address, "pid": os.getpid()}
        _write_whole(address_file, bound)
    log.info("listens on %s, metrics on %s", address, metrics_address or "no port")

    working = asyncio.create_task(_work(server, roles, job))
    ended = asyncio.create_task(ending.begun.wait())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        log.info("draining: %s", ending.reason)
    finally:
        await server.drain(ending.grace_s)
        _end_in(LAST_WORDS_S, 1 if working.done() and working.exception() else 0)


async def _work(server: RoleServer, roles: Sequence[str], job: JobConfig) -> None:
    """Load and serve until a worker fails unrecoverably, then raise."""
    workers, servicers = await load_group(roles, job)
    gc.collect()
    gc.freeze()  # what is loaded stays; a collection that walked it would stop every call for 200 ms
    await server.ready(servicers)
    log.info("ready")
    try:
        async with asyncio.TaskGroup() as watches:
            for worker in workers:
                watches.create_task(worker.watch())
    except ExceptionGroup as lost:
        log.error("%s", lost.exceptions[0])
        raise lost.exceptions[0] from None


# ------------------------------------------------------------------------------------ the end


class _Ending:
    """Why and how quickly the process is to end."""

    def __init__(self, with_parent: bool) -> None:
        self.begun = asyncio.Event()
        self.reason = ""
        self.grace_s = DRAIN_S
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        if with_parent:
            threading.Thread(target=self._watch_stdin, daemon=True, name="parent").start()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.begun.is_set():
            os._exit(128 + number)
        self._begin(f"got {number.name}", DRAIN_S)

    def _watch_stdin(self) -> None:
        # os.read and not sys.stdin, whose lock would be held at interpreter exit.
        while os.read(0, 4096):
            pass
        _end_in(ORPHAN_DRAIN_S + LAST_WORDS_S, 0)  # even if the event loop hangs
        self._loop.call_soon_threadsafe(self._begin, "the launcher is gone", ORPHAN_DRAIN_S)

    def _begin(self, reason: str, grace_s: float) -> None:
        self.reason, self.grace_s = reason, grace_s
        self.begun.set()


def _end_in(seconds: float, code: int) -> None:
    """Ends the process unless it has ended by then."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


# ---------------------------------------------------------------------------------- small parts


def _write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """A reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content), encoding="utf-8")
    part.replace(path)
