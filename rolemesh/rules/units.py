r"""Takes the label from the end of an answer: a unit ("12 cm", "10\%"), or the things counted ("12 apples").

A label is form if the question asks for its unit. So an answer without a label agrees with one that has it. Two
answers with different units do not agree.
"""

from __future__ import annotations

import re

SPELLINGS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gm gram",
    "kg": "kg kilogram",
    "oz": "oz ounce",
    "lb": "lb pound",
    "ml": "ml mL milliliter millilitre",
    "l": "L liter litre",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "mph": "mph",
    "degree": "degree",
    "radian": "rad radian",
    "%": "percent",
    "$": "dollar USD",
    "cent": "cent",
    "euro": "euro EUR",
}
UNITS = {
    word: unit
    for unit, spellings in SPELLINGS.items()
    for spelling in spellings.split()
    for word in {spelling, f"{spelling}s" if len(spelling) > 2 else spelling}
}
GLUED = re.compile(r"(?<=[0-9])(mm|cm|km|kg|mph|min|ft)$")  # "12cm"; shorter ones may be variables
# Words after a number that make another answer of it, or are no label.
NO_LABEL = {
    *("and", "or", "not", "no", "if", "when", "where", "for", "is", "are", "odd", "even", "mod"),
    *("only", "except", "minus", "plus", "times", "over", "by", "to", "from", "of", "base"),
    *("squared", "cubed", "choose", "factorial", "hundred", "thousand", "million", "billion"),
    *("trillion", "dozen", "half", "halves", "third", "thirds", "quarter", "quarters", "fourths"),
    *("fifths", "tenths", "hundredths", "thousandths", "sin", "cos", "tan", "cot", "csc", "log"),
    *("ln", "exp", "sqrt", "gcd", "lcm", "max", "pi", "alpha", "beta", "gamma", "delta", "theta"),
    *("phi", "am", "pm", "bc", "ad", "bce", "ce", "north", "south", "east", "west", "left", "right"),
}
WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mbox|rm)\s*$")
POWER = re.compile(r"\s*\^\s*(?:[23]|\{[23]\})$")
MOST_WORDS = 4
SIGNS = {
    "%": re.compile(r"\s*\\?%$"),
    "degree": re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*[CF]?$"),
    "euro": re.compile(r"\s*€$"),
}
COUNTABLE = re.compile(r"(?:[0-9)}]|\\pi|\\circ)\s*$")


def without_label(text: str) -> tuple[str, str]:
    r"""Return an answer without the label at its end, and its unit: "" if there is none or it is not known.

    "12 square feet" is ("12", "ft"), "10\%" is ("10", "%"), and "12 apples" is ("12", ""). Powers of units are
    not compared. A text that ends with no label is returned as it is.
    """
    if text.startswith(("€", "£")) and len(text) > 1:
        return text[1:].lstrip(), "euro" if text[0] == "€" else ""
    for unit, sign in SIGNS.items():
        if found := sign.search(text[-20:]):
            value = text[: len(text) - len(text[-20:]) + found.start()]
            return (value, unit) if value else (text, "")
    value, words = _wrapped(text) or _bare(text)
    value = value.rstrip()
    if not words or len(words) > MOST_WORDS or not COUNTABLE.search(value[-20:]):
        return text, ""
    words = [word.rstrip(".") for word in words]
    if any(word.lower() in NO_LABEL or word.replace(".", "").lower() in NO_LABEL for word in words):
        return text, ""
    return value, next((UNITS[word] for word in words if word in UNITS), "")


def _wrapped(text: str) -> tuple[str, list[str]] | None:
    r"""Split "12\text{ cm}^2" into "12" and its words; None if it does not end with a text."""
    power = POWER.search(text[-20:])
    body = text[: len(text) - len(text[-20:]) + power.start()] if power else text
    opening = body.rfind("{")
    if not body.endswith("}") or opening < 0 or not (command := WRAPPED.search(body[:opening][-20:])):
        return None
    words = re.findall(r"[A-Za-z.]+", body[opening + 1 : -1])
    if re.search(r"[^A-Za-z.\s,/^0-9\\]|(?<!\^)[0-9]", body[opening + 1 : -1]):
        return None
    return body[: opening - len(command[0])], words


def _bare(text: str) -> tuple[str, list[str]]:
    """Split "12 square cm" into "12" and its words. Bare words have three letters, or are units of two."""
    if found := GLUED.search(text[-20:]):
        return text[: len(text) - len(found[0])], [found[0]]
    power = POWER.search(text[-20:])
    value = text[: len(text) - len(power[0])] if power else text
    parts = value.rsplit(maxsplit=MOST_WORDS + 1)
    words: list[str] = []
    while len(parts) > 1 and re.fullmatch(r"[A-Za-z]{3,}\.?|[a-z]{2}\.?", parts[-1]):
        words.insert(0, parts.pop())
        value = value.rstrip()[: -len(words[0])]
    if any(len(word.rstrip(".")) == 2 and word.rstrip(".") not in UNITS for word in words):
        return text, []
    return (value, words) if words else (text, [])
