"""The step that a page gets in addition to prompts and roles, and the metrics that it returns."""

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
        kl: the coefficient of the KL penalty. The loop updates it after the step.
        sampling: waiting groups and further prompts, for a page with dynamic sampling.
        batch: the step's batch, for dumps; set by `report`.
    """

    number: int
    job: JobConfig
    kl: KLController
    sampling: DynamicSampling = field(default_factory=DynamicSampling)
    batch: DataProto | None = None

    def report(self, batch: DataProto, *parts: Metrics) -> Metrics:
        """Combine the step's metrics: of the batch, of its tokens' staleness, and those returned by the calls.

        Args:
            batch: the step's batch; kept for dumps.
            parts: metrics returned by calls.
        """
        self.batch = batch
        metrics: Metrics = {}
        for part in parts:
            metrics |= part
        metrics |= batch_metrics(batch, self.job.actor)
        if self.job.generates:
            metrics |= staleness_metrics(batch, newest=self.number - 1)
        return metrics


Page = Callable[[DataProto, Roles, Step], Awaitable[Metrics]]
