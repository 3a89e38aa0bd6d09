"""Reads the tests of programs from a ground truth.

The layout is that of PRIME (Cui et al. 2025, arXiv:2502.01456).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

CONTINUOUS_TESTS = 10  # the first of a row, which sandbox.continuous runs


@dataclass(frozen=True)
class Case:
    """Input and expected output: text, or, with `function`, its arguments and its result as JSON."""

    given: str
    expected: str
    function: str | None


def cases_of(ground_truth: Any, most: int | None = None) -> list[Case]:
    """Read the tests of a ground truth, or its first `most`. Tests beyond these are not looked at.

    Raises:
        ValueError: it has another form, or no tests.
    """
    inputs, outputs, function = _tests(ground_truth)
    pairs = zip(inputs[:most], outputs[:most], strict=True)
    if function is None:
        return [Case(_text(each), _text(right), None) for each, right in pairs]
    return [Case(*_call(each, right), function) for each, right in pairs]


def check_tests(ground_truth: Any, most: int | None = None) -> None:
    """Raise what `cases_of` would, without writing anything as JSON, which takes longer than to read it.

    Args:
        ground_truth: made of JSON's types.
        most: as of `cases_of`.

    Raises:
        ValueError: as `cases_of`.
    """
    inputs, outputs, function = _tests(ground_truth)
    for each, right in zip(inputs[:most], outputs[:most], strict=True):
        if function is None:
            _text(each)
            _text(right)
        elif isinstance(each, str):
            _call(each, right)
        else:
            _check_arguments(each)


def _tests(ground_truth: Any) -> tuple[Sequence[Any], Sequence[Any], str | None]:
    """Return the inputs, as many outputs, and the function's name."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, Mapping) or not {"inputs", "outputs"} <= set(truth):
        raise ValueError(f"ground_truth should hold inputs and outputs; it is {ground_truth!r:.200}")
    inputs = truth["inputs"]
    outputs = truth["outputs"]
    if not all(isinstance(texts, list | tuple) for texts in (inputs, outputs)):
        raise ValueError(f"ground_truth should hold lists of inputs and outputs; it is {ground_truth!r:.200}")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; a test has both")
    return inputs, outputs, truth.get("fn_name") or None


def _text(value: Any) -> str:
    """Convert to text; each element of a list becomes a line."""
    text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "ground_truth has a test with half a surrogate pair, which no program reads"
        ) from error
    return text


def _check_arguments(arguments: Any) -> None:
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"ground_truth has fn_name, so an input should be a list; it is {arguments!r:.200}")


def _call(arguments: Any, result: Any) -> tuple[str, str]:
    """Return both as JSON. If arguments are text, with a JSON value per line, a result in text is JSON already.

    What is JSON already is parsed to check it, and not written anew.
    """
    if not isinstance(arguments, str):
        _check_arguments(arguments)
        return json.dumps(arguments), json.dumps(result)
    lines = [line for line in arguments.split("\n") if line.strip()]
    for line in lines:
        json.loads(line)
    if not isinstance(result, str):
        return f"[{', '.join(lines)}]", json.dumps(result)
    json.loads(result, parse_int=Decimal)  # int() refuses more than 4300 digits
    return f"[{', '.join(lines)}]", result
