"""A process whose device is broken or hangs. A loss raises torch's own errors on the worker's thread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sequences import sequence_batch
from serving import gate, serve_process

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.errors import RoleFailed, RoleUnavailable, Unsupported
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import ActorClient
from rolemesh.services.processes.role_processes import RoleProcess, RoleProcesses
from rolemesh.services.processes.shutdown import LOG_FLUSH_S
from rolemesh.workers.broken_device import EXIT_CODE

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TOLD_S = 1.0  # from the error to its caller, on a busy machine
BUSY_S = 20.0
ENDED_S = 5.0  # after the failed call, on a GPU

# A policy loss that does what a file says. To hang, it waits for a byte of another one. A GPU itself finds the
# index and the size wrong.
LOSS = """
from pathlib import Path

import torch

from rolemesh.algos.policy_loss import TokenLosses
from rolemesh.plugins import policy_loss

@policy_loss("failing")
def failing(log_probs, old_log_probs, advantages, response_mask):
    what = Path({what!r}).read_text() if len(log_probs) > 1 else ""  # with one row it is tried before loading
    if what == "hang":
        open({reached!r}, "wb").write(b".")
        open({go_on!r}, "rb").read(1)
    elif what == "unordered":
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
    elif what == "assert":
        log_probs[torch.tensor([10**6], device=log_probs.device)]
    elif what == "fill":
        torch.empty(2**50, device=log_probs.device)
    elif what:
        error, _, text = what.partition(": ")
        raise getattr(torch, error)(text)
    return TokenLosses(-advantages * log_probs)
"""


def job_of(model: Path, directory: Path, plugin: Path, trainer: Mapping[str, Any]) -> JobConfig:
    """A job whose actor trains with the loss of a plug-in."""
    return make_job(
        {
            "plugins": [str(plugin)],
            "data": {"train_batch_size": 8, "max_prompt_length": 6, "max_response_length": 10},
            "trainer": {"default_local_dir": str(directory), **trainer},
            "actor": {
                "model": {"path": str(model)},
                "policy_loss": {"loss_mode": "failing"},
                "ppo_mini_batch_size": 8,
            },
        }
    )


async def test_a_broken_device_ends_the_process_a_hung_one_is_not_live(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Out of memory does neither, in torch's words and in CUDA's; nor does a kernel without a fixed order."""
    plugin, what = tmp_path / "failing.py", tmp_path / "what"
    with gate(tmp_path / "reached") as reached, gate(tmp_path / "go_on") as go_on, ExitStack() as stack:
        plugin.write_text(LOSS.format(what=str(what), reached=str(reached.path), go_on=str(go_on.path)))
        settings = {"device": "cpu", "progress_timeout_s": 0.01, "deterministic": True}
        job = job_of(tiny_model, tmp_path, plugin, settings)
        stack.callback(forget, str(plugin))
        batch = sequence_batch(8)
        async with (
            serve_process("actor", job, tmp_path) as role,
            ActorClient([role.address], methods(job), patience_s=0.1) as actor,
            grpc.aio.insecure_channel(role.health) as channel,
        ):

            async def is_live() -> bool:
                request = health_pb2.HealthCheckRequest(service="live")
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
                assert answer.status in (SERVING, NOT_SERVING)
                return bool(answer.status == SERVING)

            await actor.wait_until_ready(120)
            for full in ("OutOfMemoryError: CUDA out of memory", "AcceleratorError: CUDA error: out of memory"):
                what.write_text(full)
                with pytest.raises(RoleFailed, match="out of memory"):
                    await actor.update(batch)
                assert await is_live()
            what.write_text("unordered")
            with pytest.raises(Unsupported, match=r"trainer\.deterministic is true, but put_ of actor has no"):
                await actor.update(batch)

            what.write_text("hang")
            hanging = asyncio.create_task(actor.update(batch))
            await reached.passed(hanging)
            async with asyncio.timeout(60):
                while await is_live():
                    pass
            go_on.open(1)
            await hanging
            assert await is_live()

            what.write_text("AcceleratorError: CUDA error: an illegal memory access was encountered\nadvice")
            began = time.monotonic()
            with pytest.raises(RoleUnavailable, match=r"the device of actor is broken: .*illegal memory"):
                await actor.update(batch)
            _, said = await asyncio.wait_for(role.process.communicate(), 60)
            assert role.process.returncode == EXIT_CODE
            assert TOLD_S + LOG_FLUSH_S <= ENDED_S
            assert time.monotonic() - began < TOLD_S + LOG_FLUSH_S + BUSY_S
            assert "CUDA error: an illegal memory access was encountered" in said.decode()
            assert f"actor computes on cpu (torch {torch.__version__})" in said.decode()
            assert "actor has made no progress for" in said.decode()


@pytest.mark.gpu
async def test_an_index_kernel_error_ends_the_process_and_oom_does_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    plugin, what = tmp_path / "failing.py", tmp_path / "what"
    plugin.write_text(LOSS.format(what=str(what), reached="", go_on=""))
    job = job_of(tiny_model, tmp_path, plugin, {"device": "cuda"})
    batch = sequence_batch(8)
    with ExitStack() as stack:
        stack.callback(forget, str(plugin))
        async with (
            serve_process("actor", job, tmp_path) as role,
            ActorClient([role.address], methods(job), patience_s=0.1) as actor,
        ):
            await actor.wait_until_ready(120)
            what.write_text("fill")
            with pytest.raises(RoleFailed, match="out of memory"):
                await actor.update(batch)
            what.write_text("")
            assert (await actor.update(batch))["actor/grad_norm"] > 0
            what.write_text("assert")
            began = time.monotonic()
            with pytest.raises(RoleUnavailable, match=r"the device of actor is broken: .*device-side assert"):
                await actor.update(batch)
            _, said = await asyncio.wait_for(role.process.communicate(), 60)
            assert role.process.returncode == EXIT_CODE
            assert time.monotonic() - began < ENDED_S
            assert "actor computes on NVIDIA" in said.decode()


@pytest.mark.gpu
def test_auto_takes_no_cpu_where_cuda_cannot_use_the_gpu() -> None:
    """As after an Xid that takes a GPU off the bus: the device file is there, CUDA counts none."""
    code = "from rolemesh.workers.devices import resolve_device; resolve_device('auto')"
    for visible, refused in (("99", True), ("", False)):  # no such GPU; hidden on purpose
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
        ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert ("trainer.device is auto, and there is an NVIDIA GPU" in ended.stderr) == refused, ended.stderr
        assert (ended.returncode != 0) == refused


@dataclass
class Ended:
    """A process that has ended."""

    returncode: int
    pid: int = 1
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def terminate(self) -> None:
        raise ProcessLookupError

    kill = terminate


async def test_the_launcher_names_the_rank_whose_device_broke(tmp_path: Path) -> None:
    """Not the one that ended because of it, though it comes first."""
    (tmp_path / "log").write_text("")
    ended = [Ended(1), Ended(EXIT_CODE)]
    members = [
        RoleProcess(
            ("actor",), f"actor-0 rank {rank}", "actor-0", process, tmp_path / "log", tmp_path / "address"
        )
        for rank, process in enumerate(ended)
    ]
    for process in ended:
        process.gone.set_result(None)
    with pytest.raises(
        RoleUnavailable, match=r"^actor-0 rank 1 .*exited with code 74 \(its device is broken\)"
    ):
        await RoleProcesses(members).watch()
