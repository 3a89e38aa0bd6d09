"""What `rolemesh run` does: the roles as processes of this machine, and the controller in this one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from rich.logging import RichHandler

from rolemesh.config import JobConfig
from rolemesh.errors import RoleUnavailable
from rolemesh.models.loading import model_directory
from rolemesh.planner.devices import available_memory
from rolemesh.planner.memory import role_shapes
from rolemesh.planner.refusal import refuse_what_cannot_fit
from rolemesh.rpc.serving.server import serve_metrics
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.main import Brakes, drive, prepare, warn_of_idle_keys
from rolemesh.services.controller.run.checkpoints import write_durably
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import held
from rolemesh.services.processes.local import (
    RoleProcesses,
    gpus_by_process,
    members_of,
    role_processes,
    visible_gpus,
)
from rolemesh.services.rollout.engines.vllm.arguments import check_installed
from rolemesh.telemetry.metrics import CONTROLLER
from rolemesh.wire.allocator import tune

log = logging.getLogger(__name__)

R = TypeVar("R")

LOCAL = "127.0.0.1:0"
DEATH_NOTICE_S = 2.0  # a call to a process that died fails a little before its death is noticed


async def launch(job: JobConfig) -> None:
    """Starts the job's roles, trains, and ends the roles, however the training ends.

    Raises:
        RolemeshError: the job cannot be run, a role ended or a step failed.
    """
    tune()
    run = await prepare(job)
    if summary := run.finished():
        run.display.close()
        run.display.summary(summary)
        return
    check_models(job)
    check_engine(job)
    check_memory(job)
    # Through the display's console: another writer would tear the live lines.
    shown = RichHandler(console=run.display.console, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[shown], force=True)
    warn_of_idle_keys(job)
    with Brakes(run) as brakes, held(job.run_dir):
        async with role_processes(run.job) as processes:
            summary = await beside(processes, _train(run, processes))
        brakes.end(summary)


def check_models(job: JobConfig) -> None:
    """The directories of all models, which the role processes of this machine will load.

    Raises:
        ModelNotFound: one is not there or not whole.
    """
    models = {"actor": job.actor.model, "reference": job.reference_model, "critic": job.critic_model}
    for role, config in models.items():
        if role in job.roles:
            model_directory(config, role)


def check_engine(job: JobConfig) -> None:
    """That the rollouts' engine is installed.

    Raises:
        InvalidConfig: what to install.
    """
    if job.rollout.name == "vllm":
        check_installed()


def check_memory(job: JobConfig) -> None:
    """What certainly does not fit is refused: weights, gradients and moments, of the processes that a GPU or
    this machine's memory is to hold.

    Raises:
        InvalidConfig: how much is missing, the largest part and what to lower.
    """
    shapes, members = role_shapes(job), members_of(job)
    gpus = visible_gpus(job)
    if not gpus:
        refuse_what_cannot_fit(job, shapes, members, available_memory(), "this machine's free memory")
    given = gpus_by_process(job, gpus)
    for index, gpu in enumerate(gpus):
        memory = torch.cuda.get_device_properties(index).total_memory
        # An engine of several ranks has a share of its weights on each: not certain enough to count.
        alone = {name: roles for name, roles in members.items() if given[name] == [gpu]}
        refuse_what_cannot_fit(job, shapes, alone, memory, f"the memory of GPU {gpu}")


async def _train(run: Run, processes: RoleProcesses) -> Summary:
    addresses = await processes.addresses(run.job.trainer.ready_timeout_s)
    scraped = serve_metrics(LOCAL, CONTROLLER)
    all_scraped = {member.name: member.metrics_address for member in processes.members}
    with shown_to_prometheus(run.job, all_scraped | {"controller": scraped}):
        return await drive(run, addresses, LOCAL, scraped)


@contextmanager
def shown_to_prometheus(job: JobConfig, addresses: Mapping[str, str]) -> Iterator[None]:
    """While it is entered, <run directory>.targets.json tells a Prometheus (file_sd_configs) where /metrics of
    each process is, with the labels that it has in a cluster. It lies beside the run directory: Prometheus
    takes a * in the last part of a path alone, and one Prometheus should find every run.

    Args:
        job: names them.
        addresses: process to host:port.
    """
    labels = {"namespace": "local", "rolemesh_job": job.trainer.experiment_name}
    targets = [{"targets": [at], "labels": labels | {"pod": name}} for name, at in addresses.items()]
    directory = job.run_dir.resolve()
    path = directory.with_name(f"{directory.name}.targets.json")
    try:
        write_durably(path, json.dumps(targets, indent=1) + "\n")
    except OSError as error:  # the folder may be another user's, which must not end a run
        log.warning("no Prometheus will find this run: %s", error)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


async def beside(processes: RoleProcesses, work: Coroutine[Any, Any, R]) -> R:
    """The work's result. When a role loses its last process the work is cancelled, and the error tells how the
    process ended."""
    working, watching = asyncio.create_task(work), asyncio.create_task(processes.watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and isinstance(working.exception(), RoleUnavailable):
            await asyncio.wait({watching}, timeout=DEATH_NOTICE_S)
        if watching.done():
            await watching
        try:
            return await working
        except RoleUnavailable as error:
            raise processes.told_of(error) from error
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
