"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rolemesh.algos.aggregation import Aggregation


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float,
    aggregate: Aggregation,
) -> tuple[Tensor, Tensor]:
    """½·agg max((v − R)², (clip(v, v_old ± cliprange_value) − R)²).

    Moving a value further than cliprange_value from the old one does not reduce the loss, as with the ratio in
    the policy's loss.

    Args:
        values: [B, T], of the critic under training, with gradient.
        old_values: [B, T], before the update.
        returns: [B, T].
        response_mask: [B, T] bool.
        aggregate: of the mini-batch that these rows are part of.

    Returns:
        The rows' share of the loss; and [B, T], 1 where the clipped term is the larger, else 0.
    """
    # not the old value plus a clamped difference: inside the range a value must stay bit-identical
    near = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    free = (values - returns).square()
    clipped = (near - returns).square()
    loss = 0.5 * aggregate(torch.maximum(free, clipped), response_mask)
    return loss, (clipped > free).to(values.dtype).detach()
