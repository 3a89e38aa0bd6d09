"""Implements `rolemesh run`: the roles run as processes of this machine, the controller in this process."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from rolemesh.catalog.catalog import load
from rolemesh.checks.device_memory import refuse_what_cannot_fit, refuse_what_gpus_cannot_hold
from rolemesh.config import JobConfig
from rolemesh.config.model import AMPERE
from rolemesh.errors import RoleUnavailable
from rolemesh.models.loading import model_directory
from rolemesh.planner.device_specs import available_memory
from rolemesh.planner.memory import role_shapes
from rolemesh.rpc.serving.server import serve_metrics
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.job_warnings import (
    warn_of_no_checkpoint,
    warn_of_stale_rows,
    warn_of_unused_keys,
)
from rolemesh.services.controller.main import checked_run, drive
from rolemesh.services.controller.run.checkpoints import Checkpoints
from rolemesh.services.controller.run.decision import start_of
from rolemesh.services.controller.run.durably import write_durably
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import held
from rolemesh.services.controller.stop_on_signal import StopOnSignal
from rolemesh.services.processes.role_processes import (
    RoleProcesses,
    gpus_by_process,
    role_processes,
    visible_gpus,
)
from rolemesh.telemetry.logs import MessageFormatter, printable_lines
from rolemesh.telemetry.metrics import CONTROLLER
from rolemesh.wire.allocator import tune
from rolemesh.workers.devices import resolve_device

log = logging.getLogger(__name__)

R = TypeVar("R")

LOCAL = "127.0.0.1:0"
DEATH_NOTICE_S = 2.0  # a call to a process that died may fail before its death is noticed


async def launch(job: JobConfig) -> Summary:
    """Start the job's roles, train, and end the roles, also after an error.

    If a role is lost after the run has written a checkpoint, all roles are started anew, and the run goes on
    from there. If one is lost again before the next checkpoint, or after a request to stop, the run ends.

    Raises:
        RolemeshError: the job cannot be run, a role ended, or a step failed.
    """
    tune()
    scraped = serve_metrics(LOCAL, CONTROLLER)
    checkpoints = Checkpoints(job.run_dir)
    while True:
        began = start_of(job, checkpoints).checkpoint
        run = await checked_run(job)

        def may_go_on(began: Path | None = began) -> bool:
            return checkpoints.latest() != began and not job.trainer.val_only

        run.status.may_go_on = may_go_on  # so `rolemesh watch` does not take the loss of a role for the end
        try:
            return await _launch(job, run, scraped)
        except RoleUnavailable as lost:
            if not run.status.goes_on:
                raise
            # Not logged: a log line would have the lines of the process's log in one.
            run.display.console.print(Text(printable_lines(str(lost)), style="yellow"), soft_wrap=True)
            log.warning("starting all roles anew, and going on from %s", checkpoints.latest())


async def _launch(job: JobConfig, run: Run, scraped: str) -> Summary:
    if summary := run.finished():
        run.display.close()
        run.display.summary(summary)
        return summary
    check_models(job, job.roles)
    check_engine(job)
    check_memory(job, job.roles)
    # Log through the display's console: another writer would garble the live lines.
    log_to(run.display.console)
    warn_of_unused_keys(job)
    warn_of_stale_rows(job)
    warn_of_no_checkpoint(job)
    with StopOnSignal(run) as stop, held(job.run_dir):
        async with role_processes(run.job) as processes:
            summary = await beside(processes, _train(run, processes, scraped))
        stop.end(summary)
    return summary


def log_to(console: Console) -> None:
    """Send warnings and errors to the console, replacing any earlier setup."""
    handler = RichHandler(console=console, show_path=False)
    handler.setFormatter(MessageFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def check_models(job: JobConfig, roles: Sequence[str]) -> None:
    """Check the directories of all models that the processes of these roles will load.

    Raises:
        ModelNotFound: a directory is absent or incomplete.
    """
    for role in roles:
        if job.on_device(role):
            model_directory(job.model_of(role), role)


def check_engine(job: JobConfig) -> None:
    """Check that the rollouts' engine is installed.

    Raises:
        InvalidConfig: it is not; the message says what to install.
    """
    if job.engine.check is not None:
        with job.engine.errors_named():
            load(job.engine.check)()


def check_memory(job: JobConfig, roles: Sequence[str]) -> None:
    """Refuse roles that certainly do not fit on their GPUs, or in this machine's memory.

    Raises:
        InvalidConfig: they do not fit, and the message has the missing bytes, the largest part and the keys to
            change; or there are fewer GPUs than the processes need.
    """
    device = resolve_device(job.trainer.device)
    is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < AMPERE
    job = job.with_dtypes("cpu" if is_old else device.type)  # auto is float32 on old GPUs, as on a CPU
    gpus = visible_gpus(job)
    given = gpus_by_process(job, gpus, roles)
    shapes = role_shapes(job, roles)
    members = {name: group.roles for name, group in job.plan.only(roles).replicas.items()}
    if not gpus:
        refuse_what_cannot_fit(job, shapes, members, available_memory(), "this machine's free memory")
        return
    memory_bytes = {gpu: torch.cuda.get_device_properties(index).total_memory for index, gpu in enumerate(gpus)}
    refuse_what_gpus_cannot_hold(job, shapes, members, given, memory_bytes)


async def _train(run: Run, processes: RoleProcesses, scraped: str) -> Summary:
    addresses = await processes.addresses(run.job.trainer.ready_timeout_s)
    all_scraped = {member.name: member.metrics_address for member in processes.members}
    with shown_to_prometheus(run.job, all_scraped | {"controller": scraped}):
        return await drive(run, addresses, LOCAL, scraped)


@contextmanager
def shown_to_prometheus(job: JobConfig, addresses: Mapping[str, str]) -> Iterator[None]:
    """Write <run directory>.targets.json for Prometheus (file_sd_configs), and delete it on exit.

    The file has the address of each process's /metrics, with the same labels as in a cluster. It is next to the
    run directory, because Prometheus allows a * only in the last part of a path, and one Prometheus should find
    every run.

    Args:
        job: its experiment_name is a label.
        addresses: process name to host:port.
    """
    labels = {"namespace": "local", "rolemesh_job": job.trainer.experiment_name}
    targets = [{"targets": [at], "labels": labels | {"pod": name}} for name, at in addresses.items()]
    directory = job.run_dir.resolve()
    path = directory.with_name(f"{directory.name}.targets.json")
    try:
        write_durably(path, json.dumps(targets, indent=1) + "\n")
    except OSError as error:  # e.g. a folder of another user, which must not end a run
        log.warning("Prometheus cannot find this run: %s", error)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


async def beside(processes: RoleProcesses, work: Coroutine[Any, Any, R]) -> R:
    """Run the work and return its result. Cancel it if a role is lost (RoleProcesses.watch).

    Raises:
        RoleUnavailable: a role was lost; the message says how its process ended.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(processes.watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and isinstance(working.exception(), RoleUnavailable):
            await asyncio.wait({watching}, timeout=DEATH_NOTICE_S)
        if watching.done():
            await watching
        try:
            return await working
        except RoleUnavailable as error:
            raise processes.with_exit_reports(error) from error
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
