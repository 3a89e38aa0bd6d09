"""Checks, before there is a response, that a row can be scored by the rule of its data source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolemesh.rules.ground_truth import right_answers
from rolemesh.rules.gsm8k import right_numbers
from rolemesh.rules.program_tests import CONTINUOUS_TESTS, check_tests

if TYPE_CHECKING:
    from rolemesh.config.reward import RewardConfig


def check_ground_truth(rule: str, ground_truth: Any, config: RewardConfig) -> None:
    """Read a ground truth as a rule does when it scores.

    Args:
        rule: the name of the rule, of `rule_of`.
        ground_truth: made of JSON's types.
        config: the reward section.

    Raises:
        ValueError: the rule could not score any response with it.
    """
    try:
        if rule == "prime_code":
            check_tests(ground_truth, CONTINUOUS_TESTS if config.sandbox.continuous else None)
        elif rule == "gsm8k" and config.rules != "verl":
            right_numbers(ground_truth)
        else:
            right_answers(ground_truth)
    except RecursionError as error:
        raise ValueError(f"ground_truth nests too deeply: {error}") from error
