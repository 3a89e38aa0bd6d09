"""The functions of `import rolemesh`; `rolemesh/__init__.py` lists them. The command line uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, RolemeshError
from rolemesh.graph import StepGraph
from rolemesh.models.fetching import fetch_shapes, fetched
from rolemesh.planner.compare import cluster_of, make_plans
from rolemesh.planner.estimate import Estimate
from rolemesh.roles import Roles
from rolemesh.services.controller.display.curves import draw_curves as _draw
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.record import METRICS_FILE, Record
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.controller.run.run_dir import new_term
from rolemesh.services.controller.run.run_dir import read_metrics as _read
from rolemesh.services.processes.launch import launch
from rolemesh.services.processes.serve import load_group
from rolemesh.workers.numerics import device_prepared


def run(job: JobConfig) -> Summary:
    """Train on this machine, with a process for each group of roles, and return how the run ended.

    Args:
        job: from load_job or make_job.

    Raises:
        RolemeshError: the job cannot be run, a role ended or a step failed; or an event loop runs in this
            thread, as in a notebook (await run_async there).
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(launch(fetched(job)))  # here, because a signal ends a download in the main thread
    raise RolemeshError("an event loop runs in this thread already; use `await rolemesh.run_async(job)`")


async def run_async(job: JobConfig) -> Summary:
    """`run` for a running event loop, such as a notebook's."""
    return await launch(await asyncio.to_thread(fetched, job))


@asynccontextmanager
async def open_roles(job: JobConfig) -> AsyncIterator[Roles]:
    """Load the roles of a job in this process, where they take turns on its device.

    Use it to write a loop of your own: `async with rolemesh.open_roles(job) as roles`. Meanwhile torch computes
    as in a role's own process: without TF32, and with `trainer.deterministic` in a fixed order. torch reads the
    settings of its memory when CUDA is first used, so open the roles before that.

    Raises:
        RolemeshError: a role could not be loaded.
    """
    job = await asyncio.to_thread(fetched, job)
    with device_prepared(job.roles, job):
        workers, _ = await load_group(job.roles, job)
        try:
            yield Roles.of(job, {worker.role: worker for worker in workers})
        finally:
            for worker in workers:
                worker.close()


@asynccontextmanager
async def connect_roles(job: JobConfig, addresses: Mapping[str, Sequence[str]]) -> AsyncIterator[Roles]:
    """Connect to roles that are served somewhere (`rolemesh serve`), once all replicas are ready.

    Actor and critic answer the controller that loaded a checkpoint last (docs/wire.md#terms-of-controllers). So
    `load_checkpoint` takes them from a running controller. No other call does.

    Args:
        job: the job that the roles were started with.
        addresses: "host:port" of each replica, by role.

    Raises:
        InvalidConfig: a role of the job has no address.
        RoleUnavailable: a replica is not ready within trainer.ready_timeout_s.
    """
    if missing := [role for role in job.roles if not addresses.get(role)]:
        raise InvalidConfig(f"the job has roles {list(job.roles)}; no address was given for {missing}")
    async with AsyncExitStack() as stack:
        term = new_term(job.run_dir)
        clients = {role: new_client(role, addresses[role], job, term) for role in job.roles}
        for client in clients.values():
            await stack.enter_async_context(client)
        await until_ready(clients.values(), job.trainer.ready_timeout_s)
        yield Roles.of(job, clients)


def plan(
    job: JobConfig, *, gpus: int = 0, gpu: str = "h100", gpu_memory: str = "", search: bool = False
) -> list[Estimate]:
    """Estimate memory and time of each placement, the best first. Nothing is loaded or started.

    Of a model with a Hub name only config.json is downloaded.

    Args:
        gpus: number of GPUs; 0: this machine's CPU.
        gpu: their kind: a100, h100, h200, b200, l40s or rtx4090.
        gpu_memory: of one GPU, such as "80GiB"; empty: the kind's usual size.
        search: also search all groupings of roles.

    Raises:
        InvalidConfig: an unknown kind of GPU, or an invalid size.
        ModelNotFound: a model's directory is missing.
        HubUnavailable: a config.json could not be downloaded.
    """
    fetch_shapes(job)
    return make_plans(job, cluster_of(gpus, gpu, gpu_memory), searching=search)


def step_graph(job: JobConfig) -> StepGraph:
    """Return the calls of a step in their order, with the columns that each reads and writes.

    Raises:
        InvalidBatch: a call reads a column that nothing wrote before it.
    """
    with ThreadPoolExecutor(1) as thread:  # in this one an event loop may run already
        return thread.submit(record_step, job).result()


def read_metrics(run_dir: str | Path) -> list[Record]:
    """Return the metrics of a run, one dict for each step. A value that was not finite is None.

    Raises:
        FileNotFoundError: there is no metrics.jsonl.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no metrics of a run: {path}")
    return _read(path)


def draw_curves(run_dir: str | Path, path: str | Path) -> None:
    """Draw the metrics of a run over its steps, as a PNG at `path`."""
    _draw(read_metrics(run_dir), Path(path), Path(run_dir).name)
