"""What the actor minimises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rolemesh.algos.aggregation import Aggregation, TokenMean
from rolemesh.algos.covariance import token_keys
from rolemesh.algos.kl import kl_penalty
from rolemesh.algos.policy_loss import POLICY_LOSSES, PolicyLoss
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto


def policy_loss_of(job: JobConfig) -> PolicyLoss:
    """The job's policy loss; with algorithm.rollout_correction.bypass_mode that is bypass."""
    bypasses = job.algorithm.rollout_correction.bypass_mode
    return POLICY_LOSSES["bypass" if bypasses else job.actor.policy_loss.loss_mode]


def choose_tokens(rows: DataProto, log_probs: Tensor, job: JobConfig, num_updates: int) -> DataProto:
    """A mini-batch with the column `chosen` [B, T] bool: the tokens that clip_cov or kl_cov singles out.

    Args:
        rows: the mini-batch, whole.
        log_probs: [B, T], of the policy as it is now, without gradient.
        job: its loss chooses tokens.
        num_updates: optimizer steps made before; with actor.seed it seeds the choice, so that a resumed run
            chooses as the first one did.
    """
    choose = policy_loss_of(job).choose
    assert choose is not None, "asked only where the loss chooses tokens"
    mask = _loss_mask(rows)
    seed = [job.actor.seed, num_updates]
    keys = token_keys(rows["input_ids"], rows["attention_mask"], mask.shape[1], seed)
    rows["chosen"] = choose(log_probs, rows["old_log_probs"], rows["advantages"], mask, job.actor, keys)
    return rows


def policy_objective(
    log_probs: Tensor, entropys: Tensor | None, rows: DataProto, mini_batch_mask: Tensor, job: JobConfig
) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
    """policy loss − entropy_coeff·entropy + kl_loss_coef·KL(actor, reference).

    Args:
        log_probs: [b, T] of a micro-batch.
        entropys: [b, T]; None where entropy_coeff is 0.
        rows: the micro-batch: response_mask, old_log_probs, advantages; with use_kl_loss ref_log_probs, with
            rollout_correction rollout_is_weights and loss_mask, with clip_cov and kl_cov chosen.
        mini_batch_mask: response_mask [B, T] of the mini-batch that it is part of. Denominators are its: a
            rejected token adds nothing, and does not make the others count for more, but for those of its row
            in seq-mean-token-mean, whose mean is over the tokens that are left.

    Returns:
        The micro-batch's shares of the mini-batch's loss and of what is reported. Means over tokens, ppo_kl and
        pg_clipfrac among them, are over the tokens that count for the policy loss.
    """
    config, policy_loss, mask = job.actor, policy_loss_of(job), _loss_mask(rows)
    aggregate = Aggregation.of(mini_batch_mask, config.loss_agg_mode, config.loss_scale_factor)
    besides: dict[str, Any] = {}
    if policy_loss.choose:
        besides["chosen"] = rows["chosen"]
    if policy_loss.corrects:
        besides["correction"] = job.algorithm.rollout_correction
    # 0 in masked cells: a loss of 0 there has no gradient, but 0 times what may stand there could be no number
    old, advantages = (torch.where(mask, rows[column], 0) for column in ("old_log_probs", "advantages"))
    tokens = policy_loss.of_tokens(log_probs, old, advantages, mask, config, **besides)
    losses = tokens.losses
    if "rollout_is_weights" in rows:
        losses = losses * policy_loss.weights(rows["rollout_is_weights"], mask)
    own = Aggregation.of(mini_batch_mask, policy_loss.aggregation) if policy_loss.aggregation else aggregate
    counted = mask if tokens.accepted is None else tokens.accepted
    loss = pg_loss = own(losses, counted)
    shares: dict[str, Tensor | TokenMean] = {"pg_loss": pg_loss}
    shares |= {name: TokenMean.over(values, counted) for name, values in tokens.shares.items()}
    if entropys is not None:
        loss = loss - config.entropy_coeff * aggregate(entropys, mask)
    if config.use_kl_loss:
        reference = torch.where(mask, rows["ref_log_probs"], 0)
        kl_loss = aggregate(kl_penalty(log_probs, reference, config.kl_loss_type), mask)
        loss = loss + config.kl_loss_coef * kl_loss
        shares["kl_loss"] = kl_loss
    return loss, shares


def _loss_mask(rows: DataProto) -> Tensor:
    """The sampled tokens, without those that algorithm.rollout_correction.rollout_rs rejects."""
    mask: Tensor = rows["loss_mask"] if "loss_mask" in rows else rows["response_mask"]
    return mask
