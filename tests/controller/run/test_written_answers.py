"""Responses as they are written and shown: decoded on a thread, and only those that somebody reads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path

from torch import tensor

from rolemesh.config.model import ModelConfig
from rolemesh.data.texts import ResponseTexts
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.run.run_dir import write_answers


class Numerals:
    """A tokenizer whose texts are the ids. It decodes when it may."""

    def __init__(self) -> None:
        self.decoded: list[int] = []  # number of rows of each call
        self.asked, self.may = threading.Event(), threading.Event()

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        self.asked.set()
        assert self.may.wait(60)
        self.decoded.append(len(ids))
        return [" ".join(map(str, row)) for row in ids]


def three_rows() -> DataProto:
    columns = {
        "prompts": tensor([[0, 1], [2, 3], [0, 4]]),
        "prompt_mask": tensor([[False, True], [True, True], [False, True]]),
        "responses": tensor([[5, 0, 6], [7, 0, 0], [0, 0, 0]]),
        "response_mask": tensor([[True, False, True], [True, False, False], [False, False, False]]),
    }
    return DataProto.from_dict(columns, {"uid": ["a", "b", "c"]})


ROWS = [
    {"input": "1", "output": "5 6", "step": 7, "uid": "a"},
    {"input": "2 3", "output": "7", "step": 7, "uid": "b"},
    {"input": "4", "output": "", "step": 7, "uid": "c"},
]


async def test_answers_are_decoded_and_written_off_the_event_loop(tmp_path: Path) -> None:
    tokenizer = Numerals()
    texts = ResponseTexts(tokenizer, skip_special_tokens=True)
    writing = asyncio.create_task(write_answers(three_rows(), 7, texts, str(tmp_path), 2))
    await asyncio.to_thread(tokenizer.asked.wait)
    tokenizer.may.set()  # a blocked loop would never come here
    assert await writing == ROWS[:2]
    assert [json.loads(line) for line in (tmp_path / "7.jsonl").read_text().splitlines()] == ROWS


async def test_without_a_directory_only_shown_answers_are_decoded(tmp_path: Path) -> None:
    tokenizer = Numerals()
    tokenizer.may.set()
    texts = ResponseTexts(tokenizer, skip_special_tokens=True)
    assert await write_answers(three_rows(), 7, texts, None, 2) == ROWS[:2]
    assert tokenizer.decoded == [2, 2]  # prompts and responses
    assert await write_answers(three_rows(), 7, texts, None, 0) == []


async def test_answers_neither_shown_nor_written_are_not_decoded(tiny_model: Path) -> None:
    """trainer.log_val_generations: 0, with the tokenizer of a model."""
    texts = ResponseTexts(load_tokenizer(ModelConfig(path=str(tiny_model))), skip_special_tokens=True)
    assert texts([]) == []
    assert await write_answers(three_rows(), 7, texts, None, 0) == []
