"""Every policy loss: masked cells count nothing, no token is no loss, and extreme ratios stay finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.aggregation import Aggregation, BatchCounts
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.config.rollout_correction import RolloutCorrectionConfig
from tests.support.rows.losses import CONFIG, TOKEN_LOSSES, token_losses

BESIDES: dict[str, dict[str, Any]] = {
    "clip_cov": {"chosen": tensor([[False, True, False], [False] * 3])},
    "kl_cov": {"chosen": tensor([[False, True, False], [False] * 3])},
    "bypass": {
        "correction": RolloutCorrectionConfig(
            bypass_mode=True, loss_type="reinforce", rollout_is="sequence", rollout_rs="seq_mean_k3",
            rollout_rs_threshold=5.0,
        )
    },
}  # fmt: skip


def aggregated(name: str, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    loss = POLICY_LOSSES[name]
    tokens = token_losses(name, log_probs, old, advantages, mask, config=CONFIG, **BESIDES.get(name, {}))
    aggregate = Aggregation.of(BatchCounts.of(mask), loss.aggregation or "token-mean")
    return aggregate(tokens.losses, mask if tokens.accepted is None else tokens.accepted)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_masked_cells_and_rows_without_a_token_change_nothing(name: str) -> None:
    mask = tensor([[True, True, False], [False, False, False]])
    new, old = tensor([[-1.0, -0.3, -2.0], [-1.0, -2.0, -3.0]]), tensor([[-1.2, -0.1, -1.0]] * 2)
    advantages = tensor([[1.0, -0.5, 3.0], [2.0, 2.0, 2.0]])
    found = []
    for elsewhere in (-0.5, -7.0):
        log_probs = torch.where(mask, new, elsewhere).requires_grad_()
        others = torch.where(mask, old, 2 * elsewhere), torch.where(mask, advantages, elsewhere)
        loss = aggregated(name, log_probs, *others, mask)
        loss.backward()
        assert log_probs.grad is not None
        assert (log_probs.grad[~mask] == 0).all()
        found.append((loss.detach(), log_probs.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][1].abs().sum() > 0


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_batch_without_a_token_has_no_loss(name: str) -> None:
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    loss = aggregated(name, log_probs, torch.zeros(2, 3), torch.ones(2, 3), nothing)
    loss.backward()
    assert loss == 0
    assert log_probs.grad is not None
    assert (log_probs.grad == 0).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_ratios_beyond_all_bounds_stay_finite(name: str, sign: float) -> None:
    log_probs = tensor([[0.0, -200.0, -1.0], [-200.0, 0.0, -1.0]], requires_grad=True)
    old = tensor([[-200.0, 0.0, -1.0]] * 2)
    loss = aggregated(name, log_probs, old, torch.full((2, 3), sign), torch.ones(2, 3).bool())
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(TOKEN_LOSSES) - {"gpg", "gspo", "kl_cov", "sft"}))
def test_log_ratios_are_held_at_20(name: str) -> None:
    """π_old is lower by 90, then higher; what is reported is 20."""
    far, one = torch.full((1, 1), -90.0), torch.ones(1, 1)
    besides = {
        key: value[:1, :1] if isinstance(value, Tensor) else value
        for key, value in BESIDES.get(name, {}).items()
    }
    for new, old, expected in ((torch.zeros(1, 1), far, -20.0), (far, torch.zeros(1, 1), 20.0)):
        result = token_losses(name, new, old, -1e-9 * one, one.bool(), config=CONFIG, **besides)
        assert_close(result.shares["ppo_kl"], tensor([[expected]]))
