"""What several answers to one prompt are worth: the best of k, the majority of k, whether one of k is right."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
import torch
from torch import Tensor

NUM_DRAWS = 1000  # verl's number of draws, and its seed: maj@k is the same number
SEED = 42


def expected_best(values: Tensor, k: int) -> float:
    """best@k: the expected greatest of k values drawn from a prompt's n with replacement, mean over prompts.

    The expectation itself, of which verl's best@k is an estimate from 1,000 draws: the i-th least of n is the
    greatest of k draws with probability (i/n)^k − ((i − 1)/n)^k.

    Args:
        values: [prompts, n] float64.
        k: how many are drawn.
    """
    n = values.shape[1]
    share = torch.arange(n + 1, dtype=values.dtype) / n
    return _mean_by_rank(values, share[1:] ** k - share[:-1] ** k)


def pass_at(values: Tensor, k: int) -> float:
    """pass@k: the expected greatest of k values drawn from a prompt's n without replacement, mean over prompts.

    Of values that are 1 (right) or 0, c of them 1, it is 1 − C(n − c, k)/C(n, k), the unbiased estimate of the
    probability that one of k answers is right (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Args:
        values: [prompts, n] float64.
        k: at most n.
    """
    n = values.shape[1]
    chances = [comb(i, k - 1) / comb(n, k) for i in range(n)]
    return _mean_by_rank(values, torch.tensor(chances, dtype=values.dtype))


def _mean_by_rank(values: Tensor, chances: Tensor) -> float:
    """Mean over prompts of Σ chances[i]·(the i-th least value)."""
    return (values.sort(dim=1).values * chances).sum(dim=1).mean().item()


def expected_majority(values: Tensor, votes: Sequence[Sequence[str]], k: int) -> float:
    """maj@k: the value of the answer that most of k draws agree on, mean over prompts.

    Of answers with equal votes the one drawn first wins. There is no short formula for the expectation, so it
    is estimated as in verl, from the same draws with replacement; they are the same for each prompt.

    Args:
        values: [prompts, n] float64.
        votes: n answers to each prompt, as text.
        k: how many are drawn.
    """
    draws = np.random.RandomState(SEED).choice(values.shape[1], (NUM_DRAWS, k))
    means = []
    for of_prompt, answers in zip(values.numpy(), votes, strict=True):
        drawn = np.unique(answers, return_inverse=True)[1][draws]  # [draws, k], an integer for each answer
        agreeing = (drawn[:, :, None] == drawn[:, None, :]).sum(axis=2)  # [draws, k]
        first = agreeing.argmax(axis=1)  # the first of those that have most
        means.append(of_prompt[draws[np.arange(NUM_DRAWS), first]].mean())
    return float(np.mean(means))
