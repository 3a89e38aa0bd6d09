"""Models that compute only in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from rolemesh.models import sharded
from rolemesh.models.heads import ScoreModel


def in_float64(model: Any) -> Any:
    """Convert the model in place.

    transformers' norms always compute in float32. Then gradients that are added before a norm differ from
    gradients that are added after it, by float32's rounding.
    """
    model.double()
    norms = [(name, part) for name, part in model.named_modules() if hasattr(part, "variance_epsilon")]
    for name, part in norms:
        norm = nn.RMSNorm(part.weight.shape, part.variance_epsilon, dtype=part.weight.dtype)
        norm.weight = part.weight
        model.set_submodule(name, norm)
    return model


@contextmanager
def loaded_in_float64() -> Iterator[None]:
    """Load models in float64 within the context: whole, also on several ranks, since files have float32."""
    load: Callable[..., Any] = sharded.load_causal_lm
    score: Callable[..., Any] = ScoreModel.load
    with (
        patch.object(sharded, "_source_of", lambda *_: None),
        patch.object(sharded, "load_causal_lm", lambda *args: in_float64(load(*args))),
        patch.object(ScoreModel, "load", lambda *args, **kwargs: in_float64(score(*args, **kwargs))),
    ):
        yield
