"""algorithm.rollout_correction.bypass_mode: uses the engine's log-probabilities instead of the actor's."""

from __future__ import annotations

from dataclasses import replace

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.forwarding import Forwarding
from rolemesh.graph import node
from rolemesh.roles import Actor, Roles


def bypassing(roles: Roles, job: JobConfig) -> Roles:
    """Return the roles for a page. With bypass_mode the actor computes nothing before the update.

    A page that answers no prompts has nothing of an engine to take.
    """
    if not (job.algorithm.rollout_correction.bypass_mode and job.generates):
        return roles
    return replace(roles, actor=BypassingActor(roles.actor))


@node(reads=("rollout_log_probs",), writes=("old_log_probs",))
def take_rollout_log_probs(rows: DataProto) -> DataProto:
    """Return old_log_probs [B, T], the engine's log-probabilities of the tokens that it sampled."""
    return DataProto({"old_log_probs": rows["rollout_log_probs"]})


class BypassingActor(Forwarding[Actor]):
    """An actor whose old_log_probs are taken from the rollout."""

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return take_rollout_log_probs(batch)
