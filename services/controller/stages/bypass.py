"""algorithm.rollout_correction.bypass_mode: the engine's log-probabilities in place of the actor's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.graph import node
from rolemesh.roles import Actor, Metrics, Roles
from rolemesh.weights.source import WeightSource


def bypassing(roles: Roles, job: JobConfig) -> Roles:
    """The roles that a page is given: where the job bypasses, the actor computes nothing before the update."""
    if not job.algorithm.rollout_correction.bypass_mode:
        return roles
    return replace(roles, actor=BypassingActor(roles.actor))


@node(reads=("rollout_log_probs",), writes=("old_log_probs",))
def take_rollout_log_probs(rows: DataProto) -> DataProto:
    """old_log_probs [B, T]: what the engine said when it drew the tokens."""
    return DataProto({"old_log_probs": rows["rollout_log_probs"]})


@dataclass
class BypassingActor:
    """An actor that is not asked for old_log_probs."""

    actor: Actor

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return take_rollout_log_probs(batch)

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        return await self.actor.compute_ref_log_probs(batch)

    async def update(self, batch: DataProto) -> Metrics:
        return await self.actor.update(batch)

    async def publish_weights(self, version: int) -> WeightSource:
        return await self.actor.publish_weights(version)

    async def save_checkpoint(self, directory: Path) -> None:
        await self.actor.save_checkpoint(directory)

    async def load_checkpoint(self, directory: Path | None) -> None:
        await self.actor.load_checkpoint(directory)
