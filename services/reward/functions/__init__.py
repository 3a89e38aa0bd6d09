"""Rules, by a row's data_source.

A rule takes the response's text and the row's ground truth and returns a number, or a dict with "score" and,
where being right and the score differ, "acc". To add one: a file here and its data sources in RULES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rolemesh.data import arithmetic
from rolemesh.data import gsm8k as gsm8k_data
from services.reward.functions import gsm8k, math

Score = float | Mapping[str, Any]


class ScoreFunction(Protocol):
    """What scores one response. A function of the user's has this form."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Score: ...


class UnknownDataSource(LookupError):
    """No rule is known for a row's data_source."""


GSM8K = (gsm8k_data.DATA_SOURCE, arithmetic.DATA_SOURCE)
MATH = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "hendrycks/competition_math",
    "math",
)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format_score: float = 0.0,
) -> Score:
    """Scores a response by the rule of its data_source.

    Args:
        data_source: the row's.
        solution_str: the response's text, without special tokens.
        ground_truth: text, a number, a list of right answers, or {"target": one of these}.
        extra_info: the row's; no rule here reads it.
        format_score: of a well-formed wrong answer, where the rule knows such.

    Raises:
        UnknownDataSource: no rule is known.
    """
    if data_source in GSM8K:
        return gsm8k.compute_score(solution_str, ground_truth, format_score=format_score)
    if data_source in MATH:
        return math.compute_score(solution_str, ground_truth)
    raise UnknownDataSource(
        f"no rule for data_source {data_source!r}; known are {', '.join(GSM8K + MATH)}. Set "
        "reward.custom_reward_function.path to a Python file of yours with a function "
        "compute_score(data_source, solution_str, ground_truth, extra_info)"
    )
