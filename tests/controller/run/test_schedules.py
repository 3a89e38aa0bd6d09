"""A learning rate that depends on the run's length, where only the controller knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import recorded, small_job
from observed import over_grpc, run


async def test_roles_get_the_number_of_steps_that_the_epochs_make(tiny_model: Path, tmp_path: Path) -> None:
    """Two passes over ten prompts, four a step, are five steps. Half of them, rounded down, are two."""
    job = small_job(
        tmp_path, tiny_model, "run", "trainer.total_training_steps=null", "trainer.total_epochs=2",
        "actor.optim.lr_warmup_steps_ratio=0.5", "critic.optim.lr_scheduler_type=linear",
        "trainer.val_before_train=false",
    )  # fmt: skip
    async with over_grpc(job) as roles:
        await run(job, roles)
    records = recorded(job)
    assert [record["actor/lr"] for record in records] == pytest.approx([0, 0.5e-3, 1e-3, 1e-3, 1e-3])
    assert [record["critic/lr"] for record in records] == pytest.approx([1e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3])
