"""DAPO (Yu et al. 2025, arXiv:2503.14476): replaces groups whose answers are all equally good.

Such groups carry no training signal. The rest of DAPO is configuration: actor.clip_ratio_high, loss_agg_mode
token-mean, no KL, and the reward's penalty on long answers.

Axes: B rows (groups times rollout.n), P prompt tokens, T response tokens, S = P + T.
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
from rolemesh.services.controller.stages.dynamic_sampling import groups_with_spread
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.tasks import gather


async def dapo_step(prompts: DataProto, roles: Roles, step: Step) -> Metrics:
    """One step: answer prompts until enough groups have answers that differ, train on the comparison of answers
    within each group, send the new weights to the rollouts. `prompts` is the first batch without answers."""

    async def scored(rows: DataProto) -> DataProto:  # on each finished chunk, while others still generate
        return rows.union(await roles.reward.compute_scores(rows))  # token_level_scores [B, T], acc [B]

    sampling = step.sampling  # has groups left over from earlier steps
    while sampling.missing:
        first = sampling.num_answered  # rows of a step must have different random streams
        rows = fan_out(prompts, step.job.rollout.n, step.job.rollout.seed, step.number, first=first)
        answered = await collect(roles.rollout.generate(rows), rows, scored)  # responses [B, T]
        sampling.add(answered, groups_with_spread(answered, step.job))
        prompts = sampling.next_prompts()
    batch, found = sampling.take()

    old, ref = await gather(  # by the current policy, also for groups from earlier steps
        roles.actor.compute_log_probs(batch),  # old_log_probs, entropys [B, T]
        roles.reference.compute_log_probs(batch),  # ref_log_probs [B, T], if the job uses KL
    )
    batch = batch.union(old, ref)
    batch, mismatch = apply_rollout_correction(  # rollout_is_weights [B, T], if configured
        batch, step.job, newest=step.number - 1
    )
    batch, kl_metrics = apply_kl_penalty(batch, step.job, step.kl.value)  # token_level_rewards [B, T]
    batch = compute_advantages(batch, step.job)  # advantages, returns [B, T], by groups with one uid

    actor_metrics = await roles.actor.update(batch)
    await roles.sync_weights(step.number)
    return step.report(batch, found, mismatch, kl_metrics, actor_metrics)
