"""What a reward function said of a row."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from rolemesh.errors import RewardFailed
from rolemesh.services.reward.functions import UnknownDataSource

# Argument names of a function that is called with all rows of a call at once, by those of one that is called
# with one row.
PLURAL = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
FLOAT32_MAX = 3.4028234663852886e38  # scores are float32 from here on
TOLD = 1000  # characters of an error of the function's


@dataclass(frozen=True)
class Verdict:
    """A row's score.

    Args:
        score: what is learnt from.
        acc: whether the answer is right; the score where the function does not say.
        entries: all numbers of the function's dict by name, where it returned one.
        pred: the answer that it found in the response, "" for none; None where it does not say.
    """

    score: float
    acc: float
    entries: Mapping[str, float]
    pred: str | None = None

    @property
    def besides(self) -> dict[str, float | str]:
        """What came with score and acc, by name."""
        numbers = {name: number for name, number in self.entries.items() if name not in ("score", "acc")}
        return numbers | ({} if self.pred is None else {"pred": self.pred})

    @classmethod
    def of(cls, result: Any) -> Verdict:
        """Reads what a function returned.

        Raises:
            TypeError: neither a number nor a dict with "score".
            ValueError: a number is not finite, as float32.
            OverflowError: a whole number is too large for a float.
        """
        entries = result if isinstance(result, Mapping) else {"score": result}
        if "score" not in entries:
            raise TypeError('a dict needs "score"')
        plain = {str(name): _plain(value) for name, value in entries.items()}
        pred = plain.pop("pred", None)
        numbers = {name: float(value) for name, value in plain.items() if isinstance(value, Real)}
        if {"score", "acc"} & set(plain) - set(numbers):
            raise TypeError("expected a number, or a dict with one under 'score'")
        for name, number in numbers.items():
            if not abs(number) <= FLOAT32_MAX:
                raise ValueError(f"{name} is {number}, which is not finite as float32")
        acc = numbers.get("acc", numbers["score"])
        return cls(numbers["score"], acc, numbers, None if pred is None else _sendable(str(pred)))


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
        said = f"{type(error).__name__}: {_told(str, error):.{TOLD}}{_where(error)}"
        raise RewardFailed(f"{name} raised {said}") from error
    try:
        if "data_sources" not in arguments:
            return [Verdict.of(result)]
        num_rows = len(arguments["data_sources"])
        result = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(result, Sequence) or len(result) != num_rows:
            raise TypeError(f"expected a list of {num_rows} scores, one for each row")
        return [Verdict.of(each) for each in result]
    except Exception as error:  # what a user's object does when it is looked at
        returned = f"{_told(repr, result):.200}: {_told(str, error):.{TOLD}}"
        raise RewardFailed(f"{name} returned {returned}") from error


def _sendable(text: str) -> str:
    """Without lone surrogates, which no message can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any) -> Any:
    """A number of NumPy's, or an array without axes, as Python's own."""
    return value.item() if getattr(value, "shape", None) == () else value


def _told(describe: Callable[[Any], str], value: Any) -> str:
    """What a user's object says of itself, which may raise in its turn."""
    try:
        return describe(value)
    except Exception as error:
        return f"a {type(value).__name__} whose {describe.__name__} raises {type(error).__name__}"


def _where(error: Exception) -> str:
    """The line that raised: only the message crosses to the controller."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({at.filename}, line {at.lineno})"
