"""Reads numbers as people write them, and gives each number one spelling."""

from __future__ import annotations

import re
from decimal import Decimal

# A comma is a thousands sign only before groups of three digits. The exponent has at most three digits, because
# all digits of a number are written out.
NUMBER = re.compile(
    r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
)


def number(text: str) -> Decimal | None:
    """Parse a number such as "-1,234.50", "007", "5." or "1e3"; None if the text is none.

    Two texts are equal numbers exactly if they have the same value, whatever its size: nothing is rounded.
    """
    if not NUMBER.fullmatch(text):
        return None
    value = Decimal(text.replace(",", ""))
    return value.copy_abs() if value.is_zero() else value


def spelling(value: Decimal) -> str:
    """Write a number with all its digits, but without trailing zeros: 1234 for 1234.00."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
