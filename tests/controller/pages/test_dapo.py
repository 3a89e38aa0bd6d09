"""Dynamic sampling: what becomes of every group of answers, and of a run that is interrupted."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import small_job

from rolemesh.algos.kl import KLController
from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, InvalidData
from rolemesh.forwarding import Forwarding
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Metrics, Reward, Roles
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.pages.dapo import dapo_step
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.stages.dynamic_sampling import DynamicSampling, groups_with_spread
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.weights.weight_source import Fits, WeightSource

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

    async def begin_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint")

    async def finish_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint")

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
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
def test_every_group_trains_once_or_waits_or_has_no_spread(
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
    for number, (record, batch) in enumerate(zip(metrics, given.learnt, strict=True), 1):
        ages = (number - 1 - batch["weight_versions"][batch["response_mask"]]).float()
        assert (record["rollout/staleness/mean"], record["rollout/staleness/max"]) == (ages.mean(), ages.max())

    def total(key: str) -> float:
        return sum(record.get(f"sampling/{key}", 0.0) for record in metrics)

    assert total("groups_answered") == len(asked)
    assert total("groups_without_spread") == sum(not differs(uid) for uid in asked)
    assert (
        sum(record["train/num_gen_batches"] for record in metrics) == len(given.asked) == sampling.num_batches
    )
    for before, record in zip([{"sampling/groups_kept": 0.0}, *metrics], metrics, strict=False):
        assert record["sampling/groups_from_before"] == before["sampling/groups_kept"]
        assert size + record["sampling/groups_kept"] == (
            record["sampling/groups_from_before"]
            + record["sampling/groups_answered"]
            - record["sampling/groups_without_spread"]
        )


def test_only_groups_whose_rewards_are_not_all_equal_are_kept(world: World) -> None:
    """Three equal float32 rewards have a standard deviation above 0. A kept group has storage of its own."""
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


def test_turn_rewards_with_equal_sums_are_equal_in_any_order(world: World) -> None:
    """In float32 0.1 + 0.1 + 0.6 and 0.6 + 0.1 + 0.1 are two numbers. In the second group one turn differs."""
    equal = [[0.1, 0.1, 0.6], [0.1, 0.6, 0.1], [0.6, 0.1, 0.1]]
    rewards = torch.tensor([*equal, [0.1, 0.1, 0.6], [0.1, 0.1, 0.6], [0.1, 0.1, 0.7]])
    first, last = rewards[0], rewards[2]
    assert (first[0] + first[1]) + first[2] != (last[0] + last[1]) + last[2]
    job = world.job.model_copy(update={"rollout": world.job.rollout.model_copy(update={"n": 3})})
    answered = DataProto({"token_level_scores": rewards, "acc": torch.arange(6.0)})
    assert [group["acc"].tolist() for group in groups_with_spread(answered, job)] == [[3, 4, 5]]


async def test_a_step_that_others_have_filled_answers_no_prompt(world: World) -> None:
    sampling = world.sampling(gen_batch=6, size=2)
    _, roles = world.roles(lambda uid: True)
    records = [await world.step(number, sampling, roles, 2) for number in range(1, 5)]
    assert [each["train/num_gen_batches"] for each in records] == [1, 0, 0, 1]
    assert [each["rollout/staleness/max"] for each in records] == [0, 1, 2, 0]
    assert [each.get("sampling/score/mean") for each in records] == [0.5, None, None, 0.5]


async def test_a_step_that_exhausts_max_num_gen_batches_names_the_key(world: World) -> None:
    sampling = world.sampling(gen_batch=3, size=2, max_batches=3)
    first = sampling.next_prompts()["uid"][0]
    given, roles = world.roles(lambda uid: uid == first)
    with pytest.raises(
        InvalidData,
        match=r"1 of 2 groups .* after 3 batches .*max_num_gen_batches: .* to 8 of 9 prompts were equal",
    ):
        await world.step(1, sampling, roles, 2)
    assert len(given.asked) == 3
    assert not given.learnt


async def test_a_search_resumed_past_a_lowered_limit_ends_next_batch(world: World) -> None:
    sampling = world.sampling(gen_batch=3, size=2, max_batches=3)
    sampling.restore(4, DataProto(), 2, {"num_rounds": 4, "num_answered": 12})
    given, roles = world.roles(lambda uid: False)
    with pytest.raises(InvalidData, match=r"0 of 2 groups .* after 5 batches .* to 15 of 15 prompts"):
        await world.step(1, sampling, roles, 2)
    assert len(given.asked) == 1


class Terse(Forwarding[Reward]):
    """A reward of a job whose scores have no extra information."""

    async def compute_scores(self, batch: DataProto) -> DataProto:
        return without_extra(await self._role.compute_scores(batch))


def without_extra(rows: DataProto) -> DataProto:
    return rows.select_columns([name for name in rows.columns if name != "reward_extra_info"])


@pytest.mark.parametrize("size", [3, 5])  # groups in a batch: the waiting ones fill it alone, or they do not
@pytest.mark.parametrize("now", ["with", "without"])
async def test_waiting_groups_train_even_if_reward_extra_info_changed(
    world: World, now: str, size: int
) -> None:
    """The resumed run's reward returns other columns than the one that scored the groups."""
    first, resumed = (world.sampling(gen_batch=10, size=size) for _ in range(2))
    given, roles = world.roles(lambda uid: uid[:12] <= "train-000007")
    terse = replace(roles, reward=Terse(roles.reward))
    then, afterwards = (terse, roles) if now == "with" else (roles, terse)
    first.size = 4
    await world.step(1, first, then, 2)
    assert len(first.waiting) == 2 * 4
    assert ("reward_extra_info" in first.waiting) is (now == "without")
    resumed.restore(first.num_batches, first.waiting, 2, {})
    for number in (2, 3):
        await world.step(number, resumed, afterwards, 2)
    learnt = [uid for batch in given.learnt for uid in batch["uid"][::2]]
    waiting = list(resumed.waiting["uid"][::2])
    assert len(given.learnt[1]) == len(given.learnt[2]) == 2 * size
    assert len({*learnt, *waiting}) == len(learnt) + len(waiting) == 8 * resumed.num_batches
    scores = torch.cat([batch["token_level_scores"].sum(dim=1) for batch in given.learnt])
    assert scores.tolist() == [1, 0] * len(learnt)


async def test_ten_batches_without_a_spread_warn_once_with_the_metric(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    _, roles = world.roles(lambda uid: False)
    with pytest.raises(InvalidData, match="after 21 batches"):
        await world.step(1, world.sampling(gen_batch=1, size=1, max_batches=21), roles, 2)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "no prompt of 10 batches has answers that differ in algorithm.filter_groups.metric" in warning
    assert "seq_reward includes the environment's rewards" in warning


async def test_just_as_many_batches_as_a_step_may_answer_are_no_error(world: World) -> None:
    sampling = world.sampling(gen_batch=3, size=2, max_batches=3)
    _, roles = world.roles(lambda uid: uid.endswith("@3"))
    record = await world.step(1, sampling, roles, 2)
    assert record["sampling/groups_kept"] == 1


async def test_the_display_gets_the_progress_of_a_step(world: World) -> None:
    said: list[str] = []
    order = PromptOrder(10, world.job.data)
    sampling = DynamicSampling(5, lambda number: world.data.batch(order.rows(number)), tell=said.append)
    _, roles = world.roles(lambda uid: True)
    await world.step(1, sampling, roles, 2)
    assert said == ["4 of 5 groups", "5 of 5 groups", ""]


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
            r"rollout\.temperature is 0, .*algorithm\.filter_groups\.enable needs answers that differ",
        ),
        (["algorithm.adv_estimator=remax"], r"filter_groups\.enable .*algorithm\.adv_estimator is remax"),
        (["rollout.mode=async"], r"filter_groups\.enable.*rollout\.mode async.*max_staleness"),
        (["trainer.total_training_steps=null"], r"filter_groups\.enable.*total_training_steps.*total_epochs"),
        (
            ["algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
            r"metric is seq_final_reward, but with algorithm\.use_kl_in_reward",
        ),
        (
            [
                "algorithm.filter_groups.metric=score",
                "reward.reward_manager=dapo",
                "reward.overlong_buffer={enable: true, len: 4}",
            ],
            r"metric is score, but with reward\.overlong_buffer\.enable",
        ),
        (
            ["algorithm.filter_groups.enable=false", "data.gen_batch_size=12"],
            r"gen_batch_size is 12 and data\.train_batch_size 4, but without algorithm\.filter_groups\.enable",
        ),
    ],
)
def test_keys_that_contradict_dynamic_sampling_are_refused(
    overrides: list[str], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The message names both keys."""
    with pytest.raises(InvalidConfig, match=message):
        small_job(tmp_path, tiny_model, "run", *DAPO, *overrides)


def test_no_step_ahead_is_no_contradiction(tiny_model: Path, tmp_path: Path) -> None:
    small_job(tmp_path, tiny_model, "run", *DAPO, "rollout.mode=async", "trainer.max_staleness=0")
