"""Dynamic sampling: what becomes of every group of answers, and of a run that is interrupted."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import course, small_job, train, workers

from rolemesh.algos.kl import KLController
from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.dataproto import DataProto
from rolemesh.errors import CheckpointFailed, InvalidConfig, InvalidData, RoleFailed
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Actor, Metrics, Reward, Roles, Rollout
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.pages.dapo import dapo_step
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import read_metrics
from rolemesh.services.controller.stages.dynamic_sampling import DynamicSampling, groups_with_spread
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.weights.source import Fits, WeightSource
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


# ------------------------------------------------------- every group, over steps whose answers are given


@dataclass
class Given:
    """Rollout and actor whose answers are given, and what they were asked.

    Args:
        differ: whether the answers to a prompt differ, by its uid.
        one, two: the ids of the tokens "1" and "2".
    """

    differ: Callable[[str], bool]
    one: int
    two: int
    version: int = 0
    asked: list[DataProto] = field(default_factory=list)
    judged: list[DataProto] = field(default_factory=list)
    learnt: list[DataProto] = field(default_factory=list)

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        """ "1" for the first answer to each prompt, and "2" for the others where they differ."""
        self.asked.append(prompts)
        uids = prompts["uid"].tolist()
        first = [i for i, uid in enumerate(uids) if uids.index(uid) == i]
        ids = [self.two if self.differ(uid) and i not in first else self.one for i, uid in enumerate(uids)]
        shape = (len(prompts), 8)
        mask = torch.arange(8).expand(shape) < 1
        yield DataProto(
            {
                "row": torch.arange(len(prompts)),
                "responses": torch.where(mask, torch.tensor(ids)[:, None], 0),
                "response_mask": mask,
                "rollout_log_probs": torch.zeros(shape),
                "weight_versions": torch.where(mask, self.version, -1),
            }
        )

    async def update_weights(self, source: WeightSource) -> None:
        self.version = source.version

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        self.judged.append(batch)
        zeros = torch.zeros(batch["responses"].shape)
        return DataProto({"old_log_probs": zeros, "entropys": zeros})

    async def update(self, batch: DataProto) -> Metrics:
        self.learnt.append(batch)
        return {}

    async def publish_weights(self, version: int) -> WeightSource:
        @dataclass
        class Version:
            version: int
            address: str | None = None

            async def fetch(self, fits: Fits | None = None) -> dict[str, torch.Tensor]:
                return {}

        return Version(version)

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        raise AssertionError("the job weighs no KL")

    async def save_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint")

    async def load_checkpoint(self, directory: Path | None) -> None:
        raise AssertionError("a page loads no checkpoint")


@dataclass
class World:
    """Ten prompts, and a reward by a function of the user's."""

    job: JobConfig
    data: PromptDataset
    reward: Reward
    tokens: tuple[int, int]

    def sampling(self, gen_batch: int, size: int, max_batches: int = 0) -> DynamicSampling:
        config = self.job.data.model_copy(update={"gen_batch_size": gen_batch})
        order = PromptOrder(len(self.data), config)
        return DynamicSampling(size, lambda number: self.data.batch(order.rows(number)), max_batches)

    def roles(self, differ: Callable[[str], bool]) -> tuple[Given, Roles]:
        given = Given(differ, *self.tokens)
        return given, Roles(given, given, self.reward)

    async def step(self, number: int, sampling: DynamicSampling, roles: Roles, n: int) -> Metrics:
        rollout = self.job.rollout.model_copy(update={"n": n})
        job = self.job.model_copy(update={"rollout": rollout})
        step = Step(number, job, KLController(job.algorithm.kl_ctrl), sampling)
        return await dapo_step(sampling.next_prompts(), roles, step)


@pytest.fixture(scope="module")
def world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("world")
    job = small_job(directory, tiny_model, "run", *DAPO)
    (directory / "reward.py").write_text(RIGHT)
    tokenizer = load_tokenizer(job.actor.model)
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in "12"]
    data = PromptDataset(job.data.train_files, job.data, tokenizer)
    reward = RewardWorker(job)
    yield World(job, data, reward, (tokens[0][0], tokens[1][0]))
    reward.close()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    gen_batch=st.integers(1, 10), size=st.integers(1, 7), n=st.integers(2, 3),
    percent=st.integers(15, 100), salt=st.integers(0, 999),
)  # fmt: skip
def test_every_group_is_learnt_from_once_or_waits_or_has_no_spread(
    world: World, gen_batch: int, size: int, n: int, percent: int, salt: int
) -> None:
    def differs(uid: str) -> bool:
        return zlib.crc32(f"{uid}/{salt}".encode()) % 100 < percent

    async def steps() -> list[Metrics]:
        return [await world.step(number, sampling, roles, n) for number in range(1, 5)]

    sampling = world.sampling(gen_batch, size)
    given, roles = world.roles(differs)
    metrics = asyncio.run(steps())

    asked = [uid for rows in given.asked for uid in rows["uid"][::n]]
    learnt = [batch["uid"][::n].tolist() for batch in given.learnt]
    waiting = sampling.waiting["uid"][::n].tolist() if len(sampling.waiting) else []
    # what was asked first is learnt from first; nothing is lost, nothing comes twice
    assert len(set(asked)) == len(asked)
    assert [uid for batch in learnt for uid in batch] + waiting == [uid for uid in asked if differs(uid)]
    assert [len(batch) for batch in learnt] == [size] * 4
    for batch in given.learnt:
        assert batch["uid"].tolist() == [uid for uid in batch["uid"][::n] for _ in range(n)]
        assert torch.equal(batch["acc"].reshape(-1, n)[:, 0], torch.ones(size))
        assert not batch["acc"].reshape(-1, n)[:, 1:].any()
    # no two rows of the run draw the same numbers
    seeds = [seed for rows in given.asked for seed in rows["seeds"].tolist()]
    assert len(set(seeds)) == len(seeds) == n * len(asked)
    # epoch after epoch of all prompts, as they would come without dynamic sampling
    prompts = [uid.partition("@")[0] for uid in asked]
    for epoch in range(len(prompts) // 10):
        assert len(set(prompts[10 * epoch : 10 * (epoch + 1)])) == 10
    # old_log_probs are those of the policy that learns; what the engine said stays as it was
    assert [len(batch) for batch in given.judged] == [size * n] * 4
    for number, (told, batch) in enumerate(zip(metrics, given.learnt, strict=True), 1):
        ages = (number - 1 - batch["weight_versions"][batch["response_mask"]]).float()
        assert (told["rollout/staleness/mean"], told["rollout/staleness/max"]) == (ages.mean(), ages.max())

    def total(key: str) -> float:
        return sum(told.get(f"sampling/{key}", 0.0) for told in metrics)

    assert total("groups_answered") == len(asked)
    assert total("groups_without_spread") == sum(not differs(uid) for uid in asked)
    assert sum(told["train/num_gen_batches"] for told in metrics) == len(given.asked) == sampling.num_batches
    for before, told in zip([{"sampling/groups_kept": 0.0}, *metrics], metrics, strict=False):
        assert told["sampling/groups_from_before"] == before["sampling/groups_kept"]
        assert size + told["sampling/groups_kept"] == (
            told["sampling/groups_from_before"]
            + told["sampling/groups_answered"]
            - told["sampling/groups_without_spread"]
        )


def test_answers_differ_where_one_is_not_equal_to_another_and_only_these_are_held(world: World) -> None:
    rewards = torch.tensor(
        [0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.0, 0.0, 0.0]
    )  # in float32 0.1 three times has a spread
    answered = DataProto(
        {"token_level_scores": torch.stack([torch.zeros(9), rewards], dim=1), "acc": torch.arange(9.0)},
        meta_info={"step": 3},
    )
    job = world.job.model_copy(update={"rollout": world.job.rollout.model_copy(update={"n": 3})})
    [group] = groups_with_spread(answered, job)
    assert group["acc"].tolist() == [3, 4, 5]
    assert group["acc"].untyped_storage().nbytes() == 3 * 4
    assert group.meta_info == {}  # groups of several steps come together


async def test_a_step_that_others_have_filled_answers_no_prompt(world: World) -> None:
    sampling = world.sampling(gen_batch=6, size=2)
    _, roles = world.roles(lambda uid: True)
    told = [await world.step(number, sampling, roles, 2) for number in range(1, 5)]
    assert [each["train/num_gen_batches"] for each in told] == [1, 0, 0, 1]
    assert [each["rollout/staleness/max"] for each in told] == [0, 1, 2, 0]
    assert [each.get("sampling/score/mean") for each in told] == [0.5, None, None, 0.5]


async def test_the_last_batch_that_a_step_may_answer_is_an_error_with_the_way_out(world: World) -> None:
    sampling = world.sampling(gen_batch=3, size=2, max_batches=3)
    first = sampling.next_prompts()["uid"][0]
    given, roles = world.roles(lambda uid: uid == first)
    with pytest.raises(
        InvalidData,
        match=r"1 of 2 groups .* after 3 batches .*max_num_gen_batches .*: 8 of 9 prompts were answered equal",
    ):
        await world.step(1, sampling, roles, 2)
    assert len(given.asked) == 3
    assert not given.learnt


async def test_just_as_many_batches_as_a_step_may_answer_are_no_error(world: World) -> None:
    sampling = world.sampling(gen_batch=3, size=2, max_batches=3)
    _, roles = world.roles(lambda uid: uid.endswith("@3"))
    told = await world.step(1, sampling, roles, 2)
    assert told["sampling/groups_kept"] == 1


async def test_the_display_is_told_how_far_a_step_has_come(world: World) -> None:
    said: list[str] = []
    order = PromptOrder(10, world.job.data)
    sampling = DynamicSampling(5, lambda number: world.data.batch(order.rows(number)), tell=said.append)
    _, roles = world.roles(lambda uid: True)
    await world.step(1, sampling, roles, 2)
    assert said == ["4 of 5 groups", "5 of 5 groups", ""]


# ------------------------------------------------------------------------------------ whole runs


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
        told = [{k: v for k, v in r.items() if not k.startswith(("sampling/", "train/"))} for r in course(job)]
        actor = job.run_dir / "global_step_2" / "actor"
        ends.append((told, (actor / "model.safetensors").read_bytes()))
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


def test_the_runs_below_take_several_rounds_and_leave_groups_to_later_steps(unbroken: JobConfig) -> None:
    records = course(unbroken)
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
        ("actor", "save_checkpoint", 2),  # step 3 is made, and not saved
    ],
)
async def test_a_run_killed_between_two_phases_ends_where_an_unbroken_one_ends(
    role: str, method: str, calls: int, unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *SAVED)
    with workers(job) as roles:
        dying = replace(roles, **{role: Dying(getattr(roles, role), method, calls)})
        with pytest.raises(RoleFailed, match="killed"):
            await Run(job, load_tokenizer(job.actor.model)).train(dying)
    assert 1 <= read_metrics(job.run_dir / "metrics.jsonl")[-1]["training/global_step"] < 4  # type: ignore[operator]
    await train(job)
    assert course(job) == course(unbroken)
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


async def test_a_run_stopped_in_its_every_round_ends_where_an_unbroken_one_ends(
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
    rounds = [int(record["train/num_gen_batches"] or 0) for record in course(unbroken)]
    assert rounds[0] > 1
    assert steps[: rounds[0]] == [0] * (rounds[0] - 1) + [1]  # the first step, too, was stopped in its search
    assert course(job) == course(unbroken)
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


async def test_a_resumed_run_may_take_more_batches_and_not_another_metric(
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
    for record in course(unbroken):
        step, rounds = int(record["training/global_step"] or 0), int(record["train/num_gen_batches"] or 0)
        lines = (unbroken.run_dir / "dumps" / f"{step}.jsonl").read_text().splitlines()
        uids = [json.loads(line)["uid"] for line in lines][::2]
        assert len(set(uids)) == len(uids) == 4
        batches = [int(uid.partition("@")[2]) for uid in uids]
        assert batches == sorted(batches)
        assert sum(number <= last for number in batches) == record["sampling/groups_from_before"]
        assert max(batches) <= last + rounds
        last += rounds


# ------------------------------------------------------------------------- graph and configuration


def test_the_step_graph_has_one_round_whatever_the_batch(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *DAPO, "data.train_batch_size=1024", "actor.use_kl_loss=true")
    graph = record_step(job)
    assert graph.title == "dapo.py, one step"
    assert [call.name for call in graph.nodes] == [
        "data",
        "controller.fan_out",
        "rollout.generate",
        "controller.join",
        "reward.compute_scores",
        "controller.groups_with_spread",
        "actor.compute_log_probs",
        "reference.compute_log_probs",
        "controller.apply_rollout_correction",
        "controller.apply_kl_penalty",
        "controller.compute_advantages",
        "actor.update",
        "rollout.update_weights",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus"],
            r"filter_groups\.enable .*rollout\.n is 1",
        ),
        (["algorithm.adv_estimator=gae"], r"filter_groups\.enable .*algorithm\.adv_estimator is gae"),
        (
            ["rollout.temperature=0", "algorithm.adv_estimator=reinforce_plus_plus"],
            r"rollout\.temperature is 0, .*algorithm\.filter_groups\.enable learns",
        ),
        (["algorithm.adv_estimator=remax"], r"filter_groups\.enable .*algorithm\.adv_estimator is remax"),
        (["rollout.mode=async"], r"filter_groups\.enable.*rollout\.mode async.*max_staleness"),
        (["trainer.total_training_steps=null"], r"filter_groups\.enable.*total_epochs.*total_training_steps"),
        (
            ["algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
            r"metric is seq_final_reward and algorithm\.use_kl_in_reward true",
        ),
        (
            [
                "algorithm.filter_groups.metric=score",
                "reward.reward_manager=dapo",
                "reward.overlong_buffer={enable: true, len: 4}",
            ],
            r"metric is score and reward\.overlong_buffer\.enable true",
        ),
        (
            ["algorithm.filter_groups.enable=false", "data.gen_batch_size=12"],
            r"gen_batch_size is 12 and data\.train_batch_size 4: without algorithm\.filter_groups\.enable",
        ),
    ],
)
def test_what_contradicts_dynamic_sampling_is_refused_with_both_keys(
    overrides: list[str], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        small_job(tmp_path, tiny_model, "run", *DAPO, *overrides)


def test_no_step_ahead_is_no_contradiction(tiny_model: Path, tmp_path: Path) -> None:
    small_job(tmp_path, tiny_model, "run", *DAPO, "rollout.mode=async", "trainer.max_staleness=0")
