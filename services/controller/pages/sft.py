"""Supervised fine-tuning (Ouyang et al. 2022, arXiv:2203.02155, section 3.5): learns given responses.

Axes: B rows, P prompt tokens, T response tokens, S = P + T.
"""

from __future__ import annotations

from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.stages.experience import join


async def sft_step(prompts: DataProto, roles: Roles, step: Step) -> Metrics:
    """One step: train on what the assistant says in the batch. Loss: actor.loss_agg_mode of −log π."""
    batch = join(prompts)  # input_ids [B, S] of prompts [B, P] and responses [B, T]
    actor_metrics = await roles.actor.update(batch)
    return step.report(batch, actor_metrics)
