"""GRPO (Shao et al. 2024, arXiv:2402.03300): compares an answer with the others to the same prompt; no critic.

Axes: B rows (prompts times rollout.n), P prompt tokens, T response tokens, S = P + T.
"""

from __future__ import annotations

from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.stages.advantage_estimation import (
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantages,
)
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.tasks import gather


async def grpo_step(prompts: DataProto, roles: Roles, step: Step) -> Metrics:
    """One step: answer each prompt n times, score the answers, train on their comparison, send the new weights
    to the rollouts."""

    async def experience(rows: DataProto) -> DataProto:  # on each finished chunk, overlapping generation
        old, ref, scores = await gather(
            roles.actor.compute_log_probs(rows),  # old_log_probs, entropys [B, T]
            roles.reference.compute_log_probs(rows),  # ref_log_probs [B, T], if the job uses KL
            roles.reward.compute_scores(rows),  # token_level_scores [B, T], acc [B]
        )
        return rows.union(old, ref, scores)

    rows = fan_out(prompts, step.job.rollout.n, step.job.rollout.seed, step.number)  # prompts [B, P], seeds [B]
    batch = await collect(roles.rollout.generate(rows), rows, experience)  # responses [B, T], input_ids [B, S]

    batch, mismatch = apply_rollout_correction(batch, step.job)  # rollout_is_weights [B, T], if configured
    batch, kl_metrics = apply_kl_penalty(batch, step.job, step.kl.value)  # token_level_rewards [B, T]
    batch = compute_advantages(batch, step.job)  # advantages, returns [B, T], by groups with one uid

    actor_metrics = await roles.actor.update(batch)
    await roles.sync_weights(step.number)
    return step.report(batch, mismatch, kl_metrics, actor_metrics)
