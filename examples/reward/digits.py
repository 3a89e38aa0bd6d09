"""A reward function: a right answer is worth 1, each right digit of a wrong one a little."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], *, digit: float = 0.2
) -> dict[str, float]:
    """Return what an answer is worth. It runs in a process of its own, with a time limit (reward.timeout_s).

    Args:
        data_source: the row's; one function may score rows of several data sets.
        solution_str: the response as text, such as "#### 85".
        ground_truth: the row's reward_model.ground_truth, such as "85".
        extra_info: whatever else the row says.
        digit: from reward.custom_reward_function.reward_kwargs.
    """
    answer = solution_str.rpartition("####")[2].strip()
    right = answer == ground_truth
    digits = sum(a == b for a, b in zip(reversed(answer), reversed(ground_truth), strict=False))
    # `score` is learnt from, `acc` says whether the answer is right. Every other number becomes a metric of the
    # step, such as reward/digits/mean.
    return {"score": 1.0 if right else digit * digits, "acc": float(right), "digits": float(digits)}
