"""A progress bar for long work, shown only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield the items while showing a progress bar on standard error, if that is a terminal."""
    with counting(description, total) as count:
        for item in items:
            yield item
            count(1)


@contextmanager
def counting(description: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, and provide a function that adds to what is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(description, total=total, completed=done)
        yield lambda number: progress.advance(task, number)
