"""Measures the phases of a step, by wrapping the roles, so that pages have no code for it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from rolemesh.dataproto import DataProto
from rolemesh.forwarding import Forwarding
from rolemesh.graph import ControllerNode
from rolemesh.roles import Actor, Metrics, NoCritic, Roles, Rollout
from rolemesh.tasks import closed_at_end
from rolemesh.telemetry import metrics, timeline

R = TypeVar("R")


class Stopwatch:
    """Measures the seconds in which at least one call of a phase was running, and knows the running phases.

    Args:
        on_phase: called with the phase whenever it changes; "" between phases. Of several running phases it is
            the one that started first.
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
                began = self._since.pop(phase)
                now = time.perf_counter()
                passed = now - began
                if (written := timeline.calls.get()) is not None:
                    written.append(timeline.TimedCall(timeline.PHASES, phase, began, now))
                self._seconds[phase] = self._seconds.get(phase, 0.0) + passed
            self._tell(before)

    def take(self) -> Metrics:
        """Return `timing_s/<phase>`, the seconds of each phase since the last call."""
        taken = self._seconds
        self._seconds = {}
        return {f"timing_s/{phase}": seconds for phase, seconds in taken.items()}

    @contextmanager
    def during(self, node: ControllerNode, batch: DataProto) -> Iterator[None]:
        """Measure a controller function (rolemesh.graph.observer)."""
        with timeline.recorded(timeline.CONTROLLER, f"controller.{node.name}", batch):
            if not node.phase:
                yield
                return
            with self(node.phase):
                yield

    def _tell(self, before: str) -> None:
        if self.phase != before:
            self._on_phase(self.phase)


# The phase of each measured method. "generate" is a stream, which TimedRollout measures.
PHASES = {
    "actor": {
        "compute_log_probs": "old_log_prob",
        "compute_ref_log_probs": "ref",
        "update": "update_actor",
        "publish_weights": "update_weights",
    },
    "reference": {"compute_log_probs": "ref"},
    "rollout": {"update_weights": "update_weights"},
    "reward": {"compute_scores": "reward"},
    "critic": {"compute_values": "values", "update": "update_critic"},
}


def timed(roles: Roles, stopwatch: Stopwatch) -> Roles:
    """Return the same roles, with every call measured. A critic that a job lacks stays NoCritic."""
    critic = roles.critic
    return replace(
        roles,
        actor=Timed(roles.actor, PHASES["actor"], stopwatch),
        rollout=TimedRollout(roles.rollout, PHASES["rollout"], stopwatch),
        reward=Timed(roles.reward, PHASES["reward"], stopwatch),
        critic=critic if isinstance(critic, NoCritic) else Timed(critic, PHASES["critic"], stopwatch),
        reference=Timed(roles.reference, PHASES["reference"], stopwatch),
    )


class Timed(Forwarding[R]):
    """A role whose calls are measured.

    Args:
        role: the role that is called.
        phases: by method; a method without a phase is not measured.
        stopwatch: measures the phases.
    """

    def __init__(self, role: R, phases: Mapping[str, str], stopwatch: Stopwatch) -> None:
        super().__init__(role)
        self._phases = phases
        self._stopwatch = stopwatch

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)
        if name not in self._phases:
            return method

        @wraps(method)
        async def measured(*args: Any, **kwargs: Any) -> Any:
            with self._stopwatch(self._phases[name]):
                return await method(*args, **kwargs)

        return measured


class TimedRollout(Timed[Rollout]):
    """A rollout whose generation is measured from the first request to the end of the stream."""

    async def generate(self, prompts: DataProto) -> AsyncGenerator[DataProto]:
        stream: AsyncIterator[DataProto] = self._role.generate(prompts)
        with self._stopwatch("gen"):
            async with closed_at_end(stream):
                async for finished in stream:
                    yield finished


class WarmingActor(Forwarding[Actor]):
    """The actor in the first `trainer.critic_warmup` steps: it answers calls, but `update` does nothing.

    So the critic is trained before the policy is.
    """

    async def update(self, batch: DataProto) -> Metrics:
        return {"training/critic_warmup": 1.0}
