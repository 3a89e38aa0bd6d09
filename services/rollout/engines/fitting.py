"""Checks whether tensors, files and top_k fit a model, before the first tensor is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rolemesh.config.model import ModelConfig
from rolemesh.config.rollout import RolloutConfig
from rolemesh.errors import InvalidConfig, ModelNotFound, WeightsUnavailable
from rolemesh.models.directory import described_directory
from rolemesh.models.loading import load_outline
from rolemesh.ranks.sharded_files import TensorFiles


def check_fit(version: int, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Compare names, shapes and dtypes with the model's. A float32 tensor fits one of a smaller dtype.

    Args:
        own: the model's weights by rolemesh.models.loading.named_weights; on any device.

    Raises:
        WeightsUnavailable: a tensor is missing, unknown, or of another shape or dtype.
    """
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is unknown" for name in tensors.keys() - own.keys()]
    wrong += [
        f"{name} is {list(tensors[name].shape)} {tensors[name].dtype}, not {list(mine.shape)} {mine.dtype}"
        for name, mine in own.items()
        if name in tensors and not (tensors[name].shape == mine.shape and _can_cast(tensors[name].dtype, mine))
    ]
    if wrong:
        only_types = all(name in tensors and tensors[name].shape == mine.shape for name, mine in own.items())
        raise WeightsUnavailable(
            f"version {version} does not fit the rollout's model in {len(wrong)} tensors: "
            + "; ".join(sorted(wrong)[:5])
            + ("; name rollout.dtype, which auto decides anew on each device" if only_types else "")
        )


def load_served_outline(config: ModelConfig) -> Any:
    """Make the outline of a model that another process loads, by its config.json.

    Raises:
        ModelNotFound: as load_outline; or config.json ties weights that differ in the files. transformers does
            not tie these, but servers do.
    """
    outline = load_outline(config, "rollout")
    directory = described_directory(config, "rollout", weights=True)
    files = TensorFiles.of_model(directory)
    for one, other in getattr(outline, "all_tied_weights_keys", {}).items():
        if {one, other} <= files.names and not files.are_equal(one, other, 0, 1):
            raise ModelNotFound(
                f"rollout: config.json in {directory} ties {one} to {other} (tie_word_embeddings), but its "
                "files have two different tensors; set tie_word_embeddings to false there"
            )
    return outline


def check_kept(rollout: RolloutConfig, vocabulary: int) -> None:
    """Refuse a top_k above the vocabulary: vLLM would end when it looks for as many tokens.

    Raises:
        InvalidConfig: the message has both numbers.
    """
    if rollout.num_kept > vocabulary:
        raise InvalidConfig(
            f"rollout.top_k is {rollout.top_k}, but the model has {vocabulary} tokens; set it to at most that"
        )


def _can_cast(dtype: torch.dtype, mine: Tensor) -> bool:
    return dtype == mine.dtype or (mine.is_floating_point() and dtype == torch.float32)
