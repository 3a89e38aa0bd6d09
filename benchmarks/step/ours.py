"""The same step by a page of ours, on roles in this process or on five that serve.

python -m benchmarks.step.ours WORKLOAD grpo|ppo [--served] [KEY=VALUE ...]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.step import turns
from benchmarks.step.computing import Computing
from benchmarks.step.setting import (
    CRITIC_LEARNING_RATE,
    GROUP,
    KL_COEF,
    LEARNING_RATE,
    MICRO_BATCH,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SEQUENCES,
)
from rolemesh.algos.kl import KLController
from rolemesh.config import JobConfig
from rolemesh.config.base import merge, parse_overrides
from rolemesh.config.job import make_job
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.graph import observer
from rolemesh.models import sequence
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Roles
from rolemesh.services.actor import worker as actor
from rolemesh.services.controller.pages.choice import page_of
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.controller.run.stopwatch import Stopwatch, timed
from rolemesh.services.controller.stages.bypass import bypassing
from rolemesh.services.critic import worker as critic
from rolemesh.services.processes.role_processes import role_processes
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.services.rollout.engines.hf import engine as hf
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.wire.allocator import tune
from rolemesh.workers.lease import Lease
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

WORKERS: dict[str, Callable[[JobConfig, WorkerContext], Any]] = {
    "actor": actor.ActorWorker,
    "rollout": RolloutWorker,
    "reward": lambda job, worker_context: RewardWorker(job),  # rules score beside the models
    "critic": critic.CriticWorker,
    "reference": actor.ReferenceWorker,
}


def job_of(workload: Path, algorithm: str, run_dir: str, overrides: list[str]) -> JobConfig:
    """One optimizer step for each batch, as everybody makes it. A forward pass has at most as many tokens as
    the others' have cells."""
    group = GROUP[algorithm]
    max_tokens = MICRO_BATCH * (PROMPT_TOKENS + RESPONSE_TOKENS)
    trained = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": max_tokens}
    model: dict[str, Any] = {"enable_gradient_checkpointing": False}
    sections: dict[str, Any] = {
        "data": {
            "train_files": str(workload / "train.parquet"),
            "train_batch_size": SEQUENCES // group,
            "max_prompt_length": PROMPT_TOKENS,
            "max_response_length": RESPONSE_TOKENS,
        },
        "actor": {
            "model": {"path": str(workload / "model"), **model},
            "optim": {"lr": LEARNING_RATE},
            "ppo_mini_batch_size": SEQUENCES // group,
            **trained,
        },
        "critic": {"model": model, "optim": {"lr": CRITIC_LEARNING_RATE}, **trained},
        "reference": {"model": model, "log_prob_micro_batch_size_per_gpu": MICRO_BATCH},
        "rollout": {"n": group, "max_num_seqs": SEQUENCES},
        "reward": {"custom_reward_function": {"path": str(Path(__file__).with_name("reward.py"))}},
        "trainer": {"device": "cpu", "default_local_dir": run_dir, "total_training_steps": 1000},
    }
    kl: dict[str, dict[str, Any]] = {
        "grpo": {
            "algorithm": {"adv_estimator": "grpo"},
            "actor": {"use_kl_loss": True, "kl_loss_coef": KL_COEF},
        },
        "ppo": {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": KL_COEF}}},
    }
    return make_job(merge(merge(sections, kl[algorithm]), parse_overrides(overrides)))


async def served(job: JobConfig, stack: AsyncExitStack) -> Roles:
    """Clients of a process for each role."""
    processes = await stack.enter_async_context(role_processes(job))
    addresses = await processes.addresses(job.trainer.ready_timeout_s)
    clients: dict[str, Any] = {
        role: await stack.enter_async_context(new_client(role, addresses[role], job)) for role in job.roles
    }
    await until_ready(clients.values(), job.trainer.ready_timeout_s)
    return Roles(**clients)


@dataclass
class Staying:
    """A role that takes turns, and need not leave memory for others: there is enough."""

    role: str

    async def sleep(self) -> int:
        return 0

    async def wake(self) -> int:
        return 0


async def on_one_thread(
    builders: Mapping[str, Callable[[WorkerContext], Any]], lease: Lease | None = None
) -> dict[str, Any]:
    """Workers, loaded on one thread, on which their models compute; rules score beside it."""
    worker_context = WorkerContext(ComputingThread("models"), lease)
    loop = asyncio.get_running_loop()
    return {
        name: await loop.run_in_executor(worker_context.thread, build, worker_context)
        for name, build in builders.items()
    }


async def taking_turns(job: JobConfig) -> Roles:
    """Workers that share a device and a thread, as with placement collocate."""
    lease = Lease()
    workers = await on_one_thread({role: partial(WORKERS[role], job) for role in job.roles}, lease)
    for role, worker in workers.items():
        if not isinstance(worker, RewardWorker):
            await lease.vacate()
            lease.add(Staying(role))
    return Roles(**workers)


def stepper(job: JobConfig, roles: Roles) -> Callable[[int], Awaitable[dict[str, Any]]]:
    """Makes step `number` as the loop does: prompts out of the Parquet file, the page, the step's metrics."""
    data = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    order = PromptOrder(len(data), job.data)
    kl = KLController(job.algorithm.kl_ctrl)
    page = page_of(job)
    stopwatch = Stopwatch()
    observer.set(stopwatch)
    roles = bypassing(timed(roles, stopwatch), job)

    async def one_step(number: int) -> dict[str, Any]:
        began = time.perf_counter()
        step = Step(number, job, kl)
        await page(data.batch(order.rows(number)), roles, step)
        seconds = time.perf_counter() - began
        assert step.batch is not None
        return {
            "seconds": seconds,
            "phases": {name.removeprefix("timing_s/"): s for name, s in stopwatch.take().items()},
            "response_tokens": int(step.batch["response_mask"].sum()),
        }

    return one_step


async def compete(workload: Path, algorithm: str, arguments: list[str]) -> None:
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory())
        overrides = [argument for argument in arguments if argument != "--served"]
        job = job_of(workload, algorithm, directory, overrides)
        threads = torch.get_num_threads()
        computing = None
        if "--served" in arguments:
            roles = await served(job, stack)
        else:
            roles = await taking_turns(job)
            computing = Computing()
            computing.watch(
                (sequence, "distribution_stats"),
                (hf, "sample"),
                (actor, "policy_objective"),
                (critic, "value_objective"),
                (torch.nn.utils, "clip_grad_norm_"),
            )
            torch.set_num_threads(1)  # of this thread, which computes little
        one_step = stepper(job, roles)
        number = 0
        turns.answer({"threads": threads})
        while await asyncio.to_thread(turns.wait):
            number += 1
            if computing:
                computing.take()
            result = await one_step(number)
            turns.answer(result | (computing.take() if computing else {}))


if __name__ == "__main__":
    turns.begin()
    tune()
    asyncio.run(compete(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
