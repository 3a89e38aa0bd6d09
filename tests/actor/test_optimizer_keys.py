"""Keys of the optimizer, told by what an update does to weights and moments, in actor and critic alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import sequence_batch
from torch.testing import assert_close

from rolemesh.config.job import make_job
from rolemesh.models.loading import named_weights
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.critic.worker import CriticWorker

TRAINED = ["actor", "critic"]


def worker(role: str, model: Path, **keys: Any) -> Any:
    """A worker whose optimizer takes one step an update; `keys` are its role's."""
    job = make_job(
        {
            "data": {"train_batch_size": 16},
            "trainer": {"device": "cpu"},
            "actor": {"model": {"path": str(model)}, "ppo_mini_batch_size": 16},
            "critic": {"ppo_mini_batch_size": 16},
        }
    )
    section = getattr(job, role)
    optim = section.optim.model_copy(update=keys.pop("optim", {}))
    section = section.model_copy(update={**keys, "optim": optim})
    return {"actor": ActorWorker, "critic": CriticWorker}[role](job.model_copy(update={role: section}))


@pytest.mark.parametrize("role", TRAINED)
async def test_without_gradients_weights_shrink_by_lr_times_decay(role: str, tiny_model: Path) -> None:
    """AdamW (arXiv:1711.05101, algorithm 2, line 12): w ← w − lr·λ·w where both moments are 0."""
    trained = worker(role, tiny_model, optim={"lr": 0.1, "weight_decay": 0.5})
    batch = sequence_batch(16)
    if role == "actor":
        batch["advantages"] = torch.zeros_like(batch["advantages"])
    else:
        batch["values"] = batch["returns"] = (await trained.compute_values(batch))["values"]
    before = {name: weight.clone() for name, weight in named_weights(trained.model).items()}
    metrics = await trained.update(batch)
    assert metrics[f"{role}/grad_norm"] == 0
    for name, weight in named_weights(trained.model).items():
        assert_close(weight, before[name] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("role", TRAINED)
async def test_a_gradient_is_clipped_to_grad_clip_as_a_whole(role: str, tiny_model: Path) -> None:
    """After one step the first moment is (1 − β₁) of the gradient used: its norm is 0.1 · grad_clip."""
    trained = worker(role, tiny_model, grad_clip=0.01)
    metrics = await trained.update(sequence_batch(16))
    assert metrics[f"{role}/grad_norm"] > 0.1  # before clipping
    moments = [m for name, m in trained.optimizer.state_tensors().items() if name.endswith(".exp_avg")]
    assert float(torch.stack([moment.norm() for moment in moments]).norm()) == pytest.approx(
        0.1 * 0.01, rel=1e-3
    )
