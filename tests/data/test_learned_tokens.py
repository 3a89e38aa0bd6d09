"""Which tokens of a conversation are learned with templates and tokenizers of several kinds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolemesh.config.data import DataConfig
from rolemesh.data import PromptDataset
from rolemesh.data.assistant import render, tokenised
from rolemesh.data.message_cells import as_read
from rolemesh.data.pairs import PairDataset
from rolemesh.data.supervised import SupervisedDataset
from rolemesh.data.templates import writes_arguments_as_text
from rolemesh.errors import InvalidData
from rolemesh.models.tiny import byte_tokenizer

ASK, SAYS = {"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}
TALK = [ASK, SAYS, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
# As GLM-4's: the next role ends a turn.
NEXT_ROLE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKS_WITHOUT_END = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)
INSTRUCTIONS = (  # as Llama 2's and Vicuna's; the blank or line break joins the first word
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% if add_generation_prompt or not loop.last %}{{ join }}{% endif %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
TOOLS = "{% for c in m.tool_calls or [] %}<call>{{ WRITE }}</call>{% endfor %}"
WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + TOOLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_JSON = WITH_CALLS.replace("WRITE", "c.function.arguments | tojson")
AS_TEXT = WITH_CALLS.replace("WRITE", "'json: ' + c.function.arguments")  # as DeepSeek's
PRINTED = WITH_CALLS.replace("WRITE", "c.function.arguments")
JOINED = WITH_CALLS.replace("WRITE", "'json: ' ~ c.function.arguments")


def tokenizer_with(template: str, *special: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def joining_tokenizer(join: str) -> Any:
    """A tokenizer in which the blank or line break `join` and a following "5" or "six" are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    blank = {" ": "Ġ", "\n": "Ċ"}[join]
    merges = [(blank, "5"), ("s", "i"), ("si", "x"), (blank, "six")]
    vocab = {token: id_ for id_, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = INSTRUCTIONS.replace("join }}", f"{join!r} }}}}")
    return fast


def learned(tokenizer: Any, messages: list[Any]) -> list[str]:
    [(ids, turns)] = tokenised(tokenizer, [render(tokenizer, messages)])
    return [
        tokenizer.decode([id_ for id_, turn in zip(ids, turns, strict=True) if turn == number])
        for number in range(1, max(turns) + 1)
    ]


def file_with(directory: Path, *rows: dict[str, Any]) -> Path:
    file = directory / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.parametrize("join", [" ", "\n"], ids=["a blank", "a line break"])
def test_a_token_joining_prompt_and_answer_is_learned(join: str, tmp_path: Path) -> None:
    """It joins the generation prompt and the answer."""
    tokenizer = joining_tokenizer(join)
    assert learned(tokenizer, [ASK, SAYS]) == [f"{join}5<|im_end|>"]
    row = {"prompt": "2+3=", "chosen": "5", "rejected": "six"}
    pair = PairDataset([file_with(tmp_path, row)], DataConfig(max_length=128), tokenizer).batch([0])
    taught = [tokenizer.decode([id_]) for id_ in pair["responses"][0][pair["response_mask"][0]]]
    assert taught == [f"{join}5", "<|im_end|>", f"{join}six", "<|im_end|>"]


def test_a_next_role_that_ends_responses_is_learned_as_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no role follows, nothing ends the turn, and this is said."""
    tokenizer = tokenizer_with(NEXT_ROLE, "<|user|>", "<|assistant|>", "<|endoftext|>")
    tokenizer.eos_token = "<|user|>"
    assert learned(tokenizer, TALK) == ["5<|user|>", "yes"]
    SupervisedDataset([file_with(tmp_path, {"messages": TALK})], DataConfig(max_length=128), tokenizer)
    said = "train: the chat template writes no token that ends a response after 1 of 2 turns of the assistant"
    assert said in caplog.text


def test_the_next_role_is_no_end_if_generation_passes_it() -> None:
    tokenizer = tokenizer_with(NEXT_ROLE, "<|user|>", "<|assistant|>")
    assert learned(tokenizer, TALK) == ["5", "yes"]


def test_the_ends_that_a_model_declares_count(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(NEXT_ROLE, "<|user|>", "<|assistant|>", "<|endoftext|>")
    tokenizer.save_pretrained(tmp_path)
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    again = type(tokenizer).from_pretrained(tmp_path)
    assert learned(again, TALK) == ["5<|user|>", "yes"]


def test_an_end_that_the_marks_leave_out_is_learned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_with(MARKS_WITHOUT_END)
    assert learned(tokenizer, TALK) == ["5<|im_end|>", "yes<|im_end|>"]
    SupervisedDataset([file_with(tmp_path, {"messages": TALK})], DataConfig(max_length=128), tokenizer)
    assert "no token that ends" not in caplog.text


def test_a_final_special_token_does_not_replace_the_end_token() -> None:
    """The marked text ends with a special token, and the end of the turn follows it."""
    talk = [ASK, {"role": "assistant", "content": "<tool_call>add</tool_call>"}, ASK, SAYS]
    tokenizer = tokenizer_with(MARKS_WITHOUT_END, "<tool_call>", "</tool_call>")
    assert learned(tokenizer, talk) == ["<tool_call>add</tool_call><|im_end|>", "5<|im_end|>"]


def test_an_answer_after_a_special_token_needs_no_end() -> None:
    """No token ends it."""
    tokenizer = tokenizer_with(NEXT_ROLE, "</think>")
    talk = [ASK, {"role": "assistant", "content": "so</think>5"}]
    assert learned(tokenizer, talk) == ["so</think>5"]


def test_turns_that_are_not_learned_are_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": [ASK, SAYS, ASK], "chosen": "5", "rejected": "six"}
    PairDataset([file_with(tmp_path, row)], DataConfig(max_length=128), tokenizer_with(NEXT_ROLE))
    assert "after 2 of 2 turns" in caplog.text


@pytest.mark.parametrize(
    ("dataset", "row"),
    [
        (PairDataset, {"chosen": " 5", "rejected": " six"}),
        (PairDataset, {"chosen": [SAYS], "rejected": [{**SAYS, "content": "six"}]}),
        (SupervisedDataset, {"response": " 5"}),
    ],
)
def test_a_prompt_that_ends_with_the_assistants_turn_is_refused(
    tmp_path: Path, dataset: Any, row: dict[str, Any]
) -> None:
    prompt = [ASK, {"role": "assistant", "content": "It is"}]
    said = "row 0: column 'prompt' ends with a turn of the assistant, and a response would be another turn"
    with pytest.raises(InvalidData, match=said):
        dataset([file_with(tmp_path, {"prompt": prompt, **row})], DataConfig(max_length=128), byte_tokenizer())


# ------------------------------------------------------------------------------- arguments of calls


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (AS_JSON, '<call>{"a": "é"}</call>'),
        (AS_TEXT, '<call>json: {"a": "é"}</call>'),
        (PRINTED, '<call>{"a": "é"}</call>'),
        (JOINED, '<call>json: {"a": "é"}</call>'),
    ],
)
def test_arguments_of_calls_are_written_once_in_either_form(
    tmp_path: Path, template: str, written: str
) -> None:
    tokenizer = tokenizer_with(template)
    digests = []
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        talk = [ASK, calling(arguments), {"role": "tool", "content": "5"}]
        rows = (
            (SupervisedDataset, {"messages": [*talk, SAYS]}),
            (PairDataset, {"prompt": talk, "chosen": "5", "rejected": "six"}),
            (
                PromptDataset,
                {"prompt": talk, "data_source": "math", "reward_model": {"ground_truth": "5", "style": "rule"}},
            ),
        )
        for dataset, row in rows:
            config = DataConfig(max_prompt_length=256, max_response_length=256)
            data: Any = dataset([file_with(tmp_path, row)], config, tokenizer)
            batch = data.batch([0])
            text = tokenizer.decode(batch["prompts"][0]) + tokenizer.decode(
                batch["responses"][0] if "responses" in batch.columns else []
            )
            assert written in text
            digests.append(data.digest)
    assert digests[:3] == digests[3:]


@pytest.mark.parametrize("arguments", ["5", "{", "[1]", 5, '{"t": "\\ud800"}'])
def test_arguments_that_are_no_mapping_are_named(tmp_path: Path, arguments: Any) -> None:
    said = f"row 0: column 'messages' has a tool call whose arguments should be a mapping, .* are {arguments!r}"
    said = said.replace(repr(arguments), re.escape(repr(arguments)))
    with pytest.raises(InvalidData, match=said):
        SupervisedDataset(
            [file_with(tmp_path, {"messages": [ASK, calling(arguments)]})],
            DataConfig(),
            tokenizer_with(AS_JSON),
        )


@pytest.mark.parametrize("arguments", ["2 + 3", '{"a": ', "[1]", '{"t": "\\ud800"}'])
def test_text_that_is_no_json_stays_for_a_template_of_text(tmp_path: Path, arguments: str) -> None:
    """The template takes arguments as text."""
    talk = [ASK, calling(arguments), {"role": "tool", "content": "5"}, SAYS]
    data = SupervisedDataset(
        [file_with(tmp_path, {"messages": talk})],
        DataConfig(max_prompt_length=256, max_response_length=256),
        tokenizer := tokenizer_with(AS_TEXT),
    )
    batch = data.batch([0])
    assert f"<call>json: {arguments}</call>" in tokenizer.decode(batch["responses"][0])


@pytest.mark.parametrize("arguments", [5, "\ud800", {"t": "\ud800"}])
def test_arguments_that_are_no_text_are_named_if_text_is_due(arguments: Any) -> None:
    """The template takes arguments as text."""
    with pytest.raises(InvalidData, match="arguments should be a mapping, or JSON text of one, without half"):
        as_read([calling(arguments)], arguments_as_text=True)


def test_empty_arguments_are_those_of_a_call_without_any() -> None:
    assert as_read([calling("")]) == [calling({})]
    assert not writes_arguments_as_text(tokenizer_with(AS_JSON), {})
    assert writes_arguments_as_text(tokenizer_with(AS_TEXT), {})
