r"""The normal form of an answer: equal answers get the same text, and different answers keep different texts.

Every step changes form alone: emphasis, delimiters, spacing, notation, a name on the left, a unit on the right,
redundant zeros. The steps are repeated until nothing changes, so the normal form of a normal form is itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rolemesh.rules import notation
from rolemesh.rules.boxed import BETWEEN_DIGITS, INEQUALITIES, MIXED, TAG, last_of_neighbours
from rolemesh.rules.notation import CONNECTIVE, OTHER_SCRIPT
from rolemesh.rules.numbers import number, spelling
from rolemesh.rules.units import MULTIPLIED, without_label

MOST_ROUNDS = 8
MOST_CHARACTERS = 1000  # no answer that people write is longer; a longer text is compared as it is
DELIMITER = re.compile(r"(?<!\\)(?:\\[()\[\]]|\$+)")
MARKS = ('"', "***", "**", "__", "*", "_", "```", "``", "`")
MARK = re.compile('[*_`"]')
NO_NAME = rf"(?!{CONNECTIVE}|m?\\(?:not|neq?|leq?|geq?|approx|lt|gt|ll|gg)(?![A-Za-z]))"
SYMBOL = (
    NO_NAME
    + r"(?:(?:[a-z]|[A-Z]{1,3})(?:_\{?\w{1,3}\}?|_\{[^{}=]{1,20}\})?'?|[A-Za-z](?:\^\{?-1\}?)?\(-?\w{1,12}\)"
    r"|\\(?:overline|vec)\{[A-Za-z]{1,3}\}|m?\\[A-Za-z]+(?: ?[A-Z]{1,3})?|\([A-Za-z](?: ?, ?[A-Za-z])+\))"
)
PROSE = rf"{NO_NAME}[A-Za-z][a-z]+(?: {NO_NAME}[A-Za-z]+){{0,5}}"
NAME = re.compile(rf"(?:{SYMBOL}|(?P<prose>{PROSE}))\s*(?:=|\\in(?![A-Za-z]))\s*")
ANSWER_IS = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:the |my )?(?:final |correct |right )?answer(?: is:? +|: *)",
    re.IGNORECASE,
)
# What may stand left of the last "=" of an answer. There is no comma, word or other relation in any of these.
UNKNOWN = r"[A-Za-z](?:_\{\w{1,3}\})?"
SUM = re.compile(rf"-?[0-9]*{UNKNOWN}(?:\^\{{[0-9]+\}})?(?:[-+][0-9]*{UNKNOWN}(?:\^\{{[0-9]+\}})?)+")
CALCULATION = re.compile(
    r"(?:[-+*/^_().{}0-9]|\\?%|\\(?:times|cdot|div|frac|sqrt|binom|pi|circ|log|ln|sin|cos|tan)(?![A-Za-z]))+"
)
# A letter, and what stands beside it: "(A) 5". "(A), (B)", "(A) or 5" and "(A) 5, (B) 6" are lists, and
# "(A)^2" is a formula.
OPERATOR = r"[+*/^_=']|\\(?:cap|cup|cdot|times)(?![A-Za-z])"
CHOICE = re.compile(rf"\(([A-E])\) ?(?![,;]|{OPERATOR}|{CONNECTIVE})((?:(?!\([A-E]\)).)+)")
DOLLARS = re.compile(r"^\$(?=\s*[-+.]?[0-9][^$]*$)")


@dataclass(frozen=True)
class NormalForm:
    """An answer in its normal form.

    Args:
        value: the answer itself, "" if nothing is left.
        unit: its unit, or the things counted; "" if it has none.
        name: the symbol on its left, "x" of "x = 5"; "" if there is none.
    """

    value: str
    unit: str = ""
    name: str = ""


def read_answer(text: str) -> NormalForm:
    r"""Convert an answer to its normal form.

    The value's own normal form is the value. A text of more than a thousand characters, or one that does not
    settle within eight rounds, is its own normal form, without blanks around it.
    """
    text = text.strip()
    if (value := number(text)) is not None:
        return NormalForm(spelling(value))
    if len(text) > MOST_CHARACTERS:
        return NormalForm(text)
    unit = name = ""
    form = text
    for _ in range(MOST_ROUNDS):
        before = form
        for step in STEPS:
            form = step(form)
        form, found = without_label(form)
        unit = unit or found
        form, symbol = _without_name(form)
        name = name or symbol
        for step in STEPS_OF_VALUES:
            form = step(form)
        if form == before:
            return NormalForm(form, unit, name)
    return NormalForm(text)


def agrees(given: NormalForm, truth: NormalForm) -> bool:
    """Whether two answers are the same: equal values, and no two different units or names.

    "x = 5", "2 + 3 = 5" and "m + n = 5" agree with "5". An equation that is still to be solved, such as
    "2x = 5", does not, and neither does a list of candidates. "(A) 5" agrees with "A" and with "5".
    """
    if labelled_otherwise(given, truth) or (given.name and truth.name and given.name != truth.name):
        return False
    if given.value == truth.value:
        return bool(truth.value)
    of_given = CHOICE.fullmatch(given.value)
    of_truth = CHOICE.fullmatch(truth.value)
    if of_given and not of_truth:  # beside a letter another letter would be a second guess
        is_letter = re.fullmatch("[A-E]", truth.value)
        return of_given[1] == truth.value if is_letter else agrees(read_answer(of_given[2]), truth)
    if of_truth and not of_given:
        return of_truth[1] == given.value or agrees(given, read_answer(of_truth[2]))
    if "=" not in given.value or "=" in truth.value:
        return False
    *left, right = given.value.split("=")
    return read_answer(right).value == truth.value != "" and all(_may_equal(side, truth) for side in left)


def labelled_otherwise(given: NormalForm, truth: NormalForm) -> bool:
    """Whether both have a unit, and not the same one, or differ where a word of another script stands."""
    if given.value != truth.value and OTHER_SCRIPT.search(given.value + truth.value):
        return True
    return bool(given.unit and truth.unit and given.unit != truth.unit)


def is_multiple(answer: NormalForm) -> bool:
    """Whether a word multiplies a number of the answer, as in "5 million"."""
    return MULTIPLIED.search(answer.value) is not None


def _may_equal(side: str, truth: NormalForm) -> bool:
    """Whether a left side only repeats the question or computes the answer: "x", "m + n", or "2 + 3".

    A number is no calculation, so "5 = 6" is not read as 6. One unknown in a sum, as in "x + x^2 = 6", is to be
    solved for.
    """
    if CALCULATION.fullmatch(side):
        return number(side) is None or read_answer(side).value == truth.value
    if truth.name:
        return side == truth.name
    if SUM.fullmatch(side):
        return len(set(re.findall(UNKNOWN, side))) > 1
    return re.fullmatch(SYMBOL, side) is not None


def _without_delimiters(text: str) -> str:
    r"""Remove $…$, \(…\), \[…\] and tags such as <answer>: that it is mathematics, or the answer, is known."""
    if any(sign in text for sign in "$\\<\u201c\u201d"):
        text = BETWEEN_DIGITS.sub(", ", MIXED.sub(r"\1\2 ", INEQUALITIES.sub(r"< \1 >", text)))
    text = TAG.sub(" ", text).strip() if "<" in text else text
    text = DOLLARS.sub(r"\\$", text)  # a single "$" before a number is dollars
    return DELIMITER.sub(" ", text).strip() if "$" in text or "\\" in text else text


def _without_emphasis(text: str) -> str:
    """Remove the marks around the answer, also marks in marks."""
    text = text.strip()
    for _ in range(MOST_ROUNDS if MARK.search(text) else 0):
        before = text
        text = _without_mark(text)
        if text == before:
            break
    return text


def _without_mark(text: str) -> str:
    """Remove a pair of marks around the answer, or one mark whose other one stands outside of it."""
    text = text.strip()
    for mark in MARKS:
        if text.startswith(mark):
            end = text.find(mark, len(mark))
            if end > 0 and not text[end + len(mark) :][:1].isalnum():
                return text[len(mark) : end] + text[end + len(mark) :]
            if end < 0 and mark not in ("*", "_"):
                return text[len(mark) :]
        elif text.find(mark) == len(text) - len(mark) >= 0 and (
            mark not in ("*", "_") or text[-2:-1].isdigit() or text[-2:-1] == "."
        ):
            return text[: -len(mark)]
    return text


def _without_punctuation(text: str) -> str:
    r"""Remove the punctuation of the sentence that the answer ends, and a "\\" or "\," after the answer.

    An ellipsis and a factorial stay.
    """
    text = text.rstrip(",;: \\")
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def _without_name(text: str) -> tuple[str, str]:
    """Split "x = 5" into "5" and "x". What is no symbol, as in "the area = 5", "the answer is 5" and "= 5", is
    not kept."""
    if found := ANSWER_IS.match(text):
        return text[found.end() :], ""
    if text.startswith("=") and "=" not in text[1:]:
        return text[1:].lstrip(), ""
    found = NAME.match(text)
    if found is None or "=" in text[found.end() :] or found.end() == len(text):
        return text, ""
    return text[found.end() :], "" if found["prose"] else re.sub(r"\s*(=|\\in)\s*$", "", found[0])


def _as_number(text: str) -> str:
    value = number(text)
    return text if value is None else spelling(value)


def _replaced(pattern: str, by: str | Callable[[re.Match[str]], str], flags: int = 0) -> Callable[[str], str]:
    return partial(re.compile(pattern, flags).sub, by)


STEPS: tuple[Callable[[str], str], ...] = (
    last_of_neighbours,
    _without_delimiters,
    _without_emphasis,
    _without_punctuation,
    notation.in_one_spelling,
    notation.without_outer_wrapper,
    _replaced(r"(?<=[0-9])(?:(?:st|nd|rd|th)|\^?\{?\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\}?)\Z", ""),  # 5th
)
STEPS_OF_VALUES: tuple[Callable[[str], str], ...] = (
    _replaced(r"(?<![0-9])\\\$|\\\$(?![0-9])", ""),  # between two digits it would join two numbers
    notation.without_wrappers,
    _without_emphasis,
    # a letter or a number in brackets: "(A)", "A)", "(5)"
    _replaced(r"\A(?:\( ?([A-Z]|-? ?[0-9]+(?:\.[0-9]+)?) ?\)|([A-Z])\))\Z", r"\1\2"),
    # the article of an answer in words; no words follow a variable a
    _replaced(r"\A(?:an?|the)\s+(?=[a-z]{3,}(?:\s+[a-z]{2,})*\Z)", "", re.IGNORECASE),
    # the capital letter of a sentence: "Even", "No solution"
    _replaced(
        r"\A(?:Yes|No|Odd|[A-Z][a-z]{3,})(?: [A-Za-z]+)*\Z", lambda found: found[0][0].lower() + found[0][1:]
    ),
    notation.with_braces,
    notation.with_plain_numbers,
    notation.with_fractions,
    notation.without_blanks,
    _as_number,
)
