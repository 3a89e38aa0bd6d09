"""What the actor minimises."""

from __future__ import annotations

from torch import Tensor

from rolemesh.algos.aggregation import Aggregation
from rolemesh.algos.kl import kl_penalty
from rolemesh.algos.policy_loss import POLICY_LOSSES, Clip
from rolemesh.config.actor import ActorConfig
from rolemesh.dataproto import DataProto


def policy_objective(
    log_probs: Tensor, entropys: Tensor | None, rows: DataProto, mini_batch_mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the actor minimises: policy loss − entropy_coeff·entropy + kl_loss_coef·KL(actor, reference).

    Args:
        log_probs: [b, T] of a micro-batch.
        entropys: [b, T]; None where entropy_coeff is 0.
        rows: the micro-batch: response_mask, old_log_probs, advantages, with use_kl_loss ref_log_probs, with
            rollout_correction rollout_is_weights.
        mini_batch_mask: response_mask [B, T] of the mini-batch that it is part of.

    Returns:
        The micro-batch's shares of the mini-batch's loss and of what is reported.
    """
    mask = rows["response_mask"]
    aggregate = Aggregation.of(mini_batch_mask, config.loss_agg_mode, config.loss_scale_factor)
    mean = Aggregation.of(mini_batch_mask, "token-mean")
    clip = Clip(
        low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
        dual=config.clip_ratio_c,
    )
    policy_loss = POLICY_LOSSES[config.policy_loss.loss_mode]
    tokens = policy_loss(log_probs, rows["old_log_probs"], rows["advantages"], mask, clip)
    losses = tokens.losses * rows["rollout_is_weights"] if "rollout_is_weights" in rows else tokens.losses
    loss = pg_loss = aggregate(losses, mask)
    shares = {"pg_loss": pg_loss} | {name: mean(per_token, mask) for name, per_token in tokens.shares.items()}
    if entropys is not None:
        loss = loss - config.entropy_coeff * aggregate(entropys, mask)
    if config.use_kl_loss:
        kl_loss = aggregate(kl_penalty(log_probs, rows["ref_log_probs"], config.kl_loss_type), mask)
        loss = loss + config.kl_loss_coef * kl_loss
        shares["kl_loss"] = kl_loss
    return loss, shares
