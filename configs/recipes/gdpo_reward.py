"""The reward of gdpo.yaml: whether the number after the last #### is right, and whether there is one."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    numbers = re.findall(r"#### (-?[\d.,]+)", solution_str)
    correct = float(bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == ground_truth)
    return {"score": correct, "acc": correct, "correct": correct, "format": float(bool(numbers))}
