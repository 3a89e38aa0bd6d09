"""CriticService: protobuf to DataProto and back."""

from __future__ import annotations

from collections.abc import AsyncIterator

from rolemesh.dataproto import DataProto
from rolemesh.roles import Critic
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.servicers import CriticServiceBase
from rolemesh.rpc.serving.trained import TrainedServicer
from rolemesh.services.critic.worker import CriticWorker


class CriticServicer(TrainedServicer, CriticServiceBase):
    """Implements CriticService."""

    def __init__(self, worker: CriticWorker) -> None:
        super().__init__(worker)
        self._worker: Critic = worker
        self.validator = worker.validator

    async def ComputeValues(self, batch: DataProto, context: Context) -> AsyncIterator[DataProto]:
        yield await self._worker.compute_values(batch)
