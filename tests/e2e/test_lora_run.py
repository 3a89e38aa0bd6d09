"""A job that trains an adapter: the same bits in process and over gRPC, each role alone or all on one device,
unbroken and resumed; no reference role, and a KL of 0 before the first update."""

from __future__ import annotations

import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from in_process import recorded, small_job, train
from serving import served_group

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run

LORA = (
    "algorithm.adv_estimator=grpo",
    "actor.use_kl_loss=true",
    "actor.model.lora_rank=4",
    "actor.optim.lr=0.01",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
)


def checkpoint(job: JobConfig) -> dict[str, bytes]:
    last = job.run_dir / "global_step_2"
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
async def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    job = small_job(tmp_path_factory.mktemp("lora"), tiny_model, "run", *LORA)
    await train(job)
    return job


def test_the_reference_is_the_actor_without_its_adapter(expected: JobConfig) -> None:
    assert expected.roles == ("actor", "rollout", "reward")
    first, second = recorded(expected)
    assert first["actor/reward_kl_penalty"] == 0  # the first adapter changes nothing
    assert second["actor/reward_kl_penalty"] != 0
    files = checkpoint(expected)
    assert {
        "actor/adapter_model.safetensors",
        "actor/adapter_config.json",
        "actor/tokenizer.json",
    } <= files.keys()
    assert "actor/model.safetensors" not in files


@pytest.mark.parametrize("strategy", ["standalone", "collocate"])
async def test_an_adapter_over_grpc_equals_one_in_process_bit_for_bit(
    expected: JobConfig, strategy: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *LORA, f"placement.strategy={strategy}")
    async with AsyncExitStack() as stack:
        addresses: dict[str, list[str]] = {}
        for roles in job.plan.grouping.values():
            address = await stack.enter_async_context(served_group(roles, job))
            addresses |= {role: [address] for role in roles}
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, "127.0.0.1:0", None)
    assert recorded(job) == recorded(expected)
    assert checkpoint(job) == checkpoint(expected)


def test_a_resumed_run_with_another_alpha_is_refused(
    expected: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *LORA, "actor.model.lora_alpha=8")
    shutil.copytree(expected.run_dir / "global_step_1", job.run_dir / "global_step_1")
    (job.run_dir / "latest").write_text("global_step_1\n")
    with pytest.raises(InvalidConfig, match=r"lora_alpha is 8 now and was 16.*lora_adapter_path="):
        Run(job, load_tokenizer(job.actor.model)).finished()


async def test_a_run_killed_after_a_checkpoint_ends_as_an_unbroken_one(
    expected: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *LORA)
    shutil.copytree(expected.run_dir / "global_step_1", job.run_dir / "global_step_1")
    (job.run_dir / "latest").write_text("global_step_1\n")
    first, *_ = (expected.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (job.run_dir / "metrics.jsonl").write_text(first)
    await train(job)
    assert recorded(job) == recorded(expected)
    assert checkpoint(job) == checkpoint(expected)
