"""The tokens that end responses are those that a model directory declares, and no class's default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.rollout.engines.eos import end_tokens


def without_eos(directory: Path) -> JobConfig:
    """A job with a Llama, whose class declares token 2 to be the end."""
    make_tiny_model(directory, "llama")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        declared = json.loads((directory / name).read_text())
        for key in ("eos_token_id", "eos_token"):
            declared.pop(key, None)
        (directory / name).write_text(json.dumps(declared))
    return make_job({"actor": {"model": {"path": str(directory)}}})


def test_a_model_that_names_no_end_is_refused(tmp_path: Path) -> None:
    job = without_eos(tmp_path)
    with pytest.raises(
        InvalidConfig, match=r"names no EOS token, so every response would have .*; set eos_token_id"
    ):
        end_tokens(job)


@pytest.mark.parametrize(
    ("declared", "ends"),
    [
        ({"generation_config.json": [5, 7], "config.json": 3}, [5, 7]),
        ({"generation_config.json": None, "config.json": 3}, [3]),
        ({"config.json": [3, 4]}, [3, 4]),
        ({"tokenizer_config.json": "<|im_end|>", "config.json": 3}, [3, 258]),
    ],
)
def test_generation_config_eos_wins_over_config_and_tokenizer(
    tmp_path: Path, declared: dict[str, object], ends: list[int]
) -> None:
    """Without them, the ends are those of the config and the tokenizer."""
    job = without_eos(tmp_path)
    for name, value in declared.items():
        key = "eos_token" if name.startswith("tokenizer") else "eos_token_id"
        settings = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**settings, key: value}))
    assert end_tokens(job) == (ends, 256)
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        settings.pop("pad_token", None)
        (tmp_path / name).write_text(json.dumps(settings))
    assert end_tokens(job)[0] == ends
