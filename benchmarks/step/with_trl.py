"""The same step by TRL's trainers, in an environment of theirs: neither rolemesh nor its libraries are there.

python -m benchmarks.step.with_trl WORKLOAD grpo|ppo
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from benchmarks.step import turns
from benchmarks.step.reward import compute_score
from benchmarks.step.setting import GROUP, KL_COEF, LEARNING_RATE, MICRO_BATCH, RESPONSE_TOKENS, SEQUENCES

COMMON = {
    "per_device_train_batch_size": MICRO_BATCH,
    "gradient_accumulation_steps": SEQUENCES // MICRO_BATCH,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "temperature": 1.0,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


class Turns(TrainerCallback):  # type: ignore[misc]
    """From the end of one step to the end of the next: drawing prompts is a part of a step here, too."""

    def __init__(self) -> None:
        self.response_tokens = 0
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        turns.answer({"threads": torch.get_num_threads()})
        self.next()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self.began
        turns.answer({"seconds": seconds, "phases": {}, "response_tokens": self.response_tokens})
        self.next()

    def next(self) -> None:
        if not turns.wait():
            raise SystemExit
        self.response_tokens = 0
        self.began = time.perf_counter()


def grpo(path: Path, tokenizer: Any, prompts: list[str], directory: str) -> None:
    """GRPOTrainer. It has no pass for old log-probabilities: with one optimizer step they are the new ones."""
    watch = Turns()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        watch.response_tokens += sum(map(len, completion_ids))
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [compute_score("letters", text, "", {}) for text in texts]

    config = trl.GRPOConfig(
        **COMMON,
        output_dir=directory,
        num_generations=GROUP["grpo"],
        max_completion_length=RESPONSE_TOKENS,
        top_k=0,
        beta=KL_COEF,
        epsilon=0.2,
        loss_type="dapo",  # token-mean, as ours
        num_train_epochs=1000,
        model_init_kwargs={"dtype": "float32"},
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    trl.GRPOTrainer(
        model=str(path),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": chats}),
        processing_class=tokenizer,
        callbacks=[watch],
    ).train()


class Rule(nn.Module):
    """A reward model for PPOTrainer, which takes nothing else, that scores by the rule: its body hands the
    tokens on, its head reads them."""

    base_model_prefix = "body"

    def __init__(self, tokenizer: Any, prompt_tokens: int, watch: Turns) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.prompt_tokens = prompt_tokens
        self.watch = watch

    def body(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        ids = torch.where(attention_mask, input_ids, self.tokenizer.pad_token_id)
        return transformers.modeling_outputs.BaseModelOutput(hidden_states=(ids,))

    def score(self, ids: Tensor) -> Tensor:
        answers = ids[:, self.prompt_tokens :]
        self.watch.response_tokens += int((answers != self.tokenizer.pad_token_id).sum())
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        scores = torch.tensor([compute_score("letters", text, "", {}) for text in texts])
        return scores[:, None, None].expand(*ids.shape, 1)


def ppo(path: Path, tokenizer: Any, prompts: list[str], directory: str) -> None:
    """PPOTrainer. Its old log-probabilities are those of the logits that it generated with."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    ids = tokenizer(texts)["input_ids"]
    watch = Turns()
    config = PPOConfig(
        **COMMON,
        output_dir=directory,
        num_ppo_epochs=1,
        num_mini_batches=1,
        total_episodes=SEQUENCES * 1000,
        local_rollout_forward_batch_size=SEQUENCES,  # the batch size of its generation: quicker than 64
        response_length=RESPONSE_TOKENS,
        stop_token="eos",
        kl_coef=KL_COEF,
        gamma=1.0,
        lam=1.0,
        num_sample_generations=0,
    )

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=model(),
        ref_model=model(),
        reward_model=Rule(tokenizer, len(ids[0]), watch),
        value_model=AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        eval_dataset=Dataset.from_dict({"input_ids": ids[:1]}),
        callbacks=[watch],
    ).train()


def main(workload: str, algorithm: str) -> None:
    turns.begin()
    path = Path(workload) / "model"
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    prompts = json.loads((Path(workload) / "prompts.json").read_text())
    {"grpo": grpo, "ppo": ppo}[algorithm](path, tokenizer, prompts, mkdtemp())


if __name__ == "__main__":
    main(*sys.argv[1:])
