"""Implements `rolemesh serve ROLES`: bind the ports at once, load the roles, serve, drain.

In a group of several ranks, rank 0 does this, and the other ranks follow its orders (rolemesh/ranks/).
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from google.protobuf.descriptor import ServiceDescriptor

from rolemesh.catalog.catalog import load
from rolemesh.catalog.role_specs import ROLES
from rolemesh.checks.memory_limit import refuse_small_limit
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleFailed, RolemeshError
from rolemesh.fingerprint import fingerprint
from rolemesh.planner.device_specs import memory_limit
from rolemesh.ranks.executor import Command
from rolemesh.ranks.follower import follow
from rolemesh.ranks.leader import Leader
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.rendezvous import Rendezvous, own_gpu
from rolemesh.rpc import tls
from rolemesh.rpc.contract import WEIGHTS
from rolemesh.rpc.serving.server import RoleServer, serve_metrics
from rolemesh.services.processes.shutdown import (
    DRAIN_S,
    LOG_FLUSH_S,
    ORPHAN_DRAIN_S,
    Shutdown,
    end_at_once,
    end_in,
)
from rolemesh.telemetry import context, metrics
from rolemesh.telemetry.logs import LogFormat, setup_logging
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.weights.stripe_server import StripeServer
from rolemesh.wire.allocator import tune
from rolemesh.workers.commands import command_of as worker_command
from rolemesh.workers.devices import described, resolve_device
from rolemesh.workers.lease import Lease
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.numerics import prepare_device
from rolemesh.workers.worker_context import WorkerContext

log = logging.getLogger(__name__)

LOAD = "load"  # the first order for a role on the group's devices

Servicers = Mapping[ServiceDescriptor, Any]


def group_server(roles: Sequence[str], job: JobConfig | None = None) -> RoleServer:
    """Make the server of a group, not yet bound.

    Args:
        roles: keys of ROLES.
        job: the roles' job. Calls of other jobs are refused, and health checks report the roles' fingerprints.
            None: calls of any job are answered.

    Raises:
        InvalidConfig: there is no role, a role is unknown, or it is named twice.
    """
    unknown = [role for role in roles if role not in ROLES]
    if unknown or not roles or len(set(roles)) < len(roles):
        raise InvalidConfig(f"expected different roles of {', '.join(ROLES)}; got {', '.join(roles)}")
    max_streams = max(ROLES[role].max_streams for role in roles)
    return RoleServer(
        {role: services_of(role) for role in roles},
        max_streams=max_streams,
        job=job.trainer.experiment_name if job else "",
        fingerprints={role: fingerprint(job, role).to_metadata() for role in roles} if job else {},
    )


def services_of(role: str) -> tuple[ServiceDescriptor, ...]:
    """Return the gRPC services of a role's server."""
    spec = ROLES[role]
    return (load(spec.service), *([WEIGHTS] if spec.serves_weights else []))


async def load_group(
    roles: Sequence[str], job: JobConfig, leader: Leader | None = None
) -> tuple[list[LocalWorker], Servicers]:
    """Load the workers of a group's roles, and make their servicers.

    Roles that share the device are loaded one after another, and each sleeps before the next is loaded. So the
    device never holds two.

    Args:
        roles: keys of ROLES.
        job: the job.
        leader: gives orders to the other ranks, which also load the roles on a device; None: there is one rank.

    Raises:
        RolemeshError: a role could not be loaded.
    """
    lease = Lease()
    store = WeightStore()
    sharing = [role for role in roles if job.on_device(role)]
    workers: list[LocalWorker] = []
    servicers: dict[ServiceDescriptor, Any] = {}
    with ExitStack() as loaded:  # if a role cannot be loaded, those before it are closed
        for role in roles:
            shares = len(sharing) > 1 and role in sharing
            if shares:
                await lease.vacate()
            worker_context = WorkerContext.of(job, role, lease if shares else None)
            rendezvous = Rendezvous()
            if leader and job.on_device(role):
                worker_context = replace(worker_context, executor=leader.executor(role))
                rendezvous = leader.rendezvous
            worker, its_servicers = await _load(role, job, store, worker_context, rendezvous)
            loaded.callback(worker.close)
            if shares:
                lease.add(worker)
            workers.append(worker)
            servicers.update(its_servicers)
        loaded.pop_all()
    return workers, servicers


def load_role(
    role: str, job: JobConfig, store: WeightStore, worker_context: WorkerContext
) -> tuple[LocalWorker, Servicers]:
    """Load a role's worker, and make its servicers. Blocks until the model is loaded.

    Args:
        role: key of ROLES.
        job: the job.
        store: the weights of the process, shared by its roles.
        worker_context: the worker's thread, ranks, executor, traces and lease.
    """
    spec = ROLES[role]
    if job.on_device(role):
        device = resolve_device(job.trainer.device)
        log.info("%s computes on %s", role, described(device))
        if role == "rollout" and device.type == "cuda" and (limit := memory_limit()) is not None:
            refuse_small_limit(job, limit, engines=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    worker: LocalWorker = spec.load()(job, worker_context)
    service = load(spec.service)
    servicer = load(spec.servicer)
    if not spec.serves_weights:
        return worker, {service: servicer(worker)}
    return worker, {service: servicer(worker, store), WEIGHTS: WeightsServicer(store)}


async def _load(
    role: str, job: JobConfig, store: WeightStore, worker_context: WorkerContext, rendezvous: Rendezvous
) -> tuple[LocalWorker, Servicers]:
    loaded: list[tuple[LocalWorker, Servicers]] = []

    def load_own(rows: DataProto) -> DataProto:
        loaded.append(load_role(role, job, store, _with_ranks(role, worker_context, job, rendezvous)))
        return rows

    started = time.perf_counter()
    parts = [DataProto()] * worker_context.executor.size
    load_all = partial(contextvars.copy_context().run, worker_context.executor.run, LOAD, load_own, parts)
    try:
        await asyncio.get_running_loop().run_in_executor(worker_context.thread, load_all)
    except RolemeshError as error:  # an error that the user can fix needs no traceback
        log.error("%s could not load: %s", role, error)
        raise
    except Exception as error:
        log.exception("%s could not load", role)
        raise RoleFailed(f"{role} could not load: {type(error).__name__}: {error}") from error
    metrics.ROLE_LOAD_SECONDS.labels(role).set(time.perf_counter() - started)
    return loaded[0]


def _with_ranks(
    role: str, worker_context: WorkerContext, job: JobConfig, rendezvous: Rendezvous
) -> WorkerContext:
    """Return the context with its role's ranks. If there are several, each calls this and waits for all."""
    if rendezvous.size == 1:
        return worker_context
    rendezvous.join()
    device_type = resolve_device(job.trainer.device).type
    ranks = Ranks.of_process(device_type, job.ulysses_size(role))
    with_gpu = int(ranks.total(torch.tensor(int(device_type == "cuda"))))
    if 0 < with_gpu < ranks.size:
        raise InvalidConfig(
            f"{with_gpu} of the {ranks.size} ranks of {role} have a GPU, and each needs its own: start as many "
            "ranks as the machine has GPUs, or set trainer.device to cpu"
        )
    return replace(worker_context, ranks=ranks)


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
    drain_s: float = DRAIN_S,
    log_format: LogFormat = "text",
) -> None:
    """Serve a role, or a group's roles, until SIGTERM or SIGINT; a second signal ends the process at once.

    If this process is a rank above 0 by its environment variables (Rendezvous.of), follow rank 0 until it ends
    the group.

    Args:
        roles: keys of ROLES; they take turns on the device.
        job: the job.
        listen: host:port; port 0 selects a free one.
        metrics_listen: host:port of /metrics; None: no metrics.
        health_listen: host:port for health only, never TLS, of rank 0; None: health is served only on `listen`.
        tls_dir: directory of the TLS keys; None: no TLS.
        address_file: written as JSON {"address", "metrics", "health", "pid"} once all ports are bound.
        exit_with_parent: also end when standard input closes, i.e. when the launcher ends.
        drain_s: seconds for running calls after the first signal.
        log_format: of the lines on standard error.

    Raises:
        InvalidConfig: the roles are not a group, the keys are unusable, or an address cannot be bound.
        RolemeshError: a role could not be loaded.
    """
    os.environ.update(own_gpu(os.environ))
    prepare_device(roles, job)
    tune()
    torch.manual_seed(0)  # nothing should draw from it; if something does, every process draws the same
    setup_logging(log_format)
    server = group_server(roles, job)
    rendezvous = Rendezvous.of(os.environ)
    tls.use_keys(tls_dir, *roles)
    context.role.set(",".join(roles))
    context.rank.set(rendezvous.rank if rendezvous.size > 1 else None)
    context.job.set(job.trainer.experiment_name)
    shutdown = Shutdown(exit_with_parent, drain_s)
    shutdown.with_device()
    metrics_address = serve_metrics(metrics_listen) if metrics_listen else None
    metrics.DEVICE_BYTES.set_function(torch.cuda.memory_reserved)  # 0 until something is on a GPU
    leads = rendezvous.rank == 0  # the others answer no calls
    health_address = await server.start_health(health_listen) if health_listen and leads else None
    address = await server.start(listen) if leads else ""
    if address_file is not None:
        bound = {"address": address, "metrics": metrics_address, "health": health_address, "pid": os.getpid()}
        _write_whole(address_file, bound)
    log.info("listening on %s, metrics on %s", address or "no port", metrics_address or "no port")
    if not leads:
        await _follow(
            roles, job, rendezvous, shutdown, StripeServer(rendezvous, listen, asyncio.get_running_loop())
        )

    leader = Leader(roles, rendezvous) if rendezvous.size > 1 else None
    if leader:
        server.why = leader.waiting
    tasks = [asyncio.create_task(_work(server, roles, job, leader)), asyncio.create_task(shutdown.begun.wait())]
    if leader:
        tasks.append(asyncio.create_task(leader.watch()))
    code = 0
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        code = int(any(task.exception() for task in done))
        for task in done:
            task.result()
        log.info("draining: %s", shutdown.reason)
    finally:
        if leader and code:  # no other rank computes now, so a call that runs may never end
            shutdown.grace_s = ORPHAN_DRAIN_S
            end_in(ORPHAN_DRAIN_S + LOG_FLUSH_S, code)
        await server.drain(shutdown.grace_s)
        if shutdown.code:
            end_at_once(shutdown.code)  # followers learn it from the end of their streams
        if leader:
            await leader.close()
        end_in(LOG_FLUSH_S, code)


async def _work(server: RoleServer, roles: Sequence[str], job: JobConfig, leader: Leader | None) -> None:
    """Load the roles and serve until a worker fails unrecoverably, then raise its error."""
    if leader:
        await leader.start()
        await leader.gather()
    workers, servicers = await load_group(roles, job, leader)
    server.hung = partial(_hung, workers, job)
    gc.collect()
    gc.freeze()  # loaded objects stay; a garbage collection over them would pause every call for 200 ms
    await server.ready(servicers)
    log.info("ready")
    try:
        async with asyncio.TaskGroup() as watches:
            for worker in workers:
                watches.create_task(worker.watch())
    except ExceptionGroup as lost:
        log.error("%s", lost.exceptions[0])
        raise lost.exceptions[0] from None


def _hung(workers: Sequence[LocalWorker], job: JobConfig) -> str:
    """Return which roles have made no progress on their device for too long; empty: none."""
    limit = job.trainer.progress_timeout_s
    silent = {worker.role: worker.silent_s() for worker in workers if job.on_device(worker.role)}
    return "; ".join(
        f"{role} has made no progress for {seconds:.0f} s (trainer.progress_timeout_s is {limit:.0f})"
        for role, seconds in silent.items()
        if seconds > limit
    )


async def _follow(
    roles: Sequence[str],
    job: JobConfig,
    rendezvous: Rendezvous,
    shutdown: Shutdown,
    stripe_server: StripeServer,
) -> NoReturn:
    """Follow rank 0 until it drains or is gone, then end the process."""
    worker_contexts = {
        role: replace(WorkerContext.of(job, role), stripe_server=stripe_server)
        for role in roles
        if job.on_device(role)
    }
    workers: dict[str, LocalWorker] = {}
    loop = asyncio.get_running_loop()
    watches = []
    shown = {role: metrics.ROLE_READY.labels(role, rendezvous.rank) for role in worker_contexts}  # as 0

    async def watch(worker: LocalWorker) -> None:
        try:
            await worker.watch()
        except RolemeshError as error:
            log.error("%s", error)
            end_at_once(1)

    def load_own(role: str, rows: DataProto) -> DataProto:
        workers[role], _ = load_role(
            role, job, WeightStore(), _with_ranks(role, worker_contexts[role], job, rendezvous)
        )
        shown[role].set(1)
        log.info("%s is loaded", role)
        watches.append(asyncio.run_coroutine_threadsafe(watch(workers[role]), loop))
        return rows

    def command_of(role: str, method: str) -> Command:
        return partial(load_own, role) if method == LOAD else worker_command(workers[role], method)

    threads = {role: worker_context.thread for role, worker_context in worker_contexts.items()}
    following = asyncio.create_task(follow(roles, rendezvous, threads, command_of))
    asked = asyncio.create_task(shutdown.begun.wait())
    await asyncio.wait({following, asked}, return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        for ready in shown.values():
            ready.set(0)
        if not shutdown.code:
            log.info("%s: following until rank 0 ends, for %.0f s at most", shutdown.reason, shutdown.grace_s)
        end_in(shutdown.grace_s + (0 if shutdown.code else LOG_FLUSH_S), shutdown.code)
    code = 1
    try:
        await following
        code = 0
        log.info("rank 0 drained")
    except RolemeshError as error:
        log.error("%s", error)
    except Exception:
        log.exception("cannot follow rank 0")
    end_at_once(shutdown.code or code)


def _write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content), encoding="utf-8")
    part.replace(path)
