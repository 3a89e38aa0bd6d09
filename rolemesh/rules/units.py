r"""Takes the label from the end of an answer: a unit ("12 cm", "10\%"), or the things counted ("12 apples").

A label is form if the question asks for its unit. So an answer without a label agrees with one that has it. Two
answers with different labels do not agree.
"""

from __future__ import annotations

import re

SPELLINGS = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
    "km": "km kilometer kilometre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard",
    "mi": "mi mile", "mi per h": "mph", "mg": "mg milligram",
    "g": "g gm gram", "kg": "kg kilogram", "oz": "oz ounce", "lb": "lb pound",
    "ml": "ml mL milliliter millilitre", "L": "L liter litre", "s": "s sec second", "min": "min minute",
    "h": "h hr hour", "day": "day", "week": "week", "month": "month", "year": "yr year",
    "degree": "degree circ", "C": "C celsius", "F": "F fahrenheit", "radian": "rad radian", "V": "V volt",
    "A": "A amp ampere", "W": "W watt", "J": "J joule", "N": "N newton", "%": "percent", "$": "dollar usd",
    "cent": "cent", "euro": "euro eur",
}  # fmt: skip
UNITS = {
    word: unit
    for unit, spellings in SPELLINGS.items()
    for spelling in spellings.split()
    for word in {spelling, f"{spelling}s" if len(spelling) > 1 else spelling}
}
GLUED = re.compile(r"(?<=[0-9])(mm|cm|km|kg|mph|min|ft)$")  # "12cm"; shorter ones may be variables
# "60 km/h". Of two letters only m/s, as others are variables.
QUOTIENT = re.compile(rf"(?<=[0-9])\s?(?=\w\w|\w+/\w\w|m/s)({'|'.join(UNITS)})/({'|'.join(UNITS)})$")
WORD = re.compile(r"[A-Za-z\u00c0-\u024f]{3,}\.?|[a-z]{2}\.?")
# Words after a number that make another answer of it, or are no label.
NO_LABELS = (
    "and or not no if when where for is are odd even mod only except minus plus times over by to from of base "
    "squared cubed choose factorial less more fewer remainder nor but quarter quarters pair pairs score scores "
    "gross sin cos tan cot csc log ln exp sqrt gcd lcm max pi alpha beta gamma delta theta phi at least most "
    "approx approximately repeating recurring am pm bc ad bce ce north south east west left right"
)
NO_LABEL = frozenset(NO_LABELS.split())
# Number words in any form: "sevenths", "millions", "six".
QUANTITY = (
    r"(?i:half|halve|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]{3,5}t(?:een|ie)th"
    r"|(?:hundred|thousand|million|billion|trillion)(?:th)?|lakh|crore|dozen|zero|one|two|three|four|five|six"
    r"|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    # other languages
    r"|million(?:en)|mill[oó]n|milliarden?|milliard|mille|mil(?!es)|tausend|medio|demi|docena|douzaine|dutzend|duizend"
    r"|mila|milh(?:ão|ões)|milyon|milyar|juta|ribu|mln|mio|mrd)(?:e?s)?"
)
IS_QUANTITY = re.compile(QUANTITY)
MULTIPLIED = re.compile(rf"[0-9}})]\s*(?:{QUANTITY}|bn)(?![A-Za-z])")
CHOSEN = re.compile(r"(?:\\text(?:bf|rm)?\s*\{)?\s*\([A-E]\)[\s\\}]*")
WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mbox|rm)\s*$")
POWER = re.compile(r"\s*\^\s*(?:[23]|\{[23]\})$")
POWERS = ("square", "sq", "cubic", "cu")
MOST_WORDS = 4
SIGNS = {
    "%": re.compile(r"\s*\\?%$"),
    **{
        unit: re.compile(rf"\s*\^\s*(?:\\circ|\{{\s*\\circ\s*\}})\s*{letter}$")
        for unit, letter in (("degree C", "C"), ("degree F", "F"), ("degree", ""))
    },
    "euro": re.compile(r"\s*€$"),
    "$": re.compile(r"\s*\\\$$"),
}
CURRENCY = re.compile(r"([-+]?)\s*(\\\$|€|£)\s*(?=[-+.0-9])")
CURRENCIES = {r"\$": "$", "€": "euro", "£": UNITS["pound"]}
COUNTABLE = re.compile(r"(?:[0-9)}]|\\pi|\\circ)\s*$")


def words_of(unit: str) -> list[str]:
    return [word for word, of in UNITS.items() if of == unit]


def without_label(text: str) -> tuple[str, str]:
    r"""Return an answer without its label, and the label as a unit: "" if there is none.

    "12 square feet" is ("12", "ft"), "10\%" is ("10", "%"), r"\$5" is ("5", "$"), and "12 apples" is
    ("12", "apple"). Powers of units are not compared. A text without a label is returned as it is.
    """
    if found := CURRENCY.match(text):
        return found[1] + text[found.end() :], CURRENCIES[found[2]]
    for unit, sign in SIGNS.items():
        if found := sign.search(text[-20:]):
            value = text[: len(text) - len(text[-20:]) + found.start()]
            return (value, unit) if value else (text, "")
    value, words = _wrapped(text) or _bare(text)
    value = value.rstrip()
    if not words or len(words) > MOST_WORDS or not COUNTABLE.search(value[-20:]):
        return text, ""
    words = [word.rstrip(".") for word in words]
    if CHOSEN.fullmatch(value):  # "(D) Thursday": the letter of a choice counts nothing
        return text, ""
    if any(word.replace(".", "").lower() in NO_LABEL or IS_QUANTITY.fullmatch(word) for word in words):
        return text, ""
    return value, _unit(words)


def _unit(words: list[str]) -> str:
    """Write a label in one way: the units in it, or, without one or with "per", all of it in the singular."""
    words = [word if len(word) < 3 else word.lower() for word in words if word.lower() not in POWERS]
    known = [UNITS[word] for word in words if word in UNITS]
    if known and "per" not in words:
        return " ".join(known)
    return " ".join(UNITS.get(word) or (word if len(word) < 3 else word.removesuffix("s")) for word in words)


def _wrapped(text: str) -> tuple[str, list[str]] | None:
    r"""Split "12\text{ cm}^2" into "12" and its words; None if it does not end with a text."""
    power = POWER.search(text[-20:])
    body = text[: len(text) - len(text[-20:]) + power.start()] if power else text
    opening = body.rfind("{")
    if not body.endswith("}") or opening < 0 or not (command := WRAPPED.search(body[:opening][-20:])):
        return None
    words = re.findall(r"[A-Za-z.]+", body[opening + 1 : -1].replace("/", " per "))
    if re.search(r"[^A-Za-z.\s,/^0-9\\]|(?<!\^)[0-9]", body[opening + 1 : -1]):
        return None
    if len(words) == 1 and len(words[0]) == 1 and words[0] not in UNITS:
        return None  # \mathrm{i} and \mathrm{e} are numbers
    return body[: opening - len(command[0])], words


def _bare(text: str) -> tuple[str, list[str]]:
    """Split "12 square cm" into "12" and its words. Bare words have three letters, or are units of two."""
    if found := GLUED.search(text[-20:]):
        return text[: len(text) - len(found[0])], [found[1]]
    if found := QUOTIENT.search(text[-40:]):
        return text[: len(text) - len(found[0])], [found[1], "per", found[2]]
    power = POWER.search(text[-20:])
    value = text[: len(text) - len(power[0])] if power else text
    parts = value.rsplit(maxsplit=MOST_WORDS + 1)
    words: list[str] = []
    while len(parts) > 1 and WORD.fullmatch(parts[-1]):
        words.insert(0, parts.pop())
        value = value.rstrip()[: -len(words[0])]
    if any(len(word.rstrip(".")) == 2 and word.rstrip(".") not in UNITS for word in words):
        return text, []
    return (value, words) if words else (text, [])
