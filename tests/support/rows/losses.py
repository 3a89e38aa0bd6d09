"""Calls policy losses as the actor does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rolemesh.algos.policy_loss import TokenLosses
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.config.actor import ActorConfig, PolicyLossConfig

# The configuration of losses that are worked by hand.
CONFIG = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, policy_loss=PolicyLossConfig(dro_beta=0.1))

# Those of a token; the losses of a pair of answers are in tests/algos/test_preference.py.
TOKEN_LOSSES = [name for name, loss in POLICY_LOSSES.items() if "contexts" not in loss.reads]


def options_of(function: Callable[..., Any], config: ActorConfig) -> dict[str, Any]:
    """Return the configuration's keyword arguments for a loss, or for a function that selects tokens."""
    path = f"{function.__module__}:{function.__name__}"
    keys = {loss.code: loss.keys for loss in POLICY_LOSSES.values()}
    keys |= {loss.choose: loss.choose_keys for loss in POLICY_LOSSES.values() if loss.choose}
    return config.values_of(keys[path])


def token_losses(
    name: str, log_probs: Any, old: Any, advantages: Any, mask: Any, *, config: ActorConfig, **besides: Any
) -> TokenLosses:
    """Compute the losses of tokens by the loss of this name, which gets the columns that it reads."""
    loss, columns = POLICY_LOSSES[name], {"old_log_probs": old, "advantages": advantages}
    read = [columns[column] for column in loss.reads]
    losses: TokenLosses = loss.load()(log_probs, *read, mask, **config.values_of(loss.keys), **besides)
    return losses
