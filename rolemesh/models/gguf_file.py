"""Makes a model directory of a GGUF file, in which models are published for llama.cpp, mostly quantised.

transformers reads the file, with the package gguf. Each weight becomes the float32 number that its block of the
file stands for. What quantisation has rounded away stays lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rolemesh.errors import InvalidConfig, ModelNotFound, unreadable
from rolemesh.models.saving import save_model, written_whole

PLAIN = ("F32", "F16", "BF16")  # types of tensors that are not quantised


@dataclass(frozen=True)
class ConvertedModel:
    """The result of `convert_gguf`.

    Args:
        architecture: transformers' class of the model.
        num_parameters: tied ones counted once.
        quantizations: the file's quantised types, to the number of their tensors.
        has_template: whether the tokenizer has a chat template.
    """

    architecture: str
    num_parameters: int
    quantizations: dict[str, int]
    has_template: bool


def convert_gguf(file: Path, out: Path) -> ConvertedModel:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face directory, in float32.

    Needs memory for the model in float32.

    Args:
        file: a GGUF file of a causal language model, of an architecture that transformers reads.
        out: the new directory. It appears when it is complete.

    Raises:
        InvalidConfig: `out` exists, or the package gguf is absent.
        ModelNotFound: the file is absent or damaged, or transformers cannot read it.
        CheckpointFailed: the directory could not be written.
    """
    if out.exists():
        raise InvalidConfig(f"{out} exists; name a new directory")
    types = _tensor_types(file)
    source = {"gguf_file": file.name, "local_files_only": True}
    with _read(file):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the directory's weights are not quantised
    with written_whole(out) as unfinished:
        save_model(model, unfinished)
        tokenizer.save_pretrained(unfinished)
    return ConvertedModel(
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        quantizations={name: count for name, count in sorted(types.items()) if name not in PLAIN},
        has_template=bool(tokenizer.chat_template),
    )


def _tensor_types(file: Path) -> Counter[str]:
    """Return the types of the file's tensors, with their numbers."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InvalidConfig("GGUF files need the package gguf: pip install 'rolemesh[gguf]'") from error
    if not file.is_file():
        raise ModelNotFound(f"no such file: {file}")
    with _read(file):
        return Counter(tensor.tensor_type.name for tensor in GGUFReader(file).tensors)


@contextmanager
def _read(file: Path) -> Iterator[None]:
    """Turn every error of the libraries' parsers into ModelNotFound."""
    try:
        yield
    except Exception as error:
        raise unreadable(
            ModelNotFound, error, f"{file} cannot be read as the GGUF file of a language model: {error}"
        ) from error
