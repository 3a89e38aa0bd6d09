"""RewardService: protobuf to DataProto and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from rolemesh.dataproto import DataProto
from rolemesh.roles import Reward
from rolemesh.services.reward.worker import RewardWorker


class RewardServicer:
    """Implements RewardService."""

    def __init__(self, worker: RewardWorker) -> None:
        self._worker: Reward = worker
        self.validator = worker.validator

    async def ComputeScores(self, batch: DataProto, context: Any) -> AsyncIterator[DataProto]:
        yield await self._worker.compute_scores(batch)
