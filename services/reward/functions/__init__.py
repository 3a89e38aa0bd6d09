"""Rules, selected by a row's data_source.

A rule takes the response's text and the row's ground truth. It returns a number, or a dict with "score" and, if
the score does not say whether the answer is correct, "acc". To add a rule, add a file here, its data sources to
rolemesh/rules/sources.py, its ground truths to rolemesh/rules/checking.py, and a case to default_compute_score.

Scoring processes import this module, so neither it nor a rule may import torch or pydantic at the top. A rule
is imported with the first row that needs it: all rules take as long as the rest that such a process imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rolemesh.rules.sources import rule_of

if TYPE_CHECKING:
    from rolemesh.config.reward import RewardConfig

Score = float | Mapping[str, Any]


class ScoreFunction(Protocol):
    """Scores one response. A user's function has the same signature."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Score: ...


# Rules that run in the service's own process. They start no program, and take less time than sending a row to
# another process. They have no timeout, so for any input their time must grow at most linearly with response
# and ground truth.
QUICK = ("gsm8k", "math", "dapo")


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    config: RewardConfig | None = None,
) -> Score:
    """Score a response by the rule of its data_source.

    Args:
        data_source: the row's data_source.
        solution_str: the response's text, without special tokens unless reward.skip_special_tokens is false.
        ground_truth: text, a number, a list of correct answers, or {"target": one of these}; prime_code: tests.
        extra_info: the row's extra_info; no rule here reads it.
        config: the reward section: rules, format_score, answer_chars, math, sandbox; None: the defaults.

    Raises:
        UnknownDataSource: there is no rule.
    """
    if config is None:
        from rolemesh.config.reward import RewardConfig

        config = RewardConfig()
    as_verl = config.rules == "verl"
    match rule_of(data_source, config):
        case "gsm8k":
            from rolemesh.rules import gsm8k
            from rolemesh.services.reward.functions.verl import gsm8k_score as verl_gsm8k

            by_mark = verl_gsm8k.compute_score if as_verl else gsm8k.compute_score
            return by_mark(
                solution_str,
                ground_truth,
                format_score=config.format_score,
                answer_chars=config.answer_chars,
            )
        case "math":
            from rolemesh.services.reward.functions import math
            from rolemesh.services.reward.functions.verl import hendrycks as verl_math

            by_box = verl_math.compute_score if as_verl else math.compute_score
            return by_box(solution_str, ground_truth)
        case "dapo":
            from rolemesh.services.reward.functions import dapo_math
            from rolemesh.services.reward.functions.verl import math_dapo as verl_dapo

            by_line = verl_dapo.compute_score if as_verl else dapo_math.compute_score
            return by_line(solution_str, ground_truth, answer_chars=config.answer_chars)
        case "math_verify":
            from rolemesh.services.reward.functions import math_verify

            return math_verify.compute_score(solution_str, ground_truth, exact=not as_verl)
        case _:
            from rolemesh.services.reward.functions import prime_code

            return prime_code.compute_score(solution_str, ground_truth, config=config)
