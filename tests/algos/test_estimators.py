"""Laws that every advantage estimator of the table keeps."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rolemesh.algos.kl import KLController
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.columns import COLUMNS
from rolemesh.config.algorithm import AlgorithmConfig
from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig
from rolemesh.graph import record
from rolemesh.graph.recording import RESPONSE_TOKENS
from rolemesh.roles import Roles
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.stages.advantage_estimation import compute_advantages

B, T = 12, 7
COMPARING = [name for name, estimator in ESTIMATORS.items() if estimator.compares]
# GAE leaves what it passed on in masked cells, and ReMax the return in observations.
ZEROED = [name for name in ESTIMATORS if name not in ("gae", "remax")]


def job_sections(name: str) -> dict[str, Any]:
    keys = (
        {"gdpo_reward_keys": ["a", "b", "c"], "gdpo_reward_weights": [1.0, 0.5, 2.0]} if name == "gdpo" else {}
    )
    algorithm = {"adv_estimator": name, "gamma": 0.9, "lam": 0.8, **keys}
    rollout = {"n": 4, "multi_turn": {"enable": name == "grpo_by_turn"}}
    reward = {"custom_reward_function": {"path": "reward.py"}} if name == "gdpo" else {}
    return {"algorithm": algorithm, "rollout": rollout, "reward": reward}


def some_columns() -> dict[str, Any]:
    """Four responses to each of three prompts, of 2 to 7 tokens, rewards on their last ones."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.tensor([2, 7, 3, 5, 4, 6, 7, 2, 3, 3, 6, 5])
    rewards = torch.zeros(B, T)
    rewards[torch.arange(B), lengths - 1] = torch.randn(B, generator=draw)
    return {
        "token_level_rewards": rewards,
        "response_mask": torch.arange(T) < lengths[:, None],
        "uid": np.array(["a", "b", "c"] * 4, dtype=object),
        "values": torch.randn(B, T, generator=draw),
        "reward_components": torch.randn(B, 3, generator=draw),
        "reward_baselines": torch.randn(B, generator=draw),
        "old_log_probs": -3 * torch.rand(B, T, generator=draw),
        "sum_pi_squared": torch.rand(B, T, generator=draw),
        "entropys": torch.rand(B, T, generator=draw),
        "think_mask": torch.rand(B, T, generator=draw) < 0.7,
        "turns": torch.randint(1, 3, (B, T), generator=draw).cummax(1).values,
    }


def computed(name: str, columns: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """As the controller does it."""
    batch = DataProto.from_dict(
        {key: value for key, value in columns.items() if isinstance(value, Tensor)}, {"uid": columns["uid"]}
    )
    batch = compute_advantages(batch, make_job(job_sections(name)))
    return batch["advantages"], batch["returns"]


def test_each_estimator_has_a_page_and_only_group_ones_compare() -> None:
    assert {estimator.default_page for estimator in ESTIMATORS.values()} == {"ppo", "grpo", "remax"}
    assert all("uid" in ESTIMATORS[name].reads for name in COMPARING)
    for name, estimator in ESTIMATORS.items():
        assert estimator.needs_critic == ("critic" in PAGES[estimator.default_page].roles), name


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_table_says_what_each_function_takes(name: str) -> None:
    estimator = ESTIMATORS[name]
    parameters = inspect.signature(estimator.load()).parameters.values()
    assert tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == estimator.reads
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == {*estimator.keys, *estimator.optional}
    assert set(estimator.keys) <= set(AlgorithmConfig.model_fields)
    assert set(estimator.optional) <= set(COLUMNS)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_and_returns_are_a_number_for_each_token(name: str) -> None:
    for result in computed(name, some_columns()):
        assert result.shape == (B, T)
        assert result.dtype == torch.float32
        assert result.isfinite().all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_row_order_and_prompt_names_do_not_matter(name: str) -> None:
    columns = some_columns()
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    other = {key: value[order.numpy() if key == "uid" else order] for key, value in columns.items()}
    other["uid"] = np.array([{"a": "z", "b": "y", "c": "x"}[uid] for uid in other["uid"]], dtype=object)
    for ours, theirs in zip(computed(name, columns), computed(name, other), strict=True):
        assert_close(theirs, ours[order])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_more_padding_changes_nothing(name: str) -> None:
    columns = some_columns()
    wide = {}
    for key, value in columns.items():
        is_bt = isinstance(value, Tensor) and value.shape == (B, T)
        junk = 0 if key in ("token_level_rewards", "response_mask") else 3
        wide[key] = torch.nn.functional.pad(value, (0, 4), value=junk) if is_bt else value
    mask = columns["response_mask"]
    for ours, theirs in zip(computed(name, columns), computed(name, wide), strict=True):
        assert_close(theirs[:, :T][mask], ours[mask])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_observations_change_no_advantage_of_a_sampled_token(name: str) -> None:
    """Two columns that the policy did not sample, after the first token of every response."""
    columns = some_columns()
    at = torch.tensor([0, 0, 0, *range(1, T)])
    observed = {}
    for key, value in columns.items():
        if isinstance(value, Tensor) and value.shape == (B, T):
            value = value[:, at].clone()
            value[:, 1:3] = 0 if key in ("token_level_rewards", "response_mask") else 3
        observed[key] = value
    mask = columns["response_mask"]
    for ours, theirs in zip(computed(name, columns), computed(name, observed), strict=True):
        assert_close(theirs[observed["response_mask"]], ours[mask])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_row_without_sampled_tokens_has_no_advantage(name: str) -> None:
    """And it changes no other row's."""
    columns = some_columns()
    columns["response_mask"][3] = False
    columns["token_level_rewards"][3] = 0
    advantages, returns = computed(name, columns)
    assert torch.cat([advantages, returns]).isfinite().all()
    if name in ZEROED:
        assert (advantages[3] == 0).all()
    columns["response_mask"][:] = False
    columns["token_level_rewards"][:] = 0
    advantages, returns = computed(name, columns)
    assert torch.cat([advantages, returns]).isfinite().all()
    if name in ZEROED:
        assert (advantages == 0).all()


@pytest.mark.parametrize("name", ZEROED)
def test_padding_is_one_zero(name: str) -> None:
    """A −0.0 beside a 0.0 would be padding of two kinds, and the wire would send all of it."""
    columns = some_columns()
    advantages, _ = computed(name, columns)
    padding = advantages[~columns["response_mask"]]
    assert torch.equal(padding.view(torch.int32), torch.zeros(len(padding), dtype=torch.int32))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gdpo"])
def test_unequal_shapes_are_refused(name: str) -> None:
    columns = some_columns() | {"response_mask": torch.ones(B, T + 1, dtype=torch.bool)}
    estimator = ESTIMATORS[name]
    algorithm = make_job(job_sections(name)).algorithm
    with pytest.raises(ValueError, match="one shape"):
        estimator.load()(
            *(columns[column] for column in estimator.reads),
            **{key: getattr(algorithm, key) for key in estimator.keys},
        )


# ----------------------------------------------------------------------------------- the step graph


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_page_gives_its_estimator_every_column_that_it_reads(name: str) -> None:
    graph = record_step(make_job(job_sections(name)))
    flows = [edge.columns for edge in graph.edges if edge.target == "controller.compute_advantages"]
    assert {column for columns in flows for column in columns} == set(ESTIMATORS[name].reads)


@pytest.mark.parametrize(
    ("name", "missing"), [(name, column) for name, each in ESTIMATORS.items() for column in each.reads]
)
async def test_a_column_that_nothing_wrote_is_an_error_at_start(name: str, missing: str) -> None:
    job = make_job(job_sections(name))

    async def page(prompts: DataProto, roles: Roles) -> None:
        sizes = {"B": len(prompts), "T": RESPONSE_TOKENS, "C": 3}
        tensors = {
            column: torch.zeros([sizes[axis] for axis in COLUMNS[column].axes], dtype=COLUMNS[column].dtype)
            for column in ESTIMATORS[name].reads
            if column not in ("uid", missing)
        }
        uid = {} if missing == "uid" else {"uid": ["a"] * len(prompts)}
        compute_advantages(DataProto.from_dict(tensors, uid), job)

    with pytest.raises(InvalidBatch, match=f"compute_advantages reads column {missing!r}"):
        await record(page, job, "page")


def test_the_baseline_uses_rollout_correction_weights_if_any() -> None:
    sections = job_sections("optimal_token_baseline")
    sections["algorithm"]["rollout_correction"] = {"rollout_is": "token"}
    edges = record_step(make_job(sections)).edges
    assert ("rollout_is_weights",) in [
        edge.columns for edge in edges if edge.target == "controller.compute_advantages"
    ]


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", COMPARING)
def test_an_estimator_that_compares_needs_something_to_compare(name: str) -> None:
    sections = job_sections(name)
    sections["rollout"]["n"] = 1
    with pytest.raises(InvalidConfig, match=rf"adv_estimator {name} compares .* rollout\.n is 1"):
        make_job(sections)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in COMPARING])
def test_an_estimator_with_another_baseline_needs_one_response(name: str) -> None:
    make_job(job_sections(name) | {"rollout": {"n": 1}})


def test_turns_are_those_of_conversations() -> None:
    with pytest.raises(InvalidConfig, match=r"grpo_by_turn compares turns .*multi_turn\.enable is false"):
        make_job({"algorithm": {"adv_estimator": "grpo_by_turn"}, "rollout": {"n": 4}})


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"adv_estimator": "gdpo"}, "gdpo_reward_keys is empty"),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "gdpo_reward_weights": [1, 2]},
            "gdpo_reward_weights has 2 numbers, but gdpo_reward_keys has 1 components",
        ),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "use_kl_in_reward": True},
            "set actor.use_kl_loss instead",
        ),
        ({"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b", "a"]}, "names a component twice: a, b, a"),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "gdpo_reward_weights": [math.nan]},
            "'algorithm.gdpo_reward_weights.0' is nan",
        ),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["acc", "a"]},
            "gdpo_reward_keys names a, which only your own function could return, but "
            "reward.custom_reward_function.path is not set",
        ),
        (
            {"adv_estimator": "grpo", "kl_ctrl": {"type": "adaptive"}},
            "kl_ctrl.type is adaptive, but use_kl_in_reward is false",
        ),
        (
            {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0}},
            "kl_ctrl.kl_coef is 0, and a multiple of 0 stays 0",
        ),
        (
            {"page": "grpo"},
            "adv_estimator is gae, which needs a critic, but page grpo calls none; set algorithm.page to ppo",
        ),
        (
            {"adv_estimator": "grpo", "filter_groups": {"max_num_gen_batches": 3}},
            "max_num_gen_batches is 3, but enable is false",
        ),
        (
            {"adv_estimator": "egpo", "rollout_correction": {"bypass_mode": True}},
            "bypass_mode leaves that call",
        ),
        (
            {"adv_estimator": "optimal_token_baseline", "rollout_correction": {"bypass_mode": True}},
            "bypass_mode leaves that call",
        ),
    ],
)
def test_keys_that_contradict_an_estimator_are_refused(algorithm: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        make_job({"algorithm": algorithm, "rollout": {"n": 2}})
    assert words in str(error.value)


def test_the_rules_tell_score_and_acc() -> None:
    make_job(
        {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["score", "acc"]}, "rollout": {"n": 2}}
    )


def test_gdpo_and_a_punishment_of_the_score_contradict() -> None:
    sections = job_sections("gdpo")
    sections["reward"] |= {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 4}}
    with pytest.raises(InvalidConfig, match=r"overlong_buffer\.enable .* algorithm\.adv_estimator gdpo"):
        make_job(sections)


@pytest.mark.parametrize("key", ["turn_reward_weight", "episode_reward_weight"])
def test_gdpo_and_an_environment_that_rewards_contradict(key: str) -> None:
    """Its rewards are in the score, and in no component."""
    sections = job_sections("gdpo")
    weights = {"turn_reward_weight": 0, "episode_reward_weight": 0}
    sections["rollout"] |= {"multi_turn": {"enable": True, **weights}}
    make_job(sections)
    sections["rollout"]["multi_turn"][key] = 0.5
    with pytest.raises(
        InvalidConfig, match=rf"multi_turn\.{key} is 0\.5 .*environment's rewards .* gdpo uses only"
    ):
        make_job(sections)
    del sections["rollout"]["multi_turn"][key]
    with pytest.raises(InvalidConfig, match=rf"multi_turn\.{key} is 1 by default and adds"):
        make_job(sections)


def test_the_adaptive_kl_coefficient_cannot_reach_zero_in_a_step() -> None:
    """250 prompts with 2 answers: by 0.2·500/horizon at most."""

    def adapted(horizon: int) -> JobConfig:
        kl_ctrl = {"type": "adaptive", "kl_coef": 0.1, "horizon": horizon}
        return make_job(
            {
                "algorithm": {"use_kl_in_reward": True, "kl_ctrl": kl_ctrl},
                "data": {"train_batch_size": 250},
                "actor": {"ppo_mini_batch_size": 250, "ppo_micro_batch_size_per_gpu": 10},
                "critic": {"ppo_micro_batch_size_per_gpu": 10},
                "rollout": {"n": 2},
            }
        )

    controller = KLController(adapted(101).algorithm.kl_ctrl)
    controller.update(0.0, 500)
    assert controller.value == pytest.approx(0.1 / 101)
    with pytest.raises(
        InvalidConfig, match=r"horizon is 100, but a step has 500 samples.*set horizon to 101 or more"
    ):
        adapted(100)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"temperature": 0}, {"top_k": 1}])
@pytest.mark.parametrize("name", [*COMPARING, "remax", "reinforce_plus_plus_baseline"])
def test_sampling_with_identical_answers_is_refused_for_groups(name: str, sampling: dict[str, Any]) -> None:
    """Where all answers to a prompt are the same, an estimator by groups has nothing to compare."""
    sections = job_sections(name)
    sections["rollout"] |= sampling
    key = next(iter(sampling))
    with pytest.raises(
        InvalidConfig, match=rf"rollout\.{key} is .* algorithm\.adv_estimator {name} needs answers that differ"
    ):
        make_job(sections)


def test_greedy_answers_may_be_compared_across_prompts() -> None:
    for name in ("gae", "reinforce_plus_plus"):
        make_job(job_sections(name) | {"rollout": {"n": 1, "do_sample": False}})


def test_a_warm_up_of_a_critic_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"critic_warmup is 1, but a job with .* rloo has no critic"):
        make_job({**job_sections("rloo"), "trainer": {"critic_warmup": 1}})
