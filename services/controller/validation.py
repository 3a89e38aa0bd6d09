"""Validation: the held-out prompts, answered and scored; nothing is learnt from them."""

from __future__ import annotations

from collections.abc import Iterable

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Roles
from services.controller.experience import collect, fan_out


async def validate(prompts: Iterable[DataProto], roles: Roles, job: JobConfig) -> tuple[DataProto, Metrics]:
    """Answers each prompt rollout.val_kwargs.n times.

    Args:
        prompts: batches of them.
        roles: rollout and reward are asked.
        job: the sampling.

    Returns:
        all rows; and the mean accuracy and reward over rows of each data source.
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
    """val-core/<data_source>/acc/mean@n and val-aux/<data_source>/reward/mean@n."""
    sources, scores = batch["data_source"], batch["token_level_scores"].sum(dim=1)
    metrics = {}
    for source in sorted(set(sources)):
        of_source = [i for i, name in enumerate(sources) if name == source]
        metrics[f"val-core/{source}/acc/mean@{n}"] = batch["acc"][of_source].mean().item()
        metrics[f"val-aux/{source}/reward/mean@{n}"] = scores[of_source].mean().item()
    return metrics
