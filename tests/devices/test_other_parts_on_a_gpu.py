"""Adapters, losses, reward model and engine hf on a pretended GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from generation import generated, prompts_of, trained
from generation import job_of as rollout_job
from gpu_jobs import ROWS, gpu_job
from pretended_gpu import PretendedGpu
from sequences import sequence_batch
from torch import Tensor
from torch.testing import assert_close
from turns import conversation

from rolemesh.algos.aggregation import BatchCounts
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.config.model import ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.dataproto.transfer import on_device
from rolemesh.models.loading import named_weights
from rolemesh.models.reward_model import RewardModel
from rolemesh.services.actor.objective import choose_tokens, policy_objective
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights.published import PublishedWeights

# ------------------------------------------------------------------------------- copies


def test_a_model_may_change_a_copy_beside_one_autograd_keeps(gpu: PretendedGpu) -> None:
    """Both tensors were copied to the device together."""
    with gpu.here():
        table = torch.ones(3, 4, device="cuda", requires_grad=True)
        ids, positions = on_device((torch.tensor([1, 2]), torch.tensor([0, 1])), torch.device("cuda"))
        total = torch.nn.functional.embedding(ids, table).sum()
        positions += 1
        torch.autograd.backward(total)  # it keeps the ids
        assert table.grad is not None
        assert table.grad[:, 0].tolist() == [0, 1, 1]
        assert positions.tolist() == [1, 2]


# ------------------------------------------------------------------------------- adapters and losses


@pytest.mark.parametrize("packed", [True, False])
async def test_an_adapter_learns_and_leaves_the_base_model_unchanged(
    gpu: PretendedGpu, two_layers: Path, packed: bool
) -> None:
    """The adapter is published."""
    batch = sequence_batch(ROWS)
    actor = {"model": {"lora_rank": 4}, "optim": {"lr": 1e-2}}
    with gpu.worker(ActorWorker, gpu_job(two_layers, packed=packed, actor=actor)) as worker:
        base = (await worker.compute_ref_log_probs(batch))["ref_log_probs"]
        await worker.update(batch)
        again = (await worker.compute_ref_log_probs(batch))["ref_log_probs"]
        learnt = (await worker.compute_log_probs(batch))["old_log_probs"]
        source = await worker.publish_weights(1)
    assert torch.equal(again, base)
    assert not torch.allclose(learnt, base, atol=1e-3)
    assert isinstance(source, PublishedWeights)
    assert not any("lora" in name for name in source.holding.tensors())


def loss_job(loss_mode: str) -> JobConfig:
    policy_loss = {"loss_mode": loss_mode, "dro_beta": 0.05, "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}
    for page in PAGES.values():  # supervised and preference training
        if loss_mode in page.losses:
            return make_job({"actor": {"policy_loss": policy_loss}, "algorithm": {"page": page.name}})
    actor = {"policy_loss": policy_loss, "use_kl_loss": True, "entropy_coeff": 0.1}
    correction = {"bypass_mode": loss_mode == "bypass"}
    return make_job({"actor": actor, "algorithm": {"rollout_correction": correction}})


def learnt_from(job: JobConfig, batch: DataProto, device: str) -> tuple[Tensor, Tensor]:
    """The loss of a mini-batch, and its gradient for log-probs."""
    rows = batch.to(device)
    if job.policy_loss.choose:
        rows = choose_tokens(rows, rows["old_log_probs"] + 0.1, job, 0)
    log_probs = (rows["old_log_probs"] + 0.1 * rows["advantages"]).detach().requires_grad_()
    loss, _ = policy_objective(log_probs, log_probs.square(), rows, BatchCounts.of(batch["response_mask"]), job)
    torch.autograd.backward(loss)
    assert log_probs.grad is not None
    return loss.detach().cpu(), log_probs.grad.cpu()


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
def test_a_loss_has_the_cpus_gradient_and_waits_for_nothing(gpu: PretendedGpu, loss_mode: str) -> None:
    batch, job = sequence_batch(6), loss_job(loss_mode)
    batch["contexts"] = (batch["advantages"] > 0).long()  # whose answer a token is, of a pair
    expected = learnt_from(job, batch, "cpu")
    with gpu.here():
        gpu.record.clear()
        found = learnt_from(job, batch, "cuda")
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if not job.policy_loss.choose:  # which is asked on the host
        assert gpu.record.number("wait") == 0, gpu.record.lines("wait")


# ------------------------------------------------------------------------------- reward model


@pytest.mark.parametrize(
    ("packed", "dtype", "kernel"),
    [(True, "bfloat16", "varlen"), (True, "float32", "efficient"), (False, "bfloat16", "efficient")],
)
def test_reward_model_scores_match_the_cpu_in_the_chosen_kernel(
    gpu: PretendedGpu, tiny_reward_model: Path, packed: bool, dtype: str, kernel: str
) -> None:
    batch = sequence_batch(6)
    columns = [batch[name] for name in ("input_ids", "attention_mask", "position_ids")]
    config = ModelConfig(path=str(tiny_reward_model), use_remove_padding=packed, dtype=dtype)
    expected = RewardModel.load(config.model_copy(update={"dtype": "float32"})).score(*columns)
    gpu.record.clear()
    with gpu.here():
        model = RewardModel.load(config, "cuda")
        assert f"{kernel} forward" in gpu.record.names("attention")  # the trial at load
        gpu.record.clear()
        scores = model.score(*columns)
    assert scores.device.type == "cpu"
    assert_close(
        scores, expected, **({"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0, "atol": 0.05})
    )
    assert gpu.record.names("attention") == {f"{kernel} forward": 2}


# ------------------------------------------------------------------------------- engine hf


@pytest.fixture
def engine(gpu: PretendedGpu, two_layers: Path) -> Iterator[RolloutWorker]:
    with gpu.worker(RolloutWorker, rollout_job(two_layers, dtype="float32", top_k=5, max_num_seqs=8)) as worker:
        yield worker


@pytest.mark.usefixtures("here")
async def test_engine_hf_generates_the_cpus_tokens(
    gpu: PretendedGpu, engine: RolloutWorker, two_layers: Path
) -> None:
    """More rows than are decoded together, so that some join later, and some leave early."""
    prompts = prompts_of(12)
    gpu.record.clear()
    found = await generated(engine, prompts)
    job = rollout_job(two_layers, dtype="float32", top_k=5, max_num_seqs=8)
    on_cpu = RolloutWorker(job.model_copy(update={"trainer": job.trainer.model_copy(update={"device": "cpu"})}))
    expected = await generated(on_cpu, prompts)
    on_cpu.close()
    assert torch.equal(found["responses"], expected["responses"])
    assert_close(found["rollout_log_probs"], expected["rollout_log_probs"], rtol=1e-4, atol=1e-5)
    assert set(gpu.record.names("attention")) == {"efficient forward"}


@pytest.mark.usefixtures("here")
async def test_engine_hf_goes_on_with_rows_and_takes_new_weights(
    engine: RolloutWorker, two_layers: Path
) -> None:
    async def generate(request: DataProto) -> DataProto:
        return await generated(engine, request)

    exchanged = await conversation(prompts_of(4), 16, [[2] * 4], [generate, generate])
    assert all(answer["rollout_log_probs"].isfinite().all() for _, answer in exchanged)
    before = await generated(engine, prompts_of(4))
    await engine.update_weights(PublishedWeights(2, named_weights(trained(two_layers))))
    after = await generated(engine, prompts_of(4))
    assert engine.version == 2
    assert set(after["weight_versions"].unique().tolist()) <= {-1, 2}
    assert not torch.equal(before["responses"], after["responses"])


@pytest.mark.usefixtures("here")
async def test_engine_hf_samples_in_bfloat16(gpu: PretendedGpu, two_layers: Path) -> None:
    with gpu.worker(RolloutWorker, rollout_job(two_layers, dtype="bfloat16", top_p=0.9, top_k=20)) as worker:
        gpu.record.clear()
        answer = await generated(worker, prompts_of(3))
    assert math.isfinite(answer["rollout_log_probs"].sum())
    assert set(gpu.record.names("attention")) == {"efficient forward"}
