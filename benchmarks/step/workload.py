"""What every contestant is given: a model directory and prompts.

The model is Qwen2-shaped, random, and ends an answer with the same probability after every token: answers are
unevenly long (geometrically distributed), as in practice, and equally long for every contestant, without a rule
that says when to stop.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.step.setting import PROMPT_TOKENS, RESPONSE_TOKENS, SEQUENCES
from rolemesh.data.parquet import write_rows
from rolemesh.models.tiny import make_tiny_model

# The token that ends an answer is in no prompt: its row in the embedding is made to say when answers end.
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}\n{% endfor %}"


def end_probability(fill: float, tokens: int = RESPONSE_TOKENS) -> float:
    """With which answers of at most T tokens have fill * T on average, their end token included: the p of
    (1 - (1 - p)^T) / p = fill * T, by bisection. 0 for a fill of 0: nobody ends one."""
    if not fill:
        return 0.0
    low = 1e-9
    high = 1.0
    for _ in range(60):
        p = (low + high) / 2
        longer = (1 - (1 - p) ** tokens) / p > fill * tokens
        low, high = (p, high) if longer else (low, p)
    return low


def write_model(directory: Path, end: float) -> None:
    """A model that ends an answer with probability `end` after every token, and never draws its padding."""
    make_tiny_model(directory, hidden_size=128, num_layers=4, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = model.get_input_embeddings().weight  # tied: the head's too
    with torch.no_grad():
        # One dimension is the same for every token, so large that little moves the normalised state there: what
        # a token's row has more or less in that dimension is its logit's bias.
        rows[:, 0] = 1.0
        rows[tokenizer.pad_token_id, 0] = rows[tokenizer.eos_token_id, 0] = -2.0
        ids = torch.randint(200, (64, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        output = model(input_ids=ids, output_hidden_states=True)
        state = output.hidden_states[-1][:, -1].mean(0)  # normalised, as the head is given it
        if end:
            others = output.logits[:, -1].logsumexp(-1).mean()
            rows[tokenizer.eos_token_id] = 0.0
            rows[tokenizer.eos_token_id, 0] = (math.log(end / (1 - end)) + others) / state[0]
    model.save_pretrained(directory)


def write_workload(directory: Path, fill: float) -> None:
    """Makes DIRECTORY/model, prompts.json and the same prompts as train.parquet. A prompt is 22
    characters between the chat's two tokens; two prompts have little more in common at their beginning than the
    first of these, so that what equal beginnings save is what the answers to one prompt share."""
    write_model(directory / "model", end_probability(fill))
    prompts = [f"{f'{n} is before what?':<22}" for n in range(1000, 1000 + 8 * SEQUENCES)]
    (directory / "prompts.json").write_text(json.dumps(prompts))
    rows: list[dict[str, Any]] = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"split": "train", "index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    write_rows(directory / "train.parquet", rows)
