"""A progress bar for work that takes more than a moment; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yields the items under a bar on standard error; the bar is drawn on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield from progress.track(items, total=total, description=description)
