"""Stands in for vLLM's engine on a GPU: takes the calls that its source takes, and refuses a wrong order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm_source import Source
from vllm_uses import WORKER

from rolemesh.config import JobConfig
from rolemesh.services.rollout.engines.vllm.engine import VllmEngine
from rolemesh.services.rollout.engines.vllm.extension import RolloutExtension

MEMORY = ("weights", "kv_cache")
ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"


class RecordedVllm:
    """An AsyncLLM without rows.

    Args:
        source: of vLLM.

    Attributes:
        calls: as text, in their order; those of the workers as `worker.NAME`.
        fails_at: the name of a call that raises.
        answers: of the workers, by method; the others answer None.
    """

    errored = False

    def __init__(self, source: Source) -> None:
        self._source = source
        self.calls: list[str] = []
        self.is_paused = self.has_ended = False
        self._lacks: set[str] = set()  # tags of the memory that sleeps
        self.fails_at = ""
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        signature = self._signature(ASYNC_LLM, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if name != "collective_rpc":
                self._happen(name, given)
                return None
            method, positional = given["method"], given.get("args", ())
            own = getattr(RolloutExtension, method, None)
            its = self._signature(WORKER, method) if own is None else _bound(own)
            bound = its.bind(*positional).arguments
            self._happen(f"worker.{method}", bound if own is None else {})
            return [self.answers.get(method)]

        return call

    def shutdown(self) -> None:
        self.has_ended = True

    def _signature(self, owner: str, name: str) -> inspect.Signature:
        member = self._source.member(owner, name)
        assert member is not None, f"vLLM's {owner} has no {name}"
        found = self._source.signature(member, bound=True)
        assert found is not None, f"{name} cannot be called"
        return found

    def _happen(self, name: str, given: dict[Any, Any]) -> None:
        tags = set(given.get("tags") or MEMORY)
        allowed = {
            # vLLM asserts nothing, and rows would read memory that is gone
            "worker.sleep": self.is_paused and not self._lacks,
            "worker.wake_up": tags <= self._lacks,
            "worker.take_weights": self.is_paused and "weights" not in self._lacks,
            "resume_generation": self.is_paused and not self._lacks,
        }
        assert allowed.get(name, True), f"{name} after {self.calls}"
        shown = ", ".join(str(value) for value in given.values())
        self.calls.append(f"{name}({shown})")
        if name == self.fails_at:
            raise RuntimeError(f"{name} failed")
        self.is_paused |= name == "pause_generation"
        self.is_paused &= name != "resume_generation"
        if name == "worker.sleep":
            self._lacks = {*MEMORY}
        elif name == "worker.wake_up":
            self._lacks -= tags


def _bound(method: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class RecordedEngine(VllmEngine):
    """The engine around it, with one weight of four numbers."""

    def __init__(self, job: JobConfig, vllm: RecordedVllm) -> None:
        self._recorded = vllm
        super().__init__(job)

    def _start(self, job: JobConfig) -> None:
        self._job, self._llm, self._on_cpu = job, self._recorded, False  # type: ignore[assignment]
        self.weights = {"w": torch.empty(4, device="meta")}
        self._ends, self._pad = [0], 0
