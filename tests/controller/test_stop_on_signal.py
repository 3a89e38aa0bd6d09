"""A first signal stops a run after its step, also where nobody reads what the run prints."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import small_job

from rolemesh.services.controller.main import new_run
from rolemesh.services.controller.service.status import State
from rolemesh.services.controller.stop_on_signal import StopOnSignal


def unread_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk() -> io.TextIOWrapper:
    return open("/dev/full", "w")


@pytest.mark.parametrize("output", [unread_pipe, full_disk])
async def test_ctrl_c_stops_a_run_after_its_step_though_stdout_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Callable[[], io.TextIOWrapper]
) -> None:
    """As of `rolemesh run job.yaml | tee run.log`: Ctrl-C ends tee, too, before the run prints its line."""
    came = asyncio.Event()
    with output() as stdout:  # closing it flushes it, as the end of a process does
        monkeypatch.setattr(sys, "stdout", stdout)
        run = new_run(small_job(tmp_path, tiny_model, "run"))
        run.status.set(state=State.RUNNING)
        with StopOnSignal(run, came.set):
            signal.raise_signal(signal.SIGINT)
            await came.wait()
            assert run.status.state is State.STOPPING
            run.display.console.print("a later line")
        monkeypatch.undo()
