"""Conversations by our controller, with rollout and environment as processes of their own.

python -m benchmarks.agents_beside_trl.ours WORKLOAD WAIT_S
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from importlib.metadata import version
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.agents import serving
from benchmarks.agents_beside_trl.setting import (
    CONVERSATIONS,
    GROUP,
    MAX_CALLS,
    PROMPT_TOKENS,
    PROMPTS,
    RESPONSE_TOKENS,
    TOOL,
)
from benchmarks.agents_beside_trl.tool import WAIT_S
from benchmarks.step import turns
from benchmarks.step.contestants import ROOT
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.data.dataset import Agents, PromptDataset
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.conversations.conversation_rollout import ConversationRollout
from rolemesh.services.controller.stages.experience import fan_out


def job_of(workload: Path, run_dir: str) -> JobConfig:
    return make_job(
        {
            "plugins": [str(Path(__file__).with_name("plugin.py"))],
            "algorithm": {"adv_estimator": "grpo"},
            "data": {
                "train_files": str(workload / "train.parquet"),
                "train_batch_size": PROMPTS,
                "max_prompt_length": PROMPT_TOKENS,
                "max_response_length": RESPONSE_TOKENS,
            },
            "actor": {"model": {"path": str(workload / "model")}, "ppo_mini_batch_size": PROMPTS},
            "rollout": {
                "n": GROUP,
                "max_num_seqs": CONVERSATIONS,
                "multi_turn": {"enable": True, "tools": [TOOL], "max_assistant_turns": MAX_CALLS + 1},
                "agent": {"default_agent_loop": "tool_agent"},
            },
            "trainer": {"device": "cpu", "default_local_dir": run_dir},
        }
    )


async def phases(job: JobConfig) -> None:
    """Hold the conversations of a step as often as we are asked."""
    tokenizer = load_tokenizer(job.actor.model)
    data = PromptDataset(job.data.train_files, job.data, tokenizer, agents=Agents("tool_agent"))
    async with serving(job) as (rollout, environment, _):
        talking = ConversationRollout(rollout, environment, job, tokenizer)
        turns.answer({"versions": {"torch": version("torch"), "transformers": version("transformers")}})
        for step in count(1):
            if not await asyncio.to_thread(turns.wait):
                break
            began = time.perf_counter()
            rows = fan_out(data.batch(range(PROMPTS)), GROUP, step, step)
            batch = DataProto.concat([part async for part in talking.generate(rows)])
            seconds = time.perf_counter() - began
            turns.answer({"seconds": seconds, **counted(batch)})


def counted(batch: DataProto) -> dict[str, int]:
    """Return the conversations, the policy's turns and tokens, and the tool's answers of a phase."""
    spoken = batch["turns"]
    answered = torch.stack([(spoken == -(turn + 1)).any(1) for turn in range(1, MAX_CALLS + 2)])
    return {
        "conversations": len(batch),
        "turns": int(spoken.amax(1).sum()),
        "calls": int(answered.sum()),
        "tokens": int(batch["response_mask"].sum()),
    }


def main(workload: str, wait_s: str) -> None:
    turns.begin()
    os.environ |= {WAIT_S: wait_s, "PYTHONPATH": str(ROOT)}  # of the roles: the plug-in imports its neighbours
    with TemporaryDirectory() as directory:
        asyncio.run(phases(job_of(Path(workload), directory)))


if __name__ == "__main__":
    main(*sys.argv[1:])
