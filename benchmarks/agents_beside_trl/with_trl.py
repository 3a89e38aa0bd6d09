"""Conversations by TRL's GRPOTrainer with `tools`, in an environment of its own: rolemesh is not there.

python -m benchmarks.agents_beside_trl.with_trl WORKLOAD WAIT_S [--continuous]
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template

from benchmarks.agents_beside_trl.setting import CONVERSATIONS, GROUP, MAX_CALLS, RESPONSE_TOKENS
from benchmarks.agents_beside_trl.tool import WAIT_S, lookup
from benchmarks.step import turns


class Asked(trl.GRPOTrainer):  # type: ignore[misc]
    """Stays at its first generation phase, and makes it anew as often as it is asked."""

    def _generate(self, prompts: list[Any]) -> Any:
        turns.answer({"versions": {name: version(name) for name in ("trl", "transformers", "torch")}})
        while turns.wait():
            began = time.perf_counter()
            made = super()._generate(prompts)
            seconds = time.perf_counter() - began
            turns.answer({"seconds": seconds, **counted(made)})
        raise SystemExit


def counted(made: tuple[Any, ...]) -> dict[str, int]:
    """Return the conversations, the policy's turns and tokens, and the tool's answers of a phase."""
    _, _, tool_mask, completions, *_ = made
    messages = [message for completion in completions for message in completion]
    roles = [message["role"] for message in messages]
    return {
        "conversations": len(completions),
        "turns": roles.count("assistant"),
        "calls": roles.count("tool"),
        "tokens": sum(map(sum, tool_mask)),
    }


def main(workload: str, wait_s: str, *options: str) -> None:
    turns.begin()
    os.environ[WAIT_S] = wait_s
    path = Path(workload) / "model"
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.response_template = qwen3_template  # TRL sets it itself for templates that it knows
    prompts = json.loads((Path(workload) / "prompts.json").read_text())
    config = trl.GRPOConfig(
        output_dir=mkdtemp(),
        per_device_train_batch_size=CONVERSATIONS,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=RESPONSE_TOKENS,
        max_tool_calling_iterations=MAX_CALLS,
        temperature=1.0,
        top_k=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        use_transformers_continuous_batching="--continuous" in options,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    Asked(
        model=str(path),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": each}] for each in prompts]}),
        processing_class=tokenizer,
        tools=[lookup],
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
