"""What a character beside a number does to it, for all of Unicode: other scripts' digits, fractions, signs."""

from __future__ import annotations

import re
from unicodedata import category, decimal, east_asian_width, normalize, numeric

FRACTIONS = {sign: normalize("NFKC", sign).split("\u2044") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒↉"}
DIGIT = re.compile(r"\d")
# Marks without width: joiners, marks of direction, soft hyphens, variation selectors.
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060\u2061\u2066-\u206f\ufe00-\ufe0f\ufeff]"
)
MULTIPLES = "半십백천만억조"  # a half; ten to a trillion in Korean. Unicode gives these no value
NUMERALS = "一二两兩三四五六七八九十百千万"
# "5又二分之一" is five and a half, "5或六" a list, and "5个半小时" five hours and a half. "18还是一样" only
# says that it is the same, and "5个半圆" are semicircles.
CHANGING_WORD = re.compile(
    rf"(?:又|或者?|[还還]是|[乘除]以?|分[之の])(?!一[样樣直些般起定共次])[{NUMERALS}]"
    "|(?:[个個年天岁歲歳倍点點斤里]|[个個]月|公[斤里]|小[时時]|時間)半(?![价價圆圓径徑球音导導场場票])"
)
# Labels that begin like a number, such as a kilogram and a percentage point, and units of one letter.
UNIT = re.compile(
    "千(?:[克米瓦卡赫焦帕伏升牛安欧歐乏]|字[节節])|兆(?:[瓦赫帕焦]|字[节節])|百分[点點]|조각|[ргчлđ]"
)
SHARES = "‰‱؉؊′″‴‵‶‷⁗"  # punctuation that changes the number before it
HARMLESS = "\u20e3∼∵"  # "5~" ends a friendly sentence; before a number it makes a range. "∵" gives a reason
LEADING = "→⇒⟶⟹∴"  # signs before an answer
APOSTROPHES = "\"'\u05f3\u05f4"  # in an abbreviated word, such as ש"ח


def with_plain_digits(text: str) -> str:
    """Write the digits of every script as 0 to 9, and leave out characters without width."""
    if text.isascii():
        return text
    return DIGIT.sub(lambda found: str(decimal(found[0])), INVISIBLE.sub("", text))


def has_value(character: str) -> bool:
    """Whether a character is a number, or begins with one if it is written out: ⅒, Ⅷ, ⒊, ㏠, 万, 半."""
    return character in MULTIPLES or any(
        numeric(each, None) is not None for each in (character, normalize("NFKC", character)[0])
    )


def changes_before(character: str) -> bool:
    """Whether a character, not a letter, makes another answer of the number after it, as in -5, ≈5 and √5."""
    if character.isspace() or character in "*_`\"'\\:=•" + LEADING:
        return False
    kind = category(character)
    return has_value(character) if kind == "So" else kind not in ("Sc", "Ps", "Pi", "Pf")


def changes_after(text: str) -> bool:
    """Whether the first character of a text makes another answer of the number that it touches.

    It does in 5ⁿ, 5‰, 5α and 5万. Words, counting words such as 個, punctuation and ornaments do not. ASCII is
    not looked at here.
    """
    character = text[0]
    kind = category(text[0])
    if character.isascii() or UNIT.match(text):
        return False
    if has_value(character) or character in SHARES:
        return True
    if kind.startswith("L"):
        is_symbol = "\u0370" <= character <= "\u03ff" and character != "μ"
        is_symbol = is_symbol or "\U0001d400" <= character <= "\U0001d7ff" or kind == "Lm"
        after = text[1:].lstrip(APOSTROPHES)[:1] or " "
        goes_on = after.isalpha() or category(after).startswith("M")  # as the vowel in टि
        is_word = character in "ºª" or east_asian_width(character) in "WH" or goes_on
        return is_symbol or not is_word
    return not (character.isspace() or character in HARMLESS or kind in ("Sc", "So") or kind.startswith("P"))


def multiplies(text: str) -> bool:
    """Whether the first character of a text changes the number before a blank, as in 5 ⅒ and 5 万.

    一 to 九 do not: they may begin a word.
    """
    kind = category(text[0])
    if kind == "Lo" and not UNIT.match(text):
        return text[0] in MULTIPLES or (numeric(text[0], None) or 0) >= 10
    return kind in ("No", "Nl")
