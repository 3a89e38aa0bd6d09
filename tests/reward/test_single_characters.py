"""What a character of Unicode before, after or in a number does to it: none turns a wrong answer right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from decimal import Decimal
from unicodedata import category, decimal, normalize, numeric

import pytest

from rolemesh.rules.finding import marked_number
from rolemesh.rules.normal_form import agrees, read_answer
from rolemesh.rules.notation import FRACTIONS
from rolemesh.rules.numbers import number

THREE = read_answer("3")
# Of letters that have neither case nor value, one in 64: they are of scripts that no rule reads.
CHARACTERS = [
    character
    for character in map(chr, range(0x80, sys.maxunicode + 1))
    if category(character) not in ("Cn", "Co", "Cs")
    and (category(character) != "Lo" or numeric(character, None) is not None or ord(character) % 64 == 0)
] + [*"個人元万半千만억조つжञא", *map(chr, range(1, 0x80))]


def by_mark(text: str) -> Decimal | None:
    found = marked_number(f"#### {text}")
    return None if found is None else number(read_answer(found).value)


def by_form(text: str) -> Decimal | None:
    """The number that an answer agrees with, as the rules of MATH and DAPO compare."""
    given = read_answer(text)
    return Decimal(3) if agrees(given, THREE) else number(given.value)


def digit(character: str) -> int | None:
    return decimal(character, None)


def starts_with_a_number(character: str) -> bool:
    return any(numeric(each, None) is not None for each in (character, normalize("NFKC", character)[0]))


READERS = pytest.mark.parametrize("read", [by_mark, by_form])


@READERS
def test_a_character_after_a_number_leaves_it_or_voids_it(
    read: Callable[[str], Decimal | None],
) -> None:
    """Only a digit, of any script, makes another number, or a fraction."""
    read_as_three = set()
    for character in CHARACTERS:
        value, last = read(f"3{character}"), digit(character)
        expected = (None, Decimal(3)) if last is None else (Decimal(30 + last),)
        if character in FRACTIONS:
            above, below = map(Decimal, FRACTIONS[character])
            expected = (None, 3 + above / below)
        assert value in expected, ascii(character)
        if value == 3:
            read_as_three.add(character)
    assert not {each for each in read_as_three if starts_with_a_number(each)}
    assert not read_as_three & set("個人元万半千만억조つжञאⁿᵏαπ‰′∞±\u20e0")
    assert {*" .,:;%$€°", "\u00a0", "\u200b", "\ufe0f"} <= read_as_three


@READERS
def test_a_character_before_a_number_leaves_it_or_voids_it(
    read: Callable[[str], Decimal | None],
) -> None:
    """Only a digit, a minus sign or a point makes another number."""
    for character in CHARACTERS:
        value, first = read(f"{character}3"), digit(character)
        others: set[Decimal | None] = {None, Decimal(3)}
        if first is not None:
            others = {Decimal(10 * first + 3)}
        elif category(character) == "Pd" or character in "\u2212➖":
            others = {None, Decimal(-3)}
        elif normalize("NFKC", character) in (".", "٫"):
            others = {Decimal("0.3")} if character == "." else {None, Decimal("0.3")}
        assert value in others, ascii(character)
        if value == 3 and first != 0:
            assert character not in "√∛≈<>≤≥∼∓±¬|/^!½²Ⅷ", ascii(character)
            assert not starts_with_a_number(character), ascii(character)


@READERS
def test_a_character_between_two_digits_never_hides_one_of_them(read: Callable[[str], Decimal | None]) -> None:
    """The number is neither 3 nor 4, and 34 only across a character without width."""
    for character in CHARACTERS:
        value, middle = read(f"3{character}4"), digit(character)
        shown = normalize("NFKC", character)
        expected: set[Decimal | None] = {None}
        if middle is not None:
            expected = {Decimal(304 + 10 * middle)}
        elif category(character) in ("Cf", "Mn") and not character.isspace():
            expected = {None, Decimal(34)}
        elif shown in (".", "٫"):
            expected = {Decimal("3.4")} if character == "." else {None, Decimal("3.4")}
        elif shown in ("/", "\u2044", "\u2215", "e", "E"):
            expected = {None, Decimal("0.75"), Decimal(30000)}
        elif character in "。\n\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029":
            expected = {None, Decimal(3)}  # another line or sentence
        assert value in expected, ascii(character)
