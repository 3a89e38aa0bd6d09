"""The ranks of a role, and the seconds of collectives among them.

A collective is modelled by latency and bandwidth (Hockney's alpha-beta model): a ring over n ranks takes n - 1
turns of fixed latency, and each rank receives (n - 1)/n of the bytes. Between machines, the ring's bytes enter
each machine once, through all its network cards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.planner.device_specs import Device


@dataclass(frozen=True)
class Spread:
    """The division of a role among ranks.

    Args:
        ranks: processes of the role's group, each with a device.
        shards: ranks that hold one copy of the model (FSDP); with fewer than `ranks` there are copies (HSDP).
        together: ranks that compute the same rows, each a part of the tokens (Ulysses).
        is_gathered_twice: True if a block's weights are gathered again for the backward pass.
        is_offloaded: True if weights, gradients and moments are in host memory.
        fetches_moments: True if moments are in host memory except during the optimizer's steps.
    """

    ranks: int = 1
    shards: int = 1
    together: int = 1
    is_gathered_twice: bool = True
    is_offloaded: bool = False
    fetches_moments: bool = False

    @classmethod
    def of(cls, job: JobConfig, role: str, ranks: int) -> Spread:
        """Read how the job spreads a role over this many ranks. A rollout has an engine on each."""
        if role == "rollout":
            return cls(ranks)
        config = job.fsdp_config(role)
        shards = ranks if config.fsdp_size == -1 else min(ranks, config.fsdp_size)
        return cls(
            ranks=ranks,
            shards=shards,
            together=job.ulysses_size(role) if ranks > 1 else 1,
            is_gathered_twice=config.reshard_after_forward,
            is_offloaded=config.param_offload and ranks > 1,
            fetches_moments=config.optimizer_offload and ROLES[role].trained,
        )

    @property
    def streams(self) -> int:
        """Ranks that compute different rows."""
        return self.ranks // self.together

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return self.ranks // self.shards


def smallest(job: JobConfig, role: str) -> int:
    """Return the smallest number of ranks that a role can have. Every other one is a multiple of it."""
    return math.lcm(job.ulysses_size(role), max(1, job.fsdp_config(role).fsdp_size))


def gather_seconds(device: Device, num_bytes: float, ranks: int) -> float:
    """Return the seconds of an all-gather, or of a reduce-scatter, by a ring.

    Args:
        device: of each rank.
        num_bytes: of all ranks together.
        ranks: number of ranks.
    """
    if ranks <= 1:
        return 0.0
    nodes = -(-ranks // device.per_node)
    inside = min(ranks, device.per_node)
    moving = max(
        num_bytes * (inside - 1) / inside / device.link_bandwidth,
        num_bytes * (nodes - 1) / nodes / device.network_bandwidth,
    )
    return (
        device.call_latency
        + (ranks - nodes) * device.link_latency
        + (nodes - 1) * device.network_latency
        + moving
    )


def sum_seconds(device: Device, num_bytes: float, ranks: int) -> float:
    """Return the seconds of an all-reduce of `num_bytes`: a reduce-scatter, then an all-gather."""
    return 2 * gather_seconds(device, num_bytes, ranks)


def exchange_seconds(device: Device, num_bytes: float, ranks: int) -> float:
    """Return the seconds of an all-to-all: each rank has `num_bytes`, and keeps one of `ranks` parts."""
    return gather_seconds(device, num_bytes, ranks)
