"""The learning rate of each training step, by `optim.lr_scheduler_type`."""

from __future__ import annotations

import math
from collections.abc import Callable

from rolemesh.config.model import OptimConfig

# p: the share of the steps after the warm-up that is done. Each shape falls from 1 at p = 0 to 0 at p = 1.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),  # Loshchilov and Hutter 2017, arXiv:1608.03983
}


def num_warmup_steps(config: OptimConfig, num_steps: int | None) -> int:
    """Return the number of training steps in which the rate rises.

    It is lr_warmup_steps if above 0, else the share lr_warmup_steps_ratio of num_steps, rounded down.
    """
    if config.lr_warmup_steps > 0 or config.lr_warmup_steps_ratio == 0:
        return max(0, config.lr_warmup_steps)
    assert num_steps is not None, "the optimizer checks it"
    return int(config.lr_warmup_steps_ratio * num_steps)


def learning_rate(step: int, config: OptimConfig, num_steps: int | None) -> float:
    """Compute the learning rate of a training step.

    It depends on the arguments alone, so a resumed run needs no other state. During the W steps of the warm-up
    the rate is lr·step/W. The first step has rate 0, as in the schedules of verl and transformers. After the
    warm-up it is lr for lr_scheduler_type constant, else lr·(m + (1 − m)·shape(p)) with m = min_lr_ratio and p
    = (step − W)/(num_steps − W), at most 1.

    Args:
        step: the number of this role's updates before this one. All mini-batches and passes of an update share
            its rate.
        config: the role's optim section.
        num_steps: of the whole run; None only if neither shape nor warm-up depends on it.
    """
    warmup = num_warmup_steps(config, num_steps)
    if step < warmup:
        return config.lr * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    assert num_steps is not None, "the optimizer checks it"
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    least = config.min_lr_ratio
    return config.lr * (least + (1.0 - least) * SHAPES[config.lr_scheduler_type](done))
