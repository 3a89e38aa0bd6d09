"""A run whose order of events is recorded, with roles in this process or over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from in_process import workers
from serving import served

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.role_clients import new_client
from rolemesh.services.controller.run.loop import Run
from rolemesh.weights.weight_source import WeightSource

ASYNC = "rollout.mode=async"
NO_CRITIC = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")


@asynccontextmanager
async def in_process(job: JobConfig) -> AsyncIterator[Roles]:
    with workers(job) as roles:
        yield roles


@asynccontextmanager
async def over_grpc(job: JobConfig) -> AsyncIterator[Roles]:
    """Serve every role on a port, the rollout on two."""
    async with AsyncExitStack() as stack:
        clients: dict[str, Any] = {}
        for role in job.roles:
            addresses = await stack.enter_async_context(served(role, *[job] * (1 + (role == "rollout"))))
            clients[role] = await stack.enter_async_context(new_client(role, addresses, job))
        yield Roles.of(job, clients)


async def run(job: JobConfig, roles: Roles) -> Run:
    made = Run(job, load_tokenizer(job.actor.model))
    await made.train(roles)
    return made


@dataclass
class Observed:
    """Wraps the rollout and the actor of a run, and records their events in order."""

    roles: Roles
    events: list[str] = field(default_factory=list)
    batches: list[DataProto] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def note(self, event: str) -> None:
        async with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    async def seen(self, event: str) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: event in self.events)

    async def generate(self, prompts: DataProto) -> AsyncGenerator[DataProto]:
        what = f"step {prompts.meta_info['step']}"
        await self.note(f"{what} begins")
        ended = "closed"
        try:
            async with aclosing(
                cast(AsyncGenerator[DataProto], self.roles.rollout.generate(prompts))
            ) as stream:
                async for rows in stream:
                    await self.note(f"{what} has rows")
                    yield rows
            ended = "generated"
        finally:
            await self.note(f"{what} {ended}")

    async def update_weights(self, source: WeightSource) -> None:
        await self.roles.rollout.update_weights(source)
        await self.note(f"weights {source.version} taken")

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await self.roles.actor.compute_log_probs(batch)

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        return await self.roles.actor.compute_ref_log_probs(batch)

    async def update(self, batch: DataProto) -> Metrics:
        self.batches.append(batch)
        await self.note(f"update {len(self.batches)} begins")
        metrics = await self.roles.actor.update(batch)
        await self.note(f"update {len(self.batches)} ends")
        return metrics

    async def publish_weights(self, version: int) -> WeightSource:
        return await self.roles.actor.publish_weights(version)

    async def begin_checkpoint(self, directory: Path) -> None:
        await self.roles.actor.begin_checkpoint(directory)

    async def finish_checkpoint(self, directory: Path) -> None:
        await self.roles.actor.finish_checkpoint(directory)

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
        await self.roles.actor.load_checkpoint(directory, num_training_steps)

    def watched(self) -> Roles:
        return replace(self.roles, rollout=self, actor=self)

    @property
    def begun(self) -> list[str]:
        return [event for event in self.events if event.endswith("begins") and event.startswith("step")]
