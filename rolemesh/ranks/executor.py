"""Runs a method on all ranks of a role, and returns their answers.

Only rank 0 decides. When its computing thread begins to compute, it sends an order to every other rank, and
computes its own part. So all ranks compute the same commands in the same order, whatever calls arrive at the
service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rolemesh.dataproto import DataProto

# One rank's part of a command: its rows and its parameters (meta_info), to its answer.
Command = Callable[[DataProto], DataProto]


class RankExecutor(Protocol):
    """Runs commands on every rank of a role. Used on the role's computing thread of rank 0."""

    size: int  # number of ranks

    def run(self, name: str, command: Command, parts: Sequence[DataProto]) -> list[DataProto]:
        """Run a command on every rank, and return the ranks' answers.

        Args:
            name: of the worker's method, which every rank has.
            command: the method on this rank.
            parts: one for each rank.

        Raises:
            RolemeshError: the command raised the same error on every rank.
            RoleUnavailable: a rank was lost, or only some ranks raised an error. The group cannot continue.
        """
        ...


class OneRank:
    """The executor of a role with one rank: it calls the command."""

    size = 1

    def run(self, name: str, command: Command, parts: Sequence[DataProto]) -> list[DataProto]:
        [part] = parts
        return [command(part)]
