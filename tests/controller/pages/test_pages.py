"""The pages with real workers: the order of rows, the chunks, the failures, and what a step leaves behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from in_process import recorded, small_job, train, workers
from torch.testing import assert_close

from rolemesh.algos.kl import KLController
from rolemesh.catalog.pages import PAGES, PageSpec
from rolemesh.config import JobConfig, load_job
from rolemesh.data import PromptDataset
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RewardFailed
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Metrics, Roles, Rollout
from rolemesh.services.controller.pages.choice import page_of
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import read_metrics, write_config
from rolemesh.services.controller.stages.advantage_estimation import (
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantages,
)
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.weights.weight_source import WeightSource


def some_prompts(job: JobConfig) -> DataProto:
    data = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    return data.batch(range(job.data.train_batch_size))


@dataclass
class Shuffled:
    """A rollout whose rows arrive one by one in another order, as from busy replicas."""

    rollout: Rollout
    order: list[int]

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        everything = DataProto.concat([part async for part in self.rollout.generate(prompts)])
        place = everything["row"].argsort()
        for row in self.order:
            yield everything.select_idxs([int(place[row])])

    async def update_weights(self, source: WeightSource) -> None:
        await self.rollout.update_weights(source)


async def step_and_weights(
    job: JobConfig, order: list[int] | None = None
) -> tuple[dict[str, float], DataProto, dict[str, torch.Tensor]]:
    """One step with fresh workers: its metrics, its batch, and the actor's weights after it."""
    with workers(job) as roles:
        if order:
            roles = replace(roles, rollout=Shuffled(roles.rollout, order))
        step = Step(1, job, KLController(job.algorithm.kl_ctrl))
        metrics = await page_of(job)(some_prompts(job), roles, step)
        assert step.batch is not None
        return metrics, step.batch, await (await roles.actor.publish_weights(2)).fetch()


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
async def test_a_step_is_bit_identical_in_any_row_order_and_chunking(
    estimator: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", f"algorithm.adv_estimator={estimator}", "rollout.n=4")
    metrics, batch, weights = await step_and_weights(job)
    others = await step_and_weights(job, order=[(5 * i + 3) % 16 for i in range(16)])
    assert others[0] == metrics
    assert others[1].columns == batch.columns
    for name in batch.tensors:
        assert torch.equal(others[1][name], batch[name]), name
    assert weights.keys() == others[2].keys()
    assert all(torch.equal(others[2][name], weights[name]) for name in weights)


async def test_rewards_are_scores_less_beta_times_kl(tiny_model: Path, tmp_path: Path) -> None:
    # the reference is another model than the actor, so that there is a KL
    other = small_job(tmp_path, tiny_model, "run", "trainer.total_training_steps=1", "trainer.save_freq=1")
    await train(other)
    job = small_job(
        tmp_path, tiny_model, "next", f"reference.model.path={other.run_dir / 'global_step_1' / 'actor'}"
    )
    metrics, batch, _ = await step_and_weights(job)
    mask = batch["response_mask"]
    kl = (batch["old_log_probs"] - batch["ref_log_probs"]) * mask
    assert_close(batch["token_level_rewards"], batch["token_level_scores"] - 0.1 * kl)
    per_row = torch.stack([kl[i][mask[i]].mean() for i in range(len(batch))])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(per_row.mean().item(), rel=1e-5)
    assert metrics["actor/reward_kl_penalty"] != 0
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1


async def test_grpo_compares_the_answers_to_one_prompt(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(
        tmp_path, tiny_model, "run", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false",
        "rollout.n=4",
    )  # fmt: skip
    _, batch, _ = await step_and_weights(job)
    assert batch["uid"].tolist() == [f"train-{i // 4:06d}" for i in range(16)]
    rewards = batch["token_level_scores"].sum(dim=1).reshape(4, 4)
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-6)
    assert_close(batch["advantages"][:, 0], expected.reshape(-1), rtol=1e-5, atol=1e-5)
    assert (rewards.std(dim=1) > 0).any()


async def test_the_rollout_has_the_new_weights_when_a_step_ends(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    with workers(job) as roles:
        prompts = fan_out(some_prompts(job), 2, seed=1, step=2)
        before = DataProto.concat([part async for part in roles.rollout.generate(prompts)])
        await page_of(job)(some_prompts(job), roles, Step(1, job, KLController(job.algorithm.kl_ctrl)))
        after = DataProto.concat([part async for part in roles.rollout.generate(prompts)])
    assert not torch.equal(
        before["rollout_log_probs"][before["row"].argsort()], after["rollout_log_probs"][after["row"].argsort()]
    )


# ------------------------------------------------------------------------------- what goes wrong


async def test_a_reward_that_raises_names_its_row_and_stops_generation(
    tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1 / (extra_info['index'] - 2)\n"
    )
    closed = asyncio.Event()

    @dataclass
    class Watched(Shuffled):
        async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
            try:
                async for part in super().generate(prompts):
                    yield part
                await asyncio.Event().wait()  # more would come, were it not closed
            finally:
                closed.set()

    with workers(job) as roles:
        roles = replace(roles, rollout=Watched(roles.rollout, list(range(8))))
        with pytest.raises(RewardFailed, match="train-000002"):
            await page_of(job)(some_prompts(job), roles, Step(1, job, KLController(job.algorithm.kl_ctrl)))
    assert closed.is_set()


# -------------------------------------------------------------------------------------- the loop


async def test_validation_does_not_depend_on_its_batch_size(tiny_model: Path, tmp_path: Path) -> None:
    answers = []
    for size in (1, 3):
        job = small_job(
            tmp_path, tiny_model, f"run-{size}", "trainer.val_only=true", f"data.val_batch_size={size}",
            "rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.n=2", "trainer.log_val_generations=6",
        )  # fmt: skip
        answers.append((await train(job)).answers)
    assert len(answers[0]) == 6
    assert answers[0] == answers[1]


@dataclass
class Noting:
    """A rollout that notes what it is asked."""

    rollout: Rollout
    asked: list[DataProto] = field(default_factory=list)

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        self.asked.append(prompts)
        async for rows in self.rollout.generate(prompts):
            yield rows

    async def update_weights(self, source: WeightSource) -> None:
        await self.rollout.update_weights(source)


async def test_validations_repeat_their_draws_and_training_shares_none(
    tiny_model: Path, tmp_path: Path
) -> None:
    """So two of them differ by the model alone, and none is luckier for what training has drawn."""
    job = small_job(
        tmp_path, tiny_model, "run", "trainer.total_training_steps=2", "trainer.test_freq=1",
        "rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.n=2",
    )  # fmt: skip
    with workers(job) as roles:
        rollout = Noting(roles.rollout)
        await Run(job, load_tokenizer(job.actor.model)).train(replace(roles, rollout=rollout))
    streams = {
        kind: [rows["seeds"].tolist() for rows in rollout.asked if rows.meta_info["sampling"] == kind]
        for kind in ("train", "validation")
    }
    before, *after = streams["validation"]
    assert after == [before, before]
    assert len(set(before)) == 6
    assert len({seed for seeds in streams["train"] for seed in seeds} - set(before)) == 2 * 8


async def test_in_the_critics_warm_up_the_actor_stays_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(
        tmp_path, tiny_model, "run", "trainer.critic_warmup=2", "trainer.total_training_steps=3",
        "trainer.save_freq=1", "trainer.val_before_train=false",
    )  # fmt: skip
    await train(job)
    records = read_metrics(job.run_dir / "metrics.jsonl")
    assert ["actor/pg_loss" in record for record in records] == [False, False, True]
    assert [record.get("training/critic_warmup") for record in records] == [1.0, 1.0, None]
    assert all("critic/vf_loss" in record for record in records)
    weights = [(job.run_dir / f"global_step_{n}/actor/model.safetensors").read_bytes() for n in (1, 2, 3)]
    critics = [(job.run_dir / f"global_step_{n}/critic/model.safetensors").read_bytes() for n in (1, 2, 3)]
    assert weights[0] == weights[1] != weights[2]
    assert len(set(critics)) == 3


PHASES = [
    "step",
    "gen",
    "old_log_prob",
    "ref",
    "values",
    "reward",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "testing",
]
VALIDATED = ("mean@2", "best@2/mean")
STEP_KEYS = [
    "training/epoch",
    *(f"critic/{name}/{of}" for name in ("score", "rewards") for of in ("mean", "max", "min")),
    *(f"critic/{name}/{of}" for name in ("advantages", "returns", "values") for of in ("mean", "max", "min")),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vf_explained_var", "grad_norm", "lr")),
    *(f"actor/{name}" for name in ("pg_loss", "entropy", "ppo_kl", "pg_clipfrac", "grad_norm", "lr")),
    *(f"actor/{name}" for name in ("reward_kl_penalty", "reward_kl_penalty_coeff")),
    *(f"response_length/{of}" for of in ("mean", "max", "min", "clip_ratio")),
    *("prompt_length/mean", "perf/throughput", "perf/total_num_tokens"),
    *(f"val-core/{source}/acc/{of}" for source in ("digits", "numbers") for of in (*VALIDATED, "pass@2")),
    *(f"val-aux/{source}/reward/{of}" for source in ("digits", "numbers") for of in VALIDATED),
    *(f"timing_s/{phase}" for phase in PHASES),
]


async def test_a_run_directory_holds_config_metrics_and_dumps(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(
        tmp_path, tiny_model, "run", "trainer.total_training_steps=2", "trainer.test_freq=1",
        "rollout.val_kwargs.n=2", "rollout.val_kwargs.do_sample=true", "data.val_batch_size=2",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}", f"trainer.validation_data_dir={tmp_path / 'val'}",
    )  # fmt: skip
    summary = await train(job)
    assert (job.run_dir / "config.yaml").read_text() == job.to_yaml()

    records = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["training/global_step"] for record in records] == [0, 1, 2]
    assert [key for key in STEP_KEYS if key not in records[2]] == []

    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "2.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert set(rows[0]) == {"input", "output", "gts", "score", "acc", "step", "uid", "data_source"}
    assert rows[0]["uid"] == rows[1]["uid"] != rows[2]["uid"]
    assert rows[0]["gts"] == str(int(rows[0]["uid"].removeprefix("train-")) + 1)
    assert sum(row["score"] for row in rows) / 8 == pytest.approx(records[2]["critic/score/mean"])

    validated = [json.loads(line) for line in (tmp_path / "val" / "2.jsonl").read_text().splitlines()]
    assert [row["uid"] for row in validated] == [f"val-{i:06d}" for i in (0, 0, 1, 1, 2, 2)]
    digits = [row["acc"] for row in validated if row["data_source"] == "digits"]
    assert sum(digits) / 2 == pytest.approx(records[2]["val-core/digits/acc/mean@2"])
    assert summary.answers == validated[: job.trainer.log_val_generations]


async def test_val_only_validates_and_trains_nothing(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.val_only=true", "trainer.save_freq=1")
    summary = await train(job)
    assert [record["training/global_step"] for record in summary.records] == [0]
    assert "val-core/digits/acc/mean@1" in summary.records[0]
    assert summary.checkpoint is None
    again = small_job(tmp_path, tiny_model, "run", "trainer.val_only=true", "data.val_batch_size=3")
    await train(again)
    assert load_job(job.run_dir / "config.yaml").data.val_batch_size == 3  # no run of steps was ever here


@pytest.mark.parametrize("broken", ["a: [", "x", "trainer:", "trainer: 1", ""])
def test_a_config_that_somebody_has_broken_ends_no_run(broken: str, tiny_model: Path, tmp_path: Path) -> None:
    """It is a run's that trained, for all that is known: only another one that trains writes it anew."""
    validating, training = (
        small_job(tmp_path, tiny_model, "run", f"trainer.val_only={only}") for only in ("true", "false")
    )
    config = validating.run_dir / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(broken)
    write_config(validating)
    assert config.read_text() == broken
    write_config(training)
    assert config.read_text() == training.to_yaml()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.critic_warmup=1", "algorithm.adv_estimator=grpo"], "critic_warmup is 1, but a job with"),
        (["data.train_files=[]"], "data.train_files is empty"),
        (["data.val_files=[]", "trainer.test_freq=1"], "data.val_files is empty"),
    ],
)
async def test_a_job_that_cannot_run_is_an_error_before_the_first_step(
    overrides: list[str], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        await train(small_job(tmp_path, tiny_model, "run", *overrides))


async def self_scored_step(prompts: DataProto, roles: Roles, step: Step) -> Metrics:
    """Like grpo_step, but it scores each response by its first token."""

    async def experience(rows: DataProto) -> DataProto:
        scores = torch.zeros(rows["responses"].shape)
        scores[:, 0] = rows["responses"][:, 0] % 7
        old = await roles.actor.compute_log_probs(rows)
        return rows.union(old, DataProto({"token_level_scores": scores}))

    rows = fan_out(prompts, step.job.rollout.n, step.job.rollout.seed, step.number)
    batch = await collect(roles.rollout.generate(rows), rows, experience)
    batch, mismatch = apply_rollout_correction(batch, step.job)
    batch, kl_metrics = apply_kl_penalty(batch, step.job, step.kl.value)
    batch = compute_advantages(batch, step.job)
    actor_metrics = await roles.actor.update(batch)
    await roles.sync_weights(step.number)
    return step.report(batch, mismatch, kl_metrics, actor_metrics)


SELF_SCORED = PageSpec(name="selfscored", code=self_scored_step, origin="own.py", roles=("actor", "rollout"))
SELF_SCORING = (
    "algorithm.page=selfscored",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "trainer.total_training_steps=1",
)


async def test_a_page_may_score_its_rows_without_a_reward_role(tiny_model: Path, tmp_path: Path) -> None:
    """Its dumps hold the columns that the batch has."""
    with PAGES.adding(SELF_SCORED):
        job = small_job(
            tmp_path, tiny_model, "run", *SELF_SCORING, "data.val_files=[]",
            f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
        )  # fmt: skip
        assert job.roles == ("actor", "rollout")
        with workers(job) as roles:
            await Run(job, load_tokenizer(job.actor.model)).train(roles)
    [record] = recorded(job)
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {"input", "output", "score", "step", "uid"} <= set(rows[0])
    assert "acc" not in rows[0]
    assert sum(row["score"] for row in rows) / 8 == pytest.approx(record["critic/score/mean"])


def test_a_job_that_generates_and_has_no_reward_cannot_validate(tiny_model: Path, tmp_path: Path) -> None:
    never = ("trainer.val_before_train=false", "trainer.test_freq=-1")
    with PAGES.adding(SELF_SCORED):
        job, training = (small_job(tmp_path, tiny_model, "run", *SELF_SCORING, *each) for each in ((), never))
        tokenizer = load_tokenizer(job.actor.model)
        with pytest.raises(InvalidConfig, match=r"page selfscored has no reward .*val_before_train to false"):
            Run(job, tokenizer)
        Run(training, tokenizer)


async def test_without_a_directory_for_dumps_no_text_of_a_step_is_made(
    tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.total_training_steps=1", "data.val_files=[]")
    run = Run(job, load_tokenizer(job.actor.model))
    with workers(job) as roles, patch.object(run, "_texts", None):  # the reward has its own
        assert (await run.train(roles)).step == 1


async def test_validating_a_run_leaves_its_records_and_its_job_file(tiny_model: Path, tmp_path: Path) -> None:
    """Also where the run has no checkpoint, so that what is validated is the model that it began with."""
    job = small_job(tmp_path, tiny_model, "run", "trainer.total_training_steps=1")
    await train(job)
    before, written = recorded(job), (job.run_dir / "config.yaml").read_text()
    await train(
        small_job(tmp_path, tiny_model, "run", "trainer.total_training_steps=1", "trainer.val_only=true")
    )
    assert recorded(job) == [*before, before[0]]
    assert (job.run_dir / "config.yaml").read_text() == written
    assert not list(job.run_dir.glob("metrics-until-*"))
