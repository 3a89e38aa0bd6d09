"""Counts the starts of a run that reach no new checkpoint, so that a run that cannot go on ends.

    <run directory>/attempts.json    starts since `latest` was last written, and how the last one ended

A start that ends while it prepares or trains counts, whatever ended it: an error, lack of memory, a failed
role. It does not count if it ends while a role has no pod, because no node has room or a node was drained. It
does not count after a signal has asked it to end, nor if its input is wrong, which ends the run anyway. A run
that somebody starts anew, e.g. by `helm upgrade`, has a new count.

Once a start is counted, a file that cannot be written (attempts_file.py) is logged, and never hides how the
start ended.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rolemesh.errors import WRONG_INPUT, RoleFailed, RolemeshError, RoleUnavailable, WeightsUnavailable
from rolemesh.services.controller.run.attempts_file import AttemptsFile

log = logging.getLogger(__name__)

FILE = "attempts.json"
KILLED = "killed, or out of memory"
STUCK = "reached no new checkpoint"
LONGER = (
    ". If it only needs longer, raise the limit (rolemesh control --max-attempts; controller.maxAttempts of "
    "the chart), or lower trainer.save_freq"
)
COUNTED = 75  # exit code of a start that is counted here, or that waited for nodes


class NoProgress(RolemeshError, RuntimeError):
    """Too many starts of a run have reached no new checkpoint. The message says how the last one ended."""

    exit_code = 3


class Attempts:
    """The starts of a run.

    Args:
        run_dir: the run directory, which this process has locked.
        limit: starts without a new checkpoint; 0: no limit, and nothing is counted.
        of: identifies the run as it was started, e.g. by Job and revision; the count of another one is dropped.
        file: holds the count of something else than the run's steps, which no checkpoint resets; None: FILE in
            the run directory.
        failing: what the starts have in common, for the error.
        keeps_file: to forget starts, write 0 instead of deleting the file. So a later start finds a file to
            overwrite, though the disk is full by then.
    """

    def __init__(
        self,
        run_dir: Path,
        limit: int,
        of: str = "",
        file: Path | None = None,
        failing: str = STUCK,
        *,
        keeps_file: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._limit = limit
        self._of = of
        self._failing = failing
        self._file = AttemptsFile(file or run_dir / FILE, of, keeps_file=keeps_file)
        self._latest = None if file else run_dir / "latest"  # a workspace may have any file of this name
        self._checkpoint = "", 0  # the newest at this start, and when it was written
        self._before = 0  # earlier starts since the last checkpoint
        self._counted = 0  # with this one, unless it is forgiven
        self._last_error = ""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count this start until it ends.

        Raises:
            NoProgress: as many starts as the limit have reached no new checkpoint. Scale the roles down, and
                then `forget_unnamed` starts.
            OSError: the count cannot be read, or neither written anew nor overwritten.
        """
        if not self._limit:
            yield
            return
        self._checkpoint = _newest(self._latest)
        self._before, self._last_error = self._file.read(self._checkpoint[0])
        if self._before >= self._limit:
            raise NoProgress(
                f"the run in {self._run_dir} was started {self._before} times and {self._failing}; "
                f"the last start ended so: {self._last_error or KILLED}. Mend that, and start the run again"
                f"{LONGER if self._failing == STUCK else ''}"
            )
        if self._before:
            log.warning(
                "start %d of at most %d; the earlier ones %s, and the last one ended so: %s",
                self._before + 1,
                self._limit,
                self._failing,
                self._last_error or KILLED,
            )
        self._last_error = ""
        self._write(self._before + 1)
        try:
            yield
        except WRONG_INPUT:
            self._try_to_write(self._before)
            raise
        except Exception as error:
            self._last_error = f"{type(error).__name__}: {error}"
            if self._has_new_checkpoint():
                self._before = self._counted = 0
            self._try_to_write(self._counted)
            if isinstance(error, RolemeshError) and self._file.starts >= self._counted:
                error.exit_code = COUNTED
            raise
        except BaseException:  # asked to end
            self._try_to_write(self._before)
            raise
        self.forget()

    def forget(self) -> None:
        """Forget this start and those before. A file that cannot be changed is logged."""
        if not self._limit:
            return
        self._before = 0
        self._last_error = ""
        try:
            self._file.clear(self._checkpoint[0])
        except OSError as error:
            log.warning("earlier starts may count again: %s", error)
        self._counted = 0  # last: until the file says so, a signal has to forgive this start

    def forget_unnamed(self) -> None:
        """Forget the starts of a run that has ended, if they have no name, so that it can be started again.

        Starts with a name (`of`) stay: the run is started again under another one. If this process is killed
        before it has ended, the next start under this name ends like it, instead of waiting for roles that are
        gone.
        """
        if not self._of:
            self.forget()

    def forgive(self) -> None:
        """Do not count this start: somebody has asked it to end, and may kill it if that takes too long."""
        if self._counted:
            self._try_to_write(self._before)

    @contextmanager
    def forgiven_at_sigterm(self) -> Iterator[None]:
        """Forgive this start if SIGTERM ends the process at once, as while it reads its data. It still does.

        It also ends process 1, as in a container. There the kernel ignores a signal without a handler.

        Enter this before `counted`, so that no signal falls between the two.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread gets signals
            return
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def end(number: int, frame: FrameType | None) -> None:
            self.forgive()
            signal.signal(number, before)
            signal.raise_signal(number)
            if before == signal.SIG_DFL:  # process 1 of a container goes on: the kernel drops the signal
                os._exit(128 + number)

        signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is end:  # else somebody has taken its place since
                signal.signal(signal.SIGTERM, before)

    @contextmanager
    def training(self, kept_pods: Callable[[], bool]) -> Iterator[None]:
        """Do not count a start that has lost a role because its pod was taken away: drained, or preempted.

        A trained role that is back before the next call has another life (RoleFailed). One that is lost while
        rollouts take its weights is an error of theirs (WeightsUnavailable).

        Args:
            kept_pods: whether each role has its pod still. A container that failed leaves it there.
        """
        try:
            yield
        except (RoleUnavailable, RoleFailed, WeightsUnavailable):
            if not kept_pods():
                self._try_to_write(self._before)
            raise

    @contextmanager
    def waiting(self, have_pods: Callable[[], bool]) -> Iterator[None]:
        """Do not count while the run waits for its roles, but count a wait that failed though all have pods.

        Args:
            have_pods: whether each role has a pod with an address, ready or not.
        """
        self._try_to_write(self._before)
        try:
            yield
        except RoleUnavailable:
            if have_pods():
                self._try_to_write(self._before + 1)
            raise
        except Exception:
            self._try_to_write(self._before + 1)
            raise
        self._try_to_write(self._before + 1)

    def _has_new_checkpoint(self) -> bool:
        """Find out whether this start has written one, and remember its name. One can be made a second time."""
        before = self._checkpoint
        try:
            self._checkpoint = _newest(self._latest)
        except (OSError, ValueError) as error:  # ValueError: it is no text
            log.warning("%s cannot be read, so it is taken for an old checkpoint: %s", self._latest, error)
        return self._checkpoint != before

    def _try_to_write(self, starts: int) -> None:
        """Write the count. A failure is only logged: how this start goes on or ends matters more."""
        try:
            self._write(starts)
        except OSError as error:
            log.warning("this start may be counted wrongly: %s", error)

    def _write(self, starts: int) -> None:
        self._counted = starts
        if self._limit:
            self._file.write(self._checkpoint[0], starts, self._last_error)


def _newest(latest: Path | None) -> tuple[str, int]:
    """Return the name of the newest checkpoint and when it was committed, in ns; "" and 0 without one.

    The time is that of the file system, which for the same file may differ in the next process (FUSE).
    """
    return (latest.read_text().strip(), latest.stat().st_mtime_ns) if latest and latest.is_file() else ("", 0)
