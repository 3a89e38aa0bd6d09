"""An advantage estimator: an answer is compared with the median of the other answers to its prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from rolemesh.plugins import Options, estimator


class SurpriseOptions(Options):
    """Keys of algorithm.options in the job file. An unknown key or a wrong type is refused at the start."""

    wrong_weight: float = 1.0  # of answers that are worse than the median


# `reads` names the columns that the function gets, in order. rolemesh/columns.py lists all columns.
# `compares` says that a prompt needs two answers or more.
@estimator(
    "surprise",
    reads=("token_level_rewards", "response_mask", "uid"),
    options=SurpriseOptions,
    compares=True,
    meaning="the reward less the median of the other answers' rewards",
)
def compute_surprise(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str], *, wrong_weight: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [B, T] float32.

    With rewards 0 and 1, only the minority of a group gets an advantage: right answers where most are wrong,
    and wrong answers where most are right.

    Args:
        token_level_rewards: [B, T] float32, usually 0 except on the last token.
        response_mask: [B, T] bool, True on tokens that the policy sampled.
        uid: [B] the prompt of each row; equal for all answers to one prompt.
        wrong_weight: factor of negative advantages.
    """
    rewards = token_level_rewards.where(response_mask, 0.0).sum(1)  # [B]
    groups: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(uid):
        groups[prompt].append(row)
    advantages = torch.zeros_like(rewards)
    for rows in groups.values():
        for row in rows:
            others = rewards[[other for other in rows if other != row]]
            advantages[row] = rewards[row] - others.quantile(0.5)  # the mean of the middle two, if even
    advantages = torch.where(advantages < 0, wrong_weight * advantages, advantages)
    on_tokens = advantages[:, None].where(response_mask, 0.0)  # [B, T]; 0 on padding
    return on_tokens, on_tokens  # without a critic nobody reads the returns
