"""An I/O error may pass, so it is no wrong input: a controller that exits with code 2 is not started again.

/proc/self/mem stands in for a file of a file system that fails. It is a regular file that can be opened, and a
read of its beginning ends with EIO.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rolemesh.config.model import ModelConfig, PolicyModelConfig
from rolemesh.config.reward import CustomRewardConfig
from rolemesh.config.yaml_file import read_yaml
from rolemesh.data import column_process
from rolemesh.data.converters.competitions import write_aime
from rolemesh.data.parquet import read_table, write_rows
from rolemesh.errors import WRONG_INPUT, InvalidConfig, unreadable
from rolemesh.models.loading import (
    load_causal_lm,
    load_outline,
    load_state,
    load_tokenizer,
    vocabulary_in,
)
from rolemesh.models.lora import Adapter
from rolemesh.planner.shapes import read_shape
from rolemesh.rpc.tls import CERTIFICATE, read_keys
from rolemesh.services.reward.functions.custom import load_function

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem")


def model_at(directory: Path) -> ModelConfig:
    return ModelConfig(path=str(directory))


def read_adapter(directory: Path) -> None:
    adapter = directory / "adapter"
    (adapter / "adapter_model.safetensors").touch()
    config = PolicyModelConfig(path=str(directory), lora_rank=1, lora_adapter_path=str(adapter))
    Adapter(load_outline(config, "actor"), config, seed=0)


def read_function(directory: Path) -> None:
    load_function(CustomRewardConfig(path=str(directory / "reward.py")))


READERS: list[tuple[str, Callable[[Path], Any]]] = [
    ("tokenizer.json", lambda at: load_tokenizer(model_at(at))),
    ("tokenizer_config.json", lambda at: load_tokenizer(model_at(at))),
    ("config.json", lambda at: load_causal_lm(model_at(at), "actor")),
    ("config.json", lambda at: load_outline(model_at(at), "actor")),
    ("config.json", lambda at: vocabulary_in(model_at(at), "actor")),
    ("config.json", lambda at: read_shape(model_at(at), "actor")),
    ("generation_config.json", lambda at: load_outline(model_at(at), "actor")),
    ("model.safetensors", lambda at: load_causal_lm(model_at(at), "actor")),
    ("model.safetensors", lambda at: load_state(at / "model.safetensors")),
    ("model.safetensors", lambda at: read_shape(model_at(at), "actor")),
    ("adapter/adapter_config.json", read_adapter),
    ("job.yaml", lambda at: read_yaml(at / "job.yaml")),
    ("reward.py", read_function),
    (CERTIFICATE, read_keys),
]


@pytest.mark.parametrize(("file", "read"), READERS)
def test_an_io_error_is_no_wrong_input(
    tiny_model: Path, tmp_path: Path, file: str, read: Callable[[Path], Any]
) -> None:
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (directory / file).parent.mkdir(exist_ok=True)
    (directory / file).unlink(missing_ok=True)
    (directory / file).symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=r"Input/output error|os error 19") as raised:
        read(directory)
    assert not isinstance(raised.value, WRONG_INPUT)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    gc.collect()  # garbage of earlier tests may hold some
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/", os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("model.safetensors", load_state),
        ("a.parquet", lambda file: read_table(file, ["prompt"])),
        ("a.parquet", lambda file: write_aime(file, file.parent / "aime")),
    ],
)
def test_a_lack_of_descriptors_is_not_blamed_on_the_file(
    tiny_model: Path, tmp_path: Path, file: str, read: Callable[[Path], Any]
) -> None:
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    write_rows(directory / "a.parquet", [{"prompt": "?"}])
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files") as raised:
        read(directory / file)
    assert not isinstance(raised.value, WRONG_INPUT)


def test_a_system_error_while_reading_is_not_blamed_on_the_bytes(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"'prompt' cannot be read: .*No such file"):
        column_process.read_bounded(tmp_path / "gone.parquet", "prompt", 1000)


@pytest.mark.parametrize("error", [ValueError("no JSON"), FileNotFoundError(2, "absent")])
def test_an_error_that_no_retry_mends_is_wrong_input(error: Exception) -> None:
    assert type(unreadable(InvalidConfig, error, "why")) is InvalidConfig
