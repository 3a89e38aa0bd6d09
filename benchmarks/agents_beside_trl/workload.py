"""What every contestant is given: a model that calls a tool, and prompts.

The model is Llama-shaped and computes all that such a model does, but its blocks add zero, so the next token
depends on the last one alone. Its weights are chosen so that every call is well formed, turns are unevenly long
(geometrically distributed), and a turn calls with the probability CALLS.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.agents_beside_trl.setting import CALLS, PROMPTS, TOOL, TURN_TOKENS
from rolemesh.data.parquet import write_rows
from rolemesh.models.tiny import byte_tokenizer, make_tiny_model

# Tokens of their own, as frequent text is in a tokenizer with merges.
OPENS = f'<tool_call>{{"name": "{TOOL}", "arguments": {{"key": "'
CLOSES = '"}}</tool_call>'
# Qwen's, without the system message that describes the tools.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as wide as there are tokens, at least: the embeddings are orthogonal
HIDDEN = 320
LAYERS = 2
HEADS = 4
DIGIT_FOLLOWS = 0.75
NEVER = -40.0  # a logit


def tokenizer_with_calls() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (OPENS, CLOSES)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def next_tokens(tokenizer: Any) -> Tensor:
    """Return logits [V, V]: after which token (rows) comes which (columns)."""
    letters, digits = (
        tokenizer.convert_tokens_to_ids(list(s)) for s in (string.ascii_lowercase, string.digits)
    )
    opens, closes, end = (tokenizer.convert_tokens_to_ids(t) for t in (OPENS, CLOSES, tokenizer.eos_token))
    logits = torch.full((len(tokenizer), len(tokenizer)), NEVER)
    logits[:, letters] = -math.log(len(letters))  # a turn begins
    for said in letters:
        logits[said, letters] += math.log(1 - 1 / TURN_TOKENS)
        logits[said, opens] = math.log(CALLS / TURN_TOKENS)
        logits[said, end] = math.log((1 - CALLS) / TURN_TOKENS)
    for last in (opens, *digits):
        more = DIGIT_FOLLOWS if last != opens else 1.0
        logits[last] = NEVER
        logits[last, digits] = math.log(more / len(digits))
        logits[last, closes] = math.log(1 - more) if more < 1 else NEVER
    logits[closes] = NEVER
    logits[closes, end] = 0.0
    return logits


def write_model(directory: Path) -> None:
    """Write a model of these transitions as a Hugging Face directory."""
    tokenizer = tokenizer_with_calls()
    make_tiny_model(
        directory, "llama", hidden_size=HIDDEN, num_layers=LAYERS, num_heads=HEADS, tokenizer=tokenizer
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    rows = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q[: len(tokenizer)]
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        # The norm before the head makes vectors of length one as long as the root of their width.
        model.get_input_embeddings().weight.copy_(rows)
        model.get_output_embeddings().weight.copy_(next_tokens(tokenizer).T @ rows / math.sqrt(HIDDEN))
    model.save_pretrained(directory)


def write_workload(directory: Path) -> None:
    """Make DIRECTORY/model, prompts.json and the same prompts as train.parquet."""
    write_model(directory / "model")
    prompts = [f"{n} is before what?" for n in range(1000, 1000 + PROMPTS)]
    (directory / "prompts.json").write_text(json.dumps(prompts))
    rows: list[dict[str, Any]] = [
        {
            "data_source": "keys",
            "agent_name": "tool_agent",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "keys",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"split": "train", "index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    write_rows(directory / "train.parquet", rows)
