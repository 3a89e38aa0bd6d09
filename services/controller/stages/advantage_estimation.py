"""Compute corrections, rewards and advantages from scored rows, in the controller itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rolemesh.algos.aggregation import masked_mean
from rolemesh.algos.kl import kl_penalty
from rolemesh.algos.rollout_correction import correct
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, WeightsUnavailable
from rolemesh.graph import node
from rolemesh.roles import Metrics

REWARD_KL = "actor/reward_kl_penalty"  # the metric from which kl_ctrl adjusts the coefficient


def _correction_reads(job: JobConfig) -> tuple[str, ...]:
    own = () if job.algorithm.rollout_correction.bypass_mode else ("old_log_probs", "rollout_log_probs")
    waited = ("weight_versions",) if job.algorithm.filter_groups.enable else ()
    return (*own, *waited, "response_mask")


def _correction_writes(job: JobConfig) -> tuple[str, ...]:
    return job.algorithm.rollout_correction.columns


@node(reads=_correction_reads, writes=_correction_writes, phase="adv")
def apply_rollout_correction(
    batch: DataProto, job: JobConfig, newest: int | None = None
) -> tuple[DataProto, Metrics]:
    """Apply `algorithm.rollout_correction` for tokens that the engine sampled from another distribution.

    It adds rollout_is_weights [B, T] with rollout_is: the policy loss of each token is multiplied by its
    weight. It adds loss_mask [B, T] with rollout_rs: response_mask without the rejected tokens, which the
    losses of actor and critic leave out. Rejected tokens still count in the mini-batch's denominators, as in
    verl 0.9: rejecting makes a step smaller, and does not give other tokens more weight. The exception is
    seq-mean-token-mean, where a row's mean is over its remaining tokens.

    response_mask is unchanged, so KL, advantages and metrics are of all sampled tokens. verl computes
    advantages from the accepted tokens only; with gae, rejecting the last token would lose the reward.

    With bypass_mode there is nothing to compare here, because old_log_probs are the engine's. The actor
    corrects against the policy under training, and its update reports the same metrics.

    Args:
        batch: with old_log_probs, rollout_log_probs and response_mask [B, T].
        job: selects the correction and the bound.
        newest: the version of the weights at the start of the step, for a page whose rows may have waited
            since an earlier one. Older tokens, by weight_versions [B, T], do not count for the bound.

    Returns:
        The batch, and metrics of how far the engine's policy is from the actor's, corrected or not.

    Raises:
        WeightsUnavailable: no generation runs ahead, and yet the policies are further apart than
            trainer.max_rollout_kl, or by NaN.
    """
    if job.algorithm.rollout_correction.bypass_mode:
        return batch, {}
    found = correct(
        batch["old_log_probs"],
        batch["rollout_log_probs"],
        batch["response_mask"],
        job.algorithm.rollout_correction,
    )
    limit = job.trainer.max_rollout_kl
    kl = found.metrics["rollout_corr/kl"]
    if newest is not None and not math.isnan(kl):  # NaN counts wherever it is
        fresh = batch["response_mask"] & (batch["weight_versions"] >= newest)  # [B, T]
        kl = masked_mean(batch["rollout_log_probs"] - batch["old_log_probs"], fresh).item()
    if limit is not None and not kl <= limit and not job.steps_ahead:
        raise WeightsUnavailable(
            f"rollout_corr/kl is {kl:.3g} nats per token, above trainer.max_rollout_kl {limit:g}, although the "
            f"rollouts should have the actor's weights: engine {job.engine.name} has others, or computes with "
            "them otherwise. Nothing was learned from these responses. Compare dtype and quantization of both; "
            "set max_rollout_kl higher, or to null, if the difference is meant"
        )
    if found.weights is not None:
        batch["rollout_is_weights"] = found.weights
    if found.accepted is not None:
        batch["loss_mask"] = found.accepted
    return batch, found.metrics


def _kl_reads(job: JobConfig) -> tuple[str, ...]:
    weighed = ("response_mask", "old_log_probs", "ref_log_probs") if job.algorithm.use_kl_in_reward else ()
    return ("token_level_scores", *weighed)


@node(reads=_kl_reads, writes=("token_level_rewards",), phase="adv")
def apply_kl_penalty(batch: DataProto, job: JobConfig, beta: float) -> tuple[DataProto, Metrics]:
    """Compute token_level_rewards = token_level_scores - beta * KL(actor, reference) for each token.

    Args:
        batch: [B, T] token_level_scores and, with use_kl_in_reward, the log-probs of actor and reference.
        job: selects the estimator. Without use_kl_in_reward the scores are the rewards.
        beta: the current KL coefficient.

    Returns:
        The batch, and metrics: the KL in nats, mean over a row's tokens and then over rows, and beta.
    """
    scores = batch["token_level_scores"]
    if not job.algorithm.use_kl_in_reward:
        batch["token_level_rewards"] = scores
        return batch, {}
    mask = batch["response_mask"]
    kl = kl_penalty(batch["old_log_probs"], batch["ref_log_probs"], job.algorithm.kl_penalty) * mask  # [B, T]
    batch["token_level_rewards"] = scores - beta * kl
    row_kl = kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [B]
    return batch, {REWARD_KL: row_kl.mean().item(), "actor/reward_kl_penalty_coeff": beta}


@node(reads=("token_level_scores",), writes=("reward_baselines",))
def set_baselines(greedy: DataProto, batch: DataProto) -> tuple[DataProto, Metrics]:
    """Add reward_baselines [B], the score of the greedy answer to each row's prompt.

    Args:
        greedy: one scored greedy answer for each prompt, in the order of the prompts.
        batch: the samples, equally many for each prompt, in the same order.

    Returns:
        The batch, and the mean of the greedy answers' scores.
    """
    scores = greedy["token_level_scores"].sum(dim=1)  # [prompts]
    batch["reward_baselines"] = scores.repeat_interleave(len(batch) // len(greedy))
    return batch, {"critic/reward_baselines/mean": scores.mean().item()}


def _advantage_reads(job: JobConfig) -> tuple[str, ...]:
    estimator = job.estimator
    return (*estimator.reads, *set(estimator.optional).intersection(_correction_writes(job)))


@node(reads=_advantage_reads, writes=("advantages", "returns"), phase="adv")
def compute_advantages(batch: DataProto, job: JobConfig) -> DataProto:
    """Add advantages and returns [B, T], by `algorithm.adv_estimator`."""
    estimator = job.estimator
    options = {key: getattr(job.algorithm, key) for key in estimator.keys} | job.algorithm.options
    options |= {column: batch[column] for column in estimator.optional if column in batch}
    with estimator.errors_named():
        found = estimator.load()(*(batch[column] for column in estimator.reads), **options)
    if not isinstance(found, tuple) or len(found) != 2:
        raise InvalidConfig(
            f"{estimator} should return (advantages, returns); it returned a {type(found).__name__}"
        )
    expected = batch["response_mask"].shape
    for name, tensor in zip(("advantages", "returns"), found, strict=True):
        if not isinstance(tensor, Tensor) or tensor.shape != expected or tensor.dtype != torch.float32:
            shape = [tensor.dtype, list(tensor.shape)] if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidConfig(
                f"{estimator} should return {name} as float32 [B, T] {list(expected)}; it returned {shape}"
            )
        batch[name] = tensor
    return batch
