"""How much work there is for a role, as /metrics says it to KEDA."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from certificates import Authority, swap
from in_process import small_job
from membership import Listed, until
from serving import gate, reward_batch, reward_job, served

from rolemesh.errors import CheckpointFailed
from rolemesh.methods import methods
from rolemesh.rpc import tls
from rolemesh.rpc.calling.clients import RewardClient
from rolemesh.rpc.calling.pending import PendingRows
from rolemesh.rpc.serving.server import serve_metrics
from rolemesh.services.controller.main import control
from rolemesh.services.controller.service.controller_server import ControllerServer, serving
from rolemesh.services.controller.service.role_load import Load
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.telemetry.metrics import CONTROLLER as METRICS
from rolemesh.v1 import controller_pb2, controller_pb2_grpc


def load() -> float:
    """The reward's, at /metrics."""
    value = METRICS.get_sample_value("rolemesh_role_load_rows", {"role": "reward"})
    assert value is not None
    return value


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_load_is_the_mean_of_pending_rows_weighted_by_time() -> None:
    """256 rows that wait for 15 of 60 seconds are 64, whenever one looks."""
    clock = Clock()
    pending = PendingRows(clock)
    load = Load(pending, clock)
    assert load.mean() == 0
    clock.now = 45
    pending.add(256)
    assert load.mean() == 0
    clock.now = 50
    pending.add(-128)
    clock.now = 55
    assert load.mean() == (5 * 256 + 5 * 128) / 55
    pending.add(128)
    clock.now = 57.5
    pending.add(-256)
    clock.now = 60
    assert load.mean() == (5 * 256 + 5 * 128 + 2.5 * 256) / 60


def test_load_covers_the_last_three_steps_and_the_running_one() -> None:
    clock = Clock()
    pending = PendingRows(clock)
    load = Load(pending, clock)
    for rows in (1000, 10, 20, 30):  # the first step is forgotten
        pending.add(rows)
        clock.now += 10
        pending.add(-rows)
        load.step_began()
    assert load.mean() == 20
    clock.now += 10
    assert load.mean() == 15
    for _ in range(4):
        load.step_began()
        clock.now += 1
    assert load.mean() == 0


async def test_a_paused_run_has_no_load_and_begins_its_window_anew(tiny_model: Path) -> None:
    status = RunStatus("job")
    server = ControllerServer(status, ["reward"])
    pending = server._loads.pending["reward"]
    status.set(state=State.RUNNING, step=0)
    pending.add(100)
    assert await status.may_begin()
    assert load() > 0
    pending.add(-100)
    status.set(step=1)
    status.pause()
    begins = asyncio.create_task(status.may_begin())
    await asyncio.sleep(0)
    assert load() == 0
    pending.add(100)  # before the next step begins: a validation's, say
    assert load() > 0
    pending.add(-100)
    status.resume()
    assert await begins
    assert load() == 0


async def test_a_role_has_load_while_rows_wait_and_after_it(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as release:
        job = reward_job(tiny_model, tmp_path, started=str(started.path), gate=str(release.path))
        async with (
            served("reward", job) as addresses,
            RewardClient(Listed(*addresses), methods(job), may_grow=True) as client,
            serving(RunStatus("run"), ["reward"], "127.0.0.1:0") as server,
        ):
            server.show({"reward": client})
            assert load() == 0
            call = asyncio.create_task(client.compute_scores(reward_batch(100)))
            await started.passed(call)
            assert 0 < load() < load() < 100
            release.open()
            await call
            assert load() > load() > 0


async def test_a_role_that_a_run_waits_for_has_load(tiny_model: Path, tmp_path: Path) -> None:
    """Though it has no row yet: it may have been scaled to zero."""
    job = reward_job(tiny_model, tmp_path)
    async with (
        RewardClient(Listed(), methods(job), may_grow=True) as client,
        serving(RunStatus("run"), ["reward"], "127.0.0.1:0") as server,
    ):
        server.show({"reward": client})
        waiting = asyncio.create_task(client.wait_until_ready(120))
        await until(client.pool, lambda: client.pool.pending_rows)
        assert load() > 0
        waiting.cancel()


async def test_load_is_read_over_plain_http_though_calls_are_encrypted(tmp_path: Path) -> None:
    """As KEDA reads it, which has no keys of the job."""
    tls.use_keys(swap(tmp_path / "keys", Authority().keys("job", "controller", "operator")), "controller")
    async with serving(RunStatus("job"), ["reward"], "127.0.0.1:0") as server:
        server._loads.pending["reward"].add(100)
        metrics = serve_metrics("127.0.0.1:0", METRICS)
        with urllib.request.urlopen(f"http://{metrics}/metrics") as shown:  # noqa: ASYNC210
            [line] = [line for line in shown if line.startswith(b'rolemesh_role_load_rows{role="reward"} ')]
        assert 0 < float(line.split()[1]) <= 100
        async with grpc.aio.insecure_channel(server.address) as channel:
            controller = controller_pb2_grpc.ControllerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await controller.GetStatus(controller_pb2.GetStatusRequest())


def test_the_controller_server_imports_no_model_libraries() -> None:
    """They take seconds, in which it is to answer."""
    server = "rolemesh.services.controller.service.controller_server"
    program = f"import sys, {server}; print(sys.modules.keys() & {{'torch', 'transformers'}})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


# Its argument is a job. It loads what the controller and the reward role load, and prints what they imported
# of what only others need.
LOADS = """
import json, sys
from rolemesh.config.job import make_job
from rolemesh.services.controller.main import new_run
from rolemesh.services.processes.serve import load_role
from rolemesh.weights.store import WeightStore
from rolemesh.workers.worker_context import WorkerContext

job = make_job(json.loads(sys.argv[1]))
run = new_run(job)
worker, _ = load_role("reward", job, WeightStore(), WorkerContext.of(job, "reward"))
print(json.dumps(sorted({"peft", "matplotlib", "rolemesh.services.reward.model_scorer"} & sys.modules.keys())))
worker.close()
"""


def test_a_rule_based_job_imports_no_adapters_curves_or_scorers(tiny_model: Path, tmp_path: Path) -> None:
    """Neither in the controller nor in the reward role."""
    job = small_job(tmp_path, tiny_model, "run").model_dump(mode="json")
    del job["reward"]["custom_reward_function"]
    job["data"]["reward_fn_key"] = "ability"  # it holds "math", of which there is a rule
    ran = subprocess.run([sys.executable, "-c", LOADS, json.dumps(job)], capture_output=True, text=True)
    assert json.loads(ran.stdout or "null") == [], ran.stderr


async def test_load_and_status_are_answered_while_the_run_is_prepared(tiny_model: Path, tmp_path: Path) -> None:
    """Prompts are read, and checkpoints looked for."""
    job = small_job(tmp_path, tiny_model, "run", "algorithm.adv_estimator=grpo")
    job.run_dir.mkdir()
    pointer = job.run_dir / "latest"
    os.mkfifo(pointer)  # whoever opens it waits for somebody who writes
    async with serving(RunStatus("run"), job.roles, "127.0.0.1:0") as server:
        run = asyncio.create_task(control(job, {}, server))
        async with grpc.aio.insecure_channel(server.address) as channel:
            controller = controller_pb2_grpc.ControllerServiceStub(channel)
            while not is_being_opened(pointer):
                status = await controller.GetStatus(controller_pb2.GetStatusRequest())
                assert load() == 0
                assert status.state == controller_pb2.RUN_STATE_STARTING
                assert not run.done()
        with pytest.raises(CheckpointFailed, match=r"latest names"):
            await run


def is_being_opened(pipe: Path) -> bool:
    """Whether somebody waits for a writer; then there was one."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    return True
