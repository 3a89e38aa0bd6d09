"""PF-PPO's weights and draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from rolemesh.algos.resampling import draw_rows, resampling_weights
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from rolemesh.graph import Edge
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.stages.experience import fan_out
from rolemesh.services.controller.stages.pf_ppo import resample

SCORES = torch.tensor([1.0, -2.0, 0.0, 3.0, -2.0])


@pytest.mark.parametrize(
    ("method", "power", "expected"),
    [
        ("pow", 2.0, [1 / 9, 4 / 9, 0.0, 1.0, 4 / 9]),
        ("pow", 0.5, [3**-0.5, 1.5**-0.5, 0.0, 1.0, 1.5**-0.5]),
        ("max_min", 2.0, [0.0, 1.0, 0.0, 1.0, 1.0]),
        ("max_random", 2.0, [0.1, 0.1, 0.1, 0.4, 0.1]),
    ],
)
def test_resampling_weights_are_the_methods(method: str, power: float, expected: list[float]) -> None:
    weights = resampling_weights(SCORES, method=method, power=power)
    assert_close(weights, torch.tensor(expected).double(), atol=1e-7, rtol=1e-6)
    assert (weights > 0).all()


def test_a_power_beyond_all_numbers_still_draws_the_best_rows() -> None:
    """3e38^10 is no float64; as shares of the largest they are 1, 1 and 2^-10."""
    weights = resampling_weights(torch.tensor([3e38, -3e38, 1.5e38]), method="pow", power=10.0)
    assert_close(weights, torch.tensor([1.0, 1.0, 2.0**-10]).double(), atol=1e-7, rtol=1e-6)
    assert set(draw_rows(weights.repeat(8), seed=7, step=3).tolist()) != {23}


def test_rows_are_drawn_as_often_as_their_weights_say() -> None:
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0]).double() + 1e-8
    drawn = draw_rows(weights.repeat(10_000), seed=7, step=3) % 4
    shares = drawn.bincount(minlength=4) / len(drawn)
    # the standard deviation of a share is at most 0.5 / sqrt(40,000) = 0.0025
    assert_close(shares, torch.tensor([0.125, 0.25, 0.0, 0.625]), atol=0.01, rtol=0)


def test_scores_that_are_all_zero_draw_every_row_as_often() -> None:
    drawn = draw_rows(resampling_weights(torch.zeros(40_000), method="pow", power=2.0), seed=7, step=3)
    assert_close((drawn < 20_000).float().mean(), torch.tensor(0.5), atol=0.01, rtol=0)


def test_the_resampled_rows_are_a_function_of_seed_and_step() -> None:
    weights = torch.ones(64).double()
    assert torch.equal(draw_rows(weights, 7, 3), draw_rows(weights, 7, 3))
    others = [draw_rows(weights, *where) for where in ((7, 3), (7, 4), (8, 3), (-7, 3))]
    assert len({tuple(rows.tolist()) for rows in others}) == 4
    prompts = DataProto({"prompts": torch.zeros(64, 1, dtype=torch.int64)})
    assert torch.equal(draw_rows(weights, -7, 3), draw_rows(weights, 2**64 - 7, 3))
    streams = fan_out(prompts, 1, 7, 3)["seeds"] / 2**63  # the rows' own streams come from (7, 3), too
    assert not torch.equal((streams * 64).long(), draw_rows(weights, 7, 3))


def test_the_draw_has_a_stream_of_its_own() -> None:
    """Of 64 rows alike, a 64-bit word's upper six bits are the row."""
    words = np.random.SeedSequence((7, 3)).generate_state(64, np.uint64)  # of the step's rows
    assert draw_rows(torch.ones(64).double(), 7, 3).tolist() != (words >> np.uint64(58)).tolist()


def test_the_last_row_is_drawn_as_the_first_is() -> None:
    drawn = torch.cat([draw_rows(torch.ones(2).double(), 7, step) for step in range(50)])
    assert 30 < int(drawn.sum()) < 70  # of 100, with a standard deviation of 5


def batch() -> DataProto:
    return DataProto.from_dict({"token_level_scores": SCORES[:, None]}, {"uid": list("abcde")})


def test_a_job_that_asks_for_none_trains_on_every_row_once() -> None:
    rows, metrics = resample(given := batch(), make_job({}), 1)
    assert rows is given
    assert metrics == {}


def test_rows_keep_their_columns_and_their_number() -> None:
    job = make_job({"algorithm": {"use_pf_ppo": True, "pf_ppo": {"reweight_method": "max_min"}}})
    rows, metrics = resample(batch(), job, 1)
    assert len(rows) == 5
    scores = dict(zip("abcde", SCORES.tolist(), strict=True))
    assert [scores[uid] for uid in rows["uid"]] == rows["token_level_scores"][:, 0].tolist()
    assert set(rows["uid"]) <= {"b", "d", "e"}  # the best and the worst; the others have 1e-8
    assert metrics == {"actor/share_of_rows_drawn": len(set(rows["uid"])) / 5}


def test_rows_of_equal_turn_reward_sums_are_equally_good() -> None:
    """In float32 0.1 + 0.1 + 0.6 and 0.6 + 0.1 + 0.1 are two numbers. The second row is the worst."""
    rewards = [[0.1, 0.1, 0.6], [0.0, 0.1, 0.6], [0.1, 0.6, 0.1], [0.6, 0.1, 0.1]]
    by_turn = DataProto.from_dict(
        {"token_level_scores": torch.tensor(rewards).repeat(100, 1)}, {"uid": list("abcd") * 100}
    )
    best = {"use_pf_ppo": True, "pf_ppo": {"reweight_method": "max_random"}}
    rows, _ = resample(by_turn, make_job({"algorithm": best}), 1)
    shares = [list(rows["uid"]).count(uid) / 400 for uid in "abcd"]  # of weights 0.4, 0.1, 0.4 and 0.4
    assert shares == pytest.approx([4 / 13, 1 / 13, 4 / 13, 4 / 13], abs=0.08)  # a share's deviation is 0.023


def test_the_step_graph_shows_the_draw_where_the_job_asks_for_it() -> None:
    asked = record_step(make_job({"algorithm": {"use_pf_ppo": True}}))
    drawn = Edge("controller.resample", "actor.update", ("advantages",))
    assert drawn in asked.edges
    assert "controller.resample" not in [call.name for call in record_step(make_job({})).nodes]


def test_pf_ppo_without_ppo_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"algorithm\.use_pf_ppo .* algorithm\.adv_estimator is grpo"):
        make_job({"algorithm": {"use_pf_ppo": True, "adv_estimator": "grpo"}, "rollout": {"n": 2}})
