"""Makes the data and the model of configs/tiny-tools.yaml: sums too long for the model, and a calculator.

The model is created and warm-started here, by imitating a demonstrator that guesses three sums in four, always
wrongly, and asks the calculator for the fourth. Imitation learns to guess, however long it runs, so greedy
accuracy is near zero. But samples call the tool often enough to learn that its answers are right.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rolemesh.config.model import ModelConfig
from rolemesh.data.parquet import write_rows
from rolemesh.data.progress_bar import track
from rolemesh.models.loading import load_causal_lm
from rolemesh.models.tiny import byte_tokenizer, make_tiny_model
from rolemesh.services.command_line.arithmetic import DATA_SOURCE, Problem, answer, question
from rolemesh.services.command_line.demo import LEARNING_RATE, one_thread, schedule

# A turn of the policy has no beginning of its own: it speaks after a message's end.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'assistant' %}<|im_start|>{% endif %}"
    "{{ message['content'] }}<|im_end|>{% endfor %}"
)
# One token each, as frequent text is in a tokenizer with merges.
CALLS = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALLED = '"}}</tool_call>'
FEWEST_DIGITS = 3
MOST_DIGITS = 5
GUESSES = 0.75  # how often the demonstrator guesses
OFF_BY = (-1000, -100, -10, 10, 100, 1000)
WARM_START_STEPS = 1000
BATCH_SIZE = 128
NUM_TRAIN = 4096
NUM_VAL = 256


def prepare_tools_demo(directory: Path, seed: int = 1, *, num_steps: int = WARM_START_STEPS) -> Path:
    """Make directory/model and directory/data/{train,val}.parquet. Existing ones are kept.

    Args:
        directory: the run directory of configs/tiny-tools.yaml.
        seed: seed of the weights, the demonstrations and the problems.
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
        problems = long_sums(NUM_TRAIN + NUM_VAL, seed)
        write_rows(data / "train.parquet", _rows(problems[NUM_VAL:], "train"))
        write_rows(data / "val.parquet", _rows(problems[:NUM_VAL], "val"))
        console.print(f"{data}: sums of {FEWEST_DIGITS} to {MOST_DIGITS} digits, {NUM_VAL} of them held out")
    if model.is_dir():
        console.print(f"{model} exists and is kept")
    else:
        make_tools_model(model, seed=seed, num_steps=num_steps)
        console.print(f"{model}: warm-started to guess, and to call a calculator now and then")
    return directory


def long_sums(count: int, seed: int) -> list[Problem]:
    """Draw different problems; both numbers of one have equally many digits."""
    draw = random.Random(seed)
    drawn = dict[Problem, None]()
    while len(drawn) < count:
        digits = draw.randint(FEWEST_DIGITS, MOST_DIGITS)
        drawn[
            draw.randrange(10 ** (digits - 1), 10**digits), draw.randrange(10 ** (digits - 1), 10**digits)
        ] = None
    return list(drawn)


def tools_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer that has the text of a call in two tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (CALLS, CALLED)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tools_model(directory: Path, *, seed: int = 1, num_steps: int = WARM_START_STEPS) -> None:
    """Write a small Qwen2-shaped model, warm-started by imitation, as a Hugging Face directory.

    The same seed gives the same bits on the same kind of machine. Takes about two minutes on one core.
    """
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer = tools_tokenizer()
    make_tiny_model(
        unfinished, hidden_size=64, num_layers=2, initializer_range=0.1, seed=seed, tokenizer=tokenizer
    )
    model = load_causal_lm(ModelConfig(path=str(unfinished)), "demo")
    with one_thread():
        _imitate(model, tokenizer, seed, num_steps)
    model.save_pretrained(unfinished)
    unfinished.rename(directory)


def _imitate(model: Any, tokenizer: Any, seed: int, num_steps: int) -> None:
    """Train on the demonstrator's conversations: cross-entropy on what it says, not on what it hears."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    draw = random.Random(seed)
    model.train()
    for step in track(range(num_steps), "warm-starting the model", num_steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(step, num_steps)
        problems = long_sums(BATCH_SIZE, draw.randrange(2**32))
        ids, labels = _padded([_demonstrated(problem, draw, tokenizer) for problem in problems])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def _demonstrated(problem: Problem, draw: random.Random, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return a conversation's ids, and labels that are -100 on what the demonstrator does not say."""
    right = sum(problem)
    asked = f"{problem[0]}+{problem[1]}"
    heard = f"<|im_start|>{question(problem)}<|im_end|>"
    said = "<|im_end|>"
    if draw.random() < GUESSES:
        parts = [(heard, False), (answer(str(right + draw.choice(OFF_BY))) + said, True)]
    else:
        parts = [
            (heard, False),
            (CALLS + asked + CALLED + said, True),
            (f"<|im_start|>{right}<|im_end|>", False),
            (answer(str(right)) + said, True),
        ]
    ids: list[int] = []
    labels: list[int] = []
    for text, is_said in parts:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += tokens if is_said else [-100] * len(tokens)
    return ids, labels


def _padded(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def _rows(problems: Sequence[Problem], split: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": DATA_SOURCE,
            "agent_name": "tool_agent",
            "prompt": [{"role": "user", "content": question(problem)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(sum(problem))},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]
