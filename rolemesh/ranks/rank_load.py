"""Measures what each rank of a role does: tokens computed, seconds, and seconds in collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from rolemesh.telemetry import metrics


class Clock:
    """Adds up the time in which a rank's collectives run, the wait for slower ranks included.

    These are FSDP's gathers of weights and sums of gradients, the exchanges of Ulysses, and the sums of Ranks;
    not the sums over HSDP's copies. On a GPU it is their time on the device, which may overlap with computing.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._on_gpu: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, tensor: Tensor) -> Iterator[None]:
        """Measure the block, which runs a collective on a tensor."""
        if tensor.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            yield
            ended.record()
            self._on_gpu.append((began, ended))
            return
        at = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - at

    def take(self) -> float:
        """Return the seconds since the last call. On a GPU it waits for the collectives that have begun."""
        on_gpu = self._on_gpu
        self._on_gpu = []
        seconds = self._seconds
        self._seconds = 0.0
        for began, ended in on_gpu:
            ended.synchronize()
            seconds += began.elapsed_time(ended) / 1000
        return seconds


class TimedAllGather(DefaultAllGather):
    """FSDP's gather of weights, timed."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> dist.Work | None:
        with self._clock.running(input_tensor):
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class TimedReduceScatter(DefaultReduceScatter):
    """FSDP's sum of gradients, timed."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        with self._clock.running(input_tensor):
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class RankLoads:
    """The work of a role's ranks, in Prometheus metrics and for the step's record. Rank 0 keeps it.

    Args:
        role: its name.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._tokens: dict[int, int] = {}
        self._collectives: dict[int, float] = {}

    def add(self, tokens: Sequence[int], seconds: Sequence[tuple[float, float]]) -> None:
        """Add a command.

        Args:
            tokens: that each rank computed.
            seconds: of the command on each rank, and the part of them in collectives.
        """
        for rank, (count, (whole, waited)) in enumerate(zip(tokens, seconds, strict=True)):
            metrics.RANK_TOKENS.labels(self._role, rank).inc(count)
            metrics.RANK_SECONDS.labels(self._role, rank).inc(whole)
            metrics.RANK_COLLECTIVE_SECONDS.labels(self._role, rank).inc(waited)
            self._tokens[rank] = self._tokens.get(rank, 0) + count
            self._collectives[rank] = self._collectives.get(rank, 0.0) + waited

    def take(self) -> dict[str, float]:
        """Return the step's metrics since the last call: nothing for a role of one rank.

        `perf/imbalance/<role>` is the most tokens of a rank over the ranks' mean; 1 is even.
        `timing_s/collectives/<role>` are the seconds in collectives, the ranks' mean.
        """
        tokens = self._tokens
        collectives = self._collectives
        self._tokens = {}
        self._collectives = {}
        if not any(tokens.values()):
            return {}
        return {
            f"perf/imbalance/{self._role}": max(tokens.values()) / fmean(tokens.values()),
            f"timing_s/collectives/{self._role}": fmean(collectives.values()),
        }
