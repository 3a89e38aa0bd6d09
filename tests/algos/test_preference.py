"""Losses of pairs, by hand."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from rolemesh.algos.preference import dpo_loss, dpo_norm_loss, ipo_loss, log_ratios

BETA = 0.5
# Two pairs: a chosen answer of 2 tokens and a rejected one of 1; and one token each, the latter more likely.
MASK = tensor([[True, True, False, True], [True, False, True, False]])
CONTEXTS = tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
REF = tensor([[-1.0, -1.0, 9.0, -1.0], [-2.0, 9.0, -2.0, 9.0]], dtype=torch.float64)
LOG_PROBS = tensor([[-0.5, -0.1, -7.0, -2.0], [-2.5, -7.0, -1.0, -7.0]], dtype=torch.float64)
SUMS = [(1.4, -1.0), (-0.5, 1.0)]
MEANS = [(0.7, -1.0), (-0.5, 1.0)]


def softplus(x: float) -> float:
    return log(1 + exp(x))


def test_log_ratios_are_over_the_tokens_of_each_answer_alone() -> None:
    for mean, expected in ((False, SUMS), (True, MEANS)):
        found = log_ratios(LOG_PROBS, REF, CONTEXTS, MASK, mean=mean)
        assert_close(torch.stack(found, 1), tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (dpo_loss, [softplus(-BETA * (c - r)) for c, r in SUMS]),
        (dpo_norm_loss, [softplus(-BETA * (c - r)) for c, r in MEANS]),
        (ipo_loss, [(c - r - 1 / (2 * BETA)) ** 2 for c, r in MEANS]),
    ],
)
def test_a_pairs_loss_stands_at_each_of_its_tokens(loss: object, expected: list[float]) -> None:
    tokens = loss(LOG_PROBS, REF, CONTEXTS, MASK, dpo_beta=BETA)  # type: ignore[operator]
    assert_close(tokens.losses, tensor(expected, dtype=torch.float64)[:, None].expand(2, 4))


def test_rewards_say_which_answer_the_policy_prefers() -> None:
    of_rows = dpo_loss(LOG_PROBS, REF, CONTEXTS, MASK, dpo_beta=BETA).of_rows
    by_name = {name: values.tolist() for name, values in of_rows.items()}
    assert by_name == {
        "rewards/chosen": pytest.approx([0.7, -0.25]),
        "rewards/rejected": pytest.approx([-0.5, 0.5]),
        "rewards/margins": pytest.approx([1.2, -0.75]),
        "rewards/accuracies": [1.0, 0.0],
    }


def test_the_dpo_gradient_pushes_only_the_two_answers_apart() -> None:
    """Of eq. 7: -β·σ(-margin) at each token of the chosen answer, the opposite at each of the rejected one."""
    log_probs = LOG_PROBS.clone().requires_grad_()
    dpo_loss(log_probs, REF, CONTEXTS, MASK, dpo_beta=BETA).losses[:, 0].sum().backward()
    weights = [BETA / (1 + exp(BETA * (c - r))) for c, r in SUMS]
    signs = tensor([[-1.0, -1.0, 0.0, 1.0], [-1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    assert_close(log_probs.grad, signs * tensor(weights, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("loss", [dpo_loss, dpo_norm_loss, ipo_loss])
def test_neither_loss_nor_gradient_depends_on_masked_cells(loss: Any) -> None:
    found = []
    for elsewhere in (0.0, torch.nan, torch.inf):
        log_probs = torch.where(MASK, LOG_PROBS, elsewhere).requires_grad_()
        tokens = loss(log_probs, torch.where(MASK, REF, elsewhere), CONTEXTS, MASK, dpo_beta=BETA)
        losses = torch.where(MASK, tokens.losses, 0)
        (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
        found.append((losses.detach(), torch.where(MASK, gradient, 0)))
    assert found[0][1].isfinite().all()
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("loss", [dpo_loss, dpo_norm_loss, ipo_loss])
def test_ratios_beyond_all_bounds_stay_finite(loss: Any) -> None:
    log_probs = torch.full((2, 4), -200.0).requires_grad_()
    for ref in (torch.zeros(2, 4), torch.full((2, 4), -400.0)):
        losses = loss(log_probs, ref, CONTEXTS, MASK, dpo_beta=BETA).losses
        (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()
