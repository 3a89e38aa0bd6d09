"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, §3.2): answers to one prompt that are all as good
teach nothing, so a step answers more prompts until its batch is full of groups that differ. What a batch has no
room for is the next step's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import CheckpointFailed, InvalidData
from rolemesh.graph import node
from rolemesh.roles import Metrics

log = logging.getLogger(__name__)


@dataclass
class Search:
    """How far a step has come to its batch.

    Args:
        num_before: groups that waited when it began.
        num_rounds: batches of prompts answered.
        num_answered: prompts in these.
        num_differing: of these, whose answers differ.
        score: the sum of these prompts' mean scores.
    """

    num_before: int
    num_rounds: int = 0
    num_answered: int = 0
    num_differing: int = 0
    score: float = 0.0


class SearchStopped(Exception):
    """The run was asked to end while a step's batch lacked groups: the step is not made."""


def _metric_reads(job: JobConfig) -> tuple[str, ...]:
    return ("acc",) if job.algorithm.filter_groups.metric == "acc" else ("token_level_scores",)


@node(reads=_metric_reads, writes=())
def groups_with_spread(answered: DataProto, job: JobConfig) -> list[DataProto]:
    """The groups whose answers are not all equal in algorithm.filter_groups.metric.

    Args:
        answered: the answers to each prompt side by side, rollout.n of them.
        job: says what is compared: whether an answer is right (acc), or its reward (all others).
    """
    column: Tensor = answered[_metric_reads(job)[0]]
    values = column.reshape(len(answered), -1).sum(dim=1).reshape(-1, job.rollout.n)  # [prompts, n]
    differ = (values != values[:, :1]).any(dim=1)
    rows = DataProto(answered.tensors, answered.non_tensors)  # not of one step any more: no meta
    # copied first: what is left out is not to stay in memory as long as a neighbour waits
    return rows.select_idxs(differ.repeat_interleave(job.rollout.n)).split(job.rollout.n)


class DynamicSampling:
    """Groups of answers that wait to be learnt from, first come, first served, and the position in the data.

    Args:
        size: groups that a step learns from; 0 where the page learns from all that it answers.
        batch_of: the batch of prompts with a number, counted from 1.
        max_batches: of prompts that a step may answer; 0: as many as it takes.
        tell: is told what is going on, "" where nothing is.
        stopping: whether the run was asked to end.
    """

    def __init__(
        self,
        size: int = 0,
        batch_of: Callable[[int], DataProto] = lambda number: DataProto(),
        max_batches: int = 0,
        tell: Callable[[str], None] = lambda text: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.size = size
        self.num_batches = 0  # answered since the run began
        self._batch_of, self._max_batches, self._tell, self._stopping = batch_of, max_batches, tell, stopping
        self._waiting: list[DataProto] = []
        self.search = Search(0)

    @property
    def num_answered(self) -> int:
        """Prompts, in this step."""
        return self.search.num_answered

    @property
    def missing(self) -> int:
        """Groups that the step's batch lacks."""
        return max(0, self.size - len(self._waiting))

    def next_prompts(self) -> DataProto:
        """The first batch of prompts that has not been answered. A uid says in which batch it is, as in
        train-000012@3: answers of another epoch to the same prompt are another group.

        Raises:
            SearchStopped: the run is to end, and groups are missing. A checkpoint holds what was found.
        """
        if self.missing and self._stopping():
            raise SearchStopped
        number = self.num_batches + 1
        prompts = self._batch_of(number)
        prompts["uid"] = [f"{uid}@{number}" for uid in prompts["uid"]]
        return prompts

    def add(self, answered: DataProto, groups: Sequence[DataProto]) -> None:
        """Takes up a batch of prompts that has been answered.

        Args:
            answered: all its rows.
            groups: those of them that can be learnt from.

        Raises:
            InvalidData: it was the last batch that the step may answer, and groups are still missing.
        """
        search, num_answered = self.search, len(set(answered["uid"]))
        self.num_batches += 1
        search.num_rounds += 1
        search.num_answered += num_answered
        search.num_differing += len(groups)
        search.score += num_answered * answered["token_level_scores"].sum(dim=1).mean().item()
        self._waiting += groups
        found = f"{min(self.size, len(self._waiting))} of {self.size} groups"
        self._tell(found)
        if not self.missing:
            return
        if search.num_rounds == self._max_batches:
            raise InvalidData(
                f"{found} whose answers differ after {search.num_rounds} batches of prompts, as many as "
                "algorithm.filter_groups.max_num_gen_batches allows: "
                f"{search.num_answered - search.num_differing} of {search.num_answered} prompts were answered "
                "equally well each time. Take prompts nearer to what the model can do, raise rollout.n or "
                "data.gen_batch_size, or raise max_num_gen_batches (0: no limit) and start again: the run goes "
                "on from its last checkpoint"
            )
        log.info("%s whose answers differ after %d batches of prompts", found, search.num_rounds)

    def take(self) -> tuple[DataProto, Metrics]:
        """The step's batch, the groups that have waited longest, and what became of all. Of the metrics,
        groups_from_before + groups_answered - groups_without_spread = size + groups_kept."""
        batch = DataProto.concat(self._waiting[: self.size])
        del self._waiting[: self.size]
        search = self.search
        without = search.num_answered - search.num_differing
        metrics = {
            "train/num_gen_batches": float(search.num_rounds),
            "sampling/groups_from_before": float(search.num_before),
            "sampling/groups_answered": float(search.num_answered),
            "sampling/groups_without_spread": float(without),
            "sampling/groups_kept": float(len(self._waiting)),
        }
        if search.num_answered:
            metrics["sampling/share_without_spread"] = without / search.num_answered
            metrics["sampling/score/mean"] = (
                search.score / search.num_answered
            )  # of all answers, left out or not
        self._tell("")
        self.search = Search(len(self._waiting))
        return batch, metrics

    # ----------------------------------------------------------------------------- between two steps

    @property
    def waiting(self) -> DataProto:
        """All groups that wait, for a checkpoint."""
        return DataProto.concat(self._waiting) if self._waiting else DataProto()

    def restore(self, num_batches: int, waiting: DataProto, n: int, search: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint.

        Args:
            num_batches: answered before it.
            waiting: the groups that waited.
            n: answers in each.
            search: the Search of a step that a stop has broken off, as a dict.

        Raises:
            CheckpointFailed: the rows are not groups of n answers to one prompt.
        """
        groups = waiting.split(n) if len(waiting) else []
        if any(len(group) != n or len(set(group["uid"])) != 1 for group in groups):
            raise CheckpointFailed(
                f"the {len(waiting)} rows that wait are not groups of {n} answers to a prompt"
            )
        self.num_batches, self._waiting = num_batches, groups
        self.search = Search(**{"num_before": len(groups), **search})
