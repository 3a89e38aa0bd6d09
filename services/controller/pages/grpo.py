"""GRPO: an answer is as good as it is better than the others to the same prompt; no critic
(Shao et al. 2024, arXiv:2402.03300).

Axes: B rows (prompts times rollout.n), P prompt tokens, T response tokens, S = P + T.
"""

from __future__ import annotations

from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.stages.advantages import (
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantages,
)
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.tasks import gather


async def grpo_step(prompts: DataProto, roles: Roles, step: Step) -> Metrics:
    """One step: answer each prompt n times, judge the answers, learn from how they compare, hand the new
    weights to the rollouts."""

    async def experience(rows: DataProto) -> DataProto:  # on each finished chunk, while others still generate
        old, ref, scores = await gather(
            roles.actor.compute_log_probs(rows),  # old_log_probs, entropys [B, T]
            roles.reference.compute_log_probs(rows),  # ref_log_probs [B, T], where the job weighs KL
            roles.reward.compute_scores(rows),  # token_level_scores [B, T], acc [B]
        )
        return rows.union(old, ref, scores)

    rows = fan_out(prompts, step.job.rollout.n, step.job.rollout.seed, step.number)  # prompts [B, P], seeds [B]
    batch = await collect(roles.rollout.generate(rows), rows, experience)  # responses [B, T], input_ids [B, S]

    batch, mismatch = apply_rollout_correction(batch, step.job)  # rollout_is_weights [B, T], where asked for
    batch, kl_metrics = apply_kl_penalty(batch, step.job, step.kl.value)  # token_level_rewards [B, T]
    batch = compute_advantages(batch, step.job)  # advantages, returns [B, T], by groups of one uid

    actor_metrics = await roles.actor.update(batch)
    await roles.sync_weights(step.number)
    return step.report(batch, mismatch, kl_metrics, actor_metrics)
