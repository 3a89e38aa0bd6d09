"""Rules, by a row's data_source.

A rule takes the response's text and the row's ground truth and returns a number, or a dict with "score" and,
where being right and the score differ, "acc". To add one: a file here, its data sources in RULES and a line in
default_compute_score.

Processes that score import this module: neither it nor a rule imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rolemesh.config.reward import RewardConfig
from rolemesh.services.reward.functions import dapo, gsm8k, math, math_verify, prime_code

Score = float | Mapping[str, Any]


class ScoreFunction(Protocol):
    """What scores one response. A function of the user's has this form."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Score: ...


class UnknownDataSource(LookupError):
    """No rule is known for a row's data_source."""


RULES: dict[str, tuple[str, ...]] = {
    "gsm8k": ("openai/gsm8k", "rolemesh/arithmetic"),
    "math": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "hendrycks/competition_math",
        "math",
    ),
    "dapo": ("math_dapo", "math_dapo_reasoning", "aime*"),
    "math_verify": (
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    ),
    "prime_code": ("codecontests", "apps", "codeforces", "taco"),
}
# In the service's own process: they run nothing, and take less than sending a row to another. Their time grows
# no faster than response and ground truth, whatever is in them: nothing ends them.
QUICK = ("gsm8k", "math", "dapo")


def rule_of(data_source: str, config: RewardConfig) -> str:
    """The rule, by name, of a data source.

    Raises:
        UnknownDataSource: none is known.
    """
    for rule, sources in RULES.items():
        if data_source in sources or (rule == "dapo" and data_source.startswith("aime")):
            return config.math if rule == "math" and config.math != "hendrycks" else rule
    known = ", ".join(source for sources in RULES.values() for source in sources)
    raise UnknownDataSource(
        f"no rule for data_source {data_source!r}; known are {known}. Set "
        "reward.custom_reward_function.path to a Python file of yours with a function "
        "compute_score(data_source, solution_str, ground_truth, extra_info)"
    )


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    config: RewardConfig | None = None,
) -> Score:
    """Scores a response by the rule of its data_source.

    Args:
        data_source: the row's.
        solution_str: the response's text, without special tokens.
        ground_truth: text, a number, a list of right answers, or {"target": one of these}; prime_code: tests.
        extra_info: the row's; no rule here reads it.
        config: the reward section: format_score, answer_chars, math, sandbox; None: the defaults.

    Raises:
        UnknownDataSource: no rule is known.
    """
    config = config or RewardConfig()
    match rule_of(data_source, config):
        case "gsm8k":
            return gsm8k.compute_score(
                solution_str,
                ground_truth,
                format_score=config.format_score,
                answer_chars=config.answer_chars,
            )
        case "math":
            return math.compute_score(solution_str, ground_truth)
        case "dapo":
            return dapo.compute_score(solution_str, ground_truth, answer_chars=config.answer_chars)
        case "math_verify":
            return math_verify.compute_score(solution_str, ground_truth)
        case _:
            return prime_code.compute_score(solution_str, ground_truth, config=config)
