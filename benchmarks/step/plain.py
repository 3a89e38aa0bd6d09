"""The same step in one process with nothing around it: what a good engineer would write in a page.

python -m benchmarks.step.plain WORKLOAD grpo|ppo
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.step import turns
from benchmarks.step.reward import compute_score
from benchmarks.step.setting import (
    CRITIC_LEARNING_RATE,
    GROUP,
    KL_COEF,
    LEARNING_RATE,
    MICRO_BATCH,
    RESPONSE_TOKENS,
    SEQUENCES,
)


class Critic(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.body = AutoModel.from_pretrained(path, dtype=torch.float32)
        self.head = nn.Linear(self.body.config.hidden_size, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden[:, -RESPONSE_TOKENS - 1 : -1])[..., 0]
        return values


@torch.no_grad()
def generate(model: Any, prompts: Tensor, end: int, pad: int) -> tuple[Tensor, Tensor]:
    """Responses [B, T] and their mask; stops when every row has ended."""
    cache = DynamicCache(config=model.config)
    ids = prompts
    responses = torch.full((len(prompts), RESPONSE_TOKENS), pad)
    mask = torch.zeros(len(prompts), RESPONSE_TOKENS, dtype=torch.bool)
    live = torch.ones(len(prompts), dtype=torch.bool)
    for t in range(RESPONSE_TOKENS):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = torch.multinomial(logits.softmax(-1), 1)
        responses[:, t] = torch.where(live, ids[:, 0], pad)
        mask[:, t] = live
        live = live & (ids[:, 0] != end)
        if not live.any():
            break
    return responses, mask


def log_probs_of(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """[b, T] of the response tokens."""
    logits = model(
        input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=RESPONSE_TOKENS + 1
    ).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, -RESPONSE_TOKENS:, None])[..., 0]  # type: ignore[no-any-return]


def micro_batches(*columns: Tensor) -> Iterator[list[Tensor]]:
    for start in range(0, len(columns[0]), MICRO_BATCH):
        yield [column[start : start + MICRO_BATCH] for column in columns]


@torch.no_grad()
def in_micro_batches(function: Any, model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([function(model, *rows) for rows in micro_batches(ids, mask)])


def gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages, whitened, and returns; gamma = lambda = 1."""
    values = values * mask
    advantages = torch.zeros_like(values)
    running = torch.zeros(len(values))
    following = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        running = (rewards[:, t] + following - values[:, t] + running) * mask[:, t]
        following = values[:, t]
        advantages[:, t] = running
    returns = advantages + values
    chosen = advantages[mask]
    return (advantages - chosen.mean()) / (chosen.var() + 1e-8).sqrt(), returns


class Loop:
    def __init__(self, workload: Path, algorithm: str) -> None:
        path = workload / "model"
        self.algorithm = algorithm
        self.group = GROUP[algorithm]
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        chats = [
            [{"role": "user", "content": text}] for text in json.loads((workload / "prompts.json").read_text())
        ]
        texts = [self.tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        self.prompts = torch.tensor(self.tokenizer(texts)["input_ids"])
        self.actor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.actor_optimizer = torch.optim.AdamW(self.actor.parameters(), lr=LEARNING_RATE)
        if algorithm == "ppo":
            self.critic = Critic(path)
            self.critic_optimizer = torch.optim.AdamW(self.critic.parameters(), lr=CRITIC_LEARNING_RATE)
        self.at = 0

    def step(self) -> dict[str, Any]:
        times = [time.perf_counter()]
        phases: dict[str, float] = {}

        def done(phase: str) -> None:
            times.append(time.perf_counter())
            phases[phase] = times[-1] - times[-2]

        num = SEQUENCES // self.group
        prompts = self.prompts[self.at : self.at + num].repeat_interleave(self.group, 0)
        self.at = (self.at + num) % len(self.prompts)
        responses, mask = generate(
            self.actor, prompts, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        )
        done("gen")
        ids = torch.cat([prompts, responses], 1)
        attention = torch.cat([torch.ones_like(prompts), mask.long()], 1)
        texts = self.tokenizer.batch_decode(
            [row[:length] for row, length in zip(responses.tolist(), mask.sum(1).tolist(), strict=True)],
            skip_special_tokens=True,
        )
        scores = torch.tensor([compute_score("letters", text, "", {}) for text in texts])
        done("reward")
        old = in_micro_batches(log_probs_of, self.actor, ids, attention)
        done("old_log_prob")
        ref = in_micro_batches(log_probs_of, self.reference, ids, attention)
        done("ref")
        if self.algorithm == "ppo":
            values = in_micro_batches(lambda critic, *rows: critic(*rows), self.critic, ids, attention)
            done("values")
            rewards = -KL_COEF * (old - ref) * mask
            rewards[torch.arange(len(ids)), mask.sum(1) - 1] += scores
            advantages, returns = gae(rewards, values, mask)
            done("adv")
            self.train_critic(ids, attention, mask, values, returns)
            done("update_critic")
        else:
            groups = scores.view(-1, self.group)
            advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
            advantages = advantage.view(-1, 1) * mask
            done("adv")
        self.train_actor(ids, attention, mask, old, ref, advantages)
        done("update_actor")
        return {
            "seconds": times[-1] - times[0],
            "phases": phases,
            "response_tokens": int(mask.sum()),
        }

    def train_actor(self, *batch: Tensor) -> None:
        total = batch[2].sum()
        for ids, attention, mask, old, ref, advantages in micro_batches(*batch):
            new = log_probs_of(self.actor, ids, attention)
            ratio = (new - old).exp()
            loss = torch.max(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
            if self.algorithm == "grpo":
                difference = ref - new
                loss = loss + KL_COEF * (difference.exp() - difference - 1)
            torch.autograd.backward((loss * mask).sum() / total)
        nn.utils.clip_grad_norm_(self.actor.parameters(), 1.0)
        self.actor_optimizer.step()
        self.actor_optimizer.zero_grad()

    def train_critic(self, *batch: Tensor) -> None:
        total = batch[2].sum()
        for ids, attention, mask, old, returns in micro_batches(*batch):
            values = self.critic(ids, attention)
            clipped = old + (values - old).clamp(-0.5, 0.5)
            loss = 0.5 * torch.max(F.mse_loss(values, returns, reduction="none"), (clipped - returns) ** 2)
            torch.autograd.backward((loss * mask).sum() / total)
        nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()


def main(workload: str, algorithm: str) -> None:
    turns.begin()
    loop = Loop(Path(workload), algorithm)
    turns.answer({"threads": torch.get_num_threads()})
    while turns.wait():
        turns.answer(loop.step())


if __name__ == "__main__":
    main(*sys.argv[1:])
