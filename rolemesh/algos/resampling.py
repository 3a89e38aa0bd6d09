"""Which rows of a batch are learnt from, by their scores: PF-PPO (Shen and Zhang 2024, arXiv:2409.06957).

A reward model errs least where it is surest, so what scores high or low is learnt from more often. As in verl
the scores of the whole batch are compared; the paper compares the answers to one prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    # of the largest: a power of the scores themselves may be infinite, and then the last row were all
    "pow": lambda scores, power: (scores.abs() / scores.abs().max().clamp(min=1e-300)) ** power,
    "max_min": lambda scores, power: ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype),
    "max_random": lambda scores, power: torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype),
}


def resampling_weights(scores: Tensor, *, method: str, power: float) -> Tensor:
    """How often a row is to be drawn, beside the others.

    Args:
        scores: [B], a response's score; the KL penalty is not taken off.
        method: algorithm.pf_ppo.reweight_method. pow: |score|^power, as a share of the largest. max_min:
            1 for the best and the worst score of the batch, 0 between them. max_random: 0.4 for the best, 0.1
            for any other.
        power: algorithm.pf_ppo.weight_pow.

    Returns:
        [B] float64, above 0: where all weights are 0 every row is as likely.
    """
    return WEIGHTS[method](scores.double(), power) + 1e-8


def draw_rows(weights: Tensor, seed: int, step: int) -> Tensor:
    """As many rows as there are, drawn with replacement.

    Args:
        weights: [B] float64, above 0.
        seed: rollout.seed.
        step: counted from 1.

    Returns:
        [B] int64, a pure function of the arguments: a resumed run draws what an unbroken one draws.
    """
    # spawn_key: the streams of the step's rows come from (seed, step) too
    stream = np.random.SeedSequence((seed % 2**64, step), spawn_key=(1,))
    uniform = stream.generate_state(len(weights), np.uint64).astype(np.float64) / 2.0**64  # [0, 1]
    mass = weights.numpy().cumsum()
    rows = np.searchsorted(mass, uniform * mass[-1], side="right")
    return torch.from_numpy(np.minimum(rows, len(weights) - 1))  # 1.0 is what the largest words round to
