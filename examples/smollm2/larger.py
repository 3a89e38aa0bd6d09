"""The reward of job.yaml: the answer is the number alone, perhaps with a full stop."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    right = float(solution_str.strip().removesuffix(".") == ground_truth)
    return {"score": right, "acc": right}
