"""A reward function that stops at rows of the training data, and waits for the test there."""

from __future__ import annotations

from pathlib import Path

from outcomes import with_reward

from rolemesh.config import JobConfig

# The same scores as in_process.REWARD.
STOPPING = """
import os

seen = 0

def compute_score(data_source, solution_str, ground_truth, extra_info, reached, release, stops):
    global seen
    seen += extra_info["split"] == "train"
    if str(seen) in stops.split() and extra_info["split"] == "train":
        with open(reached, "wb", buffering=0) as file:
            file.write(b".")
        with open(release, "rb", buffering=0) as file:
            file.read(1)
    return sum(character.isdigit() for character in solution_str) / 8
"""


def stopping(job: JobConfig, reached: Path, release: Path, stops: str) -> JobConfig:
    """Return the job with a reward function that writes a byte to `reached` and then reads one from `release`.

    Args:
        job: of in_process.small_job, whose file of the reward function is overwritten.
        reached, release: FIFOs (serving.gate).
        stops: rows of the training data at which it does so, counted in each process of the reward from 1, with
            blanks between them.
    """
    path = job.reward.custom_reward_function.path
    assert path is not None
    Path(path).write_text(STOPPING)
    return with_reward(job, reached=str(reached), release=str(release), stops=stops)
