"""Calls the policy loss of a job, for training and for validation alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rolemesh.algos.policy_loss import TokenLosses
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig


def token_losses(log_probs: Tensor, rows: DataProto, mask: Tensor, job: JobConfig) -> TokenLosses:
    """Compute the losses of tokens by JobConfig.policy_loss, with its keys and options.

    Args:
        log_probs: [b, T], of the policy under training.
        rows: with the columns that the loss reads; also `chosen` if it selects tokens.
        mask: [b, T] bool, the tokens of the loss.
        job: names the loss.

    Raises:
        InvalidConfig: a plug-in's loss returns no TokenLosses [b, T].
        RoleFailed: a plug-in's loss raises.
    """
    config = job.actor
    policy_loss = job.policy_loss
    options: dict[str, Any] = config.values_of(policy_loss.keys) | config.policy_loss.options
    if policy_loss.choose:
        options["chosen"] = rows["chosen"]
    if policy_loss.corrects:
        options["correction"] = job.algorithm.rollout_correction
    # Zero masked cells: their loss of 0 must have no gradient, and 0 times an inf or NaN there would be NaN.
    read = [torch.where(mask, rows[column], 0) for column in policy_loss.reads]
    with policy_loss.errors_named():
        tokens = policy_loss.load()(log_probs, *read, mask, **options)
    if not isinstance(tokens, TokenLosses) or tokens.losses.shape != mask.shape:
        found = tokens.losses if isinstance(tokens, TokenLosses) else tokens
        raise InvalidConfig(
            f"{policy_loss} should return TokenLosses with losses of shape {list(mask.shape)}; it returned "
            f"{type(tokens).__name__} {list(getattr(found, 'shape', []))}"
        )
    return tokens
