"""Models that compute only in float64."""

from __future__ import annotations

from typing import Any

from torch import nn


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
