"""Which validation was the best so far, by trainer.save_best."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from rolemesh.services.controller.record import STEP, Record
from rolemesh.services.controller.stages.validation import validation_metrics


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
    check_reported(name, metrics)
    sign = -1 if name.endswith("loss") else 1
    earlier = [value for record in records if record[STEP] and (value := record.get(name)) is not None]
    return math.isfinite(metrics[name]) and all(sign * metrics[name] > sign * value for value in earlier)


def check_reported(name: str, metrics: Collection[str]) -> None:
    """Raise InvalidConfig if trainer.save_best names none of these metrics; empty names none."""
    if name and name not in metrics:
        known = ", ".join(sorted(key for key in metrics if key.startswith("val")))
        raise InvalidConfig(f"trainer.save_best is {name}, but the validation reports only {known}")


def check_reportable(job: JobConfig, sources: Sequence[str]) -> None:
    """Raise InvalidConfig if no validation of the job could report trainer.save_best.

    That is known before any model loads, except for a majority vote, which the reward decides on, and for what
    a loss of pairs reports.

    Args:
        job: its validation has rollout.val_kwargs.n responses to each prompt.
        sources: the data sources of the validation rows, each once.
    """
    if job.generates:
        n = job.rollout.val_kwargs.n
        rows = n * len(sources)
        scored = {"acc": torch.zeros(rows), "token_level_scores": torch.zeros(rows, 1)}
        others = {
            "data_source": [source for source in sources for _ in range(n)],
            "reward_extra_info": [{"pred": ""}] * rows,
        }
        names = [*validation_metrics(DataProto.from_dict(scored, others), n)]
    elif job.page.learns_from == "pairs":
        return
    else:
        names = ["val/loss", *(f"val/{source}/loss" for source in sources if len(sources) > 1)]
    check_reported(job.trainer.save_best, names)
