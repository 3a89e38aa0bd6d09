"""A small job and its roles in this process, for tests of the controller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors import WITHOUT_CHECKPOINTING
from documented import undocumented

from rolemesh.config import JobConfig
from rolemesh.config.base import merge, parse_overrides
from rolemesh.config.job import make_job
from rolemesh.data.parquet import write_rows
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Roles
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import read_metrics
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.environment.worker import EnvironmentWorker
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.worker_context import WorkerContext

WORKERS: dict[str, Any] = {
    "actor": ActorWorker,
    "rollout": RolloutWorker,
    "reference": ReferenceWorker,
    "critic": CriticWorker,
    "reward": RewardWorker,
    "environment": EnvironmentWorker,
}

# Rewards digits, which a random model sometimes generates.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(character.isdigit() for character in solution_str) / 8
"""


def write_data(directory: Path, name: str, num_rows: int) -> str:
    rows = [
        {
            "data_source": "digits" if i % 2 else "numbers",
            "prompt": [{"role": "user", "content": f"{i}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": name, "index": i},
        }
        for i in range(num_rows)
    ]
    return str(write_rows(directory / f"{name}.parquet", rows))


def small_job(directory: Path, model: Path, run: str, *overrides: str) -> JobConfig:
    """Make a PPO job: four prompts a step, two responses each, adaptive KL if the reward has a KL penalty."""
    (directory / "reward.py").write_text(REWARD)
    base: dict[str, Any] = {
        "algorithm": {
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.01, "horizon": 100},
        },
        "data": {
            "train_files": write_data(directory, "train", 10),
            "val_files": write_data(directory, "val", 3),
            "train_batch_size": 4,
            "max_prompt_length": 48,
            "max_response_length": 8,
        },
        "actor": {
            "model": {"path": str(model)} | WITHOUT_CHECKPOINTING,
            "optim": {"lr": 1e-3},
            "ppo_mini_batch_size": 2,
            "ppo_micro_batch_size_per_gpu": 2,
            "shuffle": True,
        },
        "rollout": {"n": 2},
        "critic": {
            "model": {**WITHOUT_CHECKPOINTING},
            "optim": {"lr": 1e-3},
            "ppo_micro_batch_size_per_gpu": 4,
        },
        "reward": {"custom_reward_function": {"path": str(directory / "reward.py")}, "num_workers": 1},
        "trainer": {
            "experiment_name": run,
            "default_local_dir": str(directory / run),
            "total_training_steps": 4,
            "logger": ["file"],
            "device": "cpu",
        },
    }
    sections = merge(base, parse_overrides(overrides))
    if not sections["algorithm"]["use_kl_in_reward"]:
        del sections["algorithm"]["kl_ctrl"]  # no KL penalty to adapt
    return make_job(sections)


@contextmanager
def workers(job: JobConfig) -> Iterator[Roles]:
    """Make the job's roles as workers in this process."""
    made: dict[str, LocalWorker] = {role: WORKERS[role](job, WorkerContext.of(job, role)) for role in job.roles}
    try:
        yield Roles.of(job, made)
    finally:
        for worker in made.values():
            worker.close()


async def train(job: JobConfig) -> Summary:
    """Run the whole job with new workers, as a new process would. docs/metrics.md must have every metric."""
    with workers(job) as roles:
        summary = await Run(job, load_tokenizer(job.actor.model)).train(roles)
    assert not (names := undocumented(summary.records)), names
    return summary


CLOCKS = ("timing_s/", "perf/throughput", "ended_at")


def recorded(job: JobConfig) -> list[dict[str, float | None]]:
    """Read metrics.jsonl without clock times: every loss, score and norm of every step."""
    records = read_metrics(job.run_dir / "metrics.jsonl")
    return [{key: value for key, value in r.items() if not key.startswith(CLOCKS)} for r in records]
