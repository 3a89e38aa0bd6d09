"""Losses of preference training: a row is a pair, of which one answer was preferred to the other.

Each function takes
    log_probs: [b, T], of the policy under training, π, with gradient.
    ref_log_probs: [b, T], of the reference policy, π_ref.
    contexts: [b, T], 0 in the chosen answer, 1 in the rejected one.
    response_mask: [b, T] bool, the tokens of both answers.
A row's loss stands at each of its tokens, so the mean over tokens and rows is the mean over pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rolemesh.algos.policy_loss import TokenLosses


def dpo_loss(
    log_probs: Tensor, ref_log_probs: Tensor, contexts: Tensor, response_mask: Tensor, *, dpo_beta: float
) -> TokenLosses:
    """Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    −log σ(β·(h_chosen − h_rejected)), where h is the sum of log π/π_ref over an answer's tokens.
    """
    chosen, rejected = log_ratios(log_probs, ref_log_probs, contexts, response_mask)
    return _of_pairs(
        -logsigmoid(dpo_beta * (chosen - rejected)), dpo_beta * chosen, dpo_beta * rejected, log_probs
    )


def dpo_norm_loss(
    log_probs: Tensor, ref_log_probs: Tensor, contexts: Tensor, response_mask: Tensor, *, dpo_beta: float
) -> TokenLosses:
    """DPO with the mean over an answer's tokens in place of the sum, so that its length does not matter.

    Lambert et al. 2024, arXiv:2411.15124, eq. 6.
    """
    chosen, rejected = log_ratios(log_probs, ref_log_probs, contexts, response_mask, mean=True)
    return _of_pairs(
        -logsigmoid(dpo_beta * (chosen - rejected)), dpo_beta * chosen, dpo_beta * rejected, log_probs
    )


def ipo_loss(
    log_probs: Tensor, ref_log_probs: Tensor, contexts: Tensor, response_mask: Tensor, *, dpo_beta: float
) -> TokenLosses:
    """Identity Preference Optimization (Azar et al. 2023, arXiv:2310.12036, eq. 17).

    (h_chosen − h_rejected − 1/2β)², where h is the mean of log π/π_ref over an answer's tokens, as in TRL. The
    paper's τ is dpo_beta.
    """
    chosen, rejected = log_ratios(log_probs, ref_log_probs, contexts, response_mask, mean=True)
    losses = (chosen - rejected - 1 / (2 * dpo_beta)).square()
    return _of_pairs(losses, dpo_beta * chosen, dpo_beta * rejected, log_probs)


def log_ratios(
    log_probs: Tensor, ref_log_probs: Tensor, contexts: Tensor, response_mask: Tensor, *, mean: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log π/π_ref of the chosen and of the rejected answers, each [b]: the sum over tokens, or mean."""
    found = []
    for answer in (0, 1):
        mask = response_mask & (contexts == answer)
        total = torch.where(mask, log_probs - ref_log_probs, 0).sum(1)
        found.append(total / mask.sum(1).clamp(min=1) if mean else total)
    return found[0], found[1]


def _of_pairs(losses: Tensor, chosen: Tensor, rejected: Tensor, like: Tensor) -> TokenLosses:
    """Make the result of losses [b] and of the answers' implicit rewards [b]."""
    chosen = chosen.detach()
    rejected = rejected.detach()
    of_rows = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(like.dtype),
    }
    return TokenLosses(losses[:, None].expand_as(like), of_rows=of_rows)
