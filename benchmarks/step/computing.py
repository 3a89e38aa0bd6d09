"""How long models compute: the time in which, in any thread, a model's forward or backward pass, what is made
of its logits (log-probabilities, drawn tokens, the loss), or an optimizer's step with its clipping is under
way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

P = ParamSpec("P")
R = TypeVar("R")


class Computing:
    """Seconds in which at least one thread computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = self._seconds = 0.0
        self._depth = threading.local()

    def begin(self, *_: Any) -> None:
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth == 0:
            with self._lock:
                if self._running == 0:
                    self._since = time.perf_counter()
                self._running += 1

    def end(self, *_: Any) -> None:
        self._depth.value -= 1
        if self._depth.value == 0:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self._seconds += time.perf_counter() - self._since

    def watch(self, *functions: tuple[Any, str]) -> None:
        """From here on, in this process. Modules within modules count once.

        Args:
            functions: what else is model computation: (module, name).
        """
        for module, name in ((torch.autograd, "backward"), *functions):
            setattr(module, name, self._watched(getattr(module, name)))
        nn.modules.module.register_module_forward_pre_hook(self.begin)
        nn.modules.module.register_module_forward_hook(self.end, always_call=True)
        register_optimizer_step_pre_hook(self.begin)
        register_optimizer_step_post_hook(self.end)

    def _watched(self, function: Callable[P, R]) -> Callable[P, R]:
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            self.begin()
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return watched

    def take(self) -> dict[str, float]:
        """`computing_s` since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return {"computing_s": seconds}
