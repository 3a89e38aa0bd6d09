"""Parquet rows to batches of prompts, and which prompts belong to which step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rolemesh.catalog.datasets import DATASETS
from rolemesh.config.data import DataConfig
from rolemesh.data import PromptDataset, PromptOrder, write_gsm8k
from rolemesh.data.converters.gsm8k_dataset import gsm8k_rows
from rolemesh.data.order import permutation
from rolemesh.data.parquet import write_rows
from rolemesh.data.row_source import GivenRows
from rolemesh.errors import InvalidData
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.services.command_line.arithmetic import arithmetic_problems, write_arithmetic

GSM8K = Path(__file__).parents[1] / "fixtures" / "gsm8k"
TOKENIZER = byte_tokenizer()
# "<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n" around the content
TEMPLATE_TOKENS = 1 + len("user\n") + 1 + 1 + 1 + len("assistant\n")


def row(content: str, **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        **columns,
    }


def dataset(files: list[Path], **config: Any) -> PromptDataset:
    return PromptDataset(files, DataConfig(**{"max_prompt_length": 32, **config}), TOKENIZER)


def contents(data: PromptDataset) -> list[str]:
    """What is left of each prompt."""
    batch = data.batch(range(len(data)))
    return [
        TOKENIZER.decode(ids[mask]) for ids, mask in zip(batch["prompts"], batch["prompt_mask"], strict=True)
    ]


# ------------------------------------------------------------------------------------ batches


def test_a_prompt_is_its_chat_template_left_padded(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row("ab"), row("abcd")])
    batch = dataset([file]).batch([1, 0])
    assert batch["prompts"].shape == batch["prompt_mask"].shape == (2, 32)
    assert batch["prompts"].dtype == torch.int64
    assert batch["prompt_mask"].dtype == torch.bool
    assert batch["prompt_mask"].sum(1).tolist() == [TEMPLATE_TOKENS + 4, TEMPLATE_TOKENS + 2]
    assert batch["prompt_mask"][:, -1].all()
    text = TOKENIZER.decode(batch["prompts"][0][batch["prompt_mask"][0]])
    assert text == "<|im_start|>user\nabcd<|im_end|>\n<|im_start|>assistant\n"
    assert set(batch["prompts"][~batch["prompt_mask"]].tolist()) == {TOKENIZER.pad_token_id}
    assert batch.meta_info == {}


def test_uid_is_the_split_and_the_row_whatever_is_left_out(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.parquet", [row("short"), row("much too long")])
    second = write_rows(tmp_path / "b.parquet", [row("other")])
    limit = TEMPLATE_TOKENS + 6
    data = dataset([first, second], max_prompt_length=limit, filter_overlong_prompts=True)
    assert data.batch([0, 1])["uid"].tolist() == ["train-000000", "train-000002"]
    assert data.num_filtered == 1
    val = PromptDataset([second], DataConfig(max_prompt_length=limit), TOKENIZER, split="val")
    assert val.batch([0])["uid"].tolist() == ["val-000000"]


def test_files_of_different_extra_info_make_one_set(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.parquet", [row("a", extra_info={"index": 7, "question": "q"})])
    second = write_rows(tmp_path / "b.parquet", [row("b", extra_info={"level": [1, 2]}, data_source="other")])
    third = write_rows(tmp_path / "c.parquet", [row("c")])
    batch = dataset([first, second, third]).batch([0, 1, 2])
    assert batch["extra_info"].tolist() == [{"index": 7, "question": "q"}, {"level": [1, 2]}, {}]
    assert batch["data_source"].tolist() == ["math", "other", "math"]
    assert batch["reward_model"].tolist() == [{"style": "rule", "ground_truth": "1"}] * 3


def test_a_message_has_only_the_keys_that_its_row_gave(tmp_path: Path) -> None:
    # Arrow gives every message of a column the union of all keys, as None
    messages = [{"role": "user", "content": "hi", "name": "bo"}, {"role": "user", "content": "yo"}]
    file = write_rows(tmp_path / "a.parquet", [row("", prompt=messages)])
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['name'] if m.name is defined else '-' }}{% endfor %}"
    batch = PromptDataset([file], DataConfig(max_prompt_length=8), tokenizer).batch([0])
    assert tokenizer.decode(batch["prompts"][0][batch["prompt_mask"][0]]) == "bo-"


SEES = (
    "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls is defined else m.content }}{% endfor %}"
)


def test_no_column_has_keys_that_arrow_adds_from_other_rows(tmp_path: Path) -> None:
    """Two rows with tool calls of different arguments. A null in a list is a value, and stays."""

    def called(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        prompt = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]
        return row("", prompt=prompt, **more)

    extras: list[dict[str, Any]] = [
        {"tools_kwargs": {"f": {"create_kwargs": {"x": 0}}}, "list": [None, {"a": 1}]},
        {"tools_kwargs": {"g": {"create_kwargs": {"text": "hi"}}}, "index": 3},
    ]
    truths = [
        {"style": "rule", "ground_truth": {"target": "1"}},
        {"style": "rule", "ground_truth": {"words": ["a"]}},
    ]
    rows = [
        called(arguments, extra_info=extra, reward_model=truth)
        for arguments, extra, truth in zip(({"x": 0}, {"text": "hi"}), extras, truths, strict=True)
    ]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SEES
    file = write_rows(tmp_path / "a.parquet", rows)
    data = PromptDataset([file], DataConfig(max_prompt_length=200), tokenizer)
    batch = data.batch([0, 1])
    texts = [
        tokenizer.decode(ids[mask]) for ids, mask in zip(batch["prompts"], batch["prompt_mask"], strict=True)
    ]
    for text, arguments in zip(texts, ('{"x": 0}', '{"text": "hi"}'), strict=True):
        assert f'"arguments": {arguments}' in text
        assert "null" not in text
    assert batch["extra_info"].tolist() == extras
    assert batch["reward_model"].tolist() == truths


def test_a_row_of_a_data_set_of_arrows_has_no_fill_ins_either() -> None:
    table = pa.table(
        {"prompt": [[{"a": 1}], [{"b": {"c": None, "d": 2}}]], "extra_info": [None, {"x": [None]}]}
    )
    rows = GivenRows(table.to_pylist(), DATASETS["parquet"], ("prompt",)).rows([0, 1])
    assert rows == [
        {"prompt": [{"a": 1}], "extra_info": None},
        {"prompt": [{"b": {"d": 2}}], "extra_info": {"x": [None]}},
    ]


def test_the_digest_tells_only_data_template_and_tokenizer_apart(tmp_path: Path) -> None:
    def digest(rows: list[Any], name: str = "a", tokenizer: Any = TOKENIZER, **config: Any) -> str:
        file = write_rows(tmp_path / f"{name}.parquet", rows)
        return PromptDataset([file], DataConfig(max_prompt_length=64, **config), tokenizer).digest

    one = digest([row("ab"), row("cd")])
    assert digest([row("ab"), row("cd", ability="x")], "b", seed=7) == one
    assert digest([row("ab"), row("ce")]) != one  # as many rows, as long
    assert digest([row("abc"), row("d")]) != one
    assert digest([row("ab")]) != one
    dated = byte_tokenizer()
    dated.chat_template = "{{ date_string or '27 Nov' }}" + dated.chat_template
    other = digest([row("ab"), row("cd")], tokenizer=dated)
    fixed = {"date_string": "26 Nov"}
    assert len({one, other, digest([row("ab"), row("cd")], "a", dated, apply_chat_template_kwargs=fixed)}) == 3


@pytest.mark.parametrize(
    ("truncation", "left_over"),
    [
        ("left", "st|>assistant\n"),
        ("right", "<|im_start|>user\nabcd"),
        ("middle", "<|im_start|>userstant\n"),
    ],
)
def test_truncation_cuts_the_named_end(tmp_path: Path, truncation: str, left_over: str) -> None:
    file = write_rows(tmp_path / "a.parquet", [row("abcdefgh")])
    limit = 10
    [text] = contents(dataset([file], max_prompt_length=limit, truncation=truncation))
    ids = TOKENIZER("<|im_start|>user\nabcdefgh<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    expected = {"left": ids[-10:], "right": ids[:10], "middle": ids[:5] + ids[-5:]}[truncation]
    assert text == TOKENIZER.decode(expected)
    assert text.endswith(left_over[-4:])


def test_train_max_samples_is_a_seeded_choice_or_the_first_rows(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row(f"{i:02d}") for i in range(50)])
    first = dataset([file], train_max_samples=5, shuffle=False)
    chosen = dataset([file], train_max_samples=5, seed=1)
    assert first.batch(range(5))["uid"].tolist() == [f"train-{i:06d}" for i in range(5)]
    uids = chosen.batch(range(5))["uid"].tolist()
    assert uids == sorted(uids)
    assert uids == dataset([file], train_max_samples=5, seed=1).batch(range(5))["uid"].tolist()
    assert uids != dataset([file], train_max_samples=5, seed=2).batch(range(5))["uid"].tolist()


def test_batches_cover_the_set_once_in_order(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row(str(i)) for i in range(7)])
    data = dataset([file])
    assert [len(batch) for batch in data.batches(3)] == [3, 3, 1]
    assert [uid for batch in data.batches(3) for uid in batch["uid"]] == [f"train-{i:06d}" for i in range(7)]
    assert [len(batch) for batch in data.batches()] == [7]


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"data_source": "math", "prompt": row("a")["prompt"]}], "has no column .'reward_model'."),
        ([{"data_source": "math", "reward_model": {"style": "rule"}}], "has no column .'prompt'."),
        ([{"prompt": row("a")["prompt"], "reward_model": {"style": "rule"}}], "has no column .'data_source'."),
        ([row("a"), row("b", data_source=None)], "a.parquet, row 1: column 'data_source' should hold a str"),
        ([row("a", reward_model="1")], "a.parquet, row 0: column 'reward_model' should hold a dict"),
        ([row("a", prompt="just text")], "a.parquet, row 0: column 'prompt' should hold a list"),
        (
            [row("a"), row("b" * 99)],
            "a.parquet, row 1: column 'prompt' is 118 tokens, data.max_prompt_length is 32",
        ),
    ],
)
def test_a_bad_row_is_named_with_file_and_column(tmp_path: Path, rows: list[Any], message: str) -> None:
    file = write_rows(tmp_path / "a.parquet", rows)
    with pytest.raises(InvalidData, match=message) as raised:
        dataset([file])
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_column_that_is_not_there_is_named_with_its_key(tmp_path: Path, kind: str) -> None:
    rows = [{"question": "a", "data_source": "math", "reward_model": {"style": "rule"}}]
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_rows(file, rows)
    else:
        file.write_text(json.dumps(rows[0]))
    said = r"has no column \['prompt'\]; it has .*'question'.*\. Set data\.prompt_key to the name of the column"
    with pytest.raises(InvalidData, match=said):
        dataset([file])
    with pytest.raises(
        InvalidData, match=r"lacks? .*Set data\.prompt_key|has no column .*Set data\.prompt_key"
    ):
        PromptDataset([file], DataConfig(), TOKENIZER, scored=False)


JSON = pa.json_(pa.string())


def json_cells(*values: Any) -> pa.Array:
    texts = [None if value is None else json.dumps(value) for value in values]
    return pa.ExtensionArray.from_storage(JSON, pa.array(texts, pa.string()))


def test_cells_of_arrows_json_type_are_what_their_text_says(tmp_path: Path) -> None:
    """Whole columns of it, and some within lists of mappings; it keeps its own nulls."""
    calls = pa.StructArray.from_arrays(
        [pa.array(["add", "sort"]), json_cells({"a": 1, "b": None}, [2])], names=["name", "arguments"]
    )
    prompt, reward = ([*row("a")["prompt"]], {"style": "rule", "ground_truth": "1"})
    table = pa.table(
        {
            "prompt": json_cells(prompt, prompt),
            "data_source": ["math", "math"],
            "reward_model": json_cells(reward, reward),
            "extra_info": pa.StructArray.from_arrays(
                [pa.ListArray.from_arrays(pa.array([0, 1, 2]), calls), json_cells(None, "x")],
                names=["calls", "more"],
            ),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    batch = dataset([tmp_path / "a.parquet"]).batch([0, 1])
    assert batch["reward_model"].tolist() == [reward, reward]
    assert batch["extra_info"].tolist() == [
        {"calls": [{"name": "add", "arguments": {"a": 1, "b": None}}]},
        {"calls": [{"name": "sort", "arguments": [2]}], "more": "x"},
    ]
    assert TOKENIZER.decode(batch["prompts"][0][batch["prompt_mask"][0]]).startswith("<|im_start|>user\na")


def test_text_that_is_not_json_in_a_column_of_it_is_named(tmp_path: Path) -> None:
    cells = pa.ExtensionArray.from_storage(JSON, pa.array(['{"a": NaN}'], pa.string()))
    columns = pa.Table.from_pylist([row("a")]).append_column("extra_info", cells)
    pq.write_table(columns, tmp_path / "a.parquet")
    with pytest.raises(InvalidData, match=r"row 0: column 'extra_info' of .*json.* cannot be read: NaN is not"):
        dataset([tmp_path / "a.parquet"])


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    text, empty = tmp_path / "text.parquet", tmp_path / "empty.parquet"
    text.write_text("no table")
    pq.write_table(pa.Table.from_pylist([row("a")]).slice(0, 0), empty)
    for file, message in (
        (text, "cannot be read as Parquet"),
        (empty, "has no rows"),
        (tmp_path / "no", "no such"),
    ):
        with pytest.raises(InvalidData, match=message) as raised:
            dataset([file])
        assert str(file) in str(raised.value)
    with pytest.raises(InvalidData, match="no file given"):
        dataset([])


def test_a_filter_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row("a" * 99)])
    with pytest.raises(InvalidData, match="none of the 1 prompts"):
        dataset([file], filter_overlong_prompts=True)


def test_a_tokenizer_without_chat_template_is_an_error(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row("a")])
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InvalidData, match="has no chat template"):
        PromptDataset([file], DataConfig(), tokenizer)


# -------------------------------------------------------------------------------------- order


def order(num_rows: int, batch_size: int, seed: int = 1, shuffle: bool = True) -> PromptOrder:
    return PromptOrder(num_rows, DataConfig(train_batch_size=batch_size, seed=seed, shuffle=shuffle))


@pytest.mark.parametrize(
    ("num_rows", "batch_size"), [(10, 4), (7, 7), (5, 4), (9, 3), (3, 2), (4, 1), (101, 13)]
)
def test_every_epoch_has_every_row_and_no_batch_has_one_twice(num_rows: int, batch_size: int) -> None:
    epochs = batch_size  # whole batches fill exactly so many epochs
    prompts = order(num_rows, batch_size)
    batches = [prompts.rows(step) for step in range(1, prompts.total_steps(epochs) + 1)]
    assert all(len(set(batch.tolist())) == batch_size for batch in batches)
    stream = [row for batch in batches for row in batch.tolist()]
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_a_step_has_the_same_rows_whatever_was_asked_before() -> None:
    asked = order(11, 4)
    in_order = [asked.rows(step).tolist() for step in range(1, 30)]
    assert [asked.rows(step).tolist() for step in reversed(range(1, 30))] == in_order[::-1]
    assert order(11, 4).rows(23).tolist() == in_order[22]


def test_seed_and_epoch_change_the_order() -> None:
    assert order(50, 50).rows(1).tolist() != order(50, 50, seed=2).rows(1).tolist()
    assert order(50, 50).rows(1).tolist() != order(50, 50).rows(2).tolist()
    assert order(6, 3, shuffle=False).rows(2).tolist() == [3, 4, 5]


def test_a_seed_may_be_below_zero() -> None:
    rows = order(11, 11, seed=-1).rows(1).tolist()
    assert sorted(rows) == list(range(11))
    assert rows == permutation(11, 2**64 - 1, 0).tolist() != order(11, 11).rows(1).tolist()


def test_steps_and_epochs_are_counted() -> None:
    prompts = order(10, 4)
    assert [prompts.total_steps(epochs) for epochs in (1, 2, 3)] == [2, 5, 7]
    assert [prompts.epoch(step) for step in (1, 3, 4, 6)] == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="from 1"):
        prompts.rows(0)


def test_fewer_rows_than_a_batch_is_an_error() -> None:
    with pytest.raises(InvalidData, match=r"3 prompts do not fill one batch of data.train_batch_size 4"):
        order(3, 4)


# ----------------------------------------------------------------------------- gsm8k, arithmetic


def test_gsm8k_rows_have_verls_layout(tmp_path: Path) -> None:
    files = write_gsm8k(GSM8K, tmp_path / "out")
    assert [file.name for file in files] == ["train.parquet", "test.parquet"]
    train = pq.read_table(files[0]).to_pylist()
    assert len(train) == 48
    assert train[0]["data_source"] == "openai/gsm8k"
    assert train[0]["ability"] == "math"
    [message] = train[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("Natalia sold clips")
    assert message["content"].endswith(
        'altogether in April and May? Let\'s think step by step and output the final answer after "####".'
    )
    assert train[0]["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert {key: train[3]["extra_info"][key] for key in ("split", "index")} == {"split": "train", "index": 3}
    assert train[0]["extra_info"]["answer"].endswith("#### 72")
    data = PromptDataset(files, DataConfig(max_prompt_length=1024), TOKENIZER)
    assert len(data) == 64


@pytest.mark.parametrize(
    ("answered_by", "brought"),
    [
        ("tool", {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}),
        ("interaction", {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "72"}}),
    ],
)
def test_gsm8k_rows_of_conversations_bring_what_verls_do(answered_by: str, brought: dict[str, Any]) -> None:
    row, plain = (gsm8k_rows(GSM8K / "train.jsonl", by)[0] for by in (answered_by, None))
    if answered_by == "interaction":
        brought["interaction_kwargs"]["query"] = plain["extra_info"]["question"]
    assert row == {**plain, "agent_name": "tool_agent", "extra_info": {**plain["extra_info"], **brought}}


def test_a_clone_of_gsm8ks_repository_is_converted_as_its_folder(tmp_path: Path) -> None:
    (tmp_path / "grade_school_math").mkdir()
    (tmp_path / "grade_school_math" / "data").symlink_to(GSM8K)
    of_the_clone = write_gsm8k(tmp_path, tmp_path / "clone")
    assert [f.name for f in of_the_clone] == ["train.parquet", "test.parquet"]
    of_the_folder = write_gsm8k(GSM8K, tmp_path / "folder")
    assert [f.read_bytes() for f in of_the_clone] == [f.read_bytes() for f in of_the_folder]


def test_one_gsm8k_file_makes_one_parquet_file(tmp_path: Path) -> None:
    assert [f.name for f in write_gsm8k(GSM8K / "test.jsonl", tmp_path)] == ["test.parquet"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q"}', "line 2: expected an object"),
        ("[1]", "line 2: expected an object"),
        ("{", "line 2: expected an object"),
        ('{"question": "q", "answer": "a"}', "line 2: the answer does not end"),
    ],
)
def test_a_line_that_is_no_gsm8k_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "q\u2028", "answer": "#### 1,000"}\n' + line + "\n")
    with pytest.raises(InvalidData, match=message):
        gsm8k_rows(file)
    file.write_text(file.read_text().split("\n")[0])
    assert gsm8k_rows(file)[0]["reward_model"]["ground_truth"] == "1000"


def test_no_gsm8k_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="neither a JSONL file nor a folder"):
        write_gsm8k(tmp_path, tmp_path / "out")


def test_held_out_additions_are_not_trained_on_in_either_order(tmp_path: Path) -> None:
    train, val = arithmetic_problems(256, seed=3)
    assert len(val) == 256
    assert len(train) + len(val) == len({*train, *val}) == 8100
    assert not {tuple(sorted(pair)) for pair in train} & {tuple(sorted(pair)) for pair in val}
    assert arithmetic_problems(256, seed=3) == (train, val) != arithmetic_problems(256, seed=4)

    files = write_arithmetic(tmp_path, num_val=16, seed=3)
    rows = pq.read_table(files[1]).to_pylist()
    assert len(rows) == 16
    a, b = rows[0]["prompt"][0]["content"].rstrip("=").split("+")
    assert rows[0]["reward_model"]["ground_truth"] == str(int(a) + int(b))


def test_write_rows_leaves_no_half_written_file(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowInvalid):
        write_rows(tmp_path / "a.parquet", [{"x": 1}, {"x": "text"}])
    assert not (tmp_path / "a.parquet").exists()
