"""START HERE: what the roles are.

A role is a Protocol with two implementations. A worker does the work in this process; a client asks a service
for it over gRPC. A page (services/controller/pages/ppo.py) takes `Roles` and cannot tell which one it has.

rolemesh/methods.py declares the columns that each method reads and writes. Before any model loads, the page
runs once with roles that only record (rolemesh/graph/) and is checked against these declarations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import Unsupported
from rolemesh.v1.environment_pb2 import (
    ActRequest,
    ActResponse,
    CloseEpisodeRequest,
    CloseEpisodeResponse,
    DescribeRequest,
    DescribeResponse,
    OpenEpisodeRequest,
    OpenEpisodeResponse,
)
from rolemesh.weights.weight_source import WeightSource

Metrics = dict[str, float]


# --------------------------------------------------------------------------------------- roles


class Actor(Protocol):
    """The policy under training."""

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Return log-probabilities and entropies [B, T] of the responses, 0 where response_mask is False."""
        ...

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        """Return what Reference.compute_log_probs returns for the base model, by switching the adapter off.
        Raises Unsupported if there is no adapter (actor.model.lora_rank 0)."""
        ...

    async def update(self, batch: DataProto) -> Metrics:
        """Train on the batch: ppo_epochs passes, one optimizer step for each mini-batch."""
        ...

    async def publish_weights(self, version: int) -> WeightSource:
        """Keep the current weights under a version, for rollouts to pull."""
        ...

    async def begin_checkpoint(self, directory: Path) -> None:
        """Copy model and optimizer, and begin to write the copy; nothing random has a state. Raises
        CheckpointFailed."""
        ...

    async def finish_checkpoint(self, directory: Path) -> None:
        """Wait until the checkpoint that was begun last is on disk. Raises CheckpointFailed."""
        ...

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
        """Load what a checkpoint has, bit for bit; None starts from the untrained model.

        Args:
            directory: of the checkpoint.
            num_training_steps: of the whole run, for a learning rate that depends on it; None:
                trainer.total_training_steps of the role's own job.

        Raises:
            CheckpointFailed: it cannot be read.
        """
        ...


class Reference(Protocol):
    """The policy that the actor is held close to. It never changes."""

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Return log-probabilities [B, T] of the responses, 0 where response_mask is False."""
        ...


class Rollout(Protocol):
    """Generation."""

    def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        """Yield one response for each row, in batches of finished rows. Column `row` names them.

        With the columns `responses` and `turns` a row goes on after its response so far, which ends where
        `turns` are 0. The answer has the new tokens alone, each at its own position.

        meta_info["sampling"] is "train" (rollout.*), "greedy" or "validation" (rollout.val_kwargs.*).
        """
        ...

    async def update_weights(self, source: WeightSource) -> None:
        """Swap in a version of the actor's weights. Raises WeightsUnavailable and keeps the old ones."""
        ...


class Critic(Protocol):
    """The value model."""

    async def compute_values(self, batch: DataProto) -> DataProto:
        """Return values [B, T], each before response token t is sampled."""
        ...

    async def update(self, batch: DataProto) -> Metrics:
        """Train on the batch."""
        ...

    async def begin_checkpoint(self, directory: Path) -> None:
        """Copy model and optimizer, and begin to write the copy; nothing random has a state. Raises
        CheckpointFailed."""
        ...

    async def finish_checkpoint(self, directory: Path) -> None:
        """Wait until the checkpoint that was begun last is on disk. Raises CheckpointFailed."""
        ...

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
        """Load what a checkpoint has, bit for bit; None starts from the untrained model.

        Args:
            directory: of the checkpoint.
            num_training_steps: of the whole run, for a learning rate that depends on it; None:
                trainer.total_training_steps of the role's own job.

        Raises:
            CheckpointFailed: it cannot be read.
        """
        ...


class Reward(Protocol):
    """The reward of a response."""

    async def compute_scores(self, batch: DataProto) -> DataProto:
        """Return scores [B, T] and acc [B]. Raises RewardFailed with the row's uid."""
        ...


class Environment(Protocol):
    """The other side of conversations. proto/rolemesh/v1/environment.proto describes the messages."""

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        """Return the tools that agents offer. Raises UnknownAgent with the known ones."""
        ...

    async def open_episode(self, request: OpenEpisodeRequest) -> OpenEpisodeResponse:
        """Begin an episode. Raises EnvironmentFailed, UnknownAgent, or InvalidData if its row lacks a key."""
        ...

    async def act(self, request: ActRequest) -> ActResponse:
        """Answer the episode's next turn. Raises EpisodeLost, after which it may begin anew with the next
        attempt, or EnvironmentFailed with the row's uid and the agent."""
        ...

    async def close_episode(self, request: CloseEpisodeRequest) -> CloseEpisodeResponse:
        """End an episode, also in the middle, and return its reward. Raises as `act`."""
        ...


class NoRollout:
    """The rollout of a job whose page answers no prompts. It needs no weights, and raises if asked."""

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        raise Unsupported("this job has no rollout: its page does not list it in `roles`")
        yield prompts

    async def update_weights(self, source: WeightSource) -> None:
        raise Unsupported("this job has no rollout: its page does not list it in `roles`")


class NoReward:
    """The reward of a job whose page scores nothing. It raises if a page calls it."""

    async def compute_scores(self, batch: DataProto) -> DataProto:
        raise Unsupported("this job has no reward: its page does not list it in `roles`")


class NoReference:
    """The reference of a job without a KL term. It adds no column."""

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return DataProto()


@dataclass
class ReferenceInActor:
    """The reference of a job whose actor trains an adapter: the actor without it. No second model is loaded."""

    actor: Actor

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await self.actor.compute_ref_log_probs(batch)


class NoCritic:
    """The critic of a job whose algorithm has none. It saves nothing and raises if a page calls it."""

    async def compute_values(self, batch: DataProto) -> DataProto:
        raise Unsupported("this job has no critic; algorithm.adv_estimator gae is the one that uses it")

    async def update(self, batch: DataProto) -> Metrics:
        raise Unsupported("this job has no critic; algorithm.adv_estimator gae is the one that uses it")

    async def begin_checkpoint(self, directory: Path) -> None:
        return None

    async def finish_checkpoint(self, directory: Path) -> None:
        return None

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
        return None


class NoEnvironment:
    """The environment of a job whose rows have one turn. It raises if anything calls it."""

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        raise Unsupported(NO_ENVIRONMENT)

    async def open_episode(self, request: OpenEpisodeRequest) -> OpenEpisodeResponse:
        raise Unsupported(NO_ENVIRONMENT)

    async def act(self, request: ActRequest) -> ActResponse:
        raise Unsupported(NO_ENVIRONMENT)

    async def close_episode(self, request: CloseEpisodeRequest) -> CloseEpisodeResponse:
        raise Unsupported(NO_ENVIRONMENT)


NO_ENVIRONMENT = "this job has no environment; set rollout.multi_turn.enable to true for conversations"


@dataclass
class Roles:
    """The roles of one job, workers or clients."""

    actor: Actor
    rollout: Rollout = field(default_factory=NoRollout)
    reward: Reward = field(default_factory=NoReward)
    critic: Critic = field(default_factory=NoCritic)
    reference: Reference = field(default_factory=NoReference)
    environment: Environment = field(default_factory=NoEnvironment)

    @classmethod
    def of(cls, job: JobConfig, given: Mapping[str, Any]) -> Roles:
        """Return the roles of a job, given those that it has by name, with stand-ins for the others."""
        in_actor: dict[str, Any] = {"reference": ReferenceInActor(given["actor"])} if job.ref_in_actor else {}
        return cls(**in_actor, **given)

    async def sync_weights(self, version: int) -> None:
        """Bring the actor's weights to the rollouts, under a version that grows with each step."""
        await self.rollout.update_weights(await self.actor.publish_weights(version))
