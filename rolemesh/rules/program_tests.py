"""Reads the tests of programs from a ground truth.

The layout is that of PRIME (Cui et al. 2025, arXiv:2502.01456).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any


@dataclass(frozen=True)
class Case:
    """Input and expected output: text, or, with `function`, its arguments and its result as JSON."""

    given: str
    expected: str
    function: str | None


def cases_of(ground_truth: Any) -> list[Case]:
    """Read the tests of a ground truth.

    Raises:
        ValueError: it has another form, or no tests.
    """
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, Mapping) or not {"inputs", "outputs"} <= set(truth):
        raise ValueError(f"ground_truth should hold inputs and outputs; it is {ground_truth!r:.200}")
    inputs, outputs, function = truth["inputs"], truth["outputs"], truth.get("fn_name") or None
    if not all(isinstance(texts, list | tuple) for texts in (inputs, outputs)):
        raise ValueError(f"ground_truth should hold lists of inputs and outputs; it is {ground_truth!r:.200}")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; a test has both")
    if function is None:
        return [Case(_text(each), _text(right), None) for each, right in zip(inputs, outputs, strict=True)]
    return [Case(*_call(each, right), function) for each, right in zip(inputs, outputs, strict=True)]


def _text(text: Any) -> str:
    """Convert to text; each element of a list becomes a line."""
    text = "\n".join(map(str, text)) if isinstance(text, list) else str(text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "ground_truth has a test with half a surrogate pair, which no program reads"
        ) from error
    return text


def _call(arguments: Any, result: Any) -> tuple[str, str]:
    """Return both as JSON. If arguments are text, with a JSON value per line, the result already is JSON."""
    if isinstance(arguments, str):
        given = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        expected = result if isinstance(result, str) else json.dumps(result)
        json.loads(expected, parse_int=Decimal)  # int() refuses more than 4300 digits
        return json.dumps(given), expected
    return json.dumps(arguments), json.dumps(result)
