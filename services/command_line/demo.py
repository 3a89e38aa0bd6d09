"""What the demo needs before its first step: a model that half knows how to add, and problems.

The model is made and warm-started on the spot, by imitating a demonstrator who forgets to carry: three in
four of the problems that have a carry it answers without ("37+48=" with 75), the rest right. What imitation
learns best is therefore the careless answer, however long it goes on: greedy accuracy stays near the share
of problems without any carry, a quarter. But its samples hold the right answer often enough for PPO to find
out that it is worth more.
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
from rolemesh.data.arithmetic import Problem, answer, arithmetic_problems, question, write_arithmetic
from rolemesh.data.progress import track
from rolemesh.models.loading import load_causal_lm
from rolemesh.models.tiny import byte_tokenizer, make_tiny_model

# As short as a chat can be: the demo's time is spent on the additions. 8 tokens a prompt.
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
FORGETS = 0.75  # how often the demonstrator forgets the carries of a problem that has one
WARM_START_STEPS = 1000
BATCH_SIZE = 128  # demonstrations per step
LEARNING_RATE = 3e-3
NUM_VAL = 256


def prepare_demo(directory: Path, seed: int = 1, *, num_steps: int = WARM_START_STEPS) -> Path:
    """Makes directory/model and directory/data/{train,val}.parquet; what is there is kept.

    Args:
        directory: the run directory of configs/tiny.yaml.
        seed: of the weights, the demonstrations and the split into training and held-out problems.
        num_steps: of the warm-start.

    Returns:
        The directory.
    """
    console = Console(stderr=True)
    data, model = directory / "data", directory / "model"
    if (data / "val.parquet").is_file():
        console.print(f"{data} is there and kept")
    else:
        write_arithmetic(data, num_val=NUM_VAL, seed=seed)
        console.print(f"{data}: two-digit additions, {NUM_VAL} of them held out")
    if model.is_dir():
        console.print(f"{model} is there and kept")
    else:
        accuracy = make_demo_model(model, seed=seed, num_steps=num_steps)
        console.print(f"{model}: warm-started, {accuracy:.0%} of the held-out problems right")
    return directory


def make_demo_model(directory: Path, *, seed: int = 1, num_steps: int = WARM_START_STEPS) -> float:
    """Writes a small Qwen2-shaped model, warm-started on flawed demonstrations, as a Hugging Face directory.
    The same seed gives the same bits on the same kind of machine. About a minute on one core.

    Returns:
        its greedy accuracy on the held-out problems.
    """
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    # With the usual 0.02 the digits take several times as long to find each other.
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
    """Problems as tokens: N rows, P prompt tokens (all alike long), T response tokens.

    Args:
        prompts: [N, P] int64.
        right: [N, T] int64, "#### 85" and the end token, right-padded with -100.
        careless: [N, T] int64, the same with all carries forgotten.
    """

    prompts: Tensor
    right: Tensor
    careless: Tensor


def demonstrations(problems: Sequence[Problem], tokenizer: Any) -> Demonstrations:
    """Both answers to each problem."""
    chats = [[{"role": "user", "content": question(problem)}] for problem in problems]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return Demonstrations(
        torch.tensor(tokenizer(texts)["input_ids"]),
        _responses([str(a + b) for a, b in problems], tokenizer),
        _responses([without_carry(a, b) for a, b in problems], tokenizer),
    )


def without_carry(a: int, b: int) -> str:
    """Two-digit numbers added digit by digit, every carry forgotten: 37 and 48 give 75."""
    return f"{(a // 10 + b // 10) % 10}{(a % 10 + b % 10) % 10}"


def _responses(numbers: Sequence[str], tokenizer: Any) -> Tensor:
    longest = len("199")
    rows = [tokenizer(answer(number))["input_ids"] + [tokenizer.eos_token_id] for number in numbers]
    padding = [[-100] * (longest - len(number)) for number in numbers]
    return torch.tensor([row + more for row, more in zip(rows, padding, strict=True)])


def warm_start(model: Any, shown: Demonstrations, *, seed: int, num_steps: int) -> None:
    """Imitation: cross-entropy on the demonstrator's answers, a new draw of problems and lapses every step."""
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
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())  # leaves out -100
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def schedule(step: int, num_steps: int) -> float:
    """The learning rate's share: linear warm-up over 50 steps, then a half cosine down to 5 %."""
    return min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))


def response_logits(model: Any, prompts: Tensor, labels: Tensor) -> Tensor:
    """[B, T, V]: what the model expects at each response token, the ones before it given."""
    inputs = torch.cat([prompts, labels[:, :-1].clamp(min=0)], dim=1)
    logits: Tensor = model(input_ids=inputs, logits_to_keep=labels.shape[1], use_cache=False).logits
    return logits


@torch.no_grad()
def greedy_accuracy(model: Any, shown: Demonstrations) -> float:
    """The share of problems whose right answer is what greedy decoding gives: every token of it is the
    likeliest after the ones before."""
    likeliest = response_logits(model, shown.prompts, shown.right).argmax(-1)
    return ((likeliest == shown.right) | (shown.right < 0)).all(1).float().mean().item()


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order whatever the number of cores: the same seed gives the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
