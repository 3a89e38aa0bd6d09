"""Several answers to one prompt, by hand and against every possible draw."""

from __future__ import annotations

from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import tensor

from rolemesh.algos.repeated import expected_best, expected_majority, pass_at
from rolemesh.dataproto import DataProto
from rolemesh.services.controller.stages.validation import validation_metrics

VALUES = [0.0, 1.0, 0.5, 0.5, -1.0]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_of_k_is_the_mean_over_draws_with_replacement(k: int) -> None:
    values = tensor([VALUES], dtype=torch.float64)
    assert expected_best(values, k).item() == pytest.approx(
        fmean(max(drawn) for drawn in product(VALUES, repeat=k))
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_draws_without_replacement(k: int) -> None:
    values = tensor([VALUES], dtype=torch.float64)
    assert pass_at(values, k).item() == pytest.approx(fmean(max(chosen) for chosen in combinations(VALUES, k)))


def test_pass_at_k_of_right_and_wrong_answers_by_hand() -> None:
    """3 of 5 right: of 10 pairs one has both wrong, and any 3 hold a right one. None right; all right."""
    right = tensor([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)
    assert pass_at(right, 2).tolist() == pytest.approx([0.9, 0, 1])
    assert pass_at(right, 3).tolist() == pytest.approx([1, 0, 1])
    assert pass_at(right, 1).tolist() == pytest.approx([0.6, 0, 1])


def test_the_majority_is_what_most_draws_say() -> None:
    """With 3 of 4 saying 72, two draws begin with 72, or hold it twice, in 3 of 4 cases: a tie is the first's.
    Of three draws two or three say 72 in 27/64 + 27/64. 1,000 draws are off by 0.014 (one deviation)."""
    values = tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    votes = [["72", "72", "72", "9"]]
    assert expected_majority(values, votes, 2).item() == pytest.approx(3 / 4, abs=0.05)
    assert expected_majority(values, votes, 3).item() == pytest.approx(54 / 64, abs=0.05)
    assert expected_majority(values, votes, 3) == expected_majority(values, votes, 3)


def test_a_majority_of_ones_own_draws_is_counted_vote_by_vote() -> None:
    """The same draws, counted with a dict as one would by hand."""
    values, votes = [0.25, 1.0, 0.0, 0.5, 0.75], ["a", "b", "a", "c", "b"]
    for k in (2, 4, 5):
        found = []
        for drawn in np.random.RandomState(42).choice(5, (1000, k)):
            counts: dict[str, int] = {}
            for i in drawn:
                counts[votes[i]] = counts.get(votes[i], 0) + 1
            winner = max(counts, key=lambda vote: counts[vote])  # of equals the first
            found.append(next(values[i] for i in drawn if votes[i] == winner))
        computed = expected_majority(tensor([values], dtype=torch.float64), [votes], k).item()
        assert computed == pytest.approx(fmean(found))


def answered(pred: bool) -> DataProto:
    """Two prompts with three answers each, of two sources; the second prompt's reward is twice its acc."""
    acc = tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    found = ["5", "6", "6", "7", "7", "7"]
    return DataProto.from_dict(
        {"acc": acc, "token_level_scores": torch.stack([acc * tensor([1.0] * 3 + [2.0] * 3), acc * 0], dim=1)},
        {
            "data_source": ["x"] * 3 + ["y"] * 3,
            "reward_extra_info": [{"form": 1.0} | ({"pred": each} if pred else {}) for each in found],
        },
    )


def test_repeated_validation_reports_mean_best_and_pass_by_name() -> None:
    """One of three right: the best of 2 is 1 − (2/3)², of 3 1 − (2/3)³; of two without replacement 2 of 3 pairs
    hold it. Below n all is val-aux."""
    metrics = validation_metrics(answered(pred=False), 3)
    of_x = {name.replace("/x/", "/"): value for name, value in metrics.items() if "/x/" in name}
    assert of_x == pytest.approx(
        {
            "val-core/acc/mean@3": 1 / 3,
            "val-core/acc/best@3/mean": 1 - (2 / 3) ** 3,
            "val-core/acc/pass@3": 1.0,
            "val-aux/acc/best@2/mean": 1 - (2 / 3) ** 2,
            "val-aux/acc/pass@2": 2 / 3,
            "val-aux/reward/mean@3": 1 / 3,
            "val-aux/reward/best@2/mean": 1 - (2 / 3) ** 2,
            "val-aux/reward/best@3/mean": 1 - (2 / 3) ** 3,
        }
    )
    assert metrics["val-core/y/acc/pass@3"] == 1
    assert metrics["val-aux/y/reward/best@2/mean"] == 2


def test_majority_needs_pred_in_every_answer_of_a_source() -> None:
    batch = answered(pred=True)
    metrics = validation_metrics(batch, 3)
    assert metrics["val-core/y/acc/maj@3/mean"] == 1
    assert metrics["val-aux/y/reward/maj@2/mean"] == 2
    # two or three of three draws say 5 in 6 + 1 of 27 cases
    assert metrics["val-core/x/acc/maj@3/mean"] == pytest.approx(7 / 27, abs=0.05)
    del batch["reward_extra_info"][4]["pred"]
    assert {name for name in validation_metrics(batch, 3) if "maj@" in name} == {
        name for name in metrics if "maj@" in name and "/x/" in name
    }
    batch["data_source"][:] = ["z"] * 6  # of one source, of which one prompt is not reported
    assert not [name for name in validation_metrics(batch, 3) if "maj@" in name]


def test_sizes_are_powers_of_two_and_n_itself() -> None:
    batch = DataProto.from_dict(
        {"acc": torch.ones(12), "token_level_scores": torch.ones(12, 1)}, {"data_source": ["x"] * 12}
    )
    assert [name for name in validation_metrics(batch, 12) if "pass" in name] == [
        *(f"val-aux/x/acc/pass@{k}" for k in (2, 4, 8)),
        "val-core/x/acc/pass@12",
    ]
    assert [name for name in validation_metrics(batch, 2) if "pass" in name] == ["val-core/x/acc/pass@2"]
    assert not [name for name in validation_metrics(batch, 1) if "mean@" not in name]
