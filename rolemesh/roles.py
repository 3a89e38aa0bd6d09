"""START HERE: what the roles are.

A role is a Protocol with two implementations. A worker does the work in this process; a client asks a service
for it over gRPC. A page (services/controller/pages/ppo.py) takes `Roles` and cannot tell which one it has.

`methods` declares the columns that each method reads and writes, and `COLUMNS` declares the content of each
column. Clients send only the columns that a method reads. A server checks every batch against the declaration
before a method sees it, and a client checks every answer before its caller sees it (rolemesh/door.py). Before
any model loads, the page runs once with roles that only record (rolemesh/graph/) and is checked against the
same tables.

Axes: B rows, P prompt tokens (left-padded), T response tokens (right-padded), S = P + T, K tokens that could be
drawn, C parts of the reward, V the vocabulary. P and T are data.max_prompt_length and data.max_response_length
in every batch: a fixed width keeps a row's bits independent of its neighbours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, Unsupported
from rolemesh.weights.source import WeightSource

Metrics = dict[str, float]


# ------------------------------------------------------------------------------------- columns


@dataclass(frozen=True)
class Column:
    """A column. It means the same in every method.

    Args:
        axes: one letter for each axis.
        dtype: of a tensor; None for a column of Python objects. Floats must be finite. In columns [B, T] this
            holds where response_mask is True, as no method reads the other cells.
        meaning: for people.
        values: the valid range, as least value and first value beyond it, each a number or the size of an axis;
            None for any.
        cells: the type of each cell, for a column without dtype.
        entries: the types of values in a cell's dict, by key, with OTHER for every other key. float also takes
            an int in float32's range. Empty for anything.
    """

    axes: str
    dtype: torch.dtype | None
    meaning: str
    values: tuple[int, int | str] | None = None
    cells: type = dict
    entries: Mapping[str, type[str] | type[float]] = field(default_factory=dict)


OTHER = "*"
TOKEN_IDS, ZERO_OR_ONE = (0, "V"), (0, 2)  # padding has a token's id too

COLUMNS: dict[str, Column] = {
    # from the data set
    "prompts": Column("BP", torch.int64, "prompt token ids, left-padded", TOKEN_IDS),
    "prompt_mask": Column("BP", torch.bool, "True on prompt tokens"),
    "uid": Column("B", None, "str: the prompt, the same for all its responses", cells=str),
    "seeds": Column("B", torch.int64, "the row's own random stream"),
    "data_source": Column("B", None, "str: picks the reward function", cells=str),
    "reward_model": Column("B", None, "dict: style and ground_truth"),
    "extra_info": Column("B", None, "dict: whatever the data set says besides"),
    # from the rollout
    "row": Column("B", torch.int64, "which row of the request this is"),
    "responses": Column("BT", torch.int64, "response token ids, right-padded, with the end token", TOKEN_IDS),
    "response_mask": Column("BT", torch.bool, "True on tokens that the policy sampled"),
    "rollout_log_probs": Column("BT", torch.float32, "the engine's, of the distribution it sampled from"),
    "weight_versions": Column(
        "BT", torch.int64, "by which weights the token was made; -1 where none was", (-1, 1 << 63)
    ),
    "kept_ids": Column(
        "BTK",
        torch.int32,
        "what could be drawn, where rollout.top_k and top_p cut some off; -1 beyond",
        values=(-1, "V"),
    ),
    # prompts and responses together
    "input_ids": Column("BS", torch.int64, "prompts and responses", TOKEN_IDS),
    "attention_mask": Column("BS", torch.int64, "1 on prompt and response tokens", ZERO_OR_ONE),
    "position_ids": Column("BS", torch.int64, "0 at the first prompt token", (0, "S")),
    # experience
    "old_log_probs": Column("BT", torch.float32, "the actor's, before the update"),
    "entropys": Column("BT", torch.float32, "of the actor's distribution, in nats"),
    "sum_pi_squared": Column("BT", torch.float32, "the squared probabilities of all tokens, summed"),
    "ref_log_probs": Column("BT", torch.float32, "the reference policy's"),
    "values": Column("BT", torch.float32, "the critic's value before token t is sampled"),
    "token_level_scores": Column("BT", torch.float32, "the reward, as a rule on the last response token"),
    "acc": Column("B", torch.float32, "1 where the answer is right (the score itself where none says)"),
    "reward_components": Column("BC", torch.float32, "the parts of the reward, by algorithm.gdpo_reward_keys"),
    "reward_extra_info": Column(
        "B",
        None,
        "dict: numbers besides the score, by name; pred: the answer found",
        entries={"pred": str, OTHER: float},
    ),
    "think_mask": Column("BT", torch.bool, "True between <think> and </think>; all of a response without them"),
    # made by the controller
    "reward_baselines": Column("B", torch.float32, "the reward of the greedy answer to the row's prompt"),
    "token_level_rewards": Column("BT", torch.float32, "scores less the KL penalty"),
    "rollout_is_weights": Column("BT", torch.float32, "of the token's loss: old over rollout probability"),
    "loss_mask": Column("BT", torch.bool, "response_mask without what the rollout correction rejects"),
    "advantages": Column("BT", torch.float32, "how much better than expected the token's outcome is"),
    "returns": Column("BT", torch.float32, "the discounted rewards from here on: the critic's target"),
}

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
    """Return the job's methods by name, such as "actor.update"."""
    kl_loss = ("ref_log_probs",) if job.actor.use_kl_loss else ()
    kept = ("kept_ids",) if job.rollout.truncates else ()
    correction = job.algorithm.rollout_correction.columns
    loss_mask = tuple(name for name in correction if name == "loss_mask")
    estimator = job.algorithm.adv_estimator
    squares = ("sum_pi_squared",) if estimator == "optimal_token_baseline" else ()
    thoughts = ("think_mask",) if estimator == "egpo" else ()
    components = ("reward_components",) if job.algorithm.gdpo_reward_keys else ()
    votes = job.rollout.val_kwargs.n > 1  # validation asks which answer most responses give
    extra = ("reward_extra_info",) if job.reward.tells_more or votes else ()
    sequence = (*SEQUENCE, *kept)
    table = [
        Method("rollout", "generate", "Generate", ("prompts", "prompt_mask", "seeds"),
               ("row", "responses", "response_mask", "rollout_log_probs", "weight_versions", *kept),
               meta={"sampling": tuple(job.rollout.sampling)}, for_training=kept),
        Method("actor", "compute_log_probs", "ComputeLogProbs", sequence,
               ("old_log_probs", "entropys", *squares)),
        Method("actor", "update", "Update", (*sequence, "old_log_probs", "advantages", *kl_loss, *correction)),
        Method("actor", "compute_ref_log_probs", "ComputeRefLogProbs", sequence, ("ref_log_probs",)),
        Method("reference", "compute_log_probs", "ComputeLogProbs", sequence, ("ref_log_probs",)),
        Method("critic", "compute_values", "ComputeValues", SEQUENCE, ("values",)),
        Method("critic", "update", "Update", (*SEQUENCE, "values", "returns", *loss_mask)),
        Method("reward", "compute_scores", "ComputeScores",
               ("prompts", "prompt_mask", "responses", "response_mask", "data_source", "reward_model", "uid"),
               ("token_level_scores", "acc", *components, *extra, *thoughts), optional=("extra_info",)),
    ]  # fmt: skip
    prompt, response = job.data.max_prompt_length, job.data.max_response_length
    sizes = {"P": prompt, "T": response, "S": prompt + response}
    sizes |= {"K": job.rollout.num_kept, "C": len(job.algorithm.gdpo_reward_keys)}
    return {f"{method.role}.{method.name}": replace(method, sizes=sizes) for method in table}


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

    async def save_checkpoint(self, directory: Path) -> None:
        """Write model and optimizer; nothing random has a state. Raises CheckpointFailed."""
        ...

    async def load_checkpoint(self, directory: Path | None) -> None:
        """Load what save_checkpoint wrote, bit for bit; None starts from the untrained model. Raises
        CheckpointFailed."""
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

    async def save_checkpoint(self, directory: Path) -> None:
        """Write model and optimizer; nothing random has a state. Raises CheckpointFailed."""
        ...

    async def load_checkpoint(self, directory: Path | None) -> None:
        """Load what save_checkpoint wrote, bit for bit; None starts from the untrained model. Raises
        CheckpointFailed."""
        ...


class Reward(Protocol):
    """The reward of a response."""

    async def compute_scores(self, batch: DataProto) -> DataProto:
        """Return scores [B, T] and acc [B]. Raises RewardFailed with the row's uid."""
        ...


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

    async def save_checkpoint(self, directory: Path) -> None:
        return None

    async def load_checkpoint(self, directory: Path | None) -> None:
        return None


@dataclass
class Roles:
    """The roles of one job, workers or clients."""

    actor: Actor
    rollout: Rollout
    reward: Reward
    critic: Critic = field(default_factory=NoCritic)
    reference: Reference = field(default_factory=NoReference)

    @classmethod
    def of(cls, job: JobConfig, given: Mapping[str, Any]) -> Roles:
        """Return the roles of a job, given those that it has by name, with stand-ins for the others."""
        in_actor: dict[str, Any] = {"reference": ReferenceInActor(given["actor"])} if job.ref_in_actor else {}
        return cls(**in_actor, **given)

    async def sync_weights(self, version: int) -> None:
        """Bring the actor's weights to the rollouts, under a version that grows with each step."""
        await self.rollout.update_weights(await self.actor.publish_weights(version))
