"""How much of a step the actor and the rollout spend on sharing a GPU: switches and new weights."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.gpu.workload import Missed
from benchmarks.steps import stepper
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.roles import Roles
from rolemesh.services.command_line.arithmetic import write_arithmetic
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.processes.role_processes import role_processes
from rolemesh.telemetry import timeline

STEPS = 3
WANTED = 0.15  # of a step
SYNC = ("publish_weights", "update_weights")


@dataclass(frozen=True)
class Sizes:
    """Of the model and the step: those of Qwen2.5-0.5B on a GPU."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    prompts: int
    responses: int
    tokens: int


SIZES = {
    "cuda": Sizes(896, 24, 14, 4864, 151936, prompts=32, responses=8, tokens=256),
    "cpu": Sizes(64, 2, 4, 128, 512, prompts=4, responses=2, tokens=12),
}


def hybrid(device: str, directory: Path) -> dict[str, Any]:
    """Steps of GRPO where actor and rollout (engine hf) take turns on the device; rules score.

    `shared` is the part of a step in which no role computes or the weights of a step are handed over.
    """
    sizes = SIZES[device]
    job = job_of(directory, sizes, device)
    steps = asyncio.run(timed(job))
    figures = {f"step {number}": step for number, step in enumerate(steps, 1)}
    least = min(step["shared"] for step in steps[1:])  # the first makes memory and chooses kernels
    if device == "cuda" and least > WANTED:
        raise Missed(f"switches and new weights take {least:.0%} of a step; wanted {WANTED:.0%}", figures)
    return figures


async def timed(job: JobConfig) -> list[dict[str, float]]:
    """Make steps with the job's roles in processes; return the seconds of each and of its parts."""
    found = []
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(role_processes(job))
        addresses = await processes.addresses(job.trainer.ready_timeout_s)
        clients = {
            role: await stack.enter_async_context(new_client(role, addresses[role], job)) for role in job.roles
        }
        await until_ready(clients.values(), job.trainer.ready_timeout_s)
        step = stepper(job, Roles(**clients))  # type: ignore[arg-type]
        for number in range(1, STEPS + 1):
            calls: list[timeline.TimedCall] = []
            token = timeline.calls.set(calls)
            began = time.perf_counter()
            await step(number)
            seconds = time.perf_counter() - began
            timeline.calls.reset(token)
            found.append(shares(calls, seconds))
    return found


def shares(calls: list[timeline.TimedCall], seconds: float) -> dict[str, float]:
    """Add up what the device computed, by method; the rest of the step is what sharing it costs."""
    computed: dict[str, float] = {}
    for call in calls:
        for part in call.parts:
            if part.name == timeline.COMPUTES and part.rank is None and not call.name.startswith("reward."):
                computed[call.name] = computed.get(call.name, 0.0) + part.ended - part.began
    useful = sum(value for name, value in computed.items() if not name.endswith(SYNC))
    return {"seconds": seconds, **computed, "shared": 1 - useful / seconds}


def job_of(directory: Path, sizes: Sizes, device: str) -> JobConfig:
    """GRPO on additions, of which nothing is learnt: random weights, and no token ends a response."""
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    write_arithmetic(directory / "data")
    rows = sizes.prompts * sizes.responses
    return make_job(
        {
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
            "data": {
                "train_files": str(directory / "data" / "train.parquet"),
                "train_batch_size": sizes.prompts,
                "max_prompt_length": 32,
                "max_response_length": sizes.tokens,
            },
            "actor": {
                "model": {"path": str(directory / "model"), "enable_gradient_checkpointing": False},
                "ppo_mini_batch_size": sizes.prompts,
                "ppo_micro_batch_size_per_gpu": rows // 8,
            },
            "rollout": {"ignore_eos": True, "n": sizes.responses, "max_num_seqs": rows},
            "placement": {"strategy": "hybrid"},
            "trainer": {"device": device, "default_local_dir": str(directory / "run")},
        }
    )
