"""Chat templates: one of the job's own, none, and those that would take all memory or time."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from rolemesh.config.data import DataConfig
from rolemesh.config.model import PolicyModelConfig
from rolemesh.data import PromptDataset, templates
from rolemesh.data.supervised import SupervisedDataset
from rolemesh.errors import InvalidData
from rolemesh.models.loading import load_tokenizer
from rolemesh.models.tiny import byte_tokenizer

ROW = {"prompt": [{"role": "user", "content": "2+3="}], "response": "5"}


def data_with(directory: Path, template: str | None, **arguments: Any) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    (file := directory / "rows.jsonl").write_text(json.dumps(ROW))
    if arguments:
        return PromptDataset([file], DataConfig(), tokenizer, **arguments)
    return SupervisedDataset([file], DataConfig(), tokenizer)


@pytest.mark.parametrize("arguments", [{}, {"scored": False}], ids=["rows", "prompts"])
def test_without_a_chat_template_the_error_names_the_key_for_one(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises(
        InvalidData, match=r"has no chat template.* set actor\.model\.custom_chat_template to a"
    ):
        data_with(tmp_path, None, **arguments)


def test_a_jobs_own_template_is_saved_with_the_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    """The tokenizer uses it, too."""
    own = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer = load_tokenizer(PolicyModelConfig(path=str(tiny_model), custom_chat_template=own))
    assert tokenizer.apply_chat_template(ROW["prompt"], tokenize=False) == "user: 2+3=\n"
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(PolicyModelConfig(path=str(tmp_path))).chat_template == own
    assert load_tokenizer(PolicyModelConfig(path=str(tiny_model))).chat_template != own


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ messages[0].content | center(10000000000) }}",
        "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 2000000 }}",
    ],
    ids=["a product", "a width", "a filter", "doublings", "loops", "a text of megabytes"],
)
def test_an_unbounded_template_is_refused_in_seconds(tmp_path: Path, template: str) -> None:
    """And in little memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InvalidData, match=r"needs more than 256 MiB of memory, 5 s .*custom_chat_template"):
        data_with(tmp_path, template)
    assert time.process_time() - began < 5  # of this process
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_template_that_was_not_tried_in_time_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No processor was free to try it, so the error does not blame it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{# in no other test #}{{ messages[0]['content'] }}"
    with monkeypatch.context() as patch:
        patch.setattr(templates, "WALL_SECONDS", 0.001)  # less than any interpreter needs to start
        with pytest.raises(InvalidData, match=r"was not tried within 0\.001 s: .*; start again"):
            templates.check_template(tokenizer, {})
    templates.check_template(tokenizer, {})
