"""Counts the starts of a run that reach no new checkpoint, so that a run that cannot go on ends.

    <run directory>/attempts.json    starts since `latest` was last written, and how the last one ended

A start counts while it prepares and while it trains, however it ends: an error, lack of memory, a lost role. It
does not count while it waits for roles that have no pod, since no node may have room for them, nor if somebody
ends it by a signal, nor if its input is wrong, which ends the run anyway.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rolemesh.errors import WRONG_INPUT, RolemeshError, RoleUnavailable
from rolemesh.services.controller.run.checkpoints import write_durably

log = logging.getLogger(__name__)

FILE = "attempts.json"
KILLED = "killed, or out of memory"
COUNTED = 75  # exit code of a start that is counted here, or that waited for nodes


class NoProgress(RolemeshError, RuntimeError):
    """Too many starts of a run have reached no new checkpoint. The message says how the last one ended."""

    exit_code = 3


class Attempts:
    """The starts of a run.

    Args:
        run_dir: the run directory, which this process has locked.
        limit: starts without a new checkpoint; 0: no limit, and nothing is counted.
    """

    def __init__(self, run_dir: Path, limit: int) -> None:
        self._run_dir, self._limit = run_dir, limit
        self._file = run_dir / FILE
        self._before = 0  # earlier starts since the last checkpoint
        self._checkpoint = ""  # the newest at this start; if the next one finds another, the count is 0
        self._last_error = ""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count this start until it ends.

        Raises:
            NoProgress: as many starts as the limit have reached no new checkpoint. They are forgotten, so that
                somebody who has mended the cause can start the run again.
        """
        if not self._limit:
            yield
            return
        self._read()
        if self._before >= self._limit:
            self._file.unlink()
            raise NoProgress(
                f"the run in {self._run_dir} was started {self._before} times and reached no new checkpoint; "
                f"the last start ended so: {self._last_error or KILLED}. Mend that, and start the run again. "
                "If it only needs longer, raise the limit (rolemesh control --max-attempts; "
                "controller.maxAttempts of the chart), or lower trainer.save_freq"
            )
        if self._before:
            log.warning(
                "start %d of at most %d without a new checkpoint; the last one ended so: %s",
                self._before + 1,
                self._limit,
                self._last_error or KILLED,
            )
        self._last_error = ""
        self._write(self._before + 1)
        try:
            yield
        except WRONG_INPUT:
            self._write(self._before)
            raise
        except Exception as error:
            self._last_error = f"{type(error).__name__}: {error}"
            self._write(self._counted)
            if isinstance(error, RolemeshError):
                error.exit_code = COUNTED
            raise
        except BaseException:  # asked to end
            self._write(self._before)
            raise
        self._file.unlink(missing_ok=True)

    @contextmanager
    def waiting(self, have_pods: Callable[[], bool]) -> Iterator[None]:
        """Do not count while the run waits for its roles, but count a wait that failed though all have pods.

        Args:
            have_pods: whether each role has a pod on some node, ready or not.
        """
        self._write(self._before)
        try:
            yield
        except RoleUnavailable:
            if have_pods():
                self._write(self._before + 1)
            raise
        except Exception:
            self._write(self._before + 1)
            raise
        self._write(self._before + 1)

    def _read(self) -> None:
        """Take over what earlier starts have written, unless the run has a new checkpoint since."""
        self._checkpoint = _newest(self._run_dir)
        if not self._file.exists():
            return
        try:
            known: dict[str, Any] = dict(json.loads(self._file.read_text(encoding="utf-8")))
            if known["checkpoint"] == self._checkpoint:
                self._before, self._last_error = int(known["starts"]), str(known["last_error"])
        except (ValueError, TypeError, KeyError) as error:
            log.warning("%s cannot be read, so starts are counted from 0: %s", self._file, error)

    def _write(self, starts: int) -> None:
        self._counted = starts
        if self._limit:
            known = {"checkpoint": self._checkpoint, "starts": starts, "last_error": self._last_error}
            write_durably(self._file, json.dumps(known, indent=1) + "\n")


def _newest(run_dir: Path) -> str:
    """Return the name of the newest checkpoint and when it was committed; one can be made a second time."""
    pointer = run_dir / "latest"
    return f"{pointer.read_text().strip()} {pointer.stat().st_mtime_ns}" if pointer.exists() else ""
