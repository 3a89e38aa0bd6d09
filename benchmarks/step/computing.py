"""How long models compute: the time in which, in any thread, a model's forward or backward pass or an
optimizer's step is under way."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


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

    def watch(self) -> None:
        """From here on, in this process. Modules within modules count once."""
        nn.modules.module.register_module_forward_pre_hook(self.begin)
        nn.modules.module.register_module_forward_hook(self.end, always_call=True)
        register_optimizer_step_pre_hook(self.begin)
        register_optimizer_step_post_hook(self.end)
        backward = torch.autograd.backward

        def watched(*args: Any, **kwargs: Any) -> None:
            self.begin()
            try:
                backward(*args, **kwargs)
            finally:
                self.end()

        torch.autograd.backward = watched

    def take(self) -> dict[str, float]:
        """`computing_s` since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return {"computing_s": seconds}
