"""Traced calls that do not end as they should, of workers that share a process and so torch's one profiler."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from pathlib import Path

import torch

from rolemesh import context as origin
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.workers.local import LocalWorker, on_worker_thread
from rolemesh.workers.traces import Traces


class ToldTraces(Traces):
    """The real ones, which say when a call asks for the profiler."""

    def __init__(self, job: JobConfig, role: str) -> None:
        super().__init__(job, role)
        self.asked = threading.Event()

    def begin(self) -> None:
        self.asked.set()
        super().begin()


class Adder(LocalWorker):
    def __init__(self, job: JobConfig, role: str) -> None:
        super().__init__(role)
        self.traces: ToldTraces = ToldTraces(job, role)

    @on_worker_thread
    def add(self) -> float:
        return float((torch.ones(4) + 1).sum())


async def test_a_call_that_is_cancelled_while_it_waits_for_the_profiler_gives_it_back(tmp_path: Path) -> None:
    job = make_job({"trainer": {"default_local_dir": str(tmp_path), "profile_steps": [1]}})
    origin.step.set(1)
    holder, other = Adder(job, "actor"), Adder(job, "critic")
    async with asyncio.timeout(60):
        async with holder.traced("add"):
            waiting = asyncio.create_task(other.add())
            await asyncio.to_thread(other.traces.asked.wait)
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert [await other.add(), await holder.add(), await other.add()] == [8, 8, 8]
    other.close()
    holder.close()
    trace = json.loads(gzip.decompress((job.profile_dir(1) / "critic.json.gz").read_bytes()))
    assert sum(event["name"] == "critic.add" for event in trace["traceEvents"]) == 2
