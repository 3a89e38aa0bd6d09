"""reward.rules: verl gives the scores of verl 0.9.1. Each row holds what verl 0.9.1 itself said, with a
format_score of 0.1 for gsm8k."""

from __future__ import annotations

import pytest

from rolemesh.config.reward import RewardConfig
from rolemesh.rules.sources import rule_of
from rolemesh.services.reward.functions import default_compute_score

VERL = RewardConfig(rules="verl", format_score=0.1)

# data source | score | ground truth | responses, in which "⏎" is a new line
SAID = r"""
openai/gsm8k | 1 | 5 | #### 5 | #### 5 and ####6
openai/gsm8k | 1 | 12 | #### 1,2
openai/gsm8k | 1 | 1234 | #### 1,234
openai/gsm8k | 1 | -5 | #### -5
openai/gsm8k | 0 | 5 | ####5 | ####  5 | #### $5 | #### +5 | ####⏎5 | 5
openai/gsm8k | 0.1 | 5 | #### 5.00 | #### 5. | #### 5⏎#### ,
openai/gsm8k | 0.1 | 1,234 | #### 1234
lighteval/MATH | 1 | 5 | \boxed{5} | \boxed 5$ is | \boxed 5$ or $\boxed{4}$ | \boxed{x = 5} | \boxed{xy=5}
lighteval/MATH | 1 | 5 | \boxed{5\text{ cm}} | \boxed{\$5}
lighteval/MATH | 1 | \frac{1}{2} | \boxed{\frac12} | \boxed{.5}
lighteval/MATH | 1 | \frac1 | \boxed{\frac1}
lighteval/MATH | 1 | \frac | \boxed{\frac}
lighteval/MATH | 1 | 0.5 | \boxed{1/2}
lighteval/MATH | 1 | 5\text{ a}\text{ b} | \boxed{5\text{ a}\text{ b}}
lighteval/MATH | 1 | 50 | \boxed{50\%}
lighteval/MATH | 1 | \sqrt{3} | \boxed{\sqrt3}
lighteval/MATH | 0 | 5 | \boxed {5} | \fbox{5} | \boxed{5 | \boxed{xyz=5} | \boxed{5\text{ a}\text{ b}}
lighteval/MATH | 0 | 5 | \boxed{$5}
lighteval/MATH | 0 | 4 | \boxed 5$ or $\boxed{4}$
lighteval/MATH | 0 | \frac{72}{1} | \boxed{\frac{72}1}
lighteval/MATH | 0 | 0.5 | \boxed{01/2}
lighteval/MATH | 0 | 50 | \boxed{50%}
lighteval/MATH | 0 | \sqrt{3} | \boxed{\sqrt 3}
math_dapo | 1 | 5 | Answer: 5 | ANSWER :5 | \boxed{5} | \boxed{6} Answer: 5 | Answer: [INVALID]⏎\boxed{5}
math_dapo | 1 | 5 | Answer: $5$ apples | Answer: x+y=5
math_dapo | 1 | 05 | \boxed{05}
math_dapo | 1 | 2 | Answer: $2$ and $3$
math_dapo | 1 | \frac{1}{2} | Answer: \frac12
math_dapo | -1 | 5 | \boxed{5 } | \boxed {5} | 5
"""
ROWS = [line.replace("⏎", "\n").split(" | ") for line in SAID.strip().splitlines()]
BLANKS = [
    ("math_dapo", "1", "[INVALID]", ""),
    *(("openai/gsm8k", "0", "5", "#### 5" + " " * num) for num in (295, 296)),
    ("lighteval/MATH", "0", "\\frac ", "\\boxed{\\frac} "),
    ("math_dapo", "1", "5", "\\boxed{5}" + " " * 90),
    ("math_dapo", "-1", "5", "\\boxed{5}" + " " * 95),
    ("math_dapo", "1", "5", "Answer: 5" + " " * 291),
    ("math_dapo", "-1", "5", "Answer: 5" + " " * 292),
]


@pytest.mark.parametrize("row", [*ROWS, *BLANKS], ids=lambda row: " ".join(row[:3]))
def test_a_score_by_verls_rules_is_the_one_that_verl_gave(row: list[str]) -> None:
    source, score, truth, *responses = row
    for response in responses:
        scored = default_compute_score(source, response, truth, config=VERL)
        assert (scored["score"] if isinstance(scored, dict) else scored) == float(score), response


def test_math_names_dapos_data_in_verl_and_hendrycks_here() -> None:
    assert rule_of("math", VERL) == "dapo"
    assert rule_of("math", RewardConfig()) == "math"
