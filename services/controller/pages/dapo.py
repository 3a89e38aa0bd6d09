"""DAPO: groups whose answers are all as good teach nothing, and others take their place (Yu et al. 2025,
arXiv:2503.14476). The rest of DAPO is configuration: actor.clip_ratio_high, loss_agg_mode token-mean, no KL,
and the penalty on long answers, which is the reward's.

Axes: B rows (groups times rollout.n), P prompt tokens, T response tokens, S = P + T.
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
from rolemesh.services.controller.stages.dynamic_sampling import groups_with_spread
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.tasks import gather


async def dapo_step(prompts: DataProto, roles: Roles, step: Step) -> Metrics:
    """One step: answer prompts until there are enough whose answers differ, learn from how these compare, hand
    the new weights to the rollouts. `prompts` are the first that nobody has answered."""

    async def scored(rows: DataProto) -> DataProto:  # on each finished chunk, while others still generate
        return rows.union(await roles.reward.compute_scores(rows))  # token_level_scores [B, T], acc [B]

    sampling = step.sampling  # has the groups that earlier steps had no room for
    while sampling.missing:
        first = sampling.num_answered  # no two rows of a step draw the same numbers
        rows = fan_out(prompts, step.job.rollout.n, step.job.rollout.seed, step.number, first=first)
        answered = await collect(roles.rollout.generate(rows), rows, scored)  # responses [B, T]
        sampling.add(answered, groups_with_spread(answered, step.job))
        prompts = sampling.next_prompts()
    batch, found = sampling.take()

    old, ref = await gather(  # by the policy of now, also for groups that have waited
        roles.actor.compute_log_probs(batch),  # old_log_probs, entropys [B, T]
        roles.reference.compute_log_probs(batch),  # ref_log_probs [B, T], where the job weighs KL
    )
    batch = batch.union(old, ref)
    batch, mismatch = apply_rollout_correction(batch, step.job)  # rollout_is_weights [B, T], where asked for
    batch, kl_metrics = apply_kl_penalty(batch, step.job, step.kl.value)  # token_level_rewards [B, T]
    batch = compute_advantages(batch, step.job)  # advantages, returns [B, T], by groups of one uid

    actor_metrics = await roles.actor.update(batch)
    await roles.sync_weights(step.number)
    return step.report(batch, found, mismatch, kl_metrics, actor_metrics)
