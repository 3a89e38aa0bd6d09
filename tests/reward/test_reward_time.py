"""A policy repeats itself, and a data set may hold anything: no rule takes time that grows with the square."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from rolemesh.config.reward import RewardConfig
from rolemesh.rules.sources import RULES
from rolemesh.services.reward.functions import QUICK, default_compute_score
from rolemesh.services.reward.functions.prime_code import program_of, same_result, same_text
from rolemesh.services.reward.functions.verl import math_dapo

REPEATED = (
    *(" ", "\n", "1", "a", "{", "}", "$", "-", "#", ".", ",", "=", "\\", "/", "%", "####", "#### ", "####,"),
    *("\\frac", "\\frac{", "\\frac1", "\\sqrt", "\\sqrt ", "\\boxed", "\\boxed{", "\\boxed ", "\\fbox{"),
    *(
        "\\text{",
        "\\text{a",
        "\\textbf{",
        "\\overline{",
        "\\text{ ",
        "\\left",
        "Answer",
        "Answer:",
        "Answer: ",
        "$a",
        "<answer>",
        "<final answer>",
        "\\boxed{1}",
        "####\\frac",
        "$$",
        "1$",
        "元",
    ),
    *("5元", "5%, ", "(a", "(5", "[1]", "5又", "<b>", "1 $"),
)
BEGINS = ("", "#### ", "#### 5", r"\boxed{", r"\boxed ", "Answer: ", "Answer: 5", r"\boxed{\sqrt", "$")
ENDS = ("", "x", "}", "\n}", "$")
CHARACTERS = 5_000
SECONDS = (
    0.05  # of CPU: less says nothing about growth. With the square 20,000 characters take a quarter at least
)
SLACK = 2.5  # four times the text may take ten times as long; with the square it takes sixteen


def cpu_s(call: Callable[[str], object], text: str) -> float:
    began = time.thread_time()
    call(text)
    return time.thread_time() - began


def grows_no_faster_than_its_text(call: Callable[[str], object], begin: str, again: str, end: str) -> bool:
    """Of this thread's CPU time: what else runs on the machine is not counted."""
    short, long = (begin + again * (num // len(again)) + end for num in (CHARACTERS, 4 * CHARACTERS))
    if (took := cpu_s(call, long)) < SECONDS:
        return True
    took = min(took, cpu_s(call, long), cpu_s(call, long))
    return took < 4 * SLACK * min(cpu_s(call, short) for _ in range(9))


SOURCES = {rule: RULES[rule][0] for rule in QUICK}


@pytest.mark.parametrize("again", REPEATED)
@pytest.mark.parametrize("rule", SOURCES)
def test_rules_on_the_roles_thread_take_linear_time(rule: str, again: str) -> None:
    """Linear in the response and in the ground truth."""
    every_character = RewardConfig(answer_chars=None)

    def of_response(text: str) -> None:
        default_compute_score(SOURCES[rule], text, "5", config=every_character)

    def of_truth(text: str) -> None:
        with suppress(ValueError):  # for gsm8k it is a number, or an error
            default_compute_score(SOURCES[rule], "#### 5 Answer: 5", text)

    for begin, end in itertools.product(BEGINS, ENDS):
        for call in (of_response, of_truth):
            assert grows_no_faster_than_its_text(call, begin, again, end), (call.__name__, begin, end)


@pytest.mark.parametrize("again", REPEATED)
def test_a_programs_output_is_read_in_linear_time(again: str) -> None:
    for call in (program_of, lambda text: same_text(text, text + "0.5"), lambda text: same_result(text, "[1]")):
        for begin, end in itertools.product(("", "[", '"', "0.", "```python"), ("", "]", '"')):
            assert grows_no_faster_than_its_text(call, begin, again, end), (begin, end)


def test_time_that_grows_with_the_square_is_found() -> None:
    """The test of the test: the expression that once held the reward's thread."""
    square = re.compile(r"\\text\{(.*?)\}")
    assert not grows_no_faster_than_its_text(lambda text: square.sub(r"\1", text), "", "\\text{", "")
    assert grows_no_faster_than_its_text(lambda text: math_dapo.normalise(text), "", "\\text{", "")


def by_expressions(answer: str) -> str:
    """What dapo's normalisation does, said briefly."""
    for before, after in (*math_dapo.REPLACED, *((unit, "") for unit in math_dapo.UNITS)):
        answer = answer.replace(before, after)
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def test_dapo_normalises_as_its_regular_expressions_would() -> None:
    pieces = ("$", "}", "{", "\n", "b", "\\text{", "\\textbf{", "\\overline{", "\\boxed{")
    for length in range(5):
        for parts in itertools.product(pieces, repeat=length):
            text = "".join(parts)
            assert math_dapo.normalise(text) == by_expressions(text), text
