"""Select the tokens that reduce the policy's entropy most, by the covariance of log-probability and advantage.

Source: Cui et al. 2025, arXiv:2505.22617, section 4. Tokens are selected from the whole mini-batch. The
selection does not depend on the order of its rows or on the micro-batches: means are rounded once, and random
choices are derived from the row's own tokens.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor


def token_covariances(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Return (A − mean A)·(log π − mean log π), with means over the mini-batch's response tokens.

    Returns:
        [B, T] float64, −inf where response_mask is False.
    """
    product = _centred(log_probs, response_mask) * _centred(advantages, response_mask)
    return torch.where(response_mask, product, -math.inf)


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    values = values.double()
    # fsum: the sum must have the same last bits in any order of the rows
    mean = math.fsum(values[mask].tolist()) / max(1, int(mask.sum()))
    return values - mean


def token_keys(input_ids: Tensor, attention_mask: Tensor, num_tokens: int, seed: list[int]) -> Tensor:
    """Draw a random number for each response token, from the seed and the row's tokens alone.

    The numbers do not depend on the position of the row in the batch.

    Args:
        input_ids, attention_mask: [B, S]; the ids of padding are ignored.
        num_tokens: T.
        seed: non-negative numbers.

    Returns:
        [B, T] float64 in [0, 1).
    """
    rows = torch.where(attention_mask.bool(), input_ids, -1).cpu().numpy()
    keys = np.empty((len(rows), num_tokens))
    for row, ids in enumerate(rows):
        own = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "big")
        keys[row] = np.random.default_rng([*seed, own]).random(num_tokens)
    return torch.from_numpy(keys)


def choose_clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    keys: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Tensor:
    """Select random tokens whose covariance lies between clip_cov_lb and clip_cov_ub.

    Tokens that PPO's clip already holds are not candidates. The number of selected tokens is the share
    clip_cov_ratio of all response tokens, at least one, and at most the number of candidates.

    Args:
        log_probs: [B, T], before this optimizer step, without gradient.
        old_log_probs, advantages, response_mask: [B, T], of the whole mini-batch.
        keys: [B, T], from token_keys.

    Returns:
        [B, T] bool.
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    held = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages > -ratio * advantages
    covariance = token_covariances(log_probs, advantages, response_mask)
    costly = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & ~held
    return _first(costly, keys, _share(clip_cov_ratio, response_mask))


def choose_kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    keys: Tensor,
    *,
    kl_cov_ratio: float,
) -> Tensor:
    """Select the share kl_cov_ratio of the tokens, at least one, with the highest covariance.

    Ties are broken by the keys.

    Args, Returns:
        as choose_clip_cov.
    """
    covariance = token_covariances(log_probs, advantages, response_mask)
    count = min(_share(kl_cov_ratio, response_mask), int(response_mask.sum()))
    if not count:
        return torch.zeros_like(response_mask)
    least = covariance.flatten().topk(count).values[-1]
    above = covariance > least
    return above | _first(covariance == least, keys, count - int(above.sum()))


def _share(ratio: float, mask: Tensor) -> int:
    return max(1, int(ratio * int(mask.sum())))


def _first(candidates: Tensor, keys: Tensor, count: int) -> Tensor:
    """Return the `count` candidates with the smallest keys, or all candidates if there are fewer."""
    places = candidates.flatten().nonzero()[:, 0]
    taken = places[keys.to(places.device).flatten()[places].argsort(stable=True)[:count]]
    chosen = torch.zeros_like(candidates).flatten()
    chosen[taken] = True
    return chosen.view_as(candidates)
