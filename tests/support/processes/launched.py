"""`rolemesh run` as a process, and a reward function that waits for the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import forks

from rolemesh.config import JobConfig

DEADLINE_S = 240  # five processes import torch on a busy machine

# Reports that the first training row is being scored, and waits for permission to continue.
GATED = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info, started, go_on, marker):
    if extra_info["split"] == "train" and not os.path.exists(marker):
        open(marker, "w").close()
        for path, flags, act in ((started, os.O_WRONLY, lambda fd: os.write(fd, b".")),
                                 (go_on, os.O_RDONLY, lambda fd: os.read(fd, 1))):
            fd = os.open(path, flags)
            act(fd)
            os.close(fd)
    return sum(character.isdigit() for character in solution_str) / 8
"""


class Launched:
    """A `rolemesh` command and its output."""

    def __init__(self, process: forks.Command) -> None:
        self.process = process

    async def says(self, words: str) -> str:
        """Read its output up to a line with these words."""
        seen = ""
        async with asyncio.timeout(DEADLINE_S):
            while words not in seen:
                line = await self.process.stdout.readline()
                assert line, f"it ended without printing {words!r}; it printed:\n{seen}"
                seen += line.decode()
        return seen

    def ended(self) -> asyncio.Task[int]:
        """Return a task that is done when the process has ended."""
        return asyncio.create_task(self.process.wait())

    async def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the rest of the output."""
        async with asyncio.timeout(DEADLINE_S):
            rest, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, rest.decode()


@asynccontextmanager
async def rolemesh(*arguments: str, executed: bool = False) -> AsyncIterator[Launched]:
    """Start a command: a fork of a process that has imported, or with `executed` as a user starts it."""
    process = await (forks.executed if executed else forks.start)(*arguments)
    try:
        yield Launched(process)
    finally:
        process.kill()
        await process.communicate()


def written(job: JobConfig, directory: Path) -> str:
    path = directory / "job.yaml"
    path.write_text(job.to_yaml())
    return str(path)


def gated(job: JobConfig, directory: Path, *fifos: Path) -> JobConfig:
    """Return the job with a reward function that waits for the test once."""
    function = directory / "gated.py"
    function.write_text(GATED)
    started, go_on = map(str, fifos)
    kwargs = {"started": started, "go_on": go_on, "marker": str(directory / "marker")}
    custom = job.reward.custom_reward_function.model_copy(
        update={"path": str(function), "reward_kwargs": kwargs}
    )
    return job.model_copy(update={"reward": job.reward.model_copy(update={"custom_reward_function": custom})})
