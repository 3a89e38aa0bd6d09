"""Reward managers: how the reward function is applied to the rows of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rolemesh.catalog.catalog import Catalog, Declaration


@dataclass(frozen=True, kw_only=True)
class RewardManagerSpec(Declaration):
    """A reward manager: `manager(compute_score, rows) -> results`, one result for each row.

    `rows` are dicts with data_source, solution_str, ground_truth and extra_info. `compute_score` is the job's
    function, or the rule of each row's data_source. A plug-in's manager gets a dict with "score" from it. A
    result is a number, or a dict with "score".

    Args:
        together: the manager gets all rows of a call at once; false: each alone, several in parallel.
        needs_function: reward.custom_reward_function must be set.
        punishes_length: it takes reward.overlong_buffer.
        quick: it adds no work, so quick rules run without a process of their own.
    """

    kind: ClassVar[str] = "reward manager"

    together: bool = False
    needs_function: bool = False
    punishes_length: bool = False
    quick: bool = False

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("compute_score", "rows"), ()


MANAGERS = "rolemesh.services.reward.managers"

REWARD_MANAGERS = Catalog(
    RewardManagerSpec,
    RewardManagerSpec(
        name="naive", code=f"{MANAGERS}:score_each", quick=True, meaning="rows in parallel, each by itself"
    ),
    RewardManagerSpec(
        name="batch",
        code=f"{MANAGERS}:score_together",
        together=True,
        needs_function=True,
        meaning="your function gets all rows of a call at once",
    ),
    RewardManagerSpec(
        name="dapo",
        code=f"{MANAGERS}:score_each",
        punishes_length=True,
        quick=True,
        meaning="as naive, with overlong_buffer",
    ),
    RewardManagerSpec(name="prime", code=f"{MANAGERS}:score_each", quick=True, meaning="as naive"),
)
