"""How long each part of a step takes, measured around the roles so that the pages stay clean."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rolemesh.dataproto import DataProto
from rolemesh.graph import ControllerNode
from rolemesh.roles import Actor, Critic, Metrics, Reference, Reward, Roles, Rollout
from rolemesh.tasks import closed_at_end
from rolemesh.telemetry import metrics, timeline
from rolemesh.weights.source import WeightSource

R = TypeVar("R")


class Stopwatch:
    """Seconds in which at least one call of a phase was under way, and which phases are under way now.

    Args:
        on_phase: told the phase whenever it changes; "" between phases. Of several at once it is the one
            that began first.
    """

    def __init__(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self._on_phase = on_phase
        self._running: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    @property
    def phase(self) -> str:
        return next(iter(self._running), "")

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        before = self.phase
        if phase not in self._running:
            self._since[phase] = time.perf_counter()
            metrics.PHASE_RUNNING.labels(phase).set(1)
        self._running[phase] = self._running.get(phase, 0) + 1
        self._tell(before)
        try:
            yield
        finally:
            before = self.phase
            self._running[phase] -= 1
            if not self._running[phase]:
                del self._running[phase]
                metrics.PHASE_RUNNING.labels(phase).set(0)
                began, now = self._since.pop(phase), time.perf_counter()
                passed = now - began
                if (written := timeline.calls.get()) is not None:
                    written.append(timeline.Call(timeline.PHASES, phase, began, now))
                self._seconds[phase] = self._seconds.get(phase, 0.0) + passed
            self._tell(before)

    def take(self) -> Metrics:
        """`timing_s/<phase>` since the last call."""
        taken, self._seconds = self._seconds, {}
        return {f"timing_s/{phase}": seconds for phase, seconds in taken.items()}

    @contextmanager
    def during(self, node: ControllerNode, batch: DataProto) -> Iterator[None]:
        """As the observer of controller functions."""
        with timeline.recorded(timeline.CONTROLLER, f"controller.{node.name}", batch):
            if not node.phase:
                yield
                return
            with self(node.phase):
                yield

    def _tell(self, before: str) -> None:
        if self.phase != before:
            self._on_phase(self.phase)


def timed(roles: Roles, stopwatch: Stopwatch) -> Roles:
    """The same roles, with every call measured."""
    return replace(
        roles,
        actor=TimedActor(roles.actor, stopwatch),
        rollout=TimedRollout(roles.rollout, stopwatch),
        reward=TimedReward(roles.reward, stopwatch),
        critic=TimedCritic(roles.critic, stopwatch),
        reference=TimedReference(roles.reference, stopwatch),
    )


@dataclass
class TimedActor:
    actor: Actor
    stopwatch: Stopwatch

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await _timed(self.stopwatch, "old_log_prob", self.actor.compute_log_probs(batch))

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        return await _timed(self.stopwatch, "ref", self.actor.compute_ref_log_probs(batch))

    async def update(self, batch: DataProto) -> Metrics:
        return await _timed(self.stopwatch, "update_actor", self.actor.update(batch))

    async def publish_weights(self, version: int) -> WeightSource:
        return await _timed(self.stopwatch, "update_weights", self.actor.publish_weights(version))

    async def save_checkpoint(self, directory: Path) -> None:
        await self.actor.save_checkpoint(directory)

    async def load_checkpoint(self, directory: Path | None) -> None:
        await self.actor.load_checkpoint(directory)


@dataclass
class TimedReference:
    reference: Reference
    stopwatch: Stopwatch

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await _timed(self.stopwatch, "ref", self.reference.compute_log_probs(batch))


@dataclass
class TimedRollout:
    rollout: Rollout
    stopwatch: Stopwatch

    async def generate(self, prompts: DataProto) -> AsyncGenerator[DataProto]:
        stream: AsyncIterator[DataProto] = self.rollout.generate(prompts)
        with self.stopwatch("gen"):
            async with closed_at_end(stream):
                async for finished in stream:
                    yield finished

    async def update_weights(self, source: WeightSource) -> None:
        await _timed(self.stopwatch, "update_weights", self.rollout.update_weights(source))


@dataclass
class TimedReward:
    reward: Reward
    stopwatch: Stopwatch

    async def compute_scores(self, batch: DataProto) -> DataProto:
        return await _timed(self.stopwatch, "reward", self.reward.compute_scores(batch))


@dataclass
class TimedCritic:
    critic: Critic
    stopwatch: Stopwatch

    async def compute_values(self, batch: DataProto) -> DataProto:
        return await _timed(self.stopwatch, "values", self.critic.compute_values(batch))

    async def update(self, batch: DataProto) -> Metrics:
        return await _timed(self.stopwatch, "update_critic", self.critic.update(batch))

    async def save_checkpoint(self, directory: Path) -> None:
        await self.critic.save_checkpoint(directory)

    async def load_checkpoint(self, directory: Path | None) -> None:
        await self.critic.load_checkpoint(directory)


async def _timed(stopwatch: Stopwatch, phase: str, call: Awaitable[R]) -> R:
    with stopwatch(phase):
        return await call


@dataclass
class WarmingActor:
    """The actor in the first `trainer.critic_warmup` steps: it answers like any actor and is not trained,
    so that the critic learns to judge before the policy follows it."""

    actor: Actor

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await self.actor.compute_log_probs(batch)

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        return await self.actor.compute_ref_log_probs(batch)

    async def update(self, batch: DataProto) -> Metrics:
        return {"training/critic_warmup": 1.0}

    async def publish_weights(self, version: int) -> WeightSource:
        return await self.actor.publish_weights(version)

    async def save_checkpoint(self, directory: Path) -> None:
        await self.actor.save_checkpoint(directory)

    async def load_checkpoint(self, directory: Path | None) -> None:
        await self.actor.load_checkpoint(directory)
