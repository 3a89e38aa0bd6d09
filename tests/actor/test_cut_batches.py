"""The same batch, however it is cut: the same loss and the same gradients, for every loss and aggregation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from actors import WITHOUT_CHECKPOINTING
from float64 import in_float64
from sequences import sequence_batch
from torch import Tensor
from torch.testing import assert_close

from rolemesh.config import JobConfig
from rolemesh.config.actor import LossAggMode
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.training.optimizer import Optimizer

ROWS = 6
# name: keys of the actor
CUTS: dict[str, dict[str, Any]] = {
    "whole": {"ppo_micro_batch_size_per_gpu": ROWS},
    "ones": {"ppo_micro_batch_size_per_gpu": 1},
    "by tokens": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20},
    "padded, by tokens": {
        "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 50, "model": {"use_remove_padding": False},
    },
}  # fmt: skip
REJECTION = {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "4.0,2.0"}
# name: loss_mode, algorithm.rollout_correction
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    mode: (mode, {"rollout_is": "token"})
    for mode in ("vanilla", "gpg", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "geo_mean", "dppo_tv",
                 "dppo_kl", "dro")
} | {
    "rejecting": ("clip_cov", {"rollout_is": "sequence", **REJECTION}),
    "bypass": ("bypass", {"bypass_mode": True, **REJECTION}),
    "bypass, reinforce": (
        "bypass", {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence", **REJECTION}
    ),
}  # fmt: skip


class Gradients(Optimizer):
    """Keeps what a step would be made along, and makes none: a worker can be asked again."""

    found: dict[str, Tensor]

    def step(self) -> float:
        self.found = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return 0.0


def job_of(model: Path, loss: str, mode: str, cut: dict[str, Any]) -> JobConfig:
    loss_mode, correction = LOSSES[loss]
    actor = {
        "model": {"path": str(model)} | WITHOUT_CHECKPOINTING,
        "ppo_mini_batch_size": ROWS // 2,
        "loss_agg_mode": mode,
        "policy_loss": {
            "loss_mode": loss_mode, "clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1, "clip_cov_lb": 0.0,
            "dro_beta": 0.1,
        },
        "entropy_coeff": 0.01,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
    }  # fmt: skip
    return make_job(
        {
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": correction},
            "rollout": {"n": 2},
            "data": {"train_batch_size": ROWS // 2, "max_prompt_length": 6, "max_response_length": 10},
            "trainer": {"device": "cpu"},
            "actor": merge(actor, cut),
        }
    )


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ActorWorker]]:
    """In float64, one for each cut."""
    model = make_tiny_model(tmp_path_factory.mktemp("smaller"), hidden_size=16, num_layers=1, num_heads=2)
    made = {name: ActorWorker(job_of(model, "vanilla", "token-mean", cut)) for name, cut in CUTS.items()}
    for worker in made.values():
        in_float64(worker.model)
        optim = worker.job.actor.optim
        worker.optimizer = Gradients(worker.model, optim, grad_clip=1.0, role="actor")
    yield made
    for worker in made.values():
        worker.close()


def scored_batch() -> DataProto:
    """In float64, with one row of which nothing was sampled."""
    batch = sequence_batch(ROWS)
    batch["response_mask"][5] = False
    generator = torch.Generator().manual_seed(1)
    batch["rollout_is_weights"] = batch["response_mask"] * torch.rand(ROWS, 10, generator=generator) * 2
    batch["loss_mask"] = batch["response_mask"] & (torch.rand(ROWS, 10, generator=generator) < 0.8)
    for name in ("old_log_probs", "ref_log_probs", "advantages", "rollout_is_weights"):
        batch[name] = batch[name].double()
    return batch


async def updated(worker: ActorWorker, loss: str, mode: str, cut: str, order: Tensor) -> dict[str, Tensor]:
    """The metrics of an update, and its gradient."""
    worker.job = job_of(Path(worker.job.actor.model.path), loss, mode, CUTS[cut])
    metrics = await worker.update(scored_batch().select_idxs(order))
    assert isinstance(worker.optimizer, Gradients)
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
    return numbers | worker.optimizer.found


@pytest.mark.parametrize("mode", get_args(LossAggMode))
@pytest.mark.parametrize("loss", LOSSES)
async def test_how_a_batch_is_cut_changes_neither_loss_nor_gradient(
    workers: dict[str, ActorWorker], loss: str, mode: str
) -> None:
    whole = await updated(workers["whole"], loss, mode, "whole", torch.arange(ROWS))
    assert whole["actor/pg_loss"] != 0
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    # A cut's rows do not depend on the aggregation, so all cuts are made with one of them.
    cuts = [*CUTS] if mode == "token-mean" else [[*CUTS][2 + len(loss) % 2]]
    for cut in cuts:
        found = await updated(workers[cut], loss, mode, cut, order)
        assert found.keys() == whole.keys()
        for name, value in found.items():
            assert_close(value, whole[name], rtol=1e-10, atol=1e-10, msg=f"{name} differs, {cut}")
