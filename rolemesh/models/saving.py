"""Write a model's directory as Hugging Face's libraries read it: a checkpoint's, or one to be served."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
)

from rolemesh.config.model import ModelConfig, PolicyModelConfig
from rolemesh.errors import CheckpointFailed, InvalidConfig, ModelNotFound, unreadable
from rolemesh.models.directory import described_directory, existing_directory
from rolemesh.models.loading import has_tokenizer, load_causal_lm, load_tokenizer, load_whole, vocabulary_of
from rolemesh.models.lora import BASE_FILE, CONFIG_FILE, Adapter
from rolemesh.models.sequence import DTYPES

# By the end of the architecture's name in config.json.
CLASSES: dict[str, Any] = {
    "ForCausalLM": AutoModelForCausalLM,
    "LMHeadModel": AutoModelForCausalLM,  # older ones, such as GPT-2's
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}
NUM_IDS = 64  # of the sequence whose logits are compared


def save_model(model: Any, directory: Path, **how: Any) -> None:
    """Write what save_pretrained writes, with the generation settings as they are.

    save_pretrained refuses settings that transformers itself loads, such as a temperature without do_sample,
    which many published models have.

    Args:
        model: a transformers model.
        directory: where; created if absent.
        how: further arguments of save_pretrained.
    """
    if not model.can_generate():
        model.save_pretrained(directory, **how)
        return
    same = copy.copy(model)  # its modules are the model's
    same.generation_config = GenerationConfig()
    same.save_pretrained(directory, **how)
    model.generation_config.to_json_file(directory / "generation_config.json")


@dataclass(frozen=True)
class Exported:
    """The result of `export`.

    Args:
        directory: the model's.
        num_parameters: tied ones counted once.
        num_bytes: of its weights.
        num_files: with weights.
        difference: largest absolute difference of its logits from those of the source in float32.
    """

    directory: Path
    num_parameters: int
    num_bytes: int
    num_files: int
    difference: float


def export(
    source: Path,
    out: Path,
    *,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    base: ModelConfig | None = None,
) -> Exported:
    """Write a model as one Hugging Face directory, read it again and compare its logits.

    Computes on the CPU, and needs memory for the model in float32.

    Args:
        source: a directory with a model, or with an adapter, whose product is then added to its base model.
        out: the new directory. It appears when it is complete and compared.
        dtype: float32, bfloat16 or float16, to which all weights are rounded.
        max_shard_size: of a file, such as 5GB or 500MB; larger tensors have a file of their own.
        base: an adapter's base model; None: the one that it names. Of a model: trust_remote_code alone counts.

    Raises:
        InvalidConfig: `out` exists, an argument has no meaning, the adapter does not fit its base model, or the
            weights are not finite in `dtype`.
        ModelNotFound: the source or the base model is absent or damaged.
        CheckpointFailed: the directory could not be written, or gives other logits than the model.
    """
    base = base or ModelConfig()
    if out.exists():
        raise InvalidConfig(f"{out} exists; name a new directory")
    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)  # as save_pretrained does later
    except ValueError as error:
        raise InvalidConfig(f"max_shard_size is {max_shard_size!r}: {error}") from error
    own = ModelConfig(path=str(source.absolute()), trust_remote_code=base.trust_remote_code)
    adapted = _adapted(source, base) if (source / CONFIG_FILE).is_file() else None
    model, expected = _merged(source, adapted) if adapted else _plain(source, base.trust_remote_code)
    _round(model, DTYPES[dtype])
    rounded = _logits(model)
    if not rounded.isfinite().all():
        raise InvalidConfig(f"the logits of {source} are not finite in {dtype}; try bfloat16 or float32")
    with written_whole(out) as unfinished:
        save_model(model, unfinished, max_shard_size=max_shard_size)
        named = own if adapted is None or has_tokenizer(source) else adapted  # peft writes none
        if has_tokenizer(existing_directory(named, "export")):
            load_tokenizer(named, "export").save_pretrained(unfinished)
        weights = {tensor.data_ptr(): tensor for tensor in model.parameters()}.values()
        num_parameters = sum(tensor.numel() for tensor in weights)
        num_bytes = sum(tensor.nbytes for tensor in weights)
        del model, weights
        again = _logits(_loaded(unfinished, base.trust_remote_code, DTYPES[dtype]))
        if not torch.equal(again, rounded):
            raise CheckpointFailed(
                f"the model written from {source} gives other logits than the one read, by up to "
                f"{_distance(again, rounded):.3g}; it was deleted"
            )
        num_files = len([*unfinished.glob("*.safetensors")])
    return Exported(out, num_parameters, num_bytes, num_files, _distance(rounded, expected))


# ------------------------------------------------------------------------------------------ parts


def _plain(source: Path, trust_remote_code: bool) -> tuple[Any, Tensor]:
    """Load a model in float32; return it and its logits."""
    model = _loaded(source, trust_remote_code, torch.float32)
    return model, _logits(model)


def _adapted(source: Path, base: ModelConfig) -> PolicyModelConfig:
    """Read which base model an adapter is for, with its rank and scale."""
    try:
        named = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
        given = {"path": base.path, "revision": base.revision} if base.path else {
            "path": named["base_model_name_or_path"] or "", "revision": named.get("revision") or ""
        }  # fmt: skip
        return PolicyModelConfig(
            **given,
            trust_remote_code=base.trust_remote_code,
            lora_rank=named["r"],
            lora_alpha=named["lora_alpha"],
            lora_adapter_path=str(source),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(ModelNotFound, error, f"{source / CONFIG_FILE} cannot be read: {error!r}") from error


def _merged(source: Path, config: PolicyModelConfig) -> tuple[Any, Tensor]:
    """Load an adapter and its base model; return both as one model, and the logits of the two."""
    model = load_causal_lm(config, f"the base model of {source}")
    adapter = Adapter(model, config, seed=0)
    try:
        if (source / BASE_FILE).is_file():  # an adapter from elsewhere has none
            adapter.check_base(source)
    except ValueError as error:
        raise InvalidConfig(f"{source} is not of this base model: {error}") from error
    expected = _logits(model)
    adapter.merge()
    return model, expected


def _loaded(directory: Path, trust_remote_code: bool, dtype: torch.dtype) -> Any:
    config = ModelConfig(path=str(directory.absolute()), trust_remote_code=trust_remote_code)
    described = described_directory(config, "export")
    try:
        [name] = json.loads((described / "config.json").read_text(encoding="utf-8"))["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(
            ModelNotFound, error, f"{described / 'config.json'} names no architecture: {error!r}"
        ) from error
    for ending, auto_class in CLASSES.items():
        if name.endswith(ending):
            return load_whole(auto_class, config, "export", dtype)
    raise ModelNotFound(f"{described} holds a {name}; expected a model {', '.join(CLASSES)}")


def _round(model: Any, dtype: torch.dtype) -> None:
    """Round the saved tensors, but not those that are computed, such as rotary frequencies."""
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """Compute the logits of a sequence of ids from all over the vocabulary, in float32."""
    ids = torch.linspace(0, vocabulary_of(model) - 1, NUM_IDS).long()[None]
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits.float()


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """Yield a directory that becomes `out` if the block ends well, and else is deleted."""
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(out)
    except (CheckpointFailed, InvalidConfig, ModelNotFound):
        raise
    except Exception as error:  # safetensors and tokenizers raise their own on a full disk
        free = shutil.disk_usage(out.parent).free if out.parent.is_dir() else 0
        raise CheckpointFailed(f"{out} could not be written: {error} ({free} bytes free)") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
