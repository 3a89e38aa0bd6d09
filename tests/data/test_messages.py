"""Content in parts, and columns of pictures: what a run on text trains on, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rolemesh.config.data import DataConfig
from rolemesh.data import PromptDataset
from rolemesh.data.pairs import PairDataset
from rolemesh.data.parquet import write_rows
from rolemesh.data.supervised import SupervisedDataset
from rolemesh.errors import InvalidData
from rolemesh.models.tiny import byte_tokenizer

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}"  # as Llama 3's
ITEMS = PLAIN.replace("{{ m['content'] | trim }}", "{% for part in m['content'] %}{{ part }}{% endfor %}")
READS_PARTS = PLAIN.replace(
    "{{ m['content'] | trim }}",
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}",
)
PARTS, PICTURE = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}], {"type": "image_url"}
SAYS = {"role": "assistant", "content": "4"}
KINDS: dict[str, Any] = {"prompt": PromptDataset, "messages": SupervisedDataset, "chosen": PairDataset}


def dataset(file: Path, kind: str, content: Any, template: str = PLAIN) -> Any:
    asked = {"role": "user", "content": content}
    columns = {
        "prompt": {"prompt": [asked], "data_source": "math", "reward_model": {"ground_truth": "4"}},
        "messages": {"messages": [asked, SAYS]},
        "chosen": {"chosen": [asked, SAYS], "rejected": [asked, {**SAYS, "content": "5"}]},
    }
    file.write_text(json.dumps(columns[kind]))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return KINDS[kind]([file], DataConfig(max_prompt_length=128, max_response_length=256), tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [PLAIN, ITEMS], ids=["the list", "part by part"])
@pytest.mark.parametrize("content", [PARTS, PARTS[:1]])
def test_parts_that_a_template_prints_as_python_are_refused(
    tmp_path: Path, kind: str, template: str, content: Any
) -> None:
    said = rf"row 0: column '{kind}' has a message whose content is a list of parts, .*does not read parts"
    with pytest.raises(InvalidData, match=said):
        dataset(tmp_path / "a.jsonl", kind, content, template)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_a_template_reads_are_the_text_that_they_hold(tmp_path: Path, kind: str) -> None:
    parts = dataset(tmp_path / "a.jsonl", kind, PARTS, READS_PARTS)
    assert parts.digest == dataset(tmp_path / "b.jsonl", kind, "2+2=", READS_PARTS).digest


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_is_a_picture_is_refused(tmp_path: Path, kind: str) -> None:
    said = rf"row 0: column '{kind}' has a part of type 'image_url' in a message; messages are text only"
    with pytest.raises(InvalidData, match=said):
        dataset(tmp_path / "a.jsonl", kind, [*PARTS, PICTURE], READS_PARTS)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_warning_names_a_file_whose_pictures_are_not_read(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "<image>2+2=", "response": "4", "images": [{"path": "a.png"}]}]
    file = tmp_path / name
    if name == "a.jsonl":
        file.write_text(json.dumps(rows[0]))
    else:
        write_rows(file, rows)
    with caplog.at_level(logging.WARNING, "rolemesh"):
        SupervisedDataset([file], DataConfig(), byte_tokenizer())
    assert caplog.messages == [f"{file}: column 'images' is not read; messages are text only"]
