"""A page, the order of a step's calls: answer often, learn only from each prompt's best and worst answers.

Xu et al. 2025 (arXiv:2504.13818). Scoring an answer is cheap and training on it is not. So this page scores all
answers first, and only those that it keeps go to the actor. (The page grpo asks for log-probabilities of every
answer while others are generated.)
"""

from __future__ import annotations

from collections import defaultdict

from pydantic import Field

from rolemesh.dataproto import DataProto
from rolemesh.plugins import Options, page
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.stages.advantage_estimation import (
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantages,
)
from rolemesh.services.controller.stages.experience import collect, fan_out


class ExtremesOptions(Options):
    """Keys of algorithm.page_options in the job file."""

    keep: int = Field(1, gt=0)  # number of best answers to each prompt, and of worst ones


@page("extremes", options=ExtremesOptions, meaning="learn from the best and the worst answers to a prompt")
async def extremes_step(prompts: DataProto, roles: Roles, step: Step, *, keep: int) -> Metrics:
    """One step. `roles` are workers in this process or clients of services; a page cannot tell which."""

    async def scored(rows: DataProto) -> DataProto:  # for each chunk of finished rows, while others generate
        return rows.union(await roles.reward.compute_scores(rows))  # token_level_scores [B, T], acc [B]

    rows = fan_out(prompts, step.job.rollout.n, step.job.rollout.seed, step.number)  # n rows for each prompt
    answered = await collect(roles.rollout.generate(rows), rows, scored)  # responses [B, T], input_ids [B, S]
    batch = answered.select_idxs(extremes(answered, keep))
    batch = batch.union(await roles.actor.compute_log_probs(batch))  # old_log_probs, entropys [B, T]
    batch = batch.union(await roles.reference.compute_log_probs(batch))  # nothing, unless the job weighs a KL
    batch, mismatch = apply_rollout_correction(batch, step.job)  # ends the run if the engine computes otherwise
    batch, kl = apply_kl_penalty(batch, step.job, step.kl.value)  # token_level_rewards [B, T]
    batch = compute_advantages(batch, step.job)  # advantages [B, T], by algorithm.adv_estimator
    update = await roles.actor.update(batch)
    await roles.sync_weights(step.number)  # the rollouts take the new weights
    own = {"extremes/score/mean": answered["token_level_scores"].sum(1).mean().item()}
    return step.report(batch, mismatch, kl, update, own)  # a page ends with this


def extremes(batch: DataProto, keep: int) -> list[int]:
    """Return the rows of each prompt's best and worst answers, in the order of the batch."""
    scores = batch["token_level_scores"].sum(1).tolist()
    groups: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(batch["uid"]):
        groups[prompt].append(row)
    ranked = [sorted(rows, key=lambda row: scores[row]) for rows in groups.values()]
    return sorted(row for rows in ranked for row in {*rows[:keep], *rows[-keep:]})
