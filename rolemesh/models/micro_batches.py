"""Splits rows over ranks, and into micro-batches for forward passes. This never changes the result."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.model import ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.models.sequence import contexts
from rolemesh.ranks.ranks import Ranks
from rolemesh.threads import progress

# meta_info of a rank's part of a batch: its only row is another rank's, and does not count.
IS_FILLER = "is_filler"


@dataclass(frozen=True)
class MicroBatches:
    """Settings for splitting a role's rows into micro-batches.

    Args:
        num_rows: rows per micro-batch, used if max_tokens is None.
        max_tokens: the most tokens in a micro-batch.
        packed: whether padding is removed; if not, every row counts with its full width.
        balanced: give micro-batches of num_rows similar numbers of tokens; else keep rows in order. Applies
            only if packed.
        max_tokens_key: the job's key that sets max_tokens, for messages.
    """

    num_rows: int
    max_tokens: int | None
    packed: bool
    balanced: bool
    max_tokens_key: str = ""

    @classmethod
    def of(cls, job: JobConfig, role: str, model: ModelConfig, num_rows: int) -> MicroBatches:
        """Read the settings of the job's actor, critic or reference."""
        packed = model.use_remove_padding
        balanced = job.trainer.balance_batch
        return cls(num_rows, job.max_tokens(role), packed, balanced, job.max_tokens_key(role))

    def cut(self, batch: DataProto) -> list[Tensor]:
        """Split a batch into micro-batches.

        Packed rows compute a shared prefix once, so answers to one prompt are kept together. With max_tokens
        this is done only if it adds at most one micro-batch. With num_rows (and balanced), rows are moved in
        units whose size divides num_rows and the number of rows of every prompt.

        Args:
            batch: input_ids, attention_mask, position_ids [B, S]; response_mask [B, T].

        Returns:
            The rows of each micro-batch, ascending.

        Raises:
            InvalidBatch: a row has more tokens than max_tokens.
        """
        if not len(batch):
            return []
        lengths = self._lengths(batch)
        if self.max_tokens is not None:
            parts = within(lengths, self.max_tokens)
            if self.packed and len(parts) > 1:
                parts = together(groups_of(batch), lengths, len(parts), self.max_tokens) or parts
            return [torch.tensor(rows) for rows in parts]
        if self.packed and self.balanced:
            num_parts = -(-len(lengths) // self.num_rows)
            parts = self._balanced_units(batch, lengths, num_parts, self.num_rows)
            return [torch.tensor(rows) for rows in sorted(parts)]
        return list(torch.split(torch.arange(len(lengths)), self.num_rows))

    def shard(self, batch: DataProto, num_ranks: int) -> list[Tensor]:
        """Divide the rows of a batch among ranks, which all compute at the same time.

        With max_tokens, ranks get similar numbers of tokens. With num_rows they get equal numbers of rows, so
        that they have equally many micro-batches; and similar numbers of tokens, if balanced.

        Args:
            batch: as for `cut`, with one row or more.
            num_ranks: number of ranks.

        Returns:
            The rows of each rank, ascending. Only the last ranks have none, if there are too few rows.

        Raises:
            InvalidBatch: a row has more tokens than max_tokens.
        """
        lengths = self._lengths(batch)
        if self.max_tokens is not None:
            parts = in_order(groups_of(batch), lengths, num_ranks)
        elif self.packed and self.balanced:
            parts = self._balanced_units(batch, lengths, num_ranks, -(-len(lengths) // num_ranks))
        else:
            parts = [rows.tolist() for rows in torch.arange(len(lengths)).tensor_split(num_ranks)]
        parts = sorted(part for part in parts if part)
        return [torch.tensor(part, dtype=torch.int64) for part in parts + [[]] * (num_ranks - len(parts))]

    def passes(self, part: DataProto, ranks: Ranks) -> Iterator[tuple[Tensor, bool]]:
        """Yield the micro-batches of one rank's rows, as many on every rank.

        Sharded weights are gathered in every pass, so a rank with fewer micro-batches computes more of them:
        its shortest row again, which does not count.

        Args:
            part: the rank's rows.
            ranks: all of which call this.

        Yields:
            The rows of a micro-batch; and whether they count.
        """
        cuts = self.cut(part)
        num_passes = ranks.most(len(cuts))
        for at in cuts:
            progress()
            yield at, not part.meta_info.get(IS_FILLER, False)
        for _ in range(num_passes - len(cuts)):
            progress()
            yield part["attention_mask"].sum(1).argmin()[None].cpu(), False

    def _lengths(self, batch: DataProto) -> list[int]:
        """Return the tokens of each row in a pass, checked against max_tokens."""
        mask = batch["attention_mask"]
        lengths: list[int] = mask.sum(1).tolist()
        if not self.packed:  # each context is computed with its padding
            lengths = (mask.shape[1] * (contexts(mask, batch["position_ids"]).amax(1) + 1)).tolist()
        if self.max_tokens is not None and (longest := max(lengths)) > self.max_tokens:
            raise InvalidBatch(
                f"row {lengths.index(longest)} has {longest} tokens"
                + ("" if self.packed else " with its padding")
                + f", and {self.max_tokens_key} is {self.max_tokens}; set it to at least {longest}"
            )
        return lengths

    def _balanced_units(
        self, batch: DataProto, lengths: Sequence[int], num_parts: int, max_rows: int
    ) -> list[list[int]]:
        """Split rows with `balance`, in units of rows with one prompt."""
        groups = groups_of(batch)
        size = math.gcd(max_rows, *map(len, groups))
        units = [rows[at : at + size] for rows in groups for at in range(0, len(rows), size)]
        weights = [sum(lengths[row] for row in unit) for unit in units]
        parts = balance(weights, num_parts, max_rows // size)
        return [sorted(row for unit in part for row in units[unit]) for part in parts]


def groups_of(batch: DataProto) -> list[list[int]]:
    """Group rows with the same prompt; the rows of each group are ascending."""
    width = batch["input_ids"].shape[1] - batch["response_mask"].shape[1]
    prompts = torch.cat([batch[name][:, :width] for name in ("input_ids", "attention_mask")], 1).cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt.tobytes(), []).append(row)
    return list(groups.values())


def together(
    groups: Sequence[Sequence[int]], lengths: Sequence[int], num_parts: int, max_tokens: int
) -> list[list[int]] | None:
    """Split rows, group after group, into num_parts or num_parts + 1 parts with similar numbers of tokens.

    Return None if a part would have more than max_tokens either way.
    """
    for number in (num_parts, num_parts + 1):
        parts = in_order(groups, lengths, number)
        if all(sum(lengths[row] for row in part) <= max_tokens for part in parts):
            return sorted(part for part in parts if part)
    return None


def in_order(groups: Sequence[Sequence[int]], lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split rows, group after group, into parts with similar numbers of tokens; a part may be empty.

    Returns:
        The rows of each part, ascending.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    total = sum(lengths)
    begins = 0
    for row in (row for group in groups for row in group):
        middle = begins + lengths[row] / 2
        parts[int(middle * num_parts / total)].append(row)
        begins += lengths[row]
    return [sorted(part) for part in parts]


def within(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split rows with `balance` into the fewest parts that have at most max_tokens each.

    No row may have more than max_tokens.
    """
    num_parts = -(-sum(lengths) // max_tokens)
    while num_parts:
        parts = balance(lengths, num_parts, len(lengths))
        if all(sum(lengths[row] for row in part) <= max_tokens for part in parts):
            return parts
        num_parts += 1
    return []


def balance(lengths: Sequence[int], num_parts: int, max_rows: int) -> list[list[int]]:
    """Split rows into parts with similar numbers of tokens: the longest first, each to the smallest part.

    The fullest part has at most 4/3 of the least possible (Graham 1969, "Bounds on multiprocessing timing
    anomalies").

    Args:
        lengths: tokens of each row.
        num_parts: at most the number of rows.
        max_rows: the most rows in a part; num_parts times max_rows is at least the number of rows.

    Returns:
        The rows of each part, ascending; the parts by their first row.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    open_parts = [(0, part) for part in range(num_parts)]  # tokens, part
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, part = heapq.heappop(open_parts)
        parts[part].append(row)
        if len(parts[part]) < max_rows:
            heapq.heappush(open_parts, (tokens + lengths[row], part))
    return sorted(sorted(part) for part in parts)
