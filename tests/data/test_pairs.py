"""Pairs of responses to rows with two contexts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rolemesh.config.data import DataConfig
from rolemesh.data.pairs import PairDataset
from rolemesh.data.parquet import write_rows
from rolemesh.errors import InvalidData
from rolemesh.models.tiny import byte_tokenizer

ASK = {"role": "user", "content": "2+3="}
PROMPT = "<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n"


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def dataset(tmp_path: Path, rows: list[dict[str, Any]], **config: Any) -> PairDataset:
    file = write_rows(tmp_path / "rows.parquet", rows)
    return PairDataset([file], DataConfig(**({"max_length": 128} | config)), byte_tokenizer())


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+3=", "chosen": "5", "rejected": "six"},
        {"prompt": [ASK], "chosen": [says("5")], "rejected": [says("six")]},
        {"chosen": [ASK, says("5")], "rejected": [ASK, says("six")]},
        {"prompt": "2+3=", "chosen": [ASK, says("5")], "rejected": [ASK, says("six")]},
        {"prompt": [ASK], "chosen": [ASK, says("5")], "rejected": [ASK, says("six")]},
        {"prompt": "", "chosen": [ASK, says("5")], "rejected": [ASK, says("six")]},
        {"prompt": [], "chosen": [ASK, says("5")], "rejected": [ASK, says("six")]},
    ],
    ids=[
        *("text", "messages", "whole conversations"),
        *("a prompt beside them", "its messages", "empty text", "no messages"),
    ],
)
def test_a_pair_is_a_row_of_two_contexts(tmp_path: Path, row: dict[str, Any]) -> None:
    batch, tokenizer = dataset(tmp_path, [row]).batch([0]), byte_tokenizer()
    turns, contexts, ids = (batch[name][0] for name in ("turns", "contexts", "responses"))
    written = turns != 0
    begin = tokenizer.decode(batch["prompts"][0][batch["prompt_mask"][0]])
    of_chosen, of_rejected = (tokenizer.decode(ids[written & (contexts == which)]) for which in (0, 1))
    assert begin + of_chosen == PROMPT + "5<|im_end|>\n"
    assert of_rejected == PROMPT + "six<|im_end|>\n"
    learned = [ids[batch["response_mask"][0] & (contexts == which)] for which in (0, 1)]
    assert [tokenizer.decode(each) for each in learned] == ["5<|im_end|>", "six<|im_end|>"]
    assert turns.unique_consecutive().tolist() == [-1, 1, -2, 2, -3, 0]


def test_earlier_assistant_turns_are_no_part_of_a_response(tmp_path: Path) -> None:
    begun = [ASK, says("6"), {"role": "user", "content": "sure?"}]
    batch = dataset(tmp_path, [{"prompt": begun, "chosen": "5", "rejected": "6"}], max_length=256).batch([0])
    assert batch["response_mask"].sum() == 4  # a digit and the end of the turn, twice
    tokens = batch["responses"][0][batch["response_mask"][0]]
    assert byte_tokenizer().decode(tokens) == "5<|im_end|>6<|im_end|>"


def test_the_prompt_of_whole_conversations_is_all_they_share(tmp_path: Path) -> None:
    """Here a system message, the row's prompt and an answer to it."""
    shared = [{"role": "system", "content": "add"}, ASK, says("6"), {"role": "user", "content": "sure?"}]
    whole = {"chosen": [*shared, says("5")], "rejected": [*shared, says("6")]}
    of_column = dataset(tmp_path, [{"prompt": "2+3=", **whole}], max_length=512)
    alone = dataset(tmp_path, [{"prompt": shared, "chosen": "5", "rejected": "6"}], max_length=512)
    assert of_column.digest == alone.digest == dataset(tmp_path, [whole], max_length=512).digest


def test_an_answer_repeating_the_prompt_is_no_whole_conversation(tmp_path: Path) -> None:
    answers = {"chosen": [says("?"), ASK, says("5")], "rejected": [says("?"), ASK, says("six")]}
    batch = dataset(tmp_path, [{"prompt": "2+3=", **answers}], max_length=256).batch([0])
    begin = batch["prompts"][0][batch["prompt_mask"][0]]
    context = batch["responses"][0][(batch["turns"][0] != 0) & (batch["contexts"][0] == 0)]
    assert byte_tokenizer().decode([*begin, *context]) == PROMPT + "?<|im_end|>\n" + PROMPT + "5<|im_end|>\n"


def test_a_prompt_conversations_do_not_share_may_stay_unread(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "chosen": [ASK, says("5")], "rejected": [ASK, says("six")]}
    said = r"row 0: column 'prompt' is not in the messages .*set data\.prompt_key to a name that no column has"
    with pytest.raises(InvalidData, match=said):
        dataset(tmp_path, [row])
    assert len(dataset(tmp_path, [row], prompt_key="none")) == 1


def test_a_pair_that_is_too_long_is_named_or_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "2+3=", "chosen": "5", "rejected": text} for text in ("six", "s" * 80)]
    with pytest.raises(InvalidData, match=r"row 1: is 131 tokens, data\.max_length is 128"):
        dataset(tmp_path, rows)
    assert len(dataset(tmp_path, rows, filter_overlong_prompts=True)) == 1


def test_pairs_of_equal_responses_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As data sets drawn by score have them: neither response can be preferred."""
    equal = [
        {"prompt": "2+3=", "chosen": "5", "rejected": "5"},
        {"prompt": "2+3=", "chosen": [ASK, says("5")], "rejected": [ASK, says("5")]},
    ]
    rows = [equal[0], {"prompt": "2+3=", "chosen": "5", "rejected": "6"}]
    data = dataset(tmp_path, rows)
    assert data.batch([0])["uid"].tolist() == ["train-000001"]
    assert "train: left out 1 of 2 pairs, whose responses are equal" in caplog.text
    for pair in equal:
        with pytest.raises(InvalidData, match="is left: 1 have equal responses, 0 are too long"):
            dataset(tmp_path, [pair])


@pytest.mark.parametrize(
    ("row", "says_what"),
    [
        ({"prompt": "2+3=", "chosen": "5"}, "lacks columns: 'chosen' and 'rejected' wanted"),
        ({"prompt": "2+3=", "chosen": "5", "rejected": ""}, "column 'rejected' should hold text or messages"),
        (
            {"chosen": "5", "rejected": "6"},
            "column 'chosen' should hold a conversation, as",
        ),
        (
            {"chosen": [ASK, says("5")], "rejected": [{"role": "user", "content": "2+2="}, says("5")]},
            "column 'chosen' should hold the assistant's answer after a prompt",
        ),
        (
            {"prompt": "2+3=", "chosen": [ASK], "rejected": [says("5")]},
            "column 'chosen' should hold the assistant's answer after a prompt",
        ),
    ],
)
def test_a_pair_that_cannot_be_compared_is_named(tmp_path: Path, row: dict[str, Any], says_what: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(says_what)):
        dataset(tmp_path, [row])
