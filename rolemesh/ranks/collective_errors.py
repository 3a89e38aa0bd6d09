"""Errors that every rank raises if one does, so that no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rolemesh.errors import CheckpointFailed, InvalidConfig, ModelNotFound, WeightsUnavailable
from rolemesh.home import OutsideHome
from rolemesh.ranks.ranks import Ranks

KINDS = {
    kind.__name__: kind
    for kind in (CheckpointFailed, InvalidConfig, ModelNotFound, WeightsUnavailable, OutsideHome, ValueError)
}
MAX_TEXT_BYTES = 8192


@contextmanager
def raise_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Run a block on every rank. If it fails on any, every rank raises the error of the first that failed.

    Within the block a rank may fail only where no other rank waits for it. Errors of types that are not in
    KINDS become an OSError. With one rank they pass through.
    """
    if ranks.size == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    first = ranks.size - ranks.most(ranks.size - ranks.rank if failure else 0)
    if first < ranks.size:
        kind, _, text = broadcast_text(ranks, f"{type(failure).__name__}:{failure}", first).partition(":")
        raise KINDS.get(kind, OSError)(text) from failure


def on_first(ranks: Ranks, function: Callable[..., object], *args: Any) -> None:
    """Call a function on rank 0 alone. If it fails, every rank raises its error."""
    with raise_on_all_ranks(ranks):
        if ranks.rank == 0:
            function(*args)


def broadcast_text(ranks: Ranks, text: str, speaker: int = 0) -> str:
    """Return one rank's text on every rank; the others' texts are ignored. At most MAX_TEXT_BYTES are kept."""
    if ranks.size == 1:
        return text
    data = text.encode()[:MAX_TEXT_BYTES] if ranks.rank == speaker else b""
    cells = torch.zeros(ranks.most(len(data)), dtype=torch.int32)
    cells[: len(data)] = torch.tensor(list(data), dtype=torch.int32)
    return bytes(ranks.total(cells).tolist()).decode(errors="ignore") if len(cells) else ""


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Return every rank's text, in the order of the ranks. At most MAX_TEXT_BYTES of each are kept."""
    data = text.encode()[:MAX_TEXT_BYTES]
    sizes = ranks.all_numbers(len(data))
    cells = torch.zeros(ranks.size, max(sizes), dtype=torch.int32)
    cells[ranks.rank, : len(data)] = torch.tensor(list(data), dtype=torch.int32)
    rows = ranks.total(cells).tolist()
    return [bytes(row[:size]).decode(errors="ignore") for row, size in zip(rows, sizes, strict=True)]
