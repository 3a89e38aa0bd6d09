"""RewardService: protobuf to DataProto and back."""

from __future__ import annotations

from collections.abc import AsyncIterator

from rolemesh.dataproto import DataProto
from rolemesh.roles import Reward
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.servicers import RewardServiceBase
from rolemesh.services.reward.worker import RewardWorker


class RewardServicer(RewardServiceBase):
    """Implements RewardService."""

    def __init__(self, worker: RewardWorker) -> None:
        self._worker: Reward = worker
        self.validator = worker.validator

    async def ComputeScores(self, batch: DataProto, context: Context) -> AsyncIterator[DataProto]:
        yield await self._worker.compute_scores(batch)
