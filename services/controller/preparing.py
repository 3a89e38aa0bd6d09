"""Implements `rolemesh prepare`: a command that comes before a pod's process.

If it fails in the controller's pod, no controller begins, and nobody would scale the roles down. So there its
failures are counted as a run's starts are, and a run that cannot be prepared ends as one that cannot go on.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rolemesh.config import load_job
from rolemesh.config.yaml_file import read_yaml
from rolemesh.errors import WRONG_INPUT, InvalidConfig, RolemeshError
from rolemesh.process_group import not_started
from rolemesh.services.controller.run.attempts import Attempts, NoProgress
from rolemesh.services.controller.scale_down import Workload, scale_down_in_pod

# Errors of exec that are about the command, and of stat that are about the path. Others may pass, such as EIO
# and ESTALE of NFS, or EAGAIN.
INPUT_ERRNOS = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.ENOEXEC,
    errno.E2BIG,
    errno.EINVAL,
}


class NotPrepared(RolemeshError, RuntimeError):
    """The command failed. Another try may succeed."""


async def refuse_wrong_job(job: Path, scaled_down: Sequence[Workload] = ()) -> None:
    """Check a job file, so that nobody waits for a command in vain. Plug-ins may need what the command creates.

    Args:
        job: its path. A job with plug-ins is not checked.
        scaled_down: workloads to scale to zero if it is wrong.

    Raises:
        InvalidConfig: it is wrong.
    """
    try:
        if not read_yaml(job).get("plugins"):
            load_job(job)
    except WRONG_INPUT:
        await scale_down_in_pod(scaled_down)
        raise


async def prepare(
    command: Sequence[str],
    creates: Path,
    attempts: Attempts,
    *,
    final: int | None = None,
    scaled_down: Sequence[Workload] = (),
) -> None:
    """Run a command, unless what it creates exists.

    Args:
        command: a program and its arguments.
        creates: made by the command.
        attempts: counts the failures since this command last succeeded. They end with exit code COUNTED.
        final: the exit status with which a retry cannot succeed; None: every failure may be retried.
        scaled_down: workloads to scale to zero if there is no retry.

    Raises:
        InvalidConfig: the command cannot be started, or ended with the status `final`; or this process may not
            look for what it creates.
        NoProgress: it has failed as often as `attempts` allows.
        NotPrepared: it failed, or what it creates is not there, or the file system failed.
    """
    try:
        with attempts.forgiven_at_sigterm(), attempts.counted():  # until the command gets the signals
            if await asyncio.to_thread(_is_there, creates):
                return
            await _run(command, creates, attempts, final)
            if not await asyncio.to_thread(_is_there, creates):
                raise NotPrepared(
                    f"`{shlex.join(command)}` of prepare succeeded, but did not create {creates}: correct the "
                    "command, or name the path that it creates last"
                )
    except (*WRONG_INPUT, NoProgress) as error:
        await scale_down_in_pod(scaled_down)
        if isinstance(error, NoProgress):
            attempts.forget_unnamed()
        raise


def _is_there(creates: Path) -> bool:
    """As `creates.exists()`, but an error of the file system is one of this step, so that it is counted."""
    try:
        os.stat(creates)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        failed = InvalidConfig if error.errno in INPUT_ERRNOS else NotPrepared
        raise failed(f"cannot tell whether {creates}, which prepare creates, is there: {error}") from error
    return True


async def _run(command: Sequence[str], creates: Path, attempts: Attempts, final: int | None) -> None:
    """Run the command to its end. It gets the signals of this process, which then ends as by the signal."""
    shown = shlex.join(command)
    got: list[int] = []
    process: asyncio.subprocess.Process | None = None

    def pass_on(number: int) -> None:
        got.append(number)
        attempts.forgive()
        send(number)

    def send(number: int) -> None:
        if process is not None:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, pass_on, number)
    try:
        process = await asyncio.create_subprocess_exec(*command)
        for early in got:  # while it was being started
            send(early)
        status = await process.wait()
    except OSError as error:
        failed = InvalidConfig if error.errno in INPUT_ERRNOS else NotPrepared
        raise failed(
            f"the step of prepare that creates {creates} cannot start `{shown}`: {not_started(command, error)}"
        ) from error
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
    if got:
        raise SystemExit(128 + got[0])
    if status and status == final:
        raise InvalidConfig(f"`{shown}` ended with status {status}, and would do so again; its log says why")
    if status:
        raise NotPrepared(f"`{shown}` ended with status {status}; its log says why")
