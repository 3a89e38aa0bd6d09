"""What a step's batch says about the run, under the names that people have on their boards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rolemesh.algos.aggregation import Aggregation, masked_mean
from rolemesh.config.actor import ActorConfig
from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics


def batch_metrics(batch: DataProto, actor: ActorConfig) -> Metrics:
    """Scores, rewards, advantages, returns, values where there are some, lengths, and the policy's entropy,
    aggregated as the actor's loss. docs/metrics.md explains each name."""
    mask = batch["response_mask"]  # [B, T]
    lengths = mask.sum(dim=1).float()  # [B]
    metrics = {
        **_spread("critic/score", batch["token_level_scores"].sum(dim=1)),  # [B]
        **_spread("critic/rewards", batch["token_level_rewards"].sum(dim=1)),
        **_spread("critic/advantages", batch["advantages"][mask]),  # of the sampled tokens
        **_spread("critic/returns", batch["returns"][mask]),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": (lengths >= mask.shape[1]).float().mean().item(),
        "prompt_length/mean": batch["prompt_mask"].sum(dim=1).float().mean().item(),
        "perf/total_num_tokens": float(batch["attention_mask"].sum()),
    }
    if "values" in batch:
        metrics |= _spread("critic/values", batch["values"][mask])
        metrics |= _explained_variance(batch["values"][mask], batch["returns"][mask])
    if "entropys" in batch:
        aggregate = Aggregation.of(mask, actor.loss_agg_mode, actor.loss_scale_factor)
        metrics["actor/entropy"] = aggregate(batch["entropys"], mask).item()
    if "reward_extra_info" in batch:
        metrics |= _extra_means(batch["reward_extra_info"])
    return metrics


def _explained_variance(values: Tensor, returns: Tensor) -> Metrics:
    """1 − Var(R − V)/(Var(R) + 1e-5), with Bessel's correction: 1 where the critic foresaw all, 0 where a
    constant would have done as well. Of fewer than two tokens there is no variance."""
    if len(returns) < 2:
        return {}
    left = (returns - values).var() / (returns.var() + 1e-5)
    return {"critic/vf_explained_var": (1 - left).item()}


def _extra_means(rows: Iterable[Mapping[str, Any]]) -> Metrics:
    """`reward/NAME/mean` of the numbers that came with the scores, over the rows that have them."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name == "pred":  # the answer, which validation counts
                continue
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
    """Mean, greatest and least; nothing of nothing."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
