"""Rows of training data, and the data set that reads them with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolemesh.config.data import DataConfig
from rolemesh.data import PromptDataset
from rolemesh.models.tiny import byte_tokenizer

BYTES = byte_tokenizer()
LIMIT = 64  # tokens of a prompt


def row(content: Any = "a", **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": 1},
        **columns,
    }


def dataset(file: Path, tokenizer: Any = BYTES, **config: Any) -> PromptDataset:
    return PromptDataset([file], DataConfig(**{"max_prompt_length": LIMIT, **config}), tokenizer)
