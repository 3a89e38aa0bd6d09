"""Models that compute in float64 from end to end."""

from __future__ import annotations

from typing import Any

from torch import nn


def in_float64(model: Any) -> Any:
    """The model, in place. transformers' norms compute in float32 whatever the type of the model, so that
    gradients which are added before a norm and after it would differ by float32's rounding."""
    model.double()
    norms = [(name, part) for name, part in model.named_modules() if hasattr(part, "variance_epsilon")]
    for name, part in norms:
        norm = nn.RMSNorm(part.weight.shape, part.variance_epsilon, dtype=part.weight.dtype)
        norm.weight = part.weight
        model.set_submodule(name, norm)
    return model
