"""Metrics of a step's batch, with verl's names where verl has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rolemesh.algos.aggregation import Aggregation, BatchCounts, masked_mean
from rolemesh.config import JobConfig
from rolemesh.config.actor import ActorConfig
from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics
from rolemesh.services.controller.conversations.conversation import CLOCK
from rolemesh.token_mask import token_mask
from rolemesh.training.usage import PEAK_MEMORY

MAX_TURNS_REPORTED = 16  # each is a metric of its own


def batch_metrics(batch: DataProto, actor: ActorConfig) -> Metrics:
    """Compute metrics of scores, rewards, advantages, returns, values, lengths and the policy's entropy.

    Each is included if the batch has its column. The entropy is aggregated like the actor's loss.
    docs/metrics.md explains each name.
    """
    mask = batch["response_mask"]  # [B, T]
    lengths = mask.sum(dim=1).float()  # [B]
    metrics: Metrics = {}
    for name, column in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if column in batch:
            metrics |= _spread(f"critic/{name}", batch[column].sum(dim=1))  # [B]
    for column in ("advantages", "returns"):
        if column in batch:
            metrics |= _spread(f"critic/{column}", batch[column][mask])  # of the sampled tokens
    metrics |= {
        **_spread("response_length", lengths),
        "response_length/clip_ratio": (token_mask(batch).sum(dim=1) >= mask.shape[1]).float().mean().item(),
        "prompt_length/mean": batch["prompt_mask"].sum(dim=1).float().mean().item(),
        "perf/total_num_tokens": float(batch["attention_mask"].sum()),
    }
    if "values" in batch:
        metrics |= _spread("critic/values", batch["values"][mask])
        metrics |= _explained_variance(batch["values"][mask], batch["returns"][mask])
    if "entropys" in batch:
        aggregate = Aggregation.of(BatchCounts.of(mask), actor.loss_agg_mode, actor.loss_scale_factor)
        metrics["actor/entropy"] = aggregate(batch["entropys"], mask).item()
    if "reward_extra_info" in batch:
        metrics |= _means("reward", batch["reward_extra_info"])
    if "conversation" in batch:
        metrics |= _conversations(batch)
    return metrics


def throughput(metrics: Metrics, job: JobConfig, seconds: float) -> float:
    """Return the tokens per second of a step; on GPUs, per GPU.

    Args:
        metrics: of the step. Trained roles on GPUs report their peak memory, and those on a CPU do not.
        job: its placement says how many GPUs there are; those of servers of engine openai do not count.
        seconds: of the step.
    """
    on_gpus = any(name in metrics for names in PEAK_MEMORY.values() for name in names)
    return metrics["perf/total_num_tokens"] / seconds / (job.plan.num_devices if on_gpus else 1)


def _conversations(batch: DataProto) -> Metrics:
    """Compute conversation/NAME/mean of each number, the share of rows by why they ended, and rewards."""
    rows = list(batch["conversation"])
    ended: dict[str, int] = {}
    for row in rows:
        ended[row["why"]] = ended.get(row["why"], 0) + 1
    numbers = [{name: value for name, value in row.items() if name not in ("why", CLOCK)} for row in rows]
    return {
        **_means("conversation", numbers),
        "timing_s/environment": fmean(row.get(CLOCK, 0.0) for row in rows),
        **{f"conversation/ended/{why}": count / len(rows) for why, count in sorted(ended.items())},
        "conversation/reward/mean": batch["environment_rewards"].sum(dim=1).mean().item(),
        "conversation/prompts/mean": 1 + batch["contexts"].amax(dim=1).float().mean().item(),
        "conversation/tokens/mean": token_mask(batch).sum(dim=1).float().mean().item(),
        **_rewards_by_turn(batch["turns"], batch["environment_rewards"]),
    }


def _rewards_by_turn(turns: Tensor, rewards: Tensor) -> Metrics:
    """Compute the mean reward of each of the first turns, over the rows that have it."""
    last = min(MAX_TURNS_REPORTED, int(turns.max()) if turns.numel() else 0)
    by_turn = {turn: turns == turn for turn in range(1, last + 1)}  # [B, T]
    return {
        f"conversation/reward/turn_{turn}/mean": ((rewards * at).sum() / at.any(dim=1).sum()).item()
        for turn, at in by_turn.items()
    }


def _explained_variance(values: Tensor, returns: Tensor) -> Metrics:
    """Compute 1 − Var(R − V)/(Var(R) + 1e-5), with Bessel's correction.

    It is 1 if the critic predicted every return, 0 if it is no better than a constant. It is left out for fewer
    than two tokens, which have no variance.
    """
    if len(returns) < 2:
        return {}
    left = (returns - values).var() / (returns.var() + 1e-5)
    return {"critic/vf_explained_var": (1 - left).item()}


def _means(of: str, rows: Iterable[Mapping[str, Any]]) -> Metrics:
    """Compute `OF/NAME/mean` of each number in the rows, over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name == "pred":  # the answer found, used for validation's majority vote
                continue
            values.setdefault(name, []).append(value)
    return {f"{of}/{name}/mean": fmean(values[name]) for name in sorted(values)}


def staleness_metrics(batch: DataProto, newest: int) -> Metrics:
    """Compute how stale the weights were that generated the step's tokens; all 0 without generation ahead.

    Args:
        batch: with response_mask and weight_versions [B, T].
        newest: the version of the weights at the start of the step.
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
    """Compute mean, maximum and minimum; empty if there are no values."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
