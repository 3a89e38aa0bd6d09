"""Sampling: the filtered distribution, and a random stream for each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rolemesh.config.rollout import SamplingConfig
from rolemesh.workers.numerics import running_sums


def draw_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Draw the first `count` numbers of each row's own stream.

    Philox is a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    Only its key, here the row's seed, determines the stream.

    Args:
        seeds: one int64 for each of B rows; a negative seed is read as its two's complement.
        count: numbers per row. A longer stream begins with the shorter one.

    Returns:
        [B, count] float64 in [0, 1).
    """
    uniforms = np.empty((len(seeds), count))
    philox = np.random.Philox(key=0)
    stream = np.random.Generator(philox)
    beginning = philox.state
    for row, seed in enumerate(seeds):
        beginning["state"]["key"][0] = seed & (2**64 - 1)
        philox.state = beginning  # takes a fifth of the time of creating a generator
        stream.random(out=uniforms[row])
    return torch.from_numpy(uniforms)


def log_distribution(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Compute the log-probabilities from which tokens are sampled.

    Logits are divided by the temperature. The top_k likeliest tokens are kept and renormalised. Of these, the
    smallest set with a mass of at least top_p is kept and renormalised again. Of equally likely tokens, the
    lower id comes first. Greedy: the plain log-softmax, without a filter.

    Args:
        logits: [B, V] floating point.

    Returns:
        [B, V] float64; -inf on tokens that cannot be sampled.
    """
    return _distribution(logits, sampling)[0]


def sample(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a token for each row by the inverse of the cumulative distribution, in order of token ids.

    Args:
        logits: [B, V] floating point.
        uniforms: [B] float64 in [0, 1); unused when greedy.

    Returns:
        tokens [B] int64, their log-probabilities [B] float32 in `log_distribution`, and the tokens that could
        be sampled [B, sampling.num_kept] int32: the likeliest first, -1 after the last. Of logits that are not
        finite the log-probability is not either.
    """
    log_probs, kept_ids = _distribution(logits, sampling)
    if sampling.greedy:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        cumulative = running_sums(log_probs.exp())
        total = cumulative[:, -1:].contiguous()
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
        # Rounding may make the product equal to the total; then take the last token with any mass.
        # Without any, as of NaN, the last id: its log-probability is not finite either.
        tokens = tokens.minimum(torch.searchsorted(cumulative, total)).clamp(max=logits.shape[1] - 1)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0].float(), kept_ids


def _distribution(logits: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Compute `log_distribution`, and the tokens that could be sampled as `sample` returns them."""
    scaled = logits.double()  # in float32 the sum over a vocabulary of 150,000 loses five digits
    if not sampling.greedy:
        scaled = scaled / sampling.temperature
    if not sampling.truncates:
        return scaled.log_softmax(-1), torch.empty(len(logits), 0, dtype=torch.int32, device=logits.device)
    ranked, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k > 0:
        ranked = ranked[:, : sampling.top_k]
        ids = ids[:, : sampling.top_k]
    mass = ranked.softmax(-1)
    cut = running_sums(mass) - mass >= sampling.top_p
    ranked = ranked.masked_fill(cut, -torch.inf).log_softmax(-1)
    log_probs = torch.full_like(scaled, -torch.inf).scatter(-1, ids, ranked)
    kept_ids = ids[:, : sampling.num_kept].masked_fill(cut[:, : sampling.num_kept], -1).int()
    return log_probs, F.pad(kept_ids, (0, sampling.num_kept - kept_ids.shape[1]), value=-1)
