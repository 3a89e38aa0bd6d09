"""Validation: answers and scores held-out prompts, without training on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import torch
from torch import Tensor

from rolemesh.algos.job_loss import token_losses
from rolemesh.algos.policy_loss import row_mean
from rolemesh.algos.repeated import expected_best, expected_majority, pass_at
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Roles, Rollout
from rolemesh.services.controller.stages.experience import collect, fan_out, join
from rolemesh.tasks import gather


async def validate(prompts: Iterable[DataProto], roles: Roles, job: JobConfig) -> tuple[DataProto, Metrics]:
    """Answer each prompt rollout.val_kwargs.n times, and score the answers.

    Args:
        prompts: batches of prompts.
        roles: rollout and reward are called.
        job: has the sampling parameters.

    Returns:
        All rows, and validation_metrics.
    """

    async def scored(rows: DataProto) -> DataProto:
        return rows.union(await roles.reward.compute_scores(rows))

    n = job.rollout.val_kwargs.n
    parts: list[DataProto] = []
    for some in prompts:
        first = sum(map(len, parts)) // n  # a prompt's random streams must not depend on the batch size
        parts.append(await respond(some, first, roles.rollout, job, scored))
    batch = DataProto.concat(parts)
    return batch, validation_metrics(batch, n)


async def respond(
    prompts: DataProto,
    first: int,
    rollout: Rollout,
    job: JobConfig,
    experience: Callable[[DataProto], Coroutine[Any, Any, DataProto]],
) -> DataProto:
    """Respond to each prompt rollout.val_kwargs.n times, in adjacent rows.

    Args:
        prompts: some of the prompts that are answered.
        first: position of their first; rows draw the same numbers, however the prompts are cut into calls.
        rollout: is called.
        job: has the sampling parameters.
        experience: adds columns to rows as they finish.
    """
    n = job.rollout.val_kwargs.n
    rows = fan_out(prompts, n, job.rollout.seed, step=0, sampling="validation", first=first)
    return await collect(rollout.generate(rows), rows, experience)


async def validate_loss(rows: Iterable[DataProto], roles: Roles) -> Metrics:
    """Compute val/loss, the mean of −log π over what the assistant says in rows with responses, and
    val/<data_source>/loss of each data source.

    Args:
        rows: batches of rows with responses.
        roles: the actor is called.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for some in rows:
        batch = join(some)
        log_probs = (await roles.actor.compute_log_probs(batch))["old_log_probs"]
        of_rows = -log_probs.double().sum(dim=1)  # [B]; 0 where response_mask is False
        lengths = batch["response_mask"].sum(dim=1)
        for source, value, length in zip(batch["data_source"], of_rows.tolist(), lengths.tolist(), strict=True):
            sums[source] = sums.get(source, 0.0) + value
            counts[source] = counts.get(source, 0) + length
    by_source = {f"val/{source}/loss": sums[source] / counts[source] for source in sorted(sums)}
    return {"val/loss": sum(sums.values()) / sum(counts.values()), **(by_source if len(sums) > 1 else {})}


async def validate_pairs(pairs: Iterable[DataProto], roles: Roles, job: JobConfig) -> Metrics:
    """Compute val/loss, the job's loss, and val/rewards/NAME of held-out pairs: means over all of them.

    A pair's loss is the mean over its tokens.

    Args:
        pairs: batches of pairs.
        roles: actor and reference are called.
        job: has the loss.
    """
    parts: list[dict[str, Tensor]] = []
    for some in pairs:
        batch = join(some)
        own, ref = await gather(roles.actor.compute_log_probs(batch), roles.reference.compute_log_probs(batch))
        mask = batch["response_mask"]
        found = token_losses(own["old_log_probs"], batch.union(ref), mask, job)
        counted = mask if found.accepted is None else found.accepted
        losses = row_mean(found.losses.double(), counted)[:, 0]  # float64: the mean of equal losses is exact
        parts.append({"loss": losses.to(found.losses.dtype), **found.of_rows})
    return {f"val/{name}": torch.cat([part[name] for part in parts]).mean().item() for name in parts[0]}


def validation_metrics(batch: DataProto, n: int) -> Metrics:
    """Return the means over prompts of `by_prompt`."""
    return {name: values.mean().item() for name, values in by_prompt(batch, n).items()}


def standard_errors(batch: DataProto, n: int) -> Metrics:
    """Return the standard error of each of `validation_metrics`: s/√P of the P prompts of a data source.

    s is the standard deviation over these prompts, with Bessel's correction, of the value that `by_prompt` has
    for each. NaN of a single prompt. So it tells how much the mean would vary with other prompts of the kind.
    """
    found = by_prompt(batch, n)
    return {
        name: values.std().item() / len(values) ** 0.5 if len(values) > 1 else math.nan
        for name, values in found.items()
    }


def by_prompt(batch: DataProto, n: int) -> dict[str, Tensor]:
    """Compute val-core/<data_source>/acc/<of> and val-aux/<data_source>/reward/<of> of each prompt, [prompts].

    <of> is mean@n, and for k = 2, 4, … and n also best@k/mean. It is also maj@k/mean if the reward reports the
    answer that it found (`pred`), and for acc pass@k. Metrics of acc with k < n are in val-aux too. The names
    are verl's, except pass@k; docs/metrics.md explains each.

    Args:
        batch: n rows for each prompt, one after the other.
        n: rollout.val_kwargs.n.
    """
    numbers = {"acc": batch["acc"], "reward": batch["token_level_scores"].sum(dim=1)}
    sources = list(batch["data_source"])[::n]
    votes = _votes(batch, n)
    found_by = {}
    for source in sorted(set(sources)):
        prompts = [i for i, name in enumerate(sources) if name == source]
        voting = [found for i in prompts if (found := votes[i]) is not None]
        for name, column in numbers.items():
            values = column.double().reshape(-1, n)[prompts]  # [prompts, n]
            statistics = {f"mean@{n}": values.mean(dim=1)}
            for k in _sizes(n):
                statistics[f"best@{k}/mean"] = expected_best(values, k)
                if len(voting) == len(prompts):
                    statistics[f"maj@{k}/mean"] = expected_majority(values, voting, k)
                if name == "acc":
                    statistics[f"pass@{k}"] = pass_at(values, k)
            for of, value in statistics.items():
                section = "core" if name == "acc" and of.partition("/")[0].endswith(f"@{n}") else "aux"
                found_by[f"val-{section}/{source}/{name}/{of}"] = value
    return found_by


def _sizes(n: int) -> list[int]:
    """Return 2, 4, 8, … below n, and n; empty for n = 1."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * (n > 1)


def _votes(batch: DataProto, n: int) -> list[list[str] | None]:
    """Return the answers found by the reward in each prompt's n responses; None if it does not report all."""
    rows = batch["reward_extra_info"] if "reward_extra_info" in batch else [{}] * len(batch)
    found = [row.get("pred") for row in rows]
    groups = [found[at : at + n] for at in range(0, len(found), n)]
    return [None if None in group else group for group in groups]
