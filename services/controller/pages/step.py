"""What a page is given besides prompts and roles, and what it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rolemesh.algos.kl import KLController
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.stages.batch_metrics import batch_metrics, staleness_metrics
from rolemesh.services.controller.stages.dynamic_sampling import DynamicSampling


@dataclass
class Step:
    """One step of a job.

    Args:
        number: counted from 1.
        job: the hyperparameters.
        kl: the KL penalty's coefficient. The loop moves it, after the step.
        sampling: the groups that wait, and more prompts; for the page that asks for them.
        batch: what the step was made of, for dumps; set by `report`.
    """

    number: int
    job: JobConfig
    kl: KLController
    sampling: DynamicSampling = field(default_factory=DynamicSampling)
    batch: DataProto | None = None

    def report(self, batch: DataProto, *parts: Metrics) -> Metrics:
        """The step's metrics: those of the batch, of its tokens' age, and those that the calls returned."""
        self.batch = batch
        metrics: Metrics = {}
        for part in parts:
            metrics |= part
        metrics |= batch_metrics(batch, self.job.actor)
        return metrics | staleness_metrics(batch, newest=self.number - 1)


Page = Callable[[DataProto, Roles, Step], Awaitable[Metrics]]
