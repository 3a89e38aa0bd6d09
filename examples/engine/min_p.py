"""An engine: transformers' generation, with min-p sampling (Nguyen et al. 2024, arXiv:2407.01082).

A token may be drawn if its probability is at least min_p times the likeliest token's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.errors import InvalidConfig
from rolemesh.plugins import Options, engine

if TYPE_CHECKING:
    from rolemesh.workers.local import LocalWorker


class MinPOptions(Options):
    """Keys of rollout.options in the job file."""

    min_p: float = Field(0.1, gt=0, lt=1)


# Every process of the job imports this file. The engine itself is imported where it is used, in the rollout.
@engine("min_p", options=MinPOptions, meaning="engine hf with min-p sampling")
def load_min_p(job: JobConfig, worker: LocalWorker, *, min_p: float) -> object:
    """Return an object with the methods of rolemesh.services.rollout.engines.Engine."""
    from rolemesh.services.rollout.engines.hf import HfEngine

    if not job.rollout.truncates:
        raise InvalidConfig("engine min_p needs rollout.top_k: the actor gets that many ids for each token")

    class MinPEngine(HfEngine):
        def sample(
            self, logits: Tensor, uniforms: Tensor, sampling: SamplingConfig
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Draw a token for each row. The results must be of the distribution that it was drawn from: the
            actor computes its own log-probabilities over the same `kept_ids`.

            Args:
                logits: [b, V].
                uniforms: [b] the rows' own random numbers. No other source keeps the law of the engines.

            Returns:
                tokens [b], their log-probabilities [b], kept_ids [b, K]: what could be drawn, then -1.
            """
            if sampling.greedy:
                return super().sample(logits, uniforms, sampling)
            least = logits.amax(-1, keepdim=True) + sampling.temperature * math.log(min_p)
            kept = logits >= least  # [b, V]
            masked = logits.masked_fill(~kept, -torch.inf)
            tokens, log_probs, ids = super().sample(masked, uniforms, sampling)  # renormalises what is left
            return tokens, log_probs, ids.masked_fill(~kept.gather(-1, ids.clamp(min=0).long()), -1)

    return MinPEngine(job, worker)
