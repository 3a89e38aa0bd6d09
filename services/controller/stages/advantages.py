"""From judged rows to what is learnt from: the part of a step that the controller computes itself."""

from __future__ import annotations

from rolemesh.algos.estimators import ESTIMATORS
from rolemesh.algos.kl import kl_penalty
from rolemesh.algos.rollout_correction import correct
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.graph import node
from rolemesh.roles import Metrics


def _correction_reads(job: JobConfig) -> tuple[str, ...]:
    own = () if job.algorithm.rollout_correction.bypass_mode else ("old_log_probs", "rollout_log_probs")
    return (*own, "response_mask")


def _correction_writes(job: JobConfig) -> tuple[str, ...]:
    return job.algorithm.rollout_correction.columns


@node(reads=_correction_reads, writes=_correction_writes, phase="adv")
def apply_rollout_correction(batch: DataProto, job: JobConfig) -> tuple[DataProto, Metrics]:
    """What `algorithm.rollout_correction` says against tokens that the engine drew from another distribution.

    rollout_is_weights [B, T], with rollout_is: the policy loss of each token is multiplied by its weight.
    loss_mask [B, T], with rollout_rs: response_mask without what is rejected, which is out of the actor's and
    the critic's loss. It still counts in the mini-batch's denominators, as in verl 0.9: to reject makes a step
    smaller, and does not make the other tokens weigh more. (Except within a row in seq-mean-token-mean: a row's
    mean is over the tokens that it keeps.) response_mask stays, and with it KL, advantages and metrics are
    those of all that was sampled. (verl takes advantages of the accepted tokens alone; with gae a rejected last
    token would take the reward along.)

    With bypass_mode there is nothing to compare here, as old_log_probs are the engine's. The actor corrects
    against the policy under training, and its update reports the same metrics.

    Returns:
        the batch; and how far the engine's policy is from the actor's, whether or not that is corrected.
    """
    if job.algorithm.rollout_correction.bypass_mode:
        return batch, {}
    found = correct(
        batch["old_log_probs"],
        batch["rollout_log_probs"],
        batch["response_mask"],
        job.algorithm.rollout_correction,
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


@node(reads=("token_level_scores",), writes=("reward_baselines",))
def set_baselines(greedy: DataProto, batch: DataProto) -> tuple[DataProto, Metrics]:
    """reward_baselines [B]: the score of the greedy answer to the row's prompt.

    Args:
        greedy: an answer to each prompt, scored, in the order of the prompts.
        batch: the samples, as many for each prompt, in the same order.

    Returns:
        the batch; and the mean of the greedy answers' scores.
    """
    scores = greedy["token_level_scores"].sum(dim=1)  # [prompts]
    batch["reward_baselines"] = scores.repeat_interleave(len(batch) // len(greedy))
    return batch, {"critic/reward_baselines/mean": scores.mean().item()}


def _advantage_reads(job: JobConfig) -> tuple[str, ...]:
    estimator = ESTIMATORS[job.algorithm.adv_estimator]
    return (*estimator.reads, *set(estimator.optional).intersection(_correction_writes(job)))


@node(reads=_advantage_reads, writes=("advantages", "returns"), phase="adv")
def compute_advantages(batch: DataProto, job: JobConfig) -> DataProto:
    """advantages and returns [B, T], by `algorithm.adv_estimator`."""
    estimator = ESTIMATORS[job.algorithm.adv_estimator]
    options = {key: getattr(job.algorithm, key) for key in estimator.keys}
    options |= {column: batch[column] for column in estimator.optional if column in batch}
    batch["advantages"], batch["returns"] = estimator.compute(
        *(batch[column] for column in estimator.reads), **options
    )
    return batch
