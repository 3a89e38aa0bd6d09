"""A step of every estimator with real workers, and ReMax's greedy answers."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from in_process import recorded, small_job, workers
from observed import over_grpc, run
from torch.testing import assert_close

from rolemesh.algos.kl import KLController
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.pages.choice import page_of
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.weights.weight_source import WeightSource

# Hardly two answers of a random model are worth the same.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    total = sum(map(ord, solution_str)) + 31 * int(ground_truth)
    return {"score": total % 97 / 97, "first": total % 7, "second": float(len(solution_str))}
"""


def job_of(name: str, model: Path, directory: Path, *overrides: str) -> JobConfig:
    gdpo = ("algorithm.gdpo_reward_keys=[first, second]",) if name == "gdpo" else ()
    job = small_job(
        directory, model, "run", f"algorithm.adv_estimator={name}", "algorithm.use_kl_in_reward=false",
        "trainer.val_before_train=false", *gdpo, *overrides,
    )  # fmt: skip
    (directory / "reward.py").write_text(REWARD)
    return job


def some_prompts(job: JobConfig) -> DataProto:
    data = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    return data.batch(range(job.data.train_batch_size))


async def one_step(job: JobConfig, roles: Roles) -> tuple[Metrics, DataProto]:
    step = Step(1, job, KLController(job.algorithm.kl_ctrl))
    metrics = await page_of(job)(some_prompts(job), roles, step)
    assert step.batch is not None
    return metrics, step.batch


async def weights_of(roles: Roles) -> dict[str, torch.Tensor]:
    return await (await roles.actor.publish_weights(2)).fetch()


# Those for which no role does anything of its own: what they are is known to the controller alone.
OTHERS = ("gae", "gdpo", "remax", "optimal_token_baseline", "egpo")
ALIKE = [name for name in ESTIMATORS if name not in (*OTHERS, "grpo_by_turn")]  # the last: tests/agents


@pytest.fixture(scope="module")
def alike(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Roles]]:
    """Roles for all of them."""
    directory = tmp_path_factory.mktemp("alike")
    with workers(job_of("grpo", tiny_model, directory)) as roles:
        yield directory, roles


@pytest.mark.parametrize("name", ALIKE)
async def test_an_estimator_of_the_controller_alone_makes_a_step(
    name: str, alike: tuple[Path, Roles], tiny_model: Path
) -> None:
    directory, roles = alike
    await assert_a_step(job_of(name, tiny_model, directory), roles)


@pytest.mark.parametrize("name", OTHERS)
async def test_an_estimator_with_roles_of_its_own_makes_a_step(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = job_of(name, tiny_model, tmp_path)
    with workers(job) as roles:
        await assert_a_step(job, roles)


async def assert_a_step(job: JobConfig, roles: Roles) -> None:
    before = {key: tensor.clone() for key, tensor in (await weights_of(roles)).items()}
    metrics, batch = await one_step(job, roles)
    after = await weights_of(roles)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/grad_norm"] > 0
    assert any(not torch.equal(after[key], before[key]) for key in before)
    mask = batch["response_mask"]
    assert batch["advantages"].shape == batch["returns"].shape == mask.shape
    assert batch["advantages"][mask].unique().numel() > 1
    reads = ESTIMATORS[job.algorithm.adv_estimator].reads
    assert [column for column in reads if column not in batch] == []


# ------------------------------------------------------------------------------------------- ReMax


async def test_remax_compares_with_the_greedy_answer_to_the_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """Of the weights that the step begins with. The reward is on the last token, so every token's return is
    it."""
    job = job_of("remax", tiny_model, tmp_path, "rollout.n=3", "rollout.temperature=0.7", "rollout.top_k=40")
    with workers(job) as roles:
        once = fan_out(some_prompts(job), 1, 0, 1, sampling="greedy")

        async def scored(rows: DataProto) -> DataProto:
            return rows.union(await roles.reward.compute_scores(rows))

        greedy = await collect(roles.rollout.generate(once), once, scored)
        metrics, batch = await one_step(job, roles)
    baselines = greedy["token_level_scores"].sum(1)
    assert baselines.unique().numel() > 1
    assert torch.equal(batch["reward_baselines"], baselines[[i // 3 for i in range(12)]])
    assert metrics["critic/reward_baselines/mean"] == pytest.approx(baselines.mean().item())
    mask, scores = batch["response_mask"], batch["token_level_scores"].sum(1)
    assert_close(batch["advantages"], (scores - batch["reward_baselines"])[:, None] * mask)
    assert len(batch) == 12  # of the samples alone


@dataclass
class Requests:
    """A rollout that writes down who asks for what, and by which weights it was made."""

    roles: Roles
    asked: list[tuple[int, str]] = field(default_factory=list)
    versions: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    async def generate(self, prompts: DataProto) -> AsyncGenerator[DataProto]:
        what = (prompts.meta_info["step"], prompts.meta_info["sampling"])
        self.asked.append(what)
        self.seen.append(f"{what[1]} {what[0]}")
        stream: AsyncIterator[DataProto] = self.roles.rollout.generate(prompts)
        async for rows in stream:
            made_by = set(rows["weight_versions"][rows["response_mask"]].tolist())
            self.versions[what] = self.versions.get(what, set()) | made_by
            yield rows

    async def update_weights(self, source: WeightSource) -> None:
        await self.roles.rollout.update_weights(source)
        self.seen.append(f"weights {source.version}")


async def test_greedy_answers_are_made_ahead_like_the_samples(tiny_model: Path, tmp_path: Path) -> None:
    job = job_of("remax", tiny_model, tmp_path, "rollout.mode=async", "trainer.total_training_steps=3")
    with workers(job) as roles:
        requests = Requests(roles)
        await run(job, replace(roles, rollout=requests))
    assert sorted(requests.asked) == [(step, use) for step in (1, 2, 3) for use in ("greedy", "train")]
    for step in (2, 3):  # begun before the weights of the step before it were there
        assert requests.seen.index(f"greedy {step}") < requests.seen.index(f"weights {step - 1}")
        assert requests.versions[step, "greedy"] <= {step - 2, step - 1}


async def test_remax_is_the_same_over_grpc_and_no_step_ahead(tiny_model: Path, tmp_path: Path) -> None:
    runs = []
    for where, overrides in (("a", ()), ("b", ("rollout.mode=async", "trainer.max_staleness=0"))):
        (tmp_path / where).mkdir()
        job = job_of("remax", tiny_model, tmp_path / where, "trainer.total_training_steps=2", *overrides)
        if overrides:
            async with over_grpc(job) as roles:
                await run(job, roles)
        else:
            with workers(job) as roles:
                await run(job, roles)
        runs.append(recorded(job))
    assert len(runs[0]) == 2
    assert runs[0] == runs[1]
