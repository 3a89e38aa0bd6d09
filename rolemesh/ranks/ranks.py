"""The ranks of a role: processes that hold one model together, each with a device of its own.

Rank 0 is the role's process, with its address. It runs methods on all ranks (executor.py). Ranks compute
together by collectives of torch.distributed: FSDP's own (sharding.py), and the few here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rolemesh.ranks.rank_load import Clock
from rolemesh.ranks.rendezvous import COLLECTIVE_TIMEOUT, Rendezvous
from rolemesh.ranks.ulysses import Ulysses


@dataclass(frozen=True)
class Ranks:
    """The ranks of one role, seen from one of them.

    Args:
        rank: of this process, from 0.
        size: number of ranks.
        mesh: the ranks as torch.distributed knows them; None if there is only one.
        ulysses: the ranks that compute the same rows as this one; None: it computes its rows alone.
        aside: these ranks with another process group.
        clock: measures the collectives of this rank.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    ulysses: Ulysses | None = None
    aside: Ranks | None = None
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def alone(cls) -> Ranks:
        """Return the only rank of a role. Its collectives are identities."""
        return cls()

    @classmethod
    def of_process(cls, device_type: str, ulysses_size: int = 1) -> Ranks:
        """Return a role's ranks over the processes that have joined (`join`), with collectives of their own.

        Every process calls it, for the same roles in the same order.

        Args:
            device_type: cpu or cuda.
            ulysses_size: how many ranks compute the same rows together; it divides the number of ranks.
        """
        if not dist.is_initialized():
            return cls.alone()
        rank = dist.get_rank()
        size = dist.get_world_size()
        ulysses = None
        clock = Clock()
        group = dist.new_group(range(size), timeout=COLLECTIVE_TIMEOUT)
        for first in range(0, size, ulysses_size) if ulysses_size > 1 else ():
            together = range(first, first + ulysses_size)  # every rank makes every group, its own or not
            made = dist.new_group(together, timeout=COLLECTIVE_TIMEOUT)
            if rank in together:
                ulysses = Ulysses(rank - first, ulysses_size, made, clock)
        aside = cls(
            rank, size, DeviceMesh.from_group(dist.new_group(range(size), COLLECTIVE_TIMEOUT, "gloo"), "cpu")
        )
        return cls(rank, size, DeviceMesh.from_group(group, device_type), ulysses, aside, clock)

    @property
    def beside(self) -> Ranks:
        """The same ranks, for a second thread beside the computing thread: its collectives do not mix with
        the computing thread's. Only for numbers on the CPU."""
        return self.aside or self

    @property
    def sharing(self) -> int:
        """The number of ranks that compute the same rows."""
        return self.ulysses.size if self.ulysses else 1

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group of torch.distributed."""
        assert self.mesh is not None, "a rank that is alone has no group"
        return self.mesh.get_group()

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers. Every rank calls it."""
        return int(self._reduced(torch.tensor(number), dist.ReduceOp.MAX)) if self.mesh else number

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sums of the ranks' numbers, of any shape, on the CPU. Every rank calls it."""
        return self._reduced(numbers.cpu(), dist.ReduceOp.SUM) if self.mesh else numbers

    def all_numbers(self, number: int) -> list[int]:
        """Return every rank's number, in the order of the ranks. Every rank calls it."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        return list(self.total(numbers).tolist())

    def exchange(self, sent: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> torch.Tensor:
        """Send bytes to each rank, and return the received ones in the order of the ranks. Every rank calls it.

        They go from host memory to host memory by gloo, even if the ranks have GPUs.

        Args:
            sent: for each rank uint8 tensors on the CPU, which it gets one after another.
            sizes: bytes that come from each rank.

        Returns:
            [sum(sizes)] uint8, on the CPU.
        """
        given = [part for parts in sent for part in parts]
        outgoing = torch.cat(given) if given else torch.empty(0, dtype=torch.uint8)
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        counts = [sum(part.numel() for part in parts) for parts in sent]
        with self.clock.running(incoming):
            dist.all_to_all_single(incoming, outgoing, [*sizes], counts, group=self.group)
        return incoming

    def wait(self) -> None:
        """Wait until every rank has called it."""
        if self.mesh:
            self.most(0)

    def _reduced(self, numbers: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        with self.clock.running(numbers):
            dist.all_reduce(numbers, how, group=self.group)
        return numbers


def join(environment: Mapping[str, str]) -> tuple[int, int]:
    """Join the other processes of a group of ranks, and return this one's rank and their number.

    Alone, without RANK and WORLD_SIZE in the environment, it returns 0 and 1, and joins nothing.

    Args:
        environment: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    Raises:
        InvalidConfig: one of them is missing or is not a number.
    """
    rendezvous = Rendezvous.of(environment)
    rendezvous.join()
    return rendezvous.rank, rendezvous.size
