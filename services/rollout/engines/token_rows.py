"""Conversions for an engine that asks servers or a library for each response: prompts to token lists, and
responses to columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch

SEED_BITS = 2**63 - 1  # makes a seed non-negative; vLLM reads a seed of -1 as no seed
STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio; keeps seeds of a row's later parts far from other rows'


def num_begun(prompts: DataProto) -> Tensor:
    """Return how many response tokens each row has already [B] int64: 0 without `turns`."""
    if "turns" not in prompts:
        return torch.zeros(len(prompts), dtype=torch.int64)
    begun: Tensor = (prompts["turns"] != 0).sum(1)
    return begun


def check_turns(prompts: DataProto) -> None:
    """Check the responses so far of a request.

    Raises:
        InvalidBatch: there is only one of `responses` and `turns`, non-zero turns do not come first, or a row
            has no room for another token.
    """
    given = [name for name in ("responses", "turns") if name in prompts]
    if not given:
        return
    if len(given) == 1:
        raise InvalidBatch(
            "rollout.generate needs both of the columns 'responses' and 'turns' to continue rows, or neither; "
            f"got {given}"
        )
    turns = prompts["turns"]
    has_token = turns != 0
    if (bad := (has_token.int().diff(dim=1) > 0).nonzero()).numel():
        row, before = bad[0].tolist()
        raise InvalidBatch(
            f"rollout.generate: column 'turns', row {row}, position {before + 1}, is {turns[row, before + 1]} "
            "after a 0; 0 only beyond the end of the response so far expected"
        )
    if (full := has_token.all(1).nonzero()).numel():
        raise InvalidBatch(
            f"rollout.generate: column 'turns', row {int(full[0])}, has {turns.shape[1]} tokens already; fewer "
            f"than T = {turns.shape[1]} (data.max_response_length) expected, so that another has room"
        )


@dataclass(frozen=True)
class RowToGenerate:
    """A row of a request.

    Args:
        row: its position in the request.
        tokens: of its prompt, without padding, and of its response so far.
        begun: number of tokens of its response so far.
        seed: of the tokens to come, 0 or more.
    """

    row: int
    tokens: list[int]
    begun: int
    seed: int


def rows_to_generate(prompts: DataProto) -> Iterator[RowToGenerate]:
    """Yield the rows of a request."""
    ids = prompts["prompts"]
    mask = prompts["prompt_mask"].bool()
    begun = num_begun(prompts).tolist()
    for row, seed in enumerate(prompts["seeds"].tolist()):
        so_far = prompts["responses"][row, : begun[row]].tolist() if begun[row] else []
        tokens = ids[row][mask[row]].tolist() + so_far
        yield RowToGenerate(row, tokens, begun[row], seed_from(seed, begun[row]))


def seed_from(seed: int, begun: int) -> int:
    """Return the seed of a row's tokens from token `begun` on, 0 or more."""
    return (seed + STRIDE * begun) & SEED_BITS


def blank_answer(rows: Sequence[int], num_tokens: int, *, pad: int, num_kept: int) -> dict[str, Tensor]:
    """Make the columns of Engine.generate's answer, without tokens yet.

    Args:
        rows: positions of the rows in the request.
        num_tokens: T, the width of the columns.
        pad: the token that fills `responses`.
        num_kept: K of `kept_ids` [b, T, K]; 0 leaves the column out.
    """
    shape = (len(rows), num_tokens)
    columns = {
        "row": torch.tensor(rows),
        "responses": torch.full(shape, pad),
        "response_mask": torch.zeros(shape, dtype=torch.bool),
        "rollout_log_probs": torch.zeros(shape),
        "weight_versions": torch.full(shape, -1),
    }
    if num_kept:
        columns["kept_ids"] = torch.full((*shape, num_kept), -1, dtype=torch.int32)
    return columns
