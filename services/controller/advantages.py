"""From judged rows to what is learnt from: the part of a step that the controller computes itself."""

from __future__ import annotations

from rolemesh.algos.advantages import compute_gae, compute_grpo
from rolemesh.algos.aggregation import masked_whiten
from rolemesh.algos.kl import kl_penalty
from rolemesh.algos.rollout_correction import (
    importance_weights,
    mismatch_metrics,
    truncate,
    weight_metrics,
)
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.graph import node
from rolemesh.roles import Metrics


def _correction_writes(job: JobConfig) -> tuple[str, ...]:
    return ("rollout_is_weights",) if job.algorithm.rollout_correction.rollout_is else ()


@node(reads=("old_log_probs", "rollout_log_probs", "response_mask"), writes=_correction_writes, phase="adv")
def apply_rollout_correction(batch: DataProto, job: JobConfig) -> tuple[DataProto, Metrics]:
    """rollout_is_weights [B, T], where `algorithm.rollout_correction.rollout_is` says of what: the policy loss
    of each token is multiplied by its weight.

    Returns:
        the batch; and how far the engine's policy is from the actor's, whether or not that is corrected. The
        weights are then those of tokens, and told before they are truncated.
    """
    correction = job.algorithm.rollout_correction
    log_probs = (batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
    weights = importance_weights(*log_probs, level=correction.rollout_is or "token")
    if correction.rollout_is:
        batch["rollout_is_weights"] = truncate(weights, correction.rollout_is_threshold)
    return batch, mismatch_metrics(*log_probs) | weight_metrics(weights, batch["response_mask"])


def _kl_reads(job: JobConfig) -> tuple[str, ...]:
    weighed = ("response_mask", "old_log_probs", "ref_log_probs") if job.algorithm.use_kl_in_reward else ()
    return ("token_level_scores", *weighed)


@node(reads=_kl_reads, writes=("token_level_rewards",), phase="adv")
def apply_kl_penalty(batch: DataProto, job: JobConfig, beta: float) -> tuple[DataProto, Metrics]:
    """token_level_rewards = token_level_scores - beta * KL(actor, reference), token by token.

    Args:
        batch: [B, T] token_level_scores and, where the job weighs KL in the reward, both log-probs.
        job: says which estimator, or that the scores are the rewards.
        beta: the KL coefficient as it stands.

    Returns:
        the batch; and the KL in nats, mean over a row's tokens and then over rows, with beta.
    """
    scores = batch["token_level_scores"]
    if not job.algorithm.use_kl_in_reward:
        batch["token_level_rewards"] = scores
        return batch, {}
    mask = batch["response_mask"]
    kl = kl_penalty(batch["old_log_probs"], batch["ref_log_probs"], job.algorithm.kl_penalty) * mask  # [B, T]
    batch["token_level_rewards"] = scores - beta * kl
    row_kl = kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [B]
    return batch, {"actor/reward_kl_penalty": row_kl.mean().item(), "actor/reward_kl_penalty_coeff": beta}


def _advantage_reads(job: JobConfig) -> tuple[str, ...]:
    own = {"gae": "values", "grpo": "uid"}[job.algorithm.adv_estimator]
    return ("token_level_rewards", "response_mask", own)


@node(reads=_advantage_reads, writes=("advantages", "returns"), phase="adv")
def compute_advantages(batch: DataProto, job: JobConfig) -> DataProto:
    """advantages and returns [B, T], by `algorithm.adv_estimator`. GAE's are whitened, its returns not."""
    rewards, mask, algorithm = batch["token_level_rewards"], batch["response_mask"], job.algorithm
    if algorithm.adv_estimator == "gae":
        advantages, returns = compute_gae(
            rewards, batch["values"], mask, gamma=algorithm.gamma, lam=algorithm.lam
        )
        advantages = masked_whiten(advantages, mask)
    else:
        advantages, returns = compute_grpo(
            rewards, mask, batch["uid"].tolist(), norm_by_std=algorithm.norm_adv_by_std_in_grpo
        )
    batch["advantages"], batch["returns"] = advantages, returns
    return batch
