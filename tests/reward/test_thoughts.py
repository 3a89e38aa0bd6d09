"""What of a response is thought, whatever the tokens are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rolemesh.config.model import ModelConfig
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.reward.thoughts import thought_tokens

LONGER = ["<think>", "</think>", "?<th", "ink>\n", " so</"]


class Texts:
    """Responses token by token: those of LONGER are one token, of anything else each byte is."""

    def __init__(self, model: Path) -> None:
        self._bytes = load_tokenizer(ModelConfig(path=str(model)))
        self.tokenizer = load_tokenizer(ModelConfig(path=str(model)))
        self.tokenizer.add_tokens(LONGER)

    def tokens(self, *pieces: str) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            longer = [self.tokenizer.convert_tokens_to_ids(piece)] if piece in LONGER else None
            ids += longer or self._bytes.encode(piece)
        return ids

    def thoughts(self, *pieces: str) -> list[str]:
        """The texts of the tokens that are thought."""
        ids = self.tokens(*pieces)
        responses = torch.tensor([[*ids, 0, 0, 0]])
        mask = torch.arange(len(ids) + 3)[None] < len(ids)
        return self.marked(responses, mask)[0]

    def marked(self, responses: Tensor, mask: Tensor) -> list[list[str]]:
        thought = thought_tokens(responses, mask, self.tokenizer)
        assert thought.shape == mask.shape
        assert not thought[~mask].any()
        return [
            [self.tokenizer.decode([token]) for token in row[of_row].tolist()]
            for row, of_row in zip(responses, thought, strict=True)
        ]


@pytest.fixture
def texts(tiny_model: Path) -> Any:
    return Texts(tiny_model)


def test_thoughts_between_tags_of_one_token_are_found(texts: Texts) -> None:
    assert texts.thoughts("a", "<think>", "bc", "</think>", "d") == ["b", "c"]


def test_thoughts_between_tags_of_many_tokens_are_found(texts: Texts) -> None:
    assert texts.thoughts("a<think>bc</think>d") == ["b", "c"]


def test_a_token_with_a_part_of_a_tag_is_no_thought(texts: Texts) -> None:
    assert texts.thoughts("?<th", "ink>\n", "bc", " so</", "think>d") == ["b", "c"]


def test_characters_of_several_bytes_do_not_move_the_tags(texts: Texts) -> None:
    *of_two_bytes, last = texts.thoughts("é€<think>üb</think>é")
    assert len(of_two_bytes) == 2
    assert last == "b"


def test_thoughts_that_the_prompt_opened_begin_with_the_response(texts: Texts) -> None:
    assert texts.thoughts("ab", "</think>", "c<think>d") == ["a", "b"]


def test_only_the_first_thoughts_count(texts: Texts) -> None:
    assert texts.thoughts("<think>", "a", "</think>", "<think>", "b", "</think>") == ["a"]


@pytest.mark.parametrize("text", ["abc", "a<think>b", "<think></think>a", "</think>a", "a<thinkb</thin"])
def test_a_response_without_thoughts_is_all_of_it(texts: Texts, text: str) -> None:
    assert texts.thoughts(text) == list(text)


def test_observations_are_no_thoughts_and_hide_none(texts: Texts) -> None:
    responses = torch.tensor([texts.tokens("<think>abc</think>d")])
    mask = torch.ones_like(responses, dtype=torch.bool)
    mask[0, len("<think>a")] = False
    assert texts.marked(responses, mask) == [["a", "c"]]


def test_thoughts_are_found_row_by_row_and_end_with_the_mask(texts: Texts) -> None:
    responses = torch.tensor([texts.tokens("<think>a</think>"), texts.tokens("no thoughts here")])
    mask = torch.ones_like(responses, dtype=torch.bool)
    mask[1, 2:] = False
    assert texts.marked(responses, mask) == [["a"], ["n", "o"]]
