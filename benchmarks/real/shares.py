"""Which share of the machine's matrix products a run's generation and training reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from rolemesh.config import JobConfig
from rolemesh.planner.shapes import read_shape
from rolemesh.services.controller.record import Record

SIDE = 2048  # of the matrices that are multiplied to find the machine's peak
PRODUCTS = 20
PASSES = {
    "gen": 1,
    "old_log_prob": 1,
    "update_actor": 3,
}  # forward passes; a backward pass has two products for one


def peak_flops() -> float:
    """Return the most operations a second of a product of float32 matrices, with torch's threads."""
    one, other = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    seconds = []
    for _ in range(PRODUCTS):
        began = time.perf_counter()
        one @ other
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds)


def shares(records: list[Record], job: JobConfig, peak: float) -> Mapping[str, float]:
    """Return the median share of the peak by phase.

    Counted are the products with weights: of prompts once for all of their responses, and of the head for
    response tokens alone. Attention, some 2 % for rows of 60 tokens, is left out.

    Args:
        records: metrics of the steps.
        job: whose steps they are.
        peak: operations a second.
    """
    shape = read_shape(job.actor.model, "actor")
    rows = job.data.train_batch_size * job.rollout.n
    found: dict[str, list[float]] = {phase: [] for phase in PASSES}
    for record in records:
        if (seconds := record.get("timing_s/gen")) is None:
            continue
        responses = (record["response_length/mean"] or 0) * rows
        prompts = (record["prompt_length/mean"] or 0) * job.data.train_batch_size
        head = shape.hidden * shape.vocabulary
        flops = 2 * (shape.multiplied_parameters * (prompts + responses) + head * responses)
        for phase, passes in PASSES.items():
            if seconds := record.get(f"timing_s/{phase}"):
                found[phase].append(passes * flops / (seconds * peak))
    return {phase: statistics.median(values) for phase, values in found.items() if values}
