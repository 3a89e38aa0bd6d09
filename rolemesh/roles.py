"""START HERE: what the roles are.

A role is a Protocol with two implementations. A worker does the work in this process; a client asks a service
for it over gRPC. A page (services/controller/pages/ppo.py) takes `Roles` and cannot tell which one it has.

`methods` declares the columns that each method reads and writes, and rolemesh/columns.py the content of each
column. Clients send only the columns that a method reads. A server checks every batch against the declaration
before a method sees it, and a client checks every answer before its caller sees it
(rolemesh/batch_validation.py).
Before any model loads, the page runs once with roles that only record (rolemesh/graph/) and is checked against
the same tables.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rolemesh.catalog.catalog import load
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, Unsupported
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


SEQUENCE = ("input_ids", "attention_mask", "position_ids", "response_mask")


@dataclass(frozen=True)
class Method:
    """A method of a role: the columns that it reads and writes.

    Args:
        role: the role's name.
        name: the method's name in Protocol and worker.
        rpc: the method's name in the .proto.
        reads: required columns.
        optional: columns that are sent if the batch has them.
        writes: columns of the answer; empty if the answer is metrics.
        meta: required keys of meta_info, with the valid values of each.
        for_training: those of `writes` that are in the answer only if meta_info["sampling"] is "train".
        sizes: of all axes except B and V.
    """

    role: str
    name: str
    rpc: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    meta: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    for_training: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def prune(self, batch: DataProto) -> DataProto:
        """Return the batch with only the columns that this method reads.

        Raises:
            InvalidBatch: a required column is missing.
        """
        if missing := [name for name in self.reads if name not in batch]:
            raise InvalidBatch(f"{self.role}.{self.name} needs columns {missing}; got {sorted(batch.columns)}")
        return batch.select_columns([*self.reads, *(name for name in self.optional if name in batch)])

    def answers(self, meta: Mapping[str, Any]) -> list[str]:
        """Return the columns of the answer to a request with this meta_info."""
        trains = meta.get("sampling") == "train"
        return [name for name in self.writes if trains or name not in self.for_training]


def methods(job: JobConfig) -> dict[str, Method]:
    """Return the methods of all roles by name, such as "actor.update"."""
    prompt = job.data.max_prompt_length
    response = job.data.max_response_length
    sizes = {"P": prompt, "T": response, "S": prompt + response}
    sizes |= {"K": job.rollout.num_kept, "C": len(job.algorithm.gdpo_reward_keys)}
    table = [method for role in ROLES.values() for method in load(role.methods)(job)]
    return {f"{method.role}.{method.name}": replace(method, sizes=sizes) for method in table}


def _sequence(job: JobConfig) -> tuple[str, ...]:
    return (*SEQUENCE, *_kept(job))


def _kept(job: JobConfig) -> tuple[str, ...]:
    return ("kept_ids",) if job.generates and job.rollout.truncates else ()


def actor_methods(job: JobConfig) -> list[Method]:
    sequence = _sequence(job)
    squares = ("sum_pi_squared",) if "sum_pi_squared" in job.estimator.reads else ()
    kl_loss = ("ref_log_probs",) if job.actor.use_kl_loss else ()
    correction = job.algorithm.rollout_correction.columns if job.generates else ()
    learnt_from = (*sequence, *job.policy_loss.reads, *kl_loss, *correction)
    of_the_old_policy = ("old_log_probs", "entropys", *squares)
    return [
        Method("actor", "compute_log_probs", "ComputeLogProbs", sequence, of_the_old_policy),
        Method("actor", "update", "Update", learnt_from),
        Method("actor", "compute_ref_log_probs", "ComputeRefLogProbs", sequence, ("ref_log_probs",)),
    ]


def rollout_methods(job: JobConfig) -> list[Method]:
    kept = _kept(job)
    writes = ("row", "responses", "response_mask", "rollout_log_probs", "weight_versions", *kept)
    sampling = {"sampling": tuple(job.rollout.sampling)}
    reads = ("prompts", "prompt_mask", "seeds")
    so_far = ("responses", "turns")
    return [Method("rollout", "generate", "Generate", reads, writes, so_far, meta=sampling, for_training=kept)]


def reference_methods(job: JobConfig) -> list[Method]:
    return [Method("reference", "compute_log_probs", "ComputeLogProbs", _sequence(job), ("ref_log_probs",))]


def critic_methods(job: JobConfig) -> list[Method]:
    loss_mask = tuple(name for name in job.algorithm.rollout_correction.columns if name == "loss_mask")
    return [
        Method("critic", "compute_values", "ComputeValues", SEQUENCE, ("values",)),
        Method("critic", "update", "Update", (*SEQUENCE, "values", "returns", *loss_mask)),
    ]


def reward_methods(job: JobConfig) -> list[Method]:
    talks = ("turns", "contexts", "environment_rewards") if job.rollout.multi_turn.enable else ()
    response = ("prompts", "prompt_mask", "responses", "response_mask", *talks)
    reads = (*response, "data_source", "reward_model", "uid")
    components = ("reward_components",) if job.algorithm.gdpo_reward_keys else ()
    votes = job.rollout.val_kwargs.n > 1  # validation asks which answer most responses give
    extra = ("reward_extra_info",) if job.reward.tells_more or votes else ()
    thoughts = ("think_mask",) if "think_mask" in job.estimator.reads else ()
    writes = ("token_level_scores", "acc", *components, *extra, *thoughts)
    return [
        Method(
            "reward",
            "compute_scores",
            "ComputeScores",
            reads,
            writes,
            optional=("extra_info", "response_texts"),
        )
    ]


def environment_methods(job: JobConfig) -> list[Method]:
    return []  # its methods take messages, not batches


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
