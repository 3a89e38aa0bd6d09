"""Publishers' files become rows that the reward rules score and that the dataset reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process_commands import rolemesh

from rolemesh.config.data import DataConfig
from rolemesh.config.reward import RewardConfig
from rolemesh.data import parquet
from rolemesh.data.dataset import PromptDataset
from rolemesh.data.pairs import PairDataset
from rolemesh.models.loading import AutoTokenizer
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.rules.sources import rule_of
from rolemesh.services.reward.functions import default_compute_score


def written(file: Path, content: Any) -> Path:
    """A text, or JSON Lines of a list; .gz is compressed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def converted(name: str, src: Path, out: Path, *names: str) -> list[dict[str, Any]]:
    answer = rolemesh("data", name, src, out)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == [str(out / f"{each}.parquet") for each in names]
    return [row for each in names for row in pq.read_table(out / f"{each}.parquet").to_pylist()]


def score(row: dict[str, Any], response: str) -> Any:
    found = default_compute_score(row["data_source"], response, row["reward_model"]["ground_truth"])
    return found["acc"] if isinstance(found, dict) else found


def test_math_rows_have_the_last_boxed_content_as_ground_truth(tmp_path: Path, tiny_model: Path) -> None:
    problem = {"level": "Level 1", "type": "Algebra"}
    for number, (question, solution) in {
        "10": ("What is $1/2+1$?", r"It is \fbox{1}? No: $\boxed{\dfrac{3}{2}}$."),
        "9": ("What is $2+2$?", r"It is $\boxed 4$."),
    }.items():
        row = {**problem, "problem": question, "solution": solution}
        written(tmp_path / f"MATH/train/algebra/{number}.json", json.dumps(row))
    rows = converted("math", tmp_path / "MATH", tmp_path / "out", "train")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["4", r"\dfrac{3}{2}"]
    assert rows[1]["prompt"][0]["content"].startswith("What is $1/2+1$? Let's think step by step")
    assert rows[1]["extra_info"] == {"split": "train", "index": 1, "level": "Level 1", "type": "Algebra"}
    assert [score(rows[1], answer) for answer in (r"\boxed{\frac32}", r"\boxed{1}")] == [1, 0]
    config = DataConfig(max_prompt_length=512)
    data = PromptDataset([tmp_path / "out/train.parquet"], config, AutoTokenizer.from_pretrained(tiny_model))
    assert len(data) == 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_aime_have_whole_numbers_as_ground_truth(tmp_path: Path, kind: str) -> None:
    records = [{"Problem": "How many?", "Answer": 25}, {"Problem": "How much {more}?", "Answer": 7}]
    if kind == "parquet":
        lower = [
            {"id": i, "problem": r["Problem"], "answer": f"{r['Answer']:03}"} for i, r in enumerate(records)
        ]
        pq.write_table(pa.Table.from_pylist(lower), tmp_path / "aime.parquet")
    else:
        written(tmp_path / "aime.jsonl", records)
    rows = converted("aime", tmp_path / f"aime.{kind}", tmp_path / "out", "test")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["25", "7"]
    assert "\n\nHow much {more}?\n\n" in rows[1]["prompt"][0]["content"]
    assert rule_of(rows[0]["data_source"], RewardConfig()) == "dapo"
    assert [score(rows[0], f"So.\nAnswer: {number}") for number in (25, 26)] == [1, 0]


def test_pairs_of_hh_rlhf_share_their_dialogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 2)  # more than one part
    start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"
    pairs = [{"chosen": f"{start} Because {i}.", "rejected": f"{start} Be quiet {i}."} for i in range(5)]
    useless = [{"chosen": start + one, "rejected": start + other} for one, other in ((" a", " a "), (" a", ""))]
    written(tmp_path / "helpful/train.jsonl.gz", pairs + useless)
    written(tmp_path / "helpful/test.jsonl", pairs[:1])
    rows = converted("hh-rlhf", tmp_path / "helpful", tmp_path / "out", "train", "test")
    assert len(rows) == 6
    assert [(m["role"], m["content"]) for m in rows[4]["prompt"]] == [
        *(("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"))
    ]
    assert (rows[4]["chosen"], rows[4]["rejected"]) == ("Because 4.", "Be quiet 4.")
    assert pq.read_metadata(tmp_path / "out/train.parquet").num_row_groups == 3
    data = PairDataset([tmp_path / "out/train.parquet"], DataConfig(max_length=512), byte_tokenizer())
    assert len(data) == 5
    assert "left out 2 pairs" in caplog.text


TESTS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def test_apps_rows_have_their_tests_as_ground_truth(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Problems without tests are left out."""
    folder = tmp_path / "APPS/test"
    written(folder / "0000/question.txt", "Add two numbers.")
    written(folder / "0000/input_output.json", json.dumps(TESTS))
    written(folder / "0000/metadata.json", '{"difficulty": "interview", "url": "u"}')
    written(folder / "0001/question.txt", "No tests.")
    long = json.dumps(TESTS)[:-1] + ', "fn_name": ' + "9" * 5000 + "}"
    columns = {"starter_code": "def add(a, b):", "difficulty": "introductory"}
    written(
        tmp_path / "APPS/train.jsonl",
        [
            {"question": "Add.", "input_output": json.dumps(TESTS | {"fn_name": "add"}), **columns},
            {"question": "Python does not read it.", "input_output": long, **columns},
            {"question": "None.", "input_output": "", **columns},
        ],
    )
    rows = converted("apps", tmp_path / "APPS", tmp_path / "out", "train", "test")
    assert [row["extra_info"] for row in rows] == [
        {"split": "train", "index": 0, "difficulty": "introductory"},
        {"split": "test", "index": 0, "difficulty": "interview"},
    ]
    assert rows[0]["prompt"][0]["content"].startswith("Add.\n\ndef add(a, b):\n\nWrite Python code")
    assert [rule_of(row["data_source"], RewardConfig()) for row in rows] == ["prime_code"] * 2
    assert json.loads(rows[1]["reward_model"]["ground_truth"]) == TESTS
    assert "left out 2 problems" in caplog.text


@pytest.mark.parametrize(
    ("name", "file", "content", "words"),
    [
        (
            "math",
            "MATH/train/a/1.json",
            '{"problem": "p"}',
            "1.json: expected an object with problem, solution",
        ),
        ("math", "MATH/1.json", "{}", "is not the folder MATH"),
        (
            "aime",
            "aime.jsonl",
            [{"problem": "p", "answer": "1000"}],
            "row 0: expected a problem, and an integer",
        ),
        ("aime", "aime.jsonl", [{"question": "p"}], "row 0 has no column ['answer', 'problem']; it has"),
        ("aime", "aime.parquet", "no parquet", "cannot be read as Parquet"),
        ("hh-rlhf", "hh/train.jsonl", [{"chosen": "a"}], "row 0: expected the texts chosen and rejected"),
        (
            "hh-rlhf",
            "hh/train.jsonl",
            [{"chosen": "a", "rejected": "b"}],
            "row 0: chosen and rejected should begin",
        ),
        (
            "apps",
            "apps/train.jsonl",
            [{"question": "q", "input_output": "[]"}],
            "row 0: input_output should be",
        ),
        ("apps", "apps/train.jsonl", [{"question": "q"}], "train.jsonl has no problems with tests"),
        ("apps", "apps/else.txt", "", "nor the folder APPS"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, file: str, content: Any, words: str) -> None:
    src = written(tmp_path / file, content)
    answer = rolemesh("data", name, src if name == "aime" else tmp_path / file.split("/")[0], tmp_path / "out")
    assert answer.returncode == 2
    assert words in answer.stderr
    assert str(tmp_path) in answer.stderr
    assert not list((tmp_path / "out").glob("*.parquet"))
