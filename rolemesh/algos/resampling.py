"""Resample a batch's rows by their scores: PF-PPO (Shen and Zhang 2024, arXiv:2409.06957).

A reward model is most reliable at high and low scores, so such rows are drawn more often. The scores of the
whole batch are compared, as in verl; the paper compares the answers to one prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    # relative to the largest: a power of the scores themselves may be infinite, and one row would take all
    # draws
    "pow": lambda scores, power: (scores.abs() / scores.abs().max().clamp(min=1e-300)) ** power,
    "max_min": lambda scores, power: ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype),
    "max_random": lambda scores, power: torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype),
}


def resampling_weights(scores: Tensor, *, method: str, power: float) -> Tensor:
    """Compute each row's weight, to which the probability of drawing it is proportional.

    Args:
        scores: [B], each response's score, without the KL penalty.
        method: algorithm.pf_ppo.reweight_method. pow: |score|^power, relative to the largest. max_min: 1 for
            the best and the worst score of the batch, else 0. max_random: 0.4 for the best, else 0.1.
        power: algorithm.pf_ppo.weight_pow.

    Returns:
        [B] float64. 1e-8 is added to each weight, so if all weights are 0 every row is equally likely.
    """
    return WEIGHTS[method](scores.double(), power) + 1e-8


def draw_rows(weights: Tensor, seed: int, step: int) -> Tensor:
    """Draw B row indices with replacement.

    Args:
        weights: [B] float64, above 0.
        seed: rollout.seed.
        step: counted from 1.

    Returns:
        [B] int64, a pure function of the arguments, so a resumed run draws the same rows as an uninterrupted
        one.
    """
    # spawn_key separates this stream from the sampling streams of the step's rows, which use (seed, step) too
    stream = np.random.SeedSequence((seed % 2**64, step), spawn_key=(1,))
    uniform = stream.generate_state(len(weights), np.uint64).astype(np.float64) / 2.0**64  # [0, 1]
    mass = weights.numpy().cumsum()
    rows = np.searchsorted(mass, uniform * mass[-1], side="right")
    return torch.from_numpy(np.minimum(rows, len(weights) - 1))  # the largest words round to 1.0
