"""Metrics of several answers to one prompt: best of k, majority of k, and pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
import torch
from torch import Tensor

NUM_DRAWS = 1000  # verl's number of draws, and its seed: maj@k equals verl's
SEED = 42


def expected_best(values: Tensor, k: int) -> Tensor:
    """best@k: the expected maximum of k values drawn from a prompt's n with replacement, [prompts] float64.

    The expectation is exact: the i-th smallest of n is the maximum of k draws with probability
    (i/n)^k − ((i − 1)/n)^k. verl's best@k estimates it from 1,000 draws.

    Args:
        values: [prompts, n] float64.
        k: number of draws.
    """
    n = values.shape[1]
    share = torch.arange(n + 1, dtype=values.dtype) / n
    return _by_rank(values, share[1:] ** k - share[:-1] ** k)


def pass_at(values: Tensor, k: int) -> Tensor:
    """pass@k: the expected maximum of k values drawn from a prompt's n without replacement, [prompts] float64.

    If c of the values are 1 (correct) and the others 0, it is 1 − C(n − c, k)/C(n, k). This is the unbiased
    estimate of the probability that at least one of k answers is correct (Chen et al. 2021, arXiv:2107.03374,
    eq. 1).

    Args:
        values: [prompts, n] float64.
        k: at most n.
    """
    n = values.shape[1]
    chances = [comb(i, k - 1) / comb(n, k) for i in range(n)]
    return _by_rank(values, torch.tensor(chances, dtype=values.dtype))


def _by_rank(values: Tensor, chances: Tensor) -> Tensor:
    """Return Σ chances[i]·(the i-th smallest value) of each prompt."""
    return (values.sort(dim=1).values * chances).sum(dim=1)


def expected_majority(values: Tensor, votes: Sequence[Sequence[str]], k: int) -> Tensor:
    """maj@k: the expected value of the majority answer of k draws, [prompts] float64.

    Of answers with equal votes, the first drawn wins. The expectation has no short formula, so it is estimated
    as in verl, from the same draws with replacement. All prompts share the draws.

    Args:
        values: [prompts, n] float64.
        votes: n answers to each prompt, as text.
        k: number of draws.
    """
    draws = np.random.RandomState(SEED).choice(values.shape[1], (NUM_DRAWS, k))
    means = []
    for of_prompt, answers in zip(values.numpy(), votes, strict=True):
        drawn = np.unique(answers, return_inverse=True)[1][draws]  # [draws, k], an integer for each answer
        agreeing = (drawn[:, :, None] == drawn[:, None, :]).sum(axis=2)  # [draws, k]
        first = agreeing.argmax(axis=1)  # of answers with most votes, the first drawn
        means.append(of_prompt[draws[np.arange(NUM_DRAWS), first]].mean())
    return torch.tensor(means, dtype=torch.float64)
