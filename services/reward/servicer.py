"""RewardService: protobuf to DataProto and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from rolemesh.roles import Reward
from rolemesh.rpc.streams import receive, send


class RewardServicer:
    """Implements RewardService."""

    def __init__(self, worker: Reward) -> None:
        self._worker = worker

    async def ComputeScores(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        scores = await self._worker.compute_scores(await receive(frames))
        async for frame in send(scores):
            yield frame
