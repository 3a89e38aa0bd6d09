r"""The normal form of an answer: equal answers get the same text, and different answers keep different texts.

Every step changes form alone: emphasis, delimiters, spacing, notation, a name on the left, a unit on the right,
zeros that say nothing. The steps are repeated until nothing changes, so the form of a form is itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rolemesh.rules.notation import (
    in_one_spelling,
    with_braces,
    with_fractions,
    with_plain_numbers,
    without_blanks,
    without_wrappers,
)
from rolemesh.rules.numbers import number, spelling
from rolemesh.rules.units import without_label

MOST_ROUNDS = 8
MOST_CHARACTERS = 1000  # no answer that people write is longer; a longer text is compared as it is
DELIMITER = re.compile(r"(?<!\\)(?:\\[()\[\]]|\$+)")
MARKS = ("***", "**", "__", "*", "_", "```", "`", '"')
NAME = re.compile(
    r"(?:(?:[a-z]|[A-Z]{1,3})(?:_\{?\w{1,3}\}?)?'?|[A-Za-z](?:\^\{?-1\}?)?\([A-Za-z]\)"
    r"|\\[A-Za-z]+(?: ?[A-Z]{1,3})?|\([A-Za-z](?: ?, ?[A-Za-z])+\)"
    r"|(?P<prose>[A-Za-z][a-z]+(?: [A-Za-z]+){0,5}))\s*(?:=|\\in(?![A-Za-z]))\s*"
)
OPTION = re.compile(r"\(([A-Z])\)|([A-Z])\)")
ARTICLE = re.compile(r"(?:an?|the)\s+(?=[a-z]{3,}(?:\s+[a-z]{2,})*$)", re.IGNORECASE)
ORDINAL = re.compile(r"([0-9])(?:(?:st|nd|rd|th)|\^?\{?\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\}?)$")
COMMAND = re.compile(r"\\[A-Za-z]+")


@dataclass(frozen=True)
class Answer:
    """An answer in its normal form.

    Args:
        value: the answer itself, "" if nothing is left.
        unit: its unit; "" if it has none, or one that is not known.
        name: the symbol on its left, "x" of "x = 5"; "" if there is none.
    """

    value: str
    unit: str = ""
    name: str = ""


def read_answer(text: str) -> Answer:
    r"""Convert an answer to its normal form.

    The value's own normal form is the value. A text of more than a thousand characters, or one that does not
    settle within eight rounds, is its own normal form, without blanks around it.
    """
    text = text.strip()
    if (value := number(text)) is not None:
        return Answer(spelling(value))
    if len(text) > MOST_CHARACTERS:
        return Answer(text)
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
            return Answer(form, unit, name)
    return Answer(text)


def agrees(given: Answer, truth: Answer) -> bool:
    """Whether two answers are the same: equal values, and no two different units or names.

    "2 + 3 = 5" and "m + n = 5" agree with "5". An equation that is still to be solved, "2x + 3 = 5", does not.
    """
    if any(a and b and a != b for a, b in ((given.unit, truth.unit), (given.name, truth.name))):
        return False
    if given.value == truth.value:
        return bool(truth.value)
    if "=" not in given.value or "=" in truth.value:
        return False
    *left, right = given.value.split("=")
    asked = all(side == truth.name or _is_asked(side, named=truth.name != "") for side in left)
    return asked and read_answer(right).value == truth.value != ""


def _is_asked(left: str, *, named: bool) -> bool:
    """Whether a left side can be what a question asks for: a calculation, or unknowns if it names none itself.

    Unknowns with a constant are an equation to solve.
    """
    terms = [term for term in re.split("[-+]", COMMAND.sub("", left)) if term]
    lettered = [re.search("[A-Za-z]", term) is not None for term in terms]
    return not any(lettered) or (all(lettered) and not named)


def _without_delimiters(text: str) -> str:
    r"""Remove $…$, \(…\) and \[…\]: they say that something is mathematics, and that is known."""
    return DELIMITER.sub(" ", text).strip() if "$" in text or "\\" in text else text


def _without_emphasis(text: str) -> str:
    """Remove a pair of marks around the answer, or one mark whose other one stands outside of it."""
    for mark in MARKS:
        if text.startswith(mark):
            end = text.find(mark, len(mark))
            if end > 0 and not text[end + len(mark) :][:1].isalnum():
                text = text[len(mark) : end] + text[end + len(mark) :]
            elif end < 0 and mark not in ("*", "_"):
                text = text[len(mark) :]
        elif text.find(mark) == len(text) - len(mark) >= 0 and (
            mark not in ("*", "_") or text[-2:-1].isdigit() or text[-2:-1] == "."
        ):
            text = text[: -len(mark)]
    return text.strip()


def _without_punctuation(text: str) -> str:
    """Remove the punctuation of the sentence that the answer ends. An ellipsis and a factorial stay."""
    text = text.rstrip(",;: ")
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def _without_name(text: str) -> tuple[str, str]:
    """Split "x = 5" into "5" and "x". A name in words, as in "the area = 5", is not kept."""
    found = NAME.match(text)
    if found is None or "=" in text[found.end() :] or found.end() == len(text):
        return text, ""
    return text[found.end() :], "" if found["prose"] else re.sub(r"\s*(=|\\in)\s*$", "", found[0])


def _without_option_brackets(text: str) -> str:
    found = OPTION.fullmatch(text)
    return (found[1] or found[2]) if found else text


def _without_article(text: str) -> str:
    """Remove the article of an answer in words. A variable a or A is none: no words follow it."""
    return ARTICLE.sub("", text, count=1) if text[:1] in "aAtT" and ARTICLE.match(text) else text


def _without_ordinal(text: str) -> str:
    return ORDINAL.sub(r"\1", text) if text.endswith(("t", "d", "h", "}")) else text


def _as_number(text: str) -> str:
    value = number(text)
    return text if value is None else spelling(value)


STEPS: tuple[Callable[[str], str], ...] = (
    _without_delimiters,
    _without_emphasis,
    _without_punctuation,
    in_one_spelling,
    _without_ordinal,
)
STEPS_OF_VALUES: tuple[Callable[[str], str], ...] = (
    without_wrappers,
    _without_option_brackets,
    _without_article,
    with_braces,
    with_plain_numbers,
    with_fractions,
    without_blanks,
    _as_number,
)
