"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, §3.2).

A group whose answers are all equally good carries no training signal. So a step answers more prompts until its
batch is full of groups whose answers differ. Surplus groups are kept for the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import CheckpointFailed, InvalidData, RolemeshError
from rolemesh.graph import node
from rolemesh.roles import Metrics

log = logging.getLogger(__name__)

EXTRA = "reward_extra_info"
WARN_AFTER = 10  # batches of prompts that have given a step nothing to learn from


@dataclass
class Search:
    """Progress of a step in filling its batch.

    Args:
        num_before: groups that waited at the start of the step.
        num_rounds: batches of prompts answered.
        num_answered: prompts in these batches.
        num_differing: prompts among these whose answers differ.
        score: sum of the mean scores of all answered prompts.
    """

    num_before: int
    num_rounds: int = 0
    num_answered: int = 0
    num_differing: int = 0
    score: float = 0.0


class SearchStopped(RolemeshError):
    """A stop was requested before a step's batch was full, so the step is not made."""


def _metric_reads(job: JobConfig) -> tuple[str, ...]:
    return ("acc",) if job.algorithm.filter_groups.metric == "acc" else ("token_level_scores",)


@node(reads=_metric_reads, writes=())
def groups_with_spread(answered: DataProto, job: JobConfig) -> list[DataProto]:
    """Return the groups whose answers are not all equal in algorithm.filter_groups.metric.

    Args:
        answered: the rollout.n answers to each prompt, in adjacent rows.
        job: selects the metric: correctness (acc), or the reward (all others).
    """
    column: Tensor = answered[_metric_reads(job)[0]]
    # float64: rewards of several turns, added in another order, have another sum in float32
    values = column.double().reshape(len(answered), -1).sum(dim=1).reshape(-1, job.rollout.n)  # [prompts, n]
    differ = (values != values[:, :1]).any(dim=1)
    rows = DataProto(
        answered.tensors, answered.non_tensors
    )  # without meta, because rows may go to another step
    # select_idxs copies, so that rejected rows do not stay in memory while a waiting group is a view of them
    return rows.select_idxs(differ.repeat_interleave(job.rollout.n)).split(job.rollout.n)


class DynamicSampling:
    """A FIFO queue of groups of answers to train on, and the position in the data.

    Args:
        size: groups in a step's batch; 0 if the page trains on all answers.
        batch_of: returns the batch of prompts with a number, counted from 1.
        max_batches: the most batches of prompts that a step may answer; 0: no limit.
        tell: called with the progress; "" when the batch is full.
        stopping: returns whether a stop was requested.
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
        self.num_batches = 0  # batches answered in the whole run
        self._batch_of = batch_of
        self._max_batches = max_batches
        self._tell = tell
        self._stopping = stopping
        self._waiting: list[DataProto] = []
        self.search = Search(0)

    @property
    def num_answered(self) -> int:
        """Number of prompts answered in this step."""
        return self.search.num_answered

    @property
    def missing(self) -> int:
        """Number of groups that the step's batch still lacks."""
        return max(0, self.size - len(self._waiting))

    def next_prompts(self) -> DataProto:
        """Return the first batch of prompts that has not been answered.

        The number of the batch is appended to each uid, as in train-000012@3, because answers to the same
        prompt in another epoch are another group.

        Raises:
            SearchStopped: a stop was requested and groups are missing. The groups found so far are for the
                checkpoint.
        """
        if self.missing and self._stopping():
            raise SearchStopped
        number = self.num_batches + 1
        prompts = self._batch_of(number)
        prompts["uid"] = [f"{uid}@{number}" for uid in prompts["uid"]]
        return prompts

    def add(self, answered: DataProto, groups: Sequence[DataProto]) -> None:
        """Add an answered batch of prompts.

        Args:
            answered: all its rows.
            groups: its groups whose answers differ.

        Raises:
            InvalidData: the step has answered max_batches batches, and groups are still missing.
        """
        search = self.search
        num_answered = len(set(answered["uid"]))
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
        if 0 < self._max_batches <= search.num_rounds:  # a resumed search may be beyond a lowered limit
            raise InvalidData(
                f"found {found} whose answers differ after {search.num_rounds} batches of prompts, the limit "
                "of algorithm.filter_groups.max_num_gen_batches: the answers to "
                f"{search.num_answered - search.num_differing} of {search.num_answered} prompts were equally "
                "good. Use prompts that the model can sometimes solve, raise rollout.n or "
                "data.gen_batch_size, or raise max_num_gen_batches (0: no limit), and start again: the run "
                "resumes from its last checkpoint"
            )
        log.info("found %s whose answers differ after %d batches of prompts", found, search.num_rounds)
        if search.num_rounds == WARN_AFTER and not search.num_differing:
            log.warning(
                "no prompt of %d batches has answers that differ in algorithm.filter_groups.metric; acc is the "
                "reward function's alone, seq_reward includes the environment's rewards",
                WARN_AFTER,
            )

    def take(self) -> tuple[DataProto, Metrics]:
        """Take the step's batch, the groups that have waited longest, and the metrics of all groups.

        In the metrics, groups_from_before + groups_answered - groups_without_spread = size + groups_kept.
        """
        batch = _joined(self._waiting[: self.size])
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
            )  # over all answered prompts, used or not
        self._tell("")
        self.search = Search(len(self._waiting))
        return batch, metrics

    # ----------------------------------------------------------------------------- between two steps

    @property
    def waiting(self) -> DataProto:
        """All waiting groups, for a checkpoint."""
        return _joined(self._waiting) if self._waiting else DataProto()

    def restore(self, num_batches: int, waiting: DataProto, n: int, search: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Args:
            num_batches: batches answered before it.
            waiting: rows of the waiting groups.
            n: answers in each group.
            search: the Search of a step that a stop interrupted, as a dict.

        Raises:
            CheckpointFailed: the rows are not groups of n answers to one prompt.
        """
        groups = waiting.split(n) if len(waiting) else []
        if any(len(group) != n or len(set(group["uid"])) != 1 for group in groups):
            raise CheckpointFailed(f"the {len(waiting)} waiting rows are not groups of {n} answers to a prompt")
        self.num_batches = num_batches
        self._waiting = groups
        self.search = Search(**{"num_before": len(groups), **search})


def _joined(groups: Sequence[DataProto]) -> DataProto:
    """Concatenate groups. The extra information of scores, which only metrics read, is empty where absent.

    After a resume some groups have it and others do not: the run may score with another function now, or
    validate with several responses (rolemesh.methods.reward_methods).
    """
    if any(EXTRA in group for group in groups):
        extra = [DataProto.from_dict({}, {EXTRA: [{}] * len(group)}) for group in groups]
        groups = [g if EXTRA in g else g.union(e) for g, e in zip(groups, extra, strict=True)]
    return DataProto.concat(groups)
