"""Guards what comes before a run in its controller's process: the job file, imports, the run directory's lock.

The run counts its starts in its directory (run/attempts.py), once it has locked it. A start that ends before
that, e.g. for lack of memory, is counted here. So a run that cannot begin ends as one that cannot go on. This
module imports neither torch nor numpy, which may take more memory than there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rolemesh.errors import WRONG_INPUT
from rolemesh.services.controller.run.attempts import Attempts, NoProgress
from rolemesh.services.controller.scale_down import Workload, scale_down_in_pod

log = logging.getLogger(__name__)


@contextmanager
def start_guard(
    counts_in: Path | None, limit: int = 0, of: str = "", scaled_down: Sequence[Workload] = ()
) -> Iterator[Callable[[], None]]:
    """Count this start until the run counts it.

    Args:
        counts_in: file of the count; None: nothing is counted.
        limit: starts in a row that may end before that; 0: no limit, and nothing is counted.
        of: as in Attempts.
        scaled_down: workloads to scale to zero if a retry would not help.

    Yields:
        A function to call when the run counts this start. It forgets those before, and leaves the file with a
        count of 0. What fails afterwards is the run's to handle.

    Raises:
        NoProgress: as many starts as the limit have ended before that.
    """
    limit = limit if counts_in else 0
    attempts = Attempts(Path.cwd(), limit, of, counts_in, "did not begin", keeps_file=True)
    has_begun = False
    with attempts.forgiven_at_sigterm(), ExitStack() as count:

        def begin() -> None:
            nonlocal has_begun
            has_begun = True
            count.close()
            attempts.forget()  # also those before a start that could not be counted

        try:
            try:
                count.enter_context(attempts.counted())
            except OSError as error:  # e.g. a full workspace, while the run directory is elsewhere
                log.warning("starts that end before the run begins are not counted: %s", error)
            yield begin
        except (*WRONG_INPUT, NoProgress) as error:
            if not has_begun:
                asyncio.run(scale_down_in_pod(scaled_down))
                if isinstance(error, NoProgress):
                    attempts.forget_unnamed()
            raise
