"""Refuses models that would load, and then compute other numbers than their own."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, ModelNotFound
from rolemesh.models.directory import weight_files
from rolemesh.ranks.sharded_files import TensorFiles

log = logging.getLogger(__name__)

SCORE_HEADS = ("score", "classifier", "v_head")  # names of a head with one output in Hugging Face's classes
HEADS = re.compile(rf"(lm_head|embed_out|{'|'.join(SCORE_HEADS)})\.")
# Tensors beside quantized weights. A model that does not know of them takes the weights for plain numbers.
QUANTIZED = re.compile(r"\.(weight_scale(_inv|_2)?|qweight|qzeros|weight_packed)$")


def attention_of(settings: Any) -> str:
    """Return transformers' name of the attention to load a model with: `sdpa`, or `eager` for a soft cap.

    The model's attention function gets the cap as an option, and transformers' sdpa ignores that option.

    Args:
        settings: a transformers configuration.
    """
    cap = getattr(settings.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if cap is None else "eager"


def check_positions(settings: Any, job: JobConfig, role: str) -> None:
    """Check that a row's rotary frequencies do not depend on the other rows of its pass.

    With the rope types `longrope` and `dynamic` transformers chooses them by the longest row, once that is
    longer than the model's original length.

    Args:
        settings: a transformers configuration.
        job: its lengths are those of the rows.
        role: for the message.

    Raises:
        InvalidConfig: rows may be longer than that.
    """
    length = job.data.max_prompt_length + job.data.max_response_length
    for kind, original in _variable_ropes(settings.get_text_config()):
        if length > original:
            raise InvalidConfig(
                f"data.max_prompt_length + data.max_response_length is {length}; the model of {role} has rope "
                f"type {kind}, and beyond {original} tokens a row's numbers would depend on the longest row of "
                f"its pass; set them to {original} in all, or take another model"
            )


def _variable_ropes(text: Any) -> Iterator[tuple[str, int]]:
    """Yield the rope types whose frequencies vary, with the length up to which they do not."""
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    for part in by_layer_type or [rope]:
        kind = part.get("rope_type") or ""
        if kind == "longrope":
            yield kind, part.get("original_max_position_embeddings") or text.max_position_embeddings
        elif "dynamic" in kind:
            yield kind, text.max_position_embeddings


def check_unread(model: Any, unread: Collection[str], directory: Path, role: str) -> None:
    """Check that a model may leave out these tensors of its directory, and log them if they are not heads.

    Args:
        model: a transformers model.
        unread: names of tensors that it does not have.
        directory: its own.
        role: for messages.

    Raises:
        ModelNotFound: the weights beside them are quantized, and config.json does not say how; or a tensor is a
            bias that the model's layer does not have.
    """
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    unread = sorted(
        name for name in unread if not (HEADS.match(name) or any(re.search(each, name) for each in ignored))
    )
    if not unread:
        return
    if quantized := [name for name in unread if QUANTIZED.search(name)]:
        raise ModelNotFound(
            f"{role}: {directory} has quantized weights ({quantized[0]}), but its config.json has no "
            "quantization_config that transformers reads; convert the weights to bfloat16"
        )
    if biases := [name for name in unread if _is_bias_of(model, name)]:
        files = TensorFiles(weight_files(directory) or sorted(directory.glob("*.safetensors")))
        if lost := [name for name in biases if name in files.names and files.is_nonzero(name)]:
            raise ModelNotFound(
                f"{role}: {directory} has {lost[0]}, which {type(model).__name__} does not have; its "
                "config.json is of another model, or lacks a key such as attention_bias"
            )
    log.warning("%s: %s has %d tensors that are not read, e.g. %s", role, directory, len(unread), unread[0])


def _is_bias_of(model: nn.Module, name: str) -> bool:
    """Return whether a tensor's name is of the bias of a layer that has none."""
    owner, _, leaf = name.rpartition(".")
    names = (owner, owner.removeprefix(f"{getattr(model, 'base_model_prefix', '')}."))
    layers = [layer for path, layer in model.named_modules() if path in names]
    return leaf == "bias" and any(getattr(layer, "bias", layer) is None for layer in layers)
