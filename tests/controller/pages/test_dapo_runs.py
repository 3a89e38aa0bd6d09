"""Whole runs of dynamic sampling: killed, stopped and resumed, they end where an unbroken one ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from in_process import recorded, small_job, train, workers

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import CheckpointFailed, InvalidConfig, RoleFailed
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Actor, Rollout
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import read_metrics
from rolemesh.weights.weight_source import WeightSource
from rolemesh.wire.codec import load_batch, save_batch

DAPO = (
    "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false",
    "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward",
)  # fmt: skip
RIGHT = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == "1")
"""
NEVER_EQUAL = """
import zlib
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return zlib.crc32(solution_str.encode()) / 2**32
"""


async def test_where_every_group_has_a_spread_dapo_is_grpo_bit_for_bit(
    tiny_model: Path, tmp_path: Path
) -> None:
    ends = []
    for enable in ("true", "false"):
        job = small_job(
            tmp_path, tiny_model, f"run-{enable}", *DAPO, f"algorithm.filter_groups.enable={enable}",
            "trainer.total_training_steps=2", "trainer.save_freq=2",
        )  # fmt: skip
        (tmp_path / "reward.py").write_text(NEVER_EQUAL)
        await train(job)
        kept = [
            {k: v for k, v in r.items() if not k.startswith(("sampling/", "train/"))} for r in recorded(job)
        ]
        actor = job.run_dir / "global_step_2" / "actor"
        ends.append((kept, (actor / "model.safetensors").read_bytes()))
    assert ends[0] == ends[1]


SAVED = (
    *DAPO,
    "trainer.save_freq=1",
    "data.gen_batch_size=6",
    "trainer.val_before_train=false",
    "rollout.seed=2",
)


@pytest.fixture(scope="module")
async def unbroken(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    directory = tmp_path_factory.mktemp("unbroken")
    dumps = f"trainer.rollout_data_dir={directory / 'run' / 'dumps'}"
    job = small_job(directory, tiny_model, "run", *SAVED, dumps)
    await train(job)
    return job


def end_of(job: JobConfig) -> dict[str, bytes]:
    last = job.run_dir / "global_step_4"
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*") if path.is_file()}


def test_the_unbroken_run_takes_extra_rounds_and_leaves_groups(unbroken: JobConfig) -> None:
    """Without both, the tests below would show nothing."""
    records = recorded(unbroken)
    assert [r["training/global_step"] for r in records] == [1, 2, 3, 4]
    assert max(r["train/num_gen_batches"] or 0 for r in records) > 1
    assert max(r["sampling/groups_from_before"] or 0 for r in records) > 0
    assert (unbroken.run_dir / "global_step_2" / "waiting_groups").exists()
    assert (records[-1]["training/epoch"] or 0) > 1  # ten prompts: faster than the steps alone would be


@dataclass
class Dying:
    """A role that dies when it is asked for the so-manieth time."""

    role: Actor | Rollout
    method: str
    calls_left: int

    def __getattr__(self, name: str) -> object:
        method = getattr(self.role, name)
        if name == self.method:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise RoleFailed("killed")
        return method


@pytest.mark.parametrize(
    ("role", "method", "calls"),
    [
        ("rollout", "generate", 3),  # a round within step 2
        ("actor", "compute_log_probs", 2),  # step 3, of which some groups have waited
        ("rollout", "update_weights", 3),  # after the actor's third update
        ("actor", "begin_checkpoint", 2),  # step 3 is made, and not saved
        ("actor", "finish_checkpoint", 1),  # step 2 is copied, and not written
    ],
)
async def test_a_run_killed_between_phases_ends_as_an_unbroken_one(
    role: str, method: str, calls: int, unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *SAVED)
    with workers(job) as roles:
        dying = replace(roles, **{role: Dying(getattr(roles, role), method, calls)})
        with pytest.raises(RoleFailed, match="killed"):
            await Run(job, load_tokenizer(job.actor.model)).train(dying)
    assert 1 <= read_metrics(job.run_dir / "metrics.jsonl")[-1]["training/global_step"] < 4  # type: ignore[operator]
    await train(job)
    assert recorded(job) == recorded(unbroken)
    written, expected = end_of(job), end_of(unbroken)
    assert written.keys() == expected.keys()
    assert [name for name in expected if written[name] != expected[name]] == []


@dataclass
class Stopping:
    """A rollout whose run is asked to stop in its first round."""

    rollout: Rollout
    request_stop: Callable[[], None]
    rounds: int = 0

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        self.rounds += 1
        self.request_stop()
        async for rows in self.rollout.generate(prompts):
            yield rows

    async def update_weights(self, source: WeightSource) -> None:
        await self.rollout.update_weights(source)


async def test_a_run_stopped_in_every_round_ends_as_an_unbroken_one(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *SAVED)
    steps: list[int] = []
    while 4 not in steps:
        with workers(job) as roles:
            run = Run(job, load_tokenizer(job.actor.model))
            rollout = Stopping(roles.rollout, run.request_stop)
            steps.append((await run.train(replace(roles, rollout=rollout))).step)
        assert rollout.rounds <= 1
    rounds = [int(record["train/num_gen_batches"] or 0) for record in recorded(unbroken)]
    assert rounds[0] > 1
    assert steps[: rounds[0]] == [0] * (rounds[0] - 1) + [1]  # the first step, too, was stopped in its search
    assert not [*job.run_dir.glob("metrics-until-*")]  # and its resume is not a new run
    assert recorded(job) == recorded(unbroken)
    written, expected = end_of(job), end_of(unbroken)
    assert written.keys() == expected.keys()
    assert [name for name in expected if written[name] != expected[name]] == []


@pytest.mark.parametrize("harm", ["cut", "halved"])
async def test_waiting_groups_that_are_not_whole_are_refused(
    harm: str, unbroken: JobConfig, tiny_model: Path
) -> None:
    step = unbroken.run_dir / "global_step_2"
    job = small_job(
        unbroken.run_dir.parent, tiny_model, "run", *SAVED,
        "trainer.resume_mode=resume_path", f"trainer.resume_from_path={step}",
    )  # fmt: skip
    whole = (step / "waiting_groups").read_bytes()
    if harm == "cut":
        (step / "waiting_groups").write_bytes(whole[:-100])
    else:
        save_batch(load_batch(step / "waiting_groups")[1:], step / "waiting_groups")
    try:
        with pytest.raises(CheckpointFailed, match=r"waiting_groups cannot be read|are not groups of 2"):
            await train(job)
    finally:
        (step / "waiting_groups").write_bytes(whole)


async def test_a_resume_may_allow_more_batches_but_not_another_metric(
    unbroken: JobConfig, tiny_model: Path
) -> None:
    more = "algorithm.filter_groups.max_num_gen_batches=9"
    job = small_job(unbroken.run_dir.parent, tiny_model, "run", *SAVED, more)
    assert (await train(job)).step == 4
    other = small_job(unbroken.run_dir.parent, tiny_model, "run", *SAVED, "algorithm.filter_groups.metric=acc")
    with pytest.raises(InvalidConfig, match=r"filter_groups\.metric is 'acc' now and was 'seq_reward'"):
        await train(other)


def test_dumps_name_the_batch_in_which_a_prompt_was_answered(unbroken: JobConfig) -> None:
    last = 0
    for record in recorded(unbroken):
        step, rounds = int(record["training/global_step"] or 0), int(record["train/num_gen_batches"] or 0)
        lines = (unbroken.run_dir / "dumps" / f"{step}.jsonl").read_text().splitlines()
        uids = [json.loads(line)["uid"] for line in lines][::2]
        assert len(set(uids)) == len(uids) == 4
        batches = [int(uid.partition("@")[2]) for uid in uids]
        assert batches == sorted(batches)
        assert sum(number <= last for number in batches) == record["sampling/groups_from_before"]
        assert max(batches) <= last + rounds
        last += rounds


async def test_a_checkpoint_of_a_run_whose_scores_told_less_is_resumed(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    """Its waiting groups lack a column that scores have now, as after an added function or val_kwargs.n."""
    shutil.copytree(unbroken.run_dir, tmp_path / "run")
    step = tmp_path / "run" / "global_step_2"
    job = small_job(
        tmp_path, tiny_model, "run", *SAVED,
        "trainer.resume_mode=resume_path", f"trainer.resume_from_path={step}",
    )  # fmt: skip
    rows = load_batch(step / "waiting_groups")
    assert "reward_extra_info" in rows
    fewer = rows.select_columns([name for name in rows.columns if name != "reward_extra_info"])
    save_batch(fewer, step / "waiting_groups")
    await train(job)
    assert recorded(job) == recorded(unbroken)
    weights = Path("actor") / "model.safetensors"
    assert end_of(job)[str(weights)] == end_of(unbroken)[str(weights)]
