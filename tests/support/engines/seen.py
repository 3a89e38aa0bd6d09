"""What a rollout was asked, and what it answered."""

from __future__ import annotations

from collections.abc import AsyncIterator

import torch

from rolemesh.dataproto import DataProto
from rolemesh.forwarding import Forwarding
from rolemesh.roles import Rollout


class Seen(Forwarding[Rollout]):
    """Keeps what a rollout was asked and what it answered."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(rollout)
        self.turns: list[tuple[DataProto, DataProto]] = []  # a row of a request, and the row that answers it

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        async for part in self._role.generate(prompts):
            self.turns += [
                (prompts.select_idxs(torch.tensor([row])), part.select_idxs(torch.tensor([at])))
                for at, row in enumerate(part["row"].tolist())
            ]
            yield part
