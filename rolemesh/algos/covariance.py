"""Which tokens cost the policy's entropy: those whose log-probability and advantage go together (Cui et al.
2025, arXiv:2505.22617, section 4).

They are chosen among all tokens of a mini-batch, the same ones whatever the order of its rows and however it is
cut: means are rounded once, and what is left to chance follows from the row's own tokens.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from rolemesh.config.actor import ActorConfig


def token_covariances(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(A − mean A)·(log π − mean log π), means over the response's tokens of the mini-batch; [B, T] float64,
    −inf where response_mask is False."""
    product = _centred(log_probs, response_mask) * _centred(advantages, response_mask)
    return torch.where(response_mask, product, -math.inf)


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    values = values.double()
    # fsum: a sum in another order must not differ in its last bits
    mean = math.fsum(values[mask].tolist()) / max(1, int(mask.sum()))
    return values - mean


def token_keys(input_ids: Tensor, attention_mask: Tensor, num_tokens: int, seed: list[int]) -> Tensor:
    """A random number for each response token, [B, T] float64: a function of the seed and of the row's tokens,
    not of where the row stands.

    Args:
        input_ids, attention_mask: [B, S]; what stands in the padding does not matter.
        num_tokens: T.
        seed: of non-negative numbers.
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
    config: ActorConfig,
    keys: Tensor,
) -> Tensor:
    """A random clip_cov_ratio of the tokens, and at least one: of those whose covariance lies between
    clip_cov_lb and clip_cov_ub and which PPO's clip does not hold already.

    Args:
        log_probs: [B, T], as they are before this optimizer step, without gradient.
        old_log_probs, advantages, response_mask: [B, T], of the whole mini-batch.
        keys: [B, T], from token_keys.

    Returns:
        [B, T] bool.
    """
    settings = config.policy_loss
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    held = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages > -ratio * advantages
    covariance = token_covariances(log_probs, advantages, response_mask)
    costly = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub) & ~held
    return _first(costly, keys, _share(settings.clip_cov_ratio, response_mask))


def choose_kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    keys: Tensor,
) -> Tensor:
    """The kl_cov_ratio of the tokens with the highest covariance, and at least one; of equal ones, some.

    Args, Returns:
        as choose_clip_cov.
    """
    covariance = token_covariances(log_probs, advantages, response_mask)
    count = min(_share(config.policy_loss.kl_cov_ratio, response_mask), int(response_mask.sum()))
    if not count:
        return torch.zeros_like(response_mask)
    least = covariance.flatten().topk(count).values[-1]
    above = covariance > least
    return above | _first(covariance == least, keys, count - int(above.sum()))


def _share(ratio: float, mask: Tensor) -> int:
    return max(1, int(ratio * int(mask.sum())))


def _first(candidates: Tensor, keys: Tensor, count: int) -> Tensor:
    """Those `count` candidates that have the least keys, or all where they are fewer."""
    places = candidates.flatten().nonzero()[:, 0]
    taken = places[keys.to(places.device).flatten()[places].argsort(stable=True)[:count]]
    chosen = torch.zeros_like(candidates).flatten()
    chosen[taken] = True
    return chosen.view_as(candidates)
