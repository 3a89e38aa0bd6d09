"""Preference training without rewards: DPO (Rafailov et al. 2023, arXiv:2305.18290) and IPO (arXiv:2310.12036).

Axes: B pairs, P prompt tokens, T tokens of both responses, with the second one's prompt; S = P + T.
"""

from __future__ import annotations

from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.stages.experience import join


async def dpo_step(prompts: DataProto, roles: Roles, step: Step) -> Metrics:
    """One step: train on which of two responses was chosen. Loss: dpo, dpo_norm or ipo."""
    batch = join(prompts)  # input_ids [B, S]; a pair is a row with two contexts
    batch = batch.union(await roles.reference.compute_log_probs(batch))  # ref_log_probs [B, T]
    actor_metrics = await roles.actor.update(batch)
    return step.report(batch, actor_metrics)
