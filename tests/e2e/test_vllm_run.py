"""A whole run with vLLM's rollouts, which take turns with the actor and the reference in one process. And what
becomes of a role when its vLLM dies, and of its vLLM when a role is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path

import psutil
import pytest
from in_process import recorded, small_job
from launched import rolemesh, written
from serving import gate

from rolemesh.config import JobConfig
from rolemesh.models.tiny import make_tiny_model
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

# Scores as small_job's reward does. At the last row of the second validation it reports that, and waits for the
# test.
GATED_VALIDATION = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info, scored, reached, go_on):
    if extra_info["split"] == "val":
        with open(scored, "a") as file:
            file.write(".")
        if os.path.getsize(scored) == 6:
            for path, flags, act in ((reached, os.O_WRONLY, lambda fd: os.write(fd, b".")),
                                     (go_on, os.O_RDONLY, lambda fd: os.read(fd, 1))):
                fd = os.open(path, flags)
                act(fd)
                os.close(fd)
    return sum(character.isdigit() for character in solution_str) / 8
"""


async def test_the_trainer_learns_from_what_two_ranks_drew(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", num_heads=2, initializer_range=0.1)  # heads of 32, for vLLM
    job = small_job(tmp_path, model, "run", *OVERRIDES, "placement.ranks.policy=2")
    async with rolemesh("run", written(job, tmp_path)) as launched:
        output, _ = await launched.process.communicate()  # as long as it takes
    assert launched.process.returncode == 0, output.decode()
    assert_drawn_from_the_policy(job)


async def test_vllm_rows_train_and_a_role_with_a_dead_vllm_ends_itself(
    tmp_path: Path,
) -> None:
    """The engine dies in the validation after step 4, when nobody asks it for anything."""
    model = make_tiny_model(tmp_path / "model", num_heads=2, initializer_range=0.1)
    function = tmp_path / "gated.py"
    function.write_text(GATED_VALIDATION)
    with gate(tmp_path / "reached") as reached, gate(tmp_path / "go_on") as go_on:
        gated = (
            "trainer.total_training_steps=4",
            "trainer.test_freq=4",
            f"reward.custom_reward_function.path={function}",
            "reward.custom_reward_function.reward_kwargs="
            f"{{scored: {tmp_path / 'scored'}, reached: {reached.path}, go_on: {go_on.path}}}",
        )
        job = small_job(tmp_path, model, "run", *OVERRIDES, *gated)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            await reached.passed(launched.ended())
            assert_drawn_from_the_policy(job)
            started = psutil.Process(launched.process.pid).children(recursive=True)
            (engine,) = [process for process in started if "EngineCore" in process.name()]
            engine.kill()
            said = await launched.says("error: policy-0 (with actor, rollout, reference, pid")
            go_on.open()
            code, rest = await launched.end()
    assert code == 1
    assert "exited with code 1" in " ".join((said + rest).split())
    assert re.search(r"ERROR .*rollout: vLLM's engine has ended", policy_log(job))


def assert_drawn_from_the_policy(job: JobConfig) -> None:
    """Before the first update of the weights and after each, asleep in between, cut by top-k and top-p."""
    steps = recorded(job)[1:]
    assert len(steps) == 3
    for step in steps:
        assert abs(step["rollout_corr/rollout_is_raw_min"] - 1) < 1e-4
        assert abs(step["rollout_corr/rollout_is_raw_max"] - 1) < 1e-4
        assert step["rollout/stale_tokens"] == 0
        assert step["actor/grad_norm"] > 0
    log = policy_log(job)
    assert log.count("switched the device from actor to rollout") >= 3
    assert log.count("switched the device from rollout to ") >= 3


def policy_log(job: JobConfig) -> str:
    return (job.run_dir / "logs" / "policy-0.log").read_text()


async def test_a_killed_roles_processes_end_before_it_is_reported(tmp_path: Path) -> None:
    """Even if the first process of vLLM had only begun."""
    model = make_tiny_model(tmp_path / "model", num_heads=2)
    groups = "placement.groups={rollout: [rollout], others: [actor, reference, critic, reward]}"
    job = small_job(tmp_path, model, "run", "rollout.name=vllm", "placement.strategy=custom", groups)
    async with role_processes(job) as processes:
        (member,) = [member for member in processes.members if "rollout" in member.roles]
        role = psutil.Process(member.process.pid)
        while not (children := await asyncio.to_thread(role.children, recursive=True)):
            assert member.process.returncode is None
            await asyncio.sleep(0.01)  # a look takes CPU that the start needs
        role.kill()
        await member.process.gone
        _, alive = psutil.wait_procs(children, timeout=100)
        assert alive == []
