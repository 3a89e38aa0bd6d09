"""Rows of three turns for engine hf: a job, a worker, and the exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from generation import P, generated, prompts_of
from turns import conversation

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.services.rollout.worker import RolloutWorker

LONG = 64  # T of most tests here
ADDED = [[(1, 5, 17)[(row + turn) % 3] for row in range(13)] for turn in range(2)]


def job_of(model: Path, **rollout: Any) -> JobConfig:
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": P, "max_response_length": LONG},
            "rollout": {"temperature": 1.0, **rollout},
            "trainer": {"default_local_dir": str(model / "runs"), "device": "cpu"},
        }
    )


@contextmanager
def worker_of(model: Path, **rollout: Any) -> Iterator[RolloutWorker]:
    with closing(RolloutWorker(job_of(model, top_k=200, top_p=0.99, **rollout))) as worker:
        yield worker


async def three_turns(worker: RolloutWorker) -> list[tuple[DataProto, DataProto]]:
    return await conversation(prompts_of(13), LONG, ADDED, [partial(generated, worker)] * 3)
