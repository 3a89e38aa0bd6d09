"""Which validation was the best so far, by trainer.save_best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rolemesh.errors import InvalidConfig
from rolemesh.services.controller.record import STEP, Record


def is_best(name: str, metrics: Mapping[str, float], records: Sequence[Record]) -> bool:
    """Return whether a validation is better than every earlier one of a step. One as good is not better.

    Higher is better, except for a metric whose name ends with `loss`.

    Args:
        name: trainer.save_best.
        metrics: of this validation.
        records: of all earlier steps, also those before a resume. The validation before step 1 does not count,
            because no checkpoint is of step 0.

    Raises:
        InvalidConfig: the validation has no such metric.
    """
    if name not in metrics:
        known = ", ".join(sorted(key for key in metrics if key.startswith("val")))
        raise InvalidConfig(f"trainer.save_best is {name}, but the validation reports only {known}")
    sign = -1 if name.endswith("loss") else 1
    earlier = [value for record in records if record[STEP] and (value := record.get(name)) is not None]
    return math.isfinite(metrics[name]) and all(sign * metrics[name] > sign * value for value in earlier)
