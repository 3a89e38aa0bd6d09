"""A reward manager: whatever rule or function scores a row, long answers cost something."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rolemesh.plugins import Options, reward_manager


class FrugalOptions(Options):
    """Keys of reward.options in the job file."""

    per_character: float = 0.01


# Without `together` the manager gets one row a call, and several calls run in parallel. With together=True it
# gets all rows of a call. A call's rows are those that finished together, so a score must not depend on them.
@reward_manager("frugal", options=FrugalOptions, meaning="the score less a price for each character")
def score_frugally(
    compute_score: Callable[..., Any], rows: Sequence[Mapping[str, Any]], *, per_character: float
) -> list[dict[str, Any]]:
    """Return a result for each row: a number, or a dict with "score".

    Args:
        compute_score: the job's reward function, or the rule of the row's data_source.
        rows: its arguments: data_source, solution_str, ground_truth and extra_info.
        per_character: price of a character of the response.
    """
    results = []
    for row in rows:
        found = compute_score(**row)  # a number or a dict
        result = dict(found) if isinstance(found, Mapping) else {"score": float(found), "acc": float(found)}
        price = per_character * len(row["solution_str"])
        results.append({**result, "score": result["score"] - price, "price": price})
    return results
