"""What a reward function said of a row."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from rolemesh.errors import RewardFailed
from services.reward.functions import UnknownDataSource

# Argument names of a function that is called with all rows of a call at once, by those of one that is called
# with one row.
PLURAL = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}


@dataclass(frozen=True)
class Verdict:
    """A row's score.

    Args:
        score: what is learnt from.
        acc: whether the answer is right; the score where the function does not say.
        entries: all numbers of the function's dict by name, where it returned one.
    """

    score: float
    acc: float
    entries: Mapping[str, float]

    @classmethod
    def of(cls, result: Any) -> Verdict:
        """Reads what a function returned.

        Raises:
            TypeError: neither a number nor a dict with "score".
            ValueError: score or acc is not finite.
        """
        entries = result if isinstance(result, Mapping) else {"score": result}
        if "score" not in entries:
            raise TypeError('a dict needs "score"')
        numbers = {str(name): float(value) for name, value in entries.items() if isinstance(value, Real)}
        for name in {"score", "acc"} & set(entries):
            if name not in numbers:
                raise TypeError("expected a number, or a dict with one under 'score'")
            if not math.isfinite(numbers[name]):
                raise ValueError(f"the {name} is {numbers[name]}, which is not finite")
        return cls(numbers["score"], numbers.get("acc", numbers["score"]), numbers)


def judge(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> list[Verdict]:
    """Calls a reward function with the arguments of a row, or of several (PLURAL).

    Args:
        function: takes the arguments by name.
        name: what an error calls it.

    Returns:
        a verdict for each row.

    Raises:
        RewardFailed: it raised, or returned what is no score. The message does not name the row.
    """
    try:
        result = function(**arguments)
    except UnknownDataSource as error:
        raise RewardFailed(str(error)) from error
    except Exception as error:  # whatever a user's function raises belongs to this row
        raise RewardFailed(f"{name} raised {type(error).__name__}: {error}{_where(error)}") from error
    try:
        if "data_sources" not in arguments:
            return [Verdict.of(result)]
        num_rows = len(arguments["data_sources"])
        if not isinstance(result, Sequence) or len(result) != num_rows:
            raise TypeError(f"expected a list of {num_rows} scores, one for each row")
        return [Verdict.of(each) for each in result]
    except (TypeError, ValueError) as error:
        raise RewardFailed(f"{name} returned {result!r:.200}: {error}") from error


def _where(error: Exception) -> str:
    """The line that raised: only the message crosses to the controller."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({at.filename}, line {at.lineno})"
