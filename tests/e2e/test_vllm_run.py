"""A whole run with vLLM's rollouts, which take turns with the actor and the reference in one process. And what
becomes of a role when its vLLM dies, and of its vLLM when a role is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from pathlib import Path

import psutil
import pytest
from in_process import course, small_job
from serving import serve_process

from rolemesh.models.tiny import make_tiny_model
from rolemesh.roles import methods
from rolemesh.rpc.calling.clients import RolloutClient
from rolemesh.services.processes.role_processes import role_processes

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(900),
]

OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "actor.use_kl_loss=true",
    "rollout.name=vllm",
    "rollout.top_k=20",
    "rollout.top_p=0.9",
    "placement.strategy=hybrid",
    "trainer.total_training_steps=3",
    "trainer.test_freq=3",
)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_trainer_learns_from_the_distribution_that_vllm_drew_from(ranks: int, tmp_path: Path) -> None:
    """Before the first update of the weights and after each, asleep in between, cut by top-k and top-p."""
    model = make_tiny_model(tmp_path / "model", num_heads=2, initializer_range=0.1)  # heads of 32, for vLLM
    job = small_job(tmp_path, model, "run", *OVERRIDES, f"placement.ranks.policy={ranks}")
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    launched = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolemesh", "run", str(tmp_path / "job.yaml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await launched.communicate()
    assert launched.returncode == 0, output.decode()
    steps = course(job)[1:]
    assert len(steps) == 3
    for step in steps:
        assert abs(step["rollout_corr/rollout_is_raw_min"] - 1) < 1e-4
        assert abs(step["rollout_corr/rollout_is_raw_max"] - 1) < 1e-4
        assert step["rollout/stale_tokens"] == 0
        assert step["actor/grad_norm"] > 0
    log = (job.run_dir / "logs" / "policy-0.log").read_text()
    assert log.count("switched the device from actor to rollout") >= 3
    assert log.count("switched the device from rollout to ") >= 3


async def test_a_role_whose_engine_has_died_ends_itself(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", num_heads=2)
    job = small_job(tmp_path, model, "run", "rollout.name=vllm")
    async with serve_process("rollout", job, tmp_path) as role:
        assert role.process.stderr is not None
        written = asyncio.create_task(role.process.stderr.read())
        async with RolloutClient([role.address], methods(job)) as client:
            await client.wait_until_ready(300)
        (engine,) = [
            child
            for child in psutil.Process(role.process.pid).children(recursive=True)
            if "EngineCore" in child.name()
        ]
        engine.kill()
        assert await role.process.wait() == 1
        words = (await written).decode()
    assert re.search(r"ERROR .*rollout: vLLM's engine has ended", words)


async def test_what_a_killed_role_had_started_is_gone_when_its_end_is_told(tmp_path: Path) -> None:
    """Even if the first process of vLLM had only begun."""
    model = make_tiny_model(tmp_path / "model", num_heads=2)
    groups = "placement.groups={rollout: [rollout], others: [actor, reference, critic, reward]}"
    job = small_job(tmp_path, model, "run", "rollout.name=vllm", "placement.strategy=custom", groups)
    async with role_processes(job) as processes:
        (member,) = [member for member in processes.members if "rollout" in member.roles]
        role = psutil.Process(member.process.pid)
        while not (children := await asyncio.to_thread(role.children, recursive=True)):
            assert member.process.returncode is None
        role.kill()
        await member.process.gone
        _, alive = psutil.wait_procs(children, timeout=100)
        assert alive == []
