"""Rows with responses to batches: exactly what the assistant says is learned; the ids are the template's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rolemesh.config.data import DataConfig
from rolemesh.config.job import make_job
from rolemesh.data.assistant import render, tokenised
from rolemesh.data.parquet import write_rows
from rolemesh.data.supervised import SupervisedDataset
from rolemesh.errors import InvalidConfig, InvalidData
from rolemesh.models.tiny import byte_tokenizer

USER, SAYS = {"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}
TALK = [{"role": "system", "content": "add"}, USER, SAYS, {"role": "user", "content": "sure?"}, SAYS]
SHORT = ["<|im_start|>", *"user\n2+3=", "<|im_end|>", "\n", "<|im_start|>", *"assistant\n"]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def dataset(tmp_path: Path, rows: list[dict[str, Any]], **config: Any) -> SupervisedDataset:
    file = write_rows(tmp_path / "rows.parquet", rows)
    lengths = {} if "max_length" in config else {"max_prompt_length": 24, "max_response_length": 8}
    return SupervisedDataset([file], DataConfig(**(lengths | config)), byte_tokenizer())


def learned(data: SupervisedDataset, row: int = 0) -> tuple[str, list[str]]:
    """The whole row as text, and each token that is learned."""
    batch, tokenizer = data.batch([row]), byte_tokenizer()
    ids = [*batch["prompts"][0][batch["prompt_mask"][0]], *batch["responses"][0][batch["turns"][0] != 0]]
    taught = batch["responses"][0][batch["response_mask"][0]]
    return tokenizer.decode(ids), [tokenizer.decode([token]) for token in taught]


def test_a_row_is_learned_from_its_answer_to_the_end_of_its_turn(tmp_path: Path) -> None:
    for row in (
        {"messages": [USER, SAYS]},
        {"prompt": "2+3=", "response": "5"},
        {"prompt": [USER], "response": "5"},
    ):
        text, taught = learned(data := dataset(tmp_path, [row]))
        assert text == "".join(SHORT) + "5<|im_end|>\n"
        assert taught == ["5", "<|im_end|>"]
        batch = data.batch([0])
        assert batch["prompt_mask"][0].tolist() == [False] + [True] * len(SHORT)
        assert batch["turns"][0].tolist() == [1, 1, -2, 0, 0, 0, 0, 0]


def test_every_turn_of_a_conversation_is_learned(tmp_path: Path) -> None:
    data = dataset(tmp_path, [{"messages": TALK}], max_length=100)
    batch = data.batch([0])
    assert batch["prompts"].shape == (1, 1)
    text, taught = learned(data)
    assert text == byte_tokenizer().apply_chat_template(TALK, tokenize=False)
    assert taught == ["5", "<|im_end|>"] * 2
    turns = batch["turns"][0]
    assert (turns == 1).sum() == (turns == 2).sum() == 2
    assert turns.unique_consecutive().tolist() == [-1, 1, -2, 2, -3, 0]


@pytest.mark.parametrize("template", [MARKED, byte_tokenizer().chat_template], ids=["marked", "without marks"])
def test_ids_and_learned_tokens_are_those_that_transformers_says(template: str) -> None:
    marked = tokenizer_with(MARKED)
    expected = marked.apply_chat_template(
        TALK, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    tokenizer = tokenizer_with(template)
    [(ids, turns)] = tokenised(tokenizer, [render(tokenizer, TALK)])
    assert ids == expected["input_ids"]
    assert [int(turn > 0) for turn in turns] == expected["assistant_masks"]


@pytest.mark.parametrize("template", [MARKED, byte_tokenizer().chat_template], ids=["marked", "without marks"])
def test_template_variables_are_in_the_text_and_the_digest(template: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with("{{ date_string }}" + template)
    file = write_rows(tmp_path / "rows.parquet", [{"messages": [USER, SAYS]}])

    def data(date: str) -> SupervisedDataset:
        fixed = {"date_string": date}
        return SupervisedDataset([file], DataConfig(max_length=64, apply_chat_template_kwargs=fixed), tokenizer)

    text, taught = learned(data("26 Nov"))
    assert text.startswith("26 Nov<|im_start|>user")
    assert taught == ["5", "<|im_end|>"]
    assert data("26 Nov").digest == data("26 Nov").digest != data("27 Nov").digest


def test_a_template_that_rewrites_is_refused_unless_it_has_marks() -> None:
    says = "{{ m['content'] if loop.last else m['content'][:1] }}"
    template = "{% for m in messages %}" + says + "\n{% endfor %}"
    talk = [USER, {"role": "assistant", "content": "so 5"}, USER, {"role": "assistant", "content": "5"}]
    with pytest.raises(InvalidData, match="renders message 1 differently within the whole conversation"):
        render(tokenizer_with(template), talk)
    marked = template.replace(says, "{% generation %}" + says + "{% endgeneration %}")
    rendered = render(tokenizer_with(marked), talk)
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["2", "s", "2", "5"]


@pytest.mark.parametrize(
    ("prompt", "response", "truncation", "text", "taught"),
    [  # 23 tokens before the answer; 10 from there on
        (4, 10, "left", "ant\n12345678<|im_end|>\n", [*"12345678", "<|im_end|>"]),
        (4, 6, "left", "45678<|im_end|>\n", [*"5678", "<|im_end|>"]),  # the first of the tail follows nothing
        (23, 4, "right", "".join(SHORT) + "1234", [*"1234"]),
    ],
)
def test_a_row_that_is_too_long_is_cut_where_asked(
    tmp_path: Path, prompt: int, response: int, truncation: str, text: str, taught: list[str]
) -> None:
    lengths = {"max_prompt_length": prompt, "max_response_length": response}
    data = dataset(tmp_path, [{"prompt": "2+3=", "response": "12345678"}], truncation=truncation, **lengths)
    assert learned(data) == (text, taught)


def test_a_row_of_which_nothing_learned_is_left_is_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": "2+3=", "response": "5"}, {"prompt": "2" * 40, "response": "5"}]
    data = dataset(tmp_path, rows, truncation="right", max_length=30)
    assert (len(data), data.num_filtered) == (1, 1)
    assert dataset(tmp_path, rows, filter_overlong_prompts=True, max_length=30).num_filtered == 1
    with pytest.raises(InvalidData, match=r"rows\.parquet, row 1: is 62 tokens, data\.max_length is 30"):
        dataset(tmp_path, rows, max_length=30)


def test_a_response_may_be_within_a_column(tmp_path: Path) -> None:
    row = {"prompt": [USER], "extra_info": {"answer": "5", "question": "2+3="}}
    for prompt in ("prompt", "extra_info.question"):
        keys = {"prompt_key": prompt, "response_key": "extra_info.answer"}
        assert learned(dataset(tmp_path, [row], **keys))[1] == ["5", "<|im_end|>"]
    with pytest.raises(InvalidData, match=r"column 'extra_info\.text' should hold text; it holds None"):
        dataset(tmp_path, [row], response_key="extra_info.text")


def test_tools_may_be_json_text(tmp_path: Path) -> None:
    """As TRL's users have them: tools whose arguments differ have no common Parquet type."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sort")]
    tokenizer = tokenizer_with("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + MARKED)
    digests = []
    for number, given in enumerate((tools, json.dumps(tools), [*map(json.dumps, tools)], "null", "", None)):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps({"messages": [USER, SAYS], "tools": given}))
        digests.append(SupervisedDataset([file], DataConfig(max_length=512), tokenizer).digest)
    assert len(set(digests[:3])) == len(set(digests[3:])) == 1
    assert digests[0] != digests[3]


@pytest.mark.parametrize("tools", [5, "add", '{"type": "function"}', {"type": "function"}, [5], ["add"]])
def test_tools_that_are_no_schemas_are_named(tmp_path: Path, tools: Any) -> None:
    said = r"row 0: column 'tools' should hold a list of JSON schemas, or this list as JSON text; it holds "
    with pytest.raises(InvalidData, match=said):
        dataset(tmp_path, [{"messages": [USER, SAYS], "tools": tools}])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "2+3="}, "lacks columns: 'messages', or 'prompt' and 'response' wanted"),
        ({"prompt": "2+3=", "response": ""}, "row 0: column 'response' should hold text; it holds ''"),
        ({"prompt": 3, "response": "5"}, "row 0: column 'prompt' should hold text or messages; it holds 3"),
        ({"messages": [USER]}, "row 0: column 'messages' has no turn of the assistant"),
        ({"messages": "hello"}, "row 0: column 'messages' should hold a list of"),
        ({"messages": [{"content": "5"}]}, "row 0: column 'messages' should hold a list of"),
    ],
)
def test_a_row_without_what_is_needed_is_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(says)):
        dataset(tmp_path, [row])


def test_a_template_that_refuses_a_conversation_names_the_row(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.parquet", [{"messages": [USER, SAYS]}])
    tokenizer = tokenizer_with("{{ raise_exception('no users here') }}")
    with pytest.raises(InvalidData, match=r"row 0: column 'messages' cannot be used: .*no users here"):
        SupervisedDataset([file], DataConfig(), tokenizer)


def test_max_length_is_a_prompt_of_one_token_and_the_rest() -> None:
    data = DataConfig(max_length=100)
    assert (data.max_prompt_length, data.max_response_length) == (1, 99)
    assert DataConfig(**data.model_dump()) == data
    with pytest.raises(InvalidConfig, match="max_length is 100, but max_prompt_length is 50"):
        make_job({"data": {"max_length": 100, "max_prompt_length": 50}})
