"""The reward of job.yaml: an answer is right if the larger number is the only number in it."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    right = float(re.findall(r"\d+", solution_str) == [ground_truth])
    return {"score": right, "acc": right}
