"""Schedules of the learning rate by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from rolemesh.algos.learning_rate import learning_rate
from rolemesh.config.job import make_job
from rolemesh.config.model import OptimConfig
from rolemesh.errors import InvalidConfig
from rolemesh.training.optimizer import Optimizer


def rates(num_steps: int | None, steps: int, **optim: Any) -> list[float]:
    """Of the first steps of a job, with a greatest rate of 2."""
    config = OptimConfig(lr=2.0, **optim)
    return [learning_rate(step, config, num_steps) for step in range(steps)]


def test_a_constant_rate_is_the_same_to_the_bit_and_knows_no_end() -> None:
    config = OptimConfig(lr=3e-7)
    assert {learning_rate(step, config, None) for step in (0, 1, 10**9)} == {3e-7}


def test_warmup_rises_linearly_from_0_to_the_full_rate() -> None:
    assert rates(None, 6, lr_warmup_steps=4) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]


def test_a_warmup_ratio_rounds_down_and_a_step_count_wins() -> None:
    assert rates(7, 4, lr_warmup_steps_ratio=0.4) == [0.0, 1.0, 2.0, 2.0]  # 2.8 steps of 7
    for none in (0, -1):
        assert rates(7, 3, lr_warmup_steps=none, lr_warmup_steps_ratio=0.4) == [0.0, 1.0, 2.0]
    assert rates(7, 3, lr_warmup_steps=1, lr_warmup_steps_ratio=0.4) == [0.0, 2.0, 2.0]


def test_linear_decay_ends_at_its_minimum_and_stays_there() -> None:
    assert rates(4, 6, lr_scheduler_type="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])
    falling = rates(6, 8, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.5)
    assert falling == pytest.approx([0.0, 1.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0])


def test_a_job_of_one_step_ends_after_it() -> None:
    assert rates(1, 3, lr_scheduler_type="linear") == [2.0, 0.0, 0.0]


def test_cosine_falls_by_half_a_wave_and_does_not_rise_again() -> None:
    """Over four steps the wave is at cos 0, 45, 90, 135 and 180 degrees."""
    wave = [1, (1 + math.sqrt(0.5)) / 2, 1 / 2, (1 - math.sqrt(0.5)) / 2, 0, 0]
    assert rates(4, 6, lr_scheduler_type="cosine") == pytest.approx([2 * w for w in wave], abs=1e-15)
    falling = rates(6, 8, lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.2)
    assert falling == pytest.approx([0.0, 1.0, *(2 * (0.2 + 0.8 * w) for w in wave)])


def test_a_job_that_is_all_warm_up_never_falls() -> None:
    assert rates(3, 4, lr_scheduler_type="cosine", lr_warmup_steps_ratio=1.0)[:3] == pytest.approx(
        [0.0, 2 / 3, 4 / 3]
    )


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"lr_warmup_steps_ratio": 0.5}, "lr_warmup_steps_ratio is 0.5"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type is cosine"),
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 3}, "lr_scheduler_type is linear"),
    ],
)
def test_a_schedule_of_an_unknown_number_of_steps_makes_no_step(optim: dict[str, Any], message: str) -> None:
    """The job has trainer.total_epochs alone, and its controller says how many steps that is."""
    config = make_job({"actor": {"optim": optim}}).actor.optim
    optimizer = Optimizer(nn.Linear(1, 1), config, grad_clip=1.0, role="actor")
    with pytest.raises(InvalidConfig, match=rf"actor\.optim\.{message}, .*set trainer.total_training_steps"):
        _ = optimizer.lr
    optimizer.num_training_steps = 4
    assert optimizer.lr == learning_rate(0, config, 4)


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"min_lr_ratio": 0.1}, "min_lr_ratio is 0.1, but lr_scheduler_type is constant"),
        ({"min_lr_ratio": 1.1, "lr_scheduler_type": "cosine"}, "min_lr_ratio"),
        ({"lr_scheduler_type": "polynomial"}, "none of constant, linear, cosine"),
        ({"warmup_style": "cosine"}, "warmup_style is now lr_scheduler_type"),
    ],
)
def test_a_schedule_that_is_none_is_refused(optim: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make_job({"actor": {"optim": optim}, "trainer": {"total_training_steps": 5}})
