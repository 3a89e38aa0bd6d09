"""The columns that each method of a role reads and writes.

`methods` declares them, and rolemesh/columns.py the content of each column. Clients send only the columns that
a method reads. A server checks every batch against the declaration before a method sees it, and a client checks
every answer before its caller sees it (rolemesh/batch_validation.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rolemesh.catalog.catalog import load
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch

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
