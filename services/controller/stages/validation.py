"""Validation: the held-out prompts, answered and scored; nothing is learnt from them."""

from __future__ import annotations

from collections.abc import Iterable

from rolemesh.algos.repeated import expected_best, expected_majority, pass_at
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.stages.experience import collect, fan_out


async def validate(prompts: Iterable[DataProto], roles: Roles, job: JobConfig) -> tuple[DataProto, Metrics]:
    """Answers each prompt rollout.val_kwargs.n times.

    Args:
        prompts: batches of them.
        roles: rollout and reward are asked.
        job: the sampling.

    Returns:
        all rows; and validation_metrics.
    """

    async def scored(rows: DataProto) -> DataProto:
        return rows.union(await roles.reward.compute_scores(rows))

    n = job.rollout.val_kwargs.n
    parts: list[DataProto] = []
    for some in prompts:
        first = sum(map(len, parts)) // n  # a prompt's random streams are its own, whatever the batch size
        rows = fan_out(some, n, job.rollout.seed, step=0, sampling="validation", first=first)
        parts.append(await collect(roles.rollout.generate(rows), rows, scored))
    batch = DataProto.concat(parts)
    return batch, validation_metrics(batch, n)


def validation_metrics(batch: DataProto, n: int) -> Metrics:
    """Of each data source, val-core/<data_source>/acc/<of> and val-aux/<data_source>/reward/<of>.

    <of> is mean@n; for k = 2, 4, … and n best@k/mean, and maj@k/mean where the reward tells the answer that it
    found (`pred`); of acc also pass@k. Those of acc with k < n are val-aux, too. The names are verl's, and
    pass@k is beside them; docs/metrics.md explains each.

    Args:
        batch: n rows for each prompt, one after the other.
        n: rollout.val_kwargs.n.
    """
    numbers = {"acc": batch["acc"], "reward": batch["token_level_scores"].sum(dim=1)}
    sources, votes = list(batch["data_source"])[::n], _votes(batch, n)
    metrics = {}
    for source in sorted(set(sources)):
        prompts = [i for i, name in enumerate(sources) if name == source]
        voting = [found for i in prompts if (found := votes[i]) is not None]
        for name, column in numbers.items():
            values = column.double().reshape(-1, n)[prompts]  # [prompts, n]
            told = {f"mean@{n}": values.mean().item()}
            for k in _sizes(n):
                told[f"best@{k}/mean"] = expected_best(values, k)
                if len(voting) == len(prompts):
                    told[f"maj@{k}/mean"] = expected_majority(values, voting, k)
                if name == "acc":
                    told[f"pass@{k}"] = pass_at(values, k)
            for of, value in told.items():
                section = "core" if name == "acc" and of.partition("/")[0].endswith(f"@{n}") else "aux"
                metrics[f"val-{section}/{source}/{name}/{of}"] = value
    return metrics


def _sizes(n: int) -> list[int]:
    """2, 4, 8, … below n, and n; none where there is one answer."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * (n > 1)


def _votes(batch: DataProto, n: int) -> list[list[str] | None]:
    """The answers that the reward found in the n responses to each prompt; None where it does not tell all."""
    rows = batch["reward_extra_info"] if "reward_extra_info" in batch else [{}] * len(batch)
    found = [row.get("pred") for row in rows]
    groups = [found[at : at + n] for at in range(0, len(found), n)]
    return [None if None in group else group for group in groups]
