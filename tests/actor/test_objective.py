"""What the actor minimises, by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from rolemesh.algos.aggregation import BatchCounts, TokenMean
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.services.actor.objective import policy_objective
from tests.support.rows.losses import TOKEN_LOSSES

MASK = tensor([[True, True, False], [True, False, False]])
OLD = tensor([[-1.0, -2.0, 9.0], [-3.0, 9.0, 9.0]])
ADVANTAGES = tensor([[1.0, 2.0, 9.0], [-4.0, 9.0, 9.0]])
ENTROPYS = tensor([[0.5, 1.0, 9.0], [2.0, 9.0, 9.0]])


def objective(entropys: Tensor | None = None, actor: dict[str, Any] | None = None, **columns: Tensor) -> Any:
    """At π = π_old, where the policy loss of a token is -A."""
    rows = DataProto({"response_mask": MASK, "old_log_probs": OLD, "advantages": ADVANTAGES, **columns})
    return policy_objective(OLD, entropys, rows, BatchCounts.of(MASK), make_job({"actor": actor or {}}))


@pytest.mark.parametrize(
    ("mode", "loss", "entropy"),
    [
        ("token-mean", 1 / 3, 3.5 / 3),
        ("token-sum", 1.0, 3.5),
        ("seq-mean-token-sum", 1 / 2, 3.5 / 2),
        ("seq-mean-token-mean", (-1.5 + 4) / 2, (0.75 + 2) / 2),
        ("seq-mean-token-sum-norm", 1 / 2 / 3, 3.5 / 2 / 3),
    ],
)
def test_the_entropy_bonus_is_taken_off_and_aggregated_alike(mode: str, loss: float, entropy: float) -> None:
    total, shares = objective(ENTROPYS, {"loss_agg_mode": mode, "entropy_coeff": 0.1})
    assert shares["pg_loss"].item() == pytest.approx(loss)
    assert total.item() == pytest.approx(loss - 0.1 * entropy)


@pytest.mark.parametrize(
    ("mode", "loss", "kl_loss"),
    [("token-mean", 1 / 3, -0.5 / 3), ("token-sum", 1.0, -0.5), ("seq-mean-token-sum", 1 / 2, -0.5 / 2)],
)
def test_the_kl_loss_is_added_and_its_mean_over_tokens_reported(mode: str, loss: float, kl_loss: float) -> None:
    """k1: π - π_ref is 0.5, 1 and -2."""
    reference = OLD - tensor([[0.5, 1.0, 7.0], [-2.0, 7.0, 7.0]])
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1", "loss_agg_mode": mode}
    total, shares = objective(None, actor, ref_log_probs=reference)
    assert shares["kl_loss"].item() == pytest.approx(kl_loss)
    assert total.item() == pytest.approx(loss + 0.1 * kl_loss)
    per_token = shares["kl_per_token"]
    assert (per_token.total.item(), per_token.num_tokens.item()) == (pytest.approx(-0.5), 3)


def test_weights_are_of_the_policy_loss_alone() -> None:
    total, shares = objective(
        ENTROPYS, {"entropy_coeff": 0.1}, rollout_is_weights=tensor([[2.0, 0.5, 9.0], [1.0, 9.0, 9.0]])
    )
    assert shares["pg_loss"].item() == pytest.approx((-2 - 1 + 4) / 3)
    assert total.item() == pytest.approx(1 / 3 - 0.1 * 3.5 / 3)


@pytest.mark.parametrize(
    ("mode", "loss", "entropy"),
    [
        ("token-mean", 2 / 3, 3 / 3),
        ("seq-mean-token-mean", (-2 + 4) / 2, (1 + 2) / 2),
    ],
)
def test_rejected_tokens_leave_each_term_but_not_its_denominator(
    mode: str, loss: float, entropy: float
) -> None:
    """A row's own mean is over the tokens that it keeps."""
    loss_mask = tensor([[False, True, False], [True, False, False]])
    total, shares = objective(ENTROPYS, {"loss_agg_mode": mode, "entropy_coeff": 0.1}, loss_mask=loss_mask)
    assert shares["pg_loss"].item() == pytest.approx(loss)
    assert total.item() == pytest.approx(loss - 0.1 * entropy)


def means(shares: dict[str, Any], *names: str) -> list[float]:
    return [(shares[name].total / shares[name].num_tokens).item() for name in names]


def test_ppo_kl_and_clip_fraction_average_the_tokens_of_the_loss() -> None:
    """Ratios 2, 1 and e^0.1; the first is clipped. Without rejection the means are of three tokens, with it of
    the two that are left."""
    apart = tensor([[math.log(2), 0.0, 9.0], [0.1, 9.0, 9.0]])
    rows = DataProto({"response_mask": MASK, "old_log_probs": OLD - apart, "advantages": ADVANTAGES.abs()})
    _, shares = policy_objective(OLD, None, rows, BatchCounts.of(MASK), make_job({}))
    assert means(shares, "ppo_kl", "pg_clipfrac") == pytest.approx([-(math.log(2) + 0.1) / 3, 1 / 3])
    rows["loss_mask"] = tensor([[True, False, False], [True, False, False]])
    _, shares = policy_objective(OLD, None, rows, BatchCounts.of(MASK), make_job({}))
    assert means(shares, "ppo_kl", "pg_clipfrac") == pytest.approx([-(math.log(2) + 0.1) / 2, 1 / 2])
    assert [float(shares[name].num_tokens) for name in ("ppo_kl", "pg_clipfrac_lower")] == [2, 2]


def test_with_bypass_means_are_over_tokens_the_policy_accepts() -> None:
    """Ratios 4, 1 and e^0.1, of which 4 is beyond 2."""
    apart = tensor([[math.log(4), 0.0, 9.0], [0.1, 9.0, 9.0]])
    rows = DataProto({"response_mask": MASK, "old_log_probs": OLD - apart, "advantages": ADVANTAGES.abs()})
    correction = {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    job = make_job({"algorithm": {"rollout_correction": correction}})
    _, shares = policy_objective(OLD, None, rows, BatchCounts.of(MASK), job)
    assert means(shares, "ppo_kl", "pg_clipfrac") == pytest.approx([-0.1 / 2, 0])


def test_masked_cells_may_hold_anything() -> None:
    total, _ = objective(torch.where(MASK, ENTROPYS, torch.nan), {"entropy_coeff": 0.1})
    assert total.isfinite()


def _tensors(shares: dict[str, Tensor | TokenMean]) -> Iterator[Tensor]:
    for share in shares.values():
        yield from share if isinstance(share, TokenMean) else [share]


@pytest.mark.parametrize("loss_mode", sorted(set(TOKEN_LOSSES) - {"sft"}))
def test_neither_loss_nor_gradient_depends_on_masked_cells(loss_mode: str) -> None:
    actor = {
        "policy_loss": {"loss_mode": loss_mode, "dro_beta": 0.05},
        "use_kl_loss": True,
        "kl_loss_type": "k2",
    }
    job = make_job(
        {"actor": actor, "algorithm": {"rollout_correction": {"bypass_mode": loss_mode == "bypass"}}}
    )
    found = []
    for elsewhere in (0.0, torch.nan, torch.inf):
        columns = {"old_log_probs": OLD, "advantages": ADVANTAGES, "ref_log_probs": OLD - 0.5}
        rows = DataProto({name: torch.where(MASK, column, elsewhere) for name, column in columns.items()})
        rows["response_mask"], rows["chosen"] = MASK, MASK & (ADVANTAGES > 1)
        log_probs = torch.where(MASK, OLD + 0.1, -1.0).requires_grad_()
        loss, shares = policy_objective(log_probs, None, rows, BatchCounts.of(MASK), job)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        found.append((loss.detach(), gradient, *_tensors(shares)))
    assert found[0][1].isfinite().all()
    assert (found[0][1][~MASK] == 0).all()
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
