"""The rule of each data source.

Scoring processes import this module, so it must not import torch or pydantic at the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolemesh.config.reward import RewardConfig


class UnknownDataSource(LookupError):
    """There is no rule for a row's data_source."""


RULES: dict[str, tuple[str, ...]] = {
    "gsm8k": ("openai/gsm8k", "rolemesh/arithmetic"),
    "math": (
        "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
        "hendrycks/competition_math", "math",
    ),
    "dapo": ("math_dapo", "math_dapo_reasoning", "aime*"),
    "math_verify": (
        "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc",
        "numina_cn_k12", "numina_olympiads",
    ),
    "prime_code": ("codecontests", "apps", "codeforces", "taco"),
}  # fmt: skip


def rule_of(data_source: str, config: RewardConfig) -> str:
    """Return the name of a data source's rule.

    Raises:
        UnknownDataSource: there is no rule.
    """
    if config.rules == "verl" and data_source == "math":
        return "dapo"  # in verl this name means DAPO's data
    for rule, sources in RULES.items():
        if data_source in sources or (rule == "dapo" and data_source.startswith("aime")):
            return config.math if rule == "math" and config.math != "hendrycks" else rule
    known = ", ".join(source for sources in RULES.values() for source in sources)
    raise UnknownDataSource(
        f"no rule for data_source {data_source!r}; known are {known}. Set "
        "reward.custom_reward_function.path to your Python file with a function "
        "compute_score(data_source, solution_str, ground_truth, extra_info)"
    )
