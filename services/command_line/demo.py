"""Makes the demo's data, and a model that can half add.

The model is created and warm-started here, by imitating a demonstrator that forgets carries. Of the problems
with a carry, it answers three in four without it ("37+48=" with 75), and the others right. So imitation learns
the careless answer best, however long it runs. Greedy accuracy stays near the share of problems without a
carry, a quarter. But samples contain the right answer often enough for PPO to learn that it scores more.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from rolemesh.config.model import ModelConfig
from rolemesh.data.progress_bar import track
from rolemesh.models.loading import load_causal_lm
from rolemesh.models.tiny import byte_tokenizer, make_tiny_model
from rolemesh.services.command_line.arithmetic import (
    Problem,
    answer,
    arithmetic_problems,
    question,
    write_arithmetic,
)

# As short as a chat can be (8 tokens a prompt), so that the demo spends its time on the additions.
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
FORGETS = 0.75  # how often the demonstrator forgets the carries of a problem
WARM_START_STEPS = 1000
BATCH_SIZE = 128  # demonstrations per step
LEARNING_RATE = 3e-3
NUM_VAL = 256


def prepare_demo(directory: Path, seed: int = 1, *, num_steps: int = WARM_START_STEPS) -> Path:
    """Make directory/model and directory/data/{train,val}.parquet. Existing ones are kept.

    Args:
        directory: the run directory of configs/tiny.yaml.
        seed: seed of the weights, the demonstrations and the split into training and held-out problems.
        num_steps: number of warm-start steps.

    Returns:
        The directory.
    """
    console = Console(stderr=True)
    data = directory / "data"
    model = directory / "model"
    if (data / "val.parquet").is_file():
        console.print(f"{data} exists and is kept")
    else:
        write_arithmetic(data, num_val=NUM_VAL, seed=seed)
        console.print(f"{data}: two-digit additions, {NUM_VAL} of them held out")
    if model.is_dir():
        console.print(f"{model} exists and is kept")
    else:
        accuracy = make_demo_model(model, seed=seed, num_steps=num_steps)
        console.print(f"{model}: warm-started, {accuracy:.0%} of the held-out problems right")
    return directory


def make_demo_model(directory: Path, *, seed: int = 1, num_steps: int = WARM_START_STEPS) -> float:
    """Write a small Qwen2-shaped model, warm-started on flawed demonstrations, as a Hugging Face directory.

    The same seed gives the same bits on the same kind of machine. Takes about a minute on one core.

    Returns:
        Its greedy accuracy on the held-out problems.
    """
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    # With the usual 0.02, learning takes several times as long.
    make_tiny_model(unfinished, hidden_size=64, num_layers=2, initializer_range=0.1, seed=seed)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(unfinished)
    model = load_causal_lm(ModelConfig(path=str(unfinished)), "demo")
    train, val = arithmetic_problems(NUM_VAL, seed)
    with one_thread():
        warm_start(model, demonstrations(train, tokenizer), seed=seed, num_steps=num_steps)
        accuracy = greedy_accuracy(model, demonstrations(val, tokenizer))
    model.save_pretrained(unfinished)
    unfinished.rename(directory)
    return accuracy


@dataclass(frozen=True)
class Demonstrations:
    """Problems as tokens: N rows, P prompt tokens (the same for all), T response tokens.

    Args:
        prompts: [N, P] int64.
        right: [N, T] int64, "#### 85" and the end token, right-padded with -100.
        careless: [N, T] int64, the answer without any carry, in the same form.
    """

    prompts: Tensor
    right: Tensor
    careless: Tensor


def demonstrations(problems: Sequence[Problem], tokenizer: Any) -> Demonstrations:
    """Tokenise the right and the careless answer to each problem."""
    chats = [[{"role": "user", "content": question(problem)}] for problem in problems]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return Demonstrations(
        torch.tensor(tokenizer(texts)["input_ids"]),
        _responses([str(a + b) for a, b in problems], tokenizer),
        _responses([without_carry(a, b) for a, b in problems], tokenizer),
    )


def without_carry(a: int, b: int) -> str:
    """Add two-digit numbers digit by digit without carries: 37 and 48 give 75."""
    return f"{(a // 10 + b // 10) % 10}{(a % 10 + b % 10) % 10}"


def _responses(numbers: Sequence[str], tokenizer: Any) -> Tensor:
    longest = len("199")
    rows = [tokenizer(answer(number))["input_ids"] + [tokenizer.eos_token_id] for number in numbers]
    padding = [[-100] * (longest - len(number)) for number in numbers]
    return torch.tensor([row + more for row, more in zip(rows, padding, strict=True)])


def warm_start(model: Any, shown: Demonstrations, *, seed: int, num_steps: int) -> None:
    """Train by imitation: cross-entropy on the demonstrator's answers, with new problems and lapses a step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in track(range(num_steps), "warm-starting the model", num_steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(step, num_steps)
        rows = torch.randint(len(shown.prompts), (BATCH_SIZE,), generator=generator)
        forgets = torch.rand(BATCH_SIZE, generator=generator) < FORGETS
        labels = torch.where(forgets[:, None], shown.careless[rows], shown.right[rows])
        logits = response_logits(model, shown.prompts[rows], labels)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())  # ignores -100
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def schedule(step: int, num_steps: int) -> float:
    """Return the learning rate's factor: linear warm-up over 50 steps, times a half cosine from 1 to 5 %."""
    return min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))


def response_logits(model: Any, prompts: Tensor, labels: Tensor) -> Tensor:
    """Return the logits [B, T, V] of each response token, given the tokens before it."""
    inputs = torch.cat([prompts, labels[:, :-1].clamp(min=0)], dim=1)
    logits: Tensor = model(input_ids=inputs, logits_to_keep=labels.shape[1], use_cache=False).logits
    return logits


@torch.no_grad()
def greedy_accuracy(model: Any, shown: Demonstrations) -> float:
    """Return the share of problems that greedy decoding answers right.

    That is the case if every token of the right answer is the likeliest one after the tokens before it.
    """
    likeliest = response_logits(model, shown.prompts, shown.right).argmax(-1)
    return ((likeliest == shown.right) | (shown.right < 0)).all(1).float().mean().item()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: sums then have one order on any number of cores, so a seed always gives the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
