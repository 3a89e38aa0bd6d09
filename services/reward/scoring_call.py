"""Call a reward function, and parse its result into a score for each row."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from rolemesh.errors import RewardFailed
from rolemesh.rules.sources import UnknownDataSource

FLOAT32_MAX = 3.4028234663852886e38  # scores become float32
MAX_ERROR_CHARACTERS = 1000  # characters kept of an error that the function raised


@dataclass(frozen=True)
class RowScore:
    """The score of a row.

    Args:
        score: the score to train on.
        acc: whether the answer is correct; the score if the function does not report it.
        entries: all numbers of the function's dict by name; only score if it returned a number.
        pred: the answer found in the response, "" if none; None if the function does not report it.
    """

    score: float
    acc: float
    entries: Mapping[str, float]
    pred: str | None = None

    @property
    def others(self) -> dict[str, float | str]:
        """Entries other than score and acc, by name, with pred."""
        numbers = {name: number for name, number in self.entries.items() if name not in ("score", "acc")}
        return numbers | ({} if self.pred is None else {"pred": self.pred})

    @classmethod
    def of(cls, result: Any) -> RowScore:
        """Parse the result of a reward function.

        Raises:
            TypeError: it is neither a number nor a dict with "score", or score or acc is not a number.
            ValueError: a number is not finite as float32.
            OverflowError: an integer is too large for a float.
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


@dataclass(frozen=True)
class Scorer:
    """Scores rows by a reward manager and the function that it applies.

    Args:
        manager: `manager(compute_score, rows)`, see rolemesh/catalog/reward_managers.py.
        compute_score: takes the values of a row as keyword arguments.
        name: of the function or manager, for messages.
    """

    manager: Callable[..., Any]
    compute_score: Callable[..., Any]
    name: str

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[RowScore]:
        """Return the score of each row.

        Raises:
            RewardFailed: the function raised, or its result is not a score. The message does not name the row.
        """
        try:
            results = self.manager(self.compute_score, rows)
        except UnknownDataSource as error:
            raise RewardFailed(str(error)) from error
        except Exception as error:  # a user's function may raise anything; it is reported for this row
            said = f"{type(error).__name__}: {_described(str, error):.{MAX_ERROR_CHARACTERS}}{_where(error)}"
            raise RewardFailed(f"{self.name} raised {said}") from error
        try:
            results = results.tolist() if hasattr(results, "tolist") else results
            if not isinstance(results, Sequence) or len(results) != len(rows):
                raise TypeError(f"expected a list of {len(rows)} scores, one for each row")
        except Exception as error:  # inspecting a user's object may raise anything
            raise self._no_score(results, error) from error
        scores = []
        for result in results:
            try:
                scores.append(RowScore.of(result))
            except Exception as error:
                raise self._no_score(result, error) from error
        return scores

    def _no_score(self, result: Any, error: Exception) -> RewardFailed:
        returned = f"{_described(repr, result):.200}: {_described(str, error):.{MAX_ERROR_CHARACTERS}}"
        return RewardFailed(f"{self.name} returned {returned}")


def _sendable(text: str) -> str:
    """Replace lone surrogates, which no message can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any) -> Any:
    """Convert a NumPy number, or an array without axes, to a Python number."""
    return value.item() if getattr(value, "shape", None) == () else value


def _described(describe: Callable[[Any], str], value: Any) -> str:
    """Describe a user's object by str or repr, which may raise."""
    try:
        return describe(value)
    except Exception as error:
        return f"a {type(value).__name__} whose {describe.__name__} raises {type(error).__name__}"


def _where(error: Exception) -> str:
    """Return file and line that raised, because only the message is sent to the controller."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({at.filename}, line {at.lineno})"
