"""The actor and the reference policy, on real models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from actors import actor_job
from prometheus_client import REGISTRY
from safetensors.torch import load_file
from saving import saved
from sequences import sequence_batch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from rolemesh.algos.aggregation import BatchCounts
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig, ModelNotFound, UpdateFailed
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.actor.objective import policy_objective
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker


@pytest.fixture(autouse=True)
def _in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles write checkpoints there alone."""
    monkeypatch.chdir(tmp_path)


async def test_log_probs_are_those_of_a_plain_forward_without_padding(any_model: Path) -> None:
    """Row by row, unpadded, through the library's own class."""
    batch = sequence_batch(5)
    worker = ActorWorker(actor_job(any_model, rollout={"temperature": 0.7}))
    answer = await worker.compute_log_probs(batch)
    model = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32).eval()
    for row in range(5):
        seen = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][seen][None]
        with torch.no_grad():
            log_softmax = torch.log_softmax(model(ids).logits[0, :-1] / 0.7, -1)
        chosen = log_softmax.gather(-1, ids[0, 1:, None])[:, 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        length = int(batch["attention_mask"][row, 6:].sum())
        mask = batch["response_mask"][row]
        for column, expected in (("old_log_probs", chosen), ("entropys", entropy)):
            padded = torch.zeros(10)
            padded[:length] = expected[-length:]
            assert_close(answer[column][row], padded * mask, rtol=1e-4, atol=1e-5)


async def test_greedy_counts_as_temperature_one(tiny_model: Path) -> None:
    batch = sequence_batch(4)
    greedy = ActorWorker(actor_job(tiny_model, rollout={"temperature": 0.7, "do_sample": False}))
    plain = ActorWorker(actor_job(tiny_model))
    for column in ("old_log_probs", "entropys"):
        assert torch.equal(
            (await greedy.compute_log_probs(batch))[column], (await plain.compute_log_probs(batch))[column]
        )


@pytest.mark.parametrize(("prompt", "response"), [(6, 10), (24, 31), (5, 1)])
async def test_a_rows_log_probs_do_not_depend_on_its_neighbours(
    any_model: Path, prompt: int, response: int
) -> None:
    """Bit for bit, by pieces of any size and by any size of micro-batch."""
    batch = sequence_batch(24, prompt=prompt, response=response)
    whole = await ActorWorker(actor_job(any_model)).compute_log_probs(batch)
    for size in (1, 8):
        worker = ActorWorker(actor_job(any_model, {"ppo_micro_batch_size_per_gpu": size}))
        pieces = [batch[at] for at in (slice(0, 1), slice(1, 4), slice(4, 11), slice(11, 24))]
        parts = DataProto.concat([await worker.compute_log_probs(piece) for piece in pieces])
        assert torch.equal(whole["old_log_probs"], parts["old_log_probs"])
        assert torch.equal(whole["entropys"], parts["entropys"])


async def test_in_a_wide_model_log_probs_do_not_depend_on_neighbours(tmp_path: Path) -> None:
    """1,024 inputs and 6 tokens: a row alone would take another kernel."""
    model = make_tiny_model(tmp_path, hidden_size=256, num_layers=1)
    batch = sequence_batch(16, prompt=5, response=1)
    worker = ActorWorker(actor_job(model, {"ppo_micro_batch_size_per_gpu": 8}))
    whole = await worker.compute_log_probs(batch)
    alone = DataProto.concat([await worker.compute_log_probs(batch[row]) for row in range(16)])
    assert torch.equal(whole["old_log_probs"], alone["old_log_probs"])


async def test_the_reference_is_the_actor_before_training(tiny_model: Path) -> None:
    job = actor_job(tiny_model, {"use_kl_loss": True}, reference={"log_prob_micro_batch_size_per_gpu": 3})
    batch = sequence_batch(10)
    reference = ReferenceWorker(job)
    answer = await reference.compute_log_probs(batch)
    assert answer.columns == ["ref_log_probs"]
    assert torch.equal(
        answer["ref_log_probs"], (await ActorWorker(job).compute_log_probs(batch))["old_log_probs"]
    )


def test_a_rollout_correction_weighs_each_tokens_gradient() -> None:
    """Before the first update the ratio is 1: the gradient of a token is −w·A over the number of tokens."""
    rows = sequence_batch(2)
    mask, old = rows["response_mask"], rows["old_log_probs"]
    weights = rows["rollout_is_weights"] = mask * torch.linspace(0.1, 2.0, 20).reshape(2, 10)
    log_probs = old.clone().requires_grad_()
    loss, _ = policy_objective(log_probs, None, rows, BatchCounts.of(mask), make_job({}))
    loss.backward()
    assert log_probs.grad is not None
    assert_close(log_probs.grad, -weights * rows["advantages"] / mask.sum())


async def test_an_update_makes_better_than_expected_tokens_likelier(tiny_model: Path) -> None:
    worker = ActorWorker(actor_job(tiny_model, {"ppo_epochs": 2}))
    batch = sequence_batch(16)
    before = (await worker.compute_log_probs(batch))["old_log_probs"]
    batch["old_log_probs"] = before
    batch["advantages"] = torch.where(torch.arange(16)[:, None] % 2 == 0, 1.0, -1.0).expand(16, 10).contiguous()
    metrics = await worker.update(batch)
    gain = ((await worker.compute_log_probs(batch))["old_log_probs"] - before).sum(-1)
    assert gain[0::2].mean() > 0 > gain[1::2].mean()
    assert set(metrics) == {
        f"actor/{name}" for name in ("pg_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "grad_norm", "lr")
    }
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/lr"] == 1e-3


async def test_the_first_mini_batch_finds_no_change_of_policy(tiny_model: Path) -> None:
    """Before any step the ratio is 1: the KL and the clip fractions are 0, and the loss is minus the mean
    advantage."""
    worker = ActorWorker(actor_job(tiny_model, {"model": {"path": str(tiny_model)}, "use_kl_loss": True}))
    batch = sequence_batch(8)
    batch["old_log_probs"] = (await worker.compute_log_probs(batch))["old_log_probs"]
    batch["ref_log_probs"] = batch["old_log_probs"]
    metrics = await worker.update(batch)
    mask = batch["response_mask"]
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/kl_coef"] == 0.001
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0
    assert metrics["actor/pg_loss"] == pytest.approx(-float(batch["advantages"][mask].mean()), rel=1e-4)


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
async def test_a_restored_actor_chooses_the_same_tokens(
    tiny_model: Path, tmp_path: Path, loss_mode: str
) -> None:
    """After two steps, one more: by the same actor, and by one that took up its checkpoint."""
    settings = {"loss_mode": loss_mode, "clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.1}
    job = actor_job(tiny_model, {"policy_loss": settings, "seed": -1})
    worker, other = ActorWorker(job), ActorWorker(job)
    await worker.update(sequence_batch(16))
    await saved(worker, tmp_path)
    await other.load_checkpoint(tmp_path)
    mine, theirs = [await each.update(sequence_batch(8, seed=1)) for each in (worker, other)]
    assert mine == theirs
    weights = [await (await each.publish_weights(1)).fetch() for each in (worker, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    if loss_mode == "clip_cov":
        num_tokens = int(sequence_batch(8, seed=1)["response_mask"].sum())
        assert mine["actor/pg_clipfrac"] == pytest.approx(int(0.1 * num_tokens) / num_tokens)


async def test_rejected_tokens_move_no_weight(tiny_model: Path) -> None:
    """And still counts in the denominators: half of equal rows give half the loss."""
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    job = actor_job(tiny_model, algorithm={"rollout_correction": correction})
    batch = sequence_batch(4)
    batch = DataProto.concat([batch, batch])
    losses, norms = [], []
    for kept in (8, 4, 0):
        batch["loss_mask"] = batch["response_mask"] & (torch.arange(8) < kept)[:, None]
        metrics = await ActorWorker(job).update(batch)
        losses.append(metrics["actor/pg_loss"])
        norms.append(metrics["actor/grad_norm"])
    assert losses == pytest.approx([losses[0], losses[0] / 2, 0])
    assert norms == pytest.approx([norms[0], norms[0] / 2, 0], rel=1e-4)


async def test_gradient_checkpointing_changes_no_bit(two_layers: Path) -> None:
    async def weights(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = {"path": str(two_layers), "enable_gradient_checkpointing": checkpointing}
        worker = ActorWorker(actor_job(two_layers, {"model": model}))
        await worker.update(sequence_batch(16))
        return await (await worker.publish_weights(1)).fetch()

    with_it, without = await weights(True), await weights(False)
    assert all(torch.equal(with_it[name], without[name]) for name in without)


async def test_bfloat16_trains_float32_weights(tiny_model: Path) -> None:
    model = {"path": str(tiny_model), "dtype": "bfloat16"}
    worker = ActorWorker(actor_job(tiny_model, {"model": model}))
    batch = sequence_batch(8)
    exact = await ActorWorker(actor_job(tiny_model)).compute_log_probs(batch)
    rounded = await worker.compute_log_probs(batch)
    assert rounded["old_log_probs"].dtype == torch.float32
    assert not torch.equal(exact["old_log_probs"], rounded["old_log_probs"])
    assert_close(exact["old_log_probs"], rounded["old_log_probs"], rtol=0.02, atol=0.05)
    metrics = await worker.update(batch)
    assert math.isfinite(metrics["actor/grad_norm"])
    published = await (await worker.publish_weights(1)).fetch()
    assert {w.dtype for w in published.values()} == {torch.float32}
    # An engine that holds its weights in rollout.dtype gets them in it. hf holds float32 whatever the dtype.
    vllm = ActorWorker(actor_job(tiny_model, {"model": model}, rollout={"name": "vllm", "dtype": "bfloat16"}))
    await vllm.update(batch)
    cast = await (await vllm.publish_weights(1)).fetch()
    for name, weight in published.items():
        assert torch.equal(cast[name], weight.bfloat16() if weight.dim() > 1 else weight), name


async def test_padding_and_what_stands_in_it_change_nothing(tiny_model: Path) -> None:
    """Other ids in the padding, other numbers in the masked cells: the same weights, bit for bit."""

    async def weights(batch: DataProto) -> dict[str, torch.Tensor]:
        worker = ActorWorker(actor_job(tiny_model))
        await worker.update(batch)
        return await (await worker.publish_weights(1)).fetch()

    batch, other = sequence_batch(8), sequence_batch(8)
    other["input_ids"] = torch.where(other["attention_mask"].bool(), other["input_ids"], 7)
    for column in ("advantages", "old_log_probs"):
        other[column] = torch.where(other["response_mask"], other[column], -9.0)
    mine, theirs = await weights(batch), await weights(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


async def test_nan_never_reaches_the_weights_and_is_counted(tiny_model: Path) -> None:
    counter = "rolemesh_nonfinite_gradients_total", {"role": "actor"}
    worker = ActorWorker(actor_job(tiny_model))
    counted = REGISTRY.get_sample_value(*counter)
    assert counted is not None  # else the first one would be no increase
    before = await (await worker.publish_weights(1)).fetch()
    batch = sequence_batch(8)
    batch["advantages"][2, 0] = float("nan")
    batch["response_mask"][2, 0] = True
    with pytest.raises(UpdateFailed, match=r"actor\.update: the gradient's norm is nan at optimizer step 1"):
        await worker.update(batch)
    after = await (await worker.publish_weights(2)).fetch()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert REGISTRY.get_sample_value(*counter) == counted + 1


async def test_published_weights_are_a_copy_under_hugging_face_names(any_model: Path) -> None:
    worker = ActorWorker(actor_job(any_model))
    source = await worker.publish_weights(3)
    before = await source.fetch()
    stored = load_file(any_model / "model.safetensors")
    assert source.version == 3
    assert before.keys() == stored.keys()  # the directory too has tied weights once
    assert all(torch.equal(before[name], stored[name]) for name in stored)
    await worker.update(sequence_batch(8))
    assert all(torch.equal(before[name], stored[name]) for name in stored)
    after = await (await worker.publish_weights(4)).fetch()
    assert not all(torch.equal(before[name], after[name]) for name in stored)


async def test_the_learning_rate_changes_once_per_training_step(
    tiny_model: Path,
) -> None:
    """Two mini-batches and three passes are one step of the schedule. At rate 0 nothing moves."""
    optim = {"lr": 1e-3, "lr_warmup_steps": 4}
    worker = ActorWorker(actor_job(tiny_model, {"optim": optim, "ppo_epochs": 3}))
    before = {name: weight.clone() for name, weight in worker.model.state_dict().items()}
    rates = [(await worker.update(sequence_batch(16)))["actor/lr"]]
    assert all(torch.equal(before[name], weight) for name, weight in worker.model.state_dict().items())
    rates += [(await worker.update(sequence_batch(16)))["actor/lr"] for _ in range(5)]
    assert rates == [0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3]
    assert worker.optimizer.num_updates == 6 * 6


async def test_rows_that_do_not_fit_are_refused(tiny_model: Path) -> None:
    worker = ActorWorker(actor_job(tiny_model))
    with pytest.raises(InvalidBatch, match="12 rows do not divide into mini-batches of 8"):
        await worker.update(sequence_batch(12))
    batch = sequence_batch(8)
    batch.pop(["advantages"])
    with pytest.raises(InvalidBatch, match="advantages"):
        await worker.update(batch)
    batch["position_ids"] = batch["position_ids"][:, :-1]
    with pytest.raises(InvalidBatch, match="position_ids"):
        await worker.compute_log_probs(batch)


def test_a_job_that_trains_in_float16_is_refused() -> None:
    for role in ("actor", "critic"):
        with pytest.raises(InvalidConfig, match=f"{role}.model: dtype is float16, .* bfloat16 or float32"):
            make_job({role: {"model": {"dtype": "float16"}}})
    make_job({"reference": {"model": {"dtype": "float16"}}, "rollout": {"dtype": "float16"}})


def test_an_actor_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such model directory"):
        ActorWorker(actor_job(tmp_path / "absent"))


@pytest.mark.parametrize("at", [4, 7])  # of a prompt of columns 0 to 5, and of a response after it
async def test_a_hole_in_a_sequence_is_refused(tiny_model: Path, at: int) -> None:
    worker, batch = ActorWorker(actor_job(tiny_model)), sequence_batch(8)
    batch["attention_mask"][:] = 1
    batch["position_ids"][:] = torch.arange(batch["position_ids"].shape[1])
    await worker.compute_log_probs(batch)
    batch["attention_mask"][2, at] = 0
    batch["response_mask"][2, 1] = False
    with pytest.raises(InvalidBatch, match="row 2 of attention_mask has a hole"):
        await worker.compute_log_probs(batch)
