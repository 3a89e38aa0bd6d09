"""How rows are cut for forward passes: what is in memory at a time, and never the result."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.model import ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch


@dataclass(frozen=True)
class MicroBatches:
    """How a role's rows are cut.

    Args:
        num_rows: rows of a micro-batch, where max_tokens is None.
        max_tokens: tokens that a micro-batch may have; the job's max_tokens_key says so.
        packed: whether padding is left out; if not, every row counts with its full width.
        balanced: micro-batches of num_rows get about as many tokens each; else rows stay in order.
    """

    num_rows: int
    max_tokens: int | None
    packed: bool
    balanced: bool
    max_tokens_key: str = ""

    @classmethod
    def of(cls, job: JobConfig, role: str, model: ModelConfig, num_rows: int) -> MicroBatches:
        """Those of the job's actor, critic or reference."""
        packed, balanced = model.use_remove_padding, job.trainer.balance_batch
        return cls(num_rows, job.max_tokens(role), packed, balanced, job.max_tokens_key(role))

    def cut(self, batch: DataProto) -> list[Tensor]:
        """The rows of each micro-batch, ascending. Without padding what rows have in common at the beginning is
        computed once, so answers to one prompt stay together: with max_tokens where that makes one pass more at
        most; with num_rows in units of as many rows as divide it and every prompt's.

        Args:
            batch: input_ids, attention_mask [B, S]; response_mask [B, T].

        Raises:
            InvalidBatch: a row has more tokens than max_tokens.
        """
        mask = batch["attention_mask"]
        if not len(mask):
            return []
        lengths = mask.sum(1).tolist() if self.packed else [mask.shape[1]] * len(mask)
        if self.max_tokens is not None:
            if (longest := max(lengths)) > self.max_tokens:
                raise InvalidBatch(
                    f"row {lengths.index(longest)} has {longest} tokens"
                    + ("" if self.packed else " with its padding")
                    + f", and {self.max_tokens_key} is {self.max_tokens}; set it to that or more"
                )
            parts = within(lengths, self.max_tokens)
            if self.packed and len(parts) > 1:
                parts = together(groups_of(batch), lengths, len(parts), self.max_tokens) or parts
            return [torch.tensor(rows) for rows in parts]
        if self.packed and self.balanced:
            groups = groups_of(batch)
            size = math.gcd(self.num_rows, *map(len, groups))
            units = [rows[at : at + size] for rows in groups for at in range(0, len(rows), size)]
            num_parts = -(-len(lengths) // self.num_rows)
            weights = [sum(lengths[row] for row in unit) for unit in units]
            parts = balance(weights, num_parts, self.num_rows // size)
            parts = [sorted(row for unit in part for row in units[unit]) for part in parts]
            return [torch.tensor(rows) for rows in sorted(parts)]
        return list(torch.split(torch.arange(len(lengths)), self.num_rows))


def groups_of(batch: DataProto) -> list[list[int]]:
    """Rows with the same prompt, those of each ascending."""
    width = batch["input_ids"].shape[1] - batch["response_mask"].shape[1]
    prompts = torch.cat([batch[name][:, :width] for name in ("input_ids", "attention_mask")], 1).cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt.tobytes(), []).append(row)
    return list(groups.values())


def together(
    groups: Sequence[Sequence[int]], lengths: Sequence[int], num_parts: int, max_tokens: int
) -> list[list[int]] | None:
    """Rows group after group, cut into so many parts, or one more, of about as many tokens; None where one of
    them would have more than max_tokens."""
    rows = [row for group in groups for row in group]
    total = sum(lengths)
    for number in (num_parts, num_parts + 1):
        parts: list[list[int]] = [[] for _ in range(number)]
        begins = 0
        for row in rows:
            middle = begins + lengths[row] / 2
            parts[int(middle * number / total)].append(row)
            begins += lengths[row]
        if all(sum(lengths[row] for row in part) <= max_tokens for part in parts):
            return sorted(sorted(part) for part in parts if part)
    return None


def within(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows in as few parts as `balance` finds, none of more than max_tokens, and no row either."""
    num_parts = -(-sum(lengths) // max_tokens)
    while num_parts:
        parts = balance(lengths, num_parts, len(lengths))
        if all(sum(lengths[row] for row in part) <= max_tokens for part in parts):
            return parts
        num_parts += 1
    return []


def balance(lengths: Sequence[int], num_parts: int, max_rows: int) -> list[list[int]]:
    """Rows in parts of about as many tokens: the longest first, each to the part that has the fewest (Graham
    1969, "Bounds on multiprocessing timing anomalies": the fullest part has at most 4/3 of the least possible).

    Args:
        lengths: tokens of each row.
        num_parts: at most as many as there are rows.
        max_rows: no part has more; num_parts times it is at least the number of rows.

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
