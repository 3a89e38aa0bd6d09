"""The objective that the actor minimises."""

from __future__ import annotations

import torch
from torch import Tensor

from rolemesh.algos.aggregation import Aggregation, BatchCounts, TokenMean
from rolemesh.algos.covariance import token_keys
from rolemesh.algos.job_loss import token_losses
from rolemesh.algos.kl import kl_penalty
from rolemesh.algos.policy_loss import scale_losses
from rolemesh.catalog.catalog import BUILT_IN, load
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto


def check_policy_loss(job: JobConfig, device: torch.device) -> None:
    """Call a plug-in's policy loss with one row, so that a wrong loss ends the run before a model loads.

    Raises:
        InvalidConfig: it returns no TokenLosses [b, T].
        RoleFailed: it raises.
    """
    if job.policy_loss.origin == BUILT_IN:
        return
    log_probs = torch.full((1, 2), -1.0, device=device, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool, device=device)
    floats = dict.fromkeys((*job.policy_loss.reads, "ref_log_probs"), log_probs.detach())
    rows = DataProto(floats | {"response_mask": mask, "chosen": mask})
    policy_objective(log_probs.clone(), log_probs, rows, BatchCounts(2, 1, 2), job)


def choose_tokens(rows: DataProto, log_probs: Tensor, job: JobConfig, num_updates: int) -> DataProto:
    """Add the column `chosen` [B, T] bool to a mini-batch: the tokens that clip_cov or kl_cov selects.

    Args:
        rows: the whole mini-batch.
        log_probs: [B, T], of the current policy, without gradient.
        job: its loss must be one that selects tokens.
        num_updates: optimizer steps made before. It seeds the choice together with actor.seed, so a resumed run
            chooses the same tokens.
    """
    loss = job.policy_loss
    assert loss.choose is not None, "called only if the loss selects tokens"
    mask = _loss_mask(rows)
    seed = [job.actor.seed % 2**64, num_updates]
    keys = token_keys(rows["input_ids"], rows["attention_mask"], mask.shape[1], seed)
    options = job.actor.values_of(loss.choose_keys)
    old = rows["old_log_probs"]
    advantages = rows["advantages"]
    with loss.errors_named():
        rows["chosen"] = load(loss.choose)(log_probs, old, advantages, mask, keys, **options)
    return rows


def policy_objective(
    log_probs: Tensor, entropys: Tensor | None, rows: DataProto, mini_batch: BatchCounts, job: JobConfig
) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
    """Compute policy loss − entropy_coeff·entropy + kl_loss_coef·KL(actor, reference).

    Args:
        log_probs: [b, T] of a micro-batch.
        entropys: [b, T]; None if entropy_coeff is 0.
        rows: the micro-batch, with response_mask and the columns that the loss reads. Also ref_log_probs with
            use_kl_loss, rollout_is_weights and loss_mask with rollout_correction, chosen with clip_cov and
            kl_cov.
        mini_batch: counts of the micro-batch's mini-batch. The denominators come from it, so
            rejecting a token does not give other tokens more weight. The exception is seq-mean-token-mean,
            whose mean over a row is over its remaining tokens.
        job: the job.

    Returns:
        The micro-batch's shares of the mini-batch's loss and metrics. Means over tokens, e.g. ppo_kl and
        pg_clipfrac, are over the tokens of the policy loss.
    """
    config = job.actor
    policy_loss = job.policy_loss
    mask = _loss_mask(rows)
    aggregate = Aggregation.of(mini_batch, config.loss_agg_mode, config.loss_scale_factor)
    tokens = token_losses(log_probs, rows, mask, job)
    losses = tokens.losses
    if "rollout_is_weights" in rows:
        losses = scale_losses(losses, rows["rollout_is_weights"], mask, by_row=policy_loss.row_weights)
    own = Aggregation.of(mini_batch, policy_loss.aggregation) if policy_loss.aggregation else aggregate
    counted = mask if tokens.accepted is None else tokens.accepted
    loss = pg_loss = own(losses, counted)
    shares: dict[str, Tensor | TokenMean] = {policy_loss.metric: pg_loss}
    shares |= {name: TokenMean.over(values, counted) for name, values in tokens.shares.items()}
    shares |= {name: values.sum() / mini_batch.num_sequences for name, values in tokens.of_rows.items()}
    if entropys is not None:
        loss = loss - config.entropy_coeff * aggregate(entropys, mask)
    if config.use_kl_loss:
        reference = torch.where(mask, rows["ref_log_probs"], 0)
        kl = kl_penalty(log_probs, reference, config.kl_loss_type)
        kl_loss = aggregate(kl, mask)
        loss = loss + config.kl_loss_coef * kl_loss
        shares |= {"kl_loss": kl_loss, "kl_per_token": TokenMean.over(kl, mask)}
    return loss, shares


def _loss_mask(rows: DataProto) -> Tensor:
    """Return the sampled tokens that algorithm.rollout_correction.rollout_rs accepts."""
    mask: Tensor = rows["loss_mask"] if "loss_mask" in rows else rows["response_mask"]
    return mask
