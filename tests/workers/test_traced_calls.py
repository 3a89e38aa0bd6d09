"""Traced calls that do not end as they should, of workers that share a process and so torch's one profiler."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import re
import threading
from pathlib import Path

import pytest
import torch

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.home import Home
from rolemesh.telemetry import context as origin
from rolemesh.workers import traces
from rolemesh.workers.local import LocalWorker, on_worker_thread
from rolemesh.workers.traces import Traces
from rolemesh.workers.worker_context import ComputingThread, WorkerContext


class WatchedTraces(Traces):
    """The real ones, which say when a call asks for the profiler."""

    def __init__(self, job: JobConfig, role: str) -> None:
        super().__init__(job, role)
        self.asked = threading.Event()

    def begin(self) -> None:
        self.asked.set()
        super().begin()


class Adder(LocalWorker):
    def __init__(self, job: JobConfig, role: str) -> None:
        self.watched = WatchedTraces(job, role)
        super().__init__(role, WorkerContext(ComputingThread(role), traces=self.watched))

    @on_worker_thread
    def add(self) -> float:
        return float((torch.ones(4) + 1).sum())


async def test_a_call_cancelled_while_waiting_gives_the_profiler_back(tmp_path: Path) -> None:
    job = make_job({"trainer": {"default_local_dir": str(tmp_path), "profile_steps": [1]}})
    origin.step.set(1)
    holder, other = Adder(job, "actor"), Adder(job, "critic")
    async with asyncio.timeout(60):
        async with holder.traced("add"):
            waiting = asyncio.create_task(other.add())
            await asyncio.to_thread(other.watched.asked.wait)
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert [await other.add(), await holder.add(), await other.add()] == [8, 8, 8]
    other.close()
    holder.close()
    trace = json.loads(gzip.decompress((job.profile_dir(1) / "critic.json.gz").read_bytes()))
    assert sum(event["name"] == "critic.add" for event in trace["traceEvents"]) == 2


async def test_a_profiler_that_cannot_be_made_is_free_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job({"trainer": {"default_local_dir": str(tmp_path), "profile_steps": [1]}})
    origin.step.set(1)
    first, other = Adder(job, "actor"), Adder(job, "critic")
    with monkeypatch.context() as broken:
        broken.setattr(traces, "profile", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await first.add()
    async with asyncio.timeout(60):
        assert [await other.add(), await first.add()] == [8, 8]
    other.close()
    first.close()


async def test_a_trace_goes_on_after_one_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job({"trainer": {"default_local_dir": str(tmp_path), "profile_steps": [1]}})
    origin.step.set(1)
    worker = Adder(job, "actor")

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    await worker.add()
    with monkeypatch.context() as full:
        full.setattr(Home, "file", no_room)
        assert await worker.add() == 8
    await worker.add()
    worker.close()
    trace = json.loads(gzip.decompress((job.profile_dir(1) / "actor.json.gz").read_bytes()))
    assert sum(event["name"] == "actor.add" for event in trace["traceEvents"]) == 2


async def test_a_trace_follows_no_link_and_its_call_is_answered_anyway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "foreign").mkdir()
    job = make_job({"trainer": {"default_local_dir": str(tmp_path / "run"), "profile_steps": [1, 2]}})
    worker = Adder(job, "actor")
    job.profile_dir(1).parent.mkdir(parents=True)
    job.profile_dir(1).symlink_to(tmp_path / "foreign")
    job.profile_dir(2).mkdir()
    (job.profile_dir(2) / "actor.json.gz").symlink_to(tmp_path / "foreign" / "file")
    for step in (1, 2):
        origin.step.set(step)
        caplog.clear()
        assert await worker.add() == 8
        [said] = caplog.messages
        assert re.search(r"actor\.json\.gz was not written: .*(links are not followed|symbolic link)", said)
    assert list((tmp_path / "foreign").iterdir()) == []
    worker.close()
