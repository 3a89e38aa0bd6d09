"""What a step's batch says about the run, under the names that people have on their boards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

import torch
from torch import Tensor

from rolemesh.algos.aggregation import masked_mean
from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics


def batch_metrics(batch: DataProto) -> Metrics:
    """Scores, rewards, advantages, returns, values where there are some, and lengths."""
    mask = batch["response_mask"]  # [B, T]
    lengths = mask.sum(dim=1).float()  # [B]
    scores = batch["token_level_scores"].sum(dim=1)  # [B]
    rewards = batch["token_level_rewards"].sum(dim=1)
    metrics = {
        **_spread("critic/score", scores),
        **_spread("critic/rewards", rewards),
        "critic/advantages/mean": masked_mean(batch["advantages"], mask).item(),
        "critic/returns/mean": masked_mean(batch["returns"], mask).item(),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": (lengths >= mask.shape[1]).float().mean().item(),
        "prompt_length/mean": batch["prompt_mask"].sum(dim=1).float().mean().item(),
        "perf/total_num_tokens": float(batch["attention_mask"].sum()),
    }
    if "values" in batch:
        metrics["critic/values/mean"] = masked_mean(batch["values"], mask).item()
    if "entropys" in batch:
        metrics["actor/entropy"] = masked_mean(batch["entropys"], mask).item()
    if "reward_extra_info" in batch:
        metrics |= _extra_means(batch["reward_extra_info"])
    return metrics


def _extra_means(rows: Iterable[Mapping[str, float]]) -> Metrics:
    """`reward/NAME/mean` of what came with the scores, over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {f"reward/{name}/mean": fmean(values[name]) for name in sorted(values)}


def staleness_metrics(batch: DataProto, newest: int) -> Metrics:
    """How far behind the weights were that made the step's tokens; all 0 where nothing ran ahead.

    Args:
        newest: the version that the step began with.
    """
    mask = batch["response_mask"]  # [B, T]
    behind = torch.where(mask, newest - batch["weight_versions"], 0)  # [B, T], in steps
    least = torch.where(mask, behind, newest + 1).amin(dim=1)  # [B]
    return {
        "rollout/stale_tokens": float((behind > 0).sum()),
        "rollout/staleness/mean": masked_mean(behind.float(), mask).item(),
        "rollout/staleness/max": float(behind.max()),
        "rollout/mixed_rows": float((behind.amax(dim=1) > least).sum()),
    }


def _spread(name: str, values: Tensor) -> Metrics:
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
