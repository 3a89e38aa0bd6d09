"""reward.rules: verl gives the scores of verl 0.9.1. Each row holds what verl 0.9.1 itself said, with a
format_score of 0.1 for gsm8k."""

from __future__ import annotations

import pytest

from rolemesh.config.reward import RewardConfig
from rolemesh.rules.sources import rule_of
from rolemesh.services.reward.functions import default_compute_score

VERL = RewardConfig(rules="verl", format_score=0.1)

SAID = [
    ("openai/gsm8k", "#### 5", "5", 1.0),
    ("openai/gsm8k", "####5", "5", 0.0),
    ("openai/gsm8k", "####  5", "5", 0.0),
    ("openai/gsm8k", "#### $5", "5", 0.0),
    ("openai/gsm8k", "#### +5", "5", 0.0),
    ("openai/gsm8k", "####\n5", "5", 0.0),
    ("openai/gsm8k", "#### 5 and ####6", "5", 1.0),
    ("openai/gsm8k", "#### 5.00", "5", 0.1),
    ("openai/gsm8k", "#### 5.", "5", 0.1),
    ("openai/gsm8k", "#### 1,234", "1234", 1.0),
    ("openai/gsm8k", "#### 1234", "1,234", 0.1),
    ("openai/gsm8k", "#### 1,2", "12", 1.0),
    ("openai/gsm8k", "#### 5\n#### ,", "5", 0.1),
    ("openai/gsm8k", "#### -5", "-5", 1.0),
    ("openai/gsm8k", "#### 5" + " " * 296, "5", 0.0),
    ("openai/gsm8k", "#### 5" + " " * 295, "5", 0.0),
    ("openai/gsm8k", "5", "5", 0.0),
    ("lighteval/MATH", "\\boxed{5}", "5", 1.0),
    ("lighteval/MATH", "\\boxed {5}", "5", 0.0),
    ("lighteval/MATH", "\\boxed 5$ is", "5", 1.0),
    ("lighteval/MATH", "\\boxed 5$ or $\\boxed{4}$", "5", 1.0),
    ("lighteval/MATH", "\\boxed 5$ or $\\boxed{4}$", "4", 0.0),
    ("lighteval/MATH", "\\fbox{5}", "5", 0.0),
    ("lighteval/MATH", "\\boxed{5", "5", 0.0),
    ("lighteval/MATH", "\\boxed{\\frac12}", "\\frac{1}{2}", 1.0),
    ("lighteval/MATH", "\\boxed{\\frac1}", "\\frac1", 1.0),
    ("lighteval/MATH", "\\boxed{\\frac}", "\\frac", 1.0),
    ("lighteval/MATH", "\\boxed{\\frac} ", "\\frac ", 0.0),
    ("lighteval/MATH", "\\boxed{\\frac{72}1}", "\\frac{72}{1}", 0.0),
    ("lighteval/MATH", "\\boxed{1/2}", "0.5", 1.0),
    ("lighteval/MATH", "\\boxed{01/2}", "0.5", 0.0),
    ("lighteval/MATH", "\\boxed{x = 5}", "5", 1.0),
    ("lighteval/MATH", "\\boxed{xy=5}", "5", 1.0),
    ("lighteval/MATH", "\\boxed{xyz=5}", "5", 0.0),
    ("lighteval/MATH", "\\boxed{5\\text{ cm}}", "5", 1.0),
    ("lighteval/MATH", "\\boxed{5\\text{ a}\\text{ b}}", "5", 0.0),
    ("lighteval/MATH", "\\boxed{5\\text{ a}\\text{ b}}", "5\\text{ a}\\text{ b}", 1.0),
    ("lighteval/MATH", "\\boxed{50%}", "50", 0.0),
    ("lighteval/MATH", "\\boxed{50\\%}", "50", 1.0),
    ("lighteval/MATH", "\\boxed{$5}", "5", 0.0),
    ("lighteval/MATH", "\\boxed{\\$5}", "5", 1.0),
    ("lighteval/MATH", "\\boxed{\\sqrt3}", "\\sqrt{3}", 1.0),
    ("lighteval/MATH", "\\boxed{\\sqrt 3}", "\\sqrt{3}", 0.0),
    ("lighteval/MATH", "\\boxed{.5}", "\\frac{1}{2}", 1.0),
    ("math_dapo", "Answer: 5", "5", 1.0),
    ("math_dapo", "ANSWER :5", "5", 1.0),
    ("math_dapo", "\\boxed{5}", "5", 1.0),
    ("math_dapo", "\\boxed{05}", "05", 1.0),
    ("math_dapo", "\\boxed{5 }", "5", -1.0),
    ("math_dapo", "\\boxed {5}", "5", -1.0),
    ("math_dapo", "\\boxed{5}" + " " * 90, "5", 1.0),
    ("math_dapo", "\\boxed{5}" + " " * 95, "5", -1.0),
    ("math_dapo", "\\boxed{6} Answer: 5", "5", 1.0),
    ("math_dapo", "Answer: 5" + " " * 291, "5", 1.0),
    ("math_dapo", "Answer: 5" + " " * 292, "5", -1.0),
    ("math_dapo", "Answer: [INVALID]\n\\boxed{5}", "5", 1.0),
    ("math_dapo", "Answer: $5$ apples", "5", 1.0),
    ("math_dapo", "Answer: $2$ and $3$", "2", 1.0),
    ("math_dapo", "Answer: x+y=5", "5", 1.0),
    ("math_dapo", "5", "5", -1.0),
    ("math_dapo", "", "[INVALID]", 1.0),
    ("math_dapo", "Answer: \\frac12", "\\frac{1}{2}", 1.0),
]


@pytest.mark.parametrize(("source", "response", "truth", "score"), SAID)
def test_a_score_by_verls_rules_is_the_one_that_verl_gave(
    source: str, response: str, truth: str, score: float
) -> None:
    scored = default_compute_score(source, response, truth, config=VERL)
    assert (scored["score"] if isinstance(scored, dict) else scored) == score


def test_math_names_dapos_data_in_verl_and_hendrycks_here() -> None:
    assert rule_of("math", VERL) == "dapo"
    assert rule_of("math", RewardConfig()) == "math"
