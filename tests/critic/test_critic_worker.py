"""The critic, on real models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import WITHOUT_CHECKPOINTING
from float64 import in_float64
from saving import saved
from sequences import sequence_batch
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rolemesh.algos.aggregation import BatchCounts, TokenMean
from rolemesh.config import JobConfig
from rolemesh.config.actor import CriticConfig
from rolemesh.config.job import make_job
from rolemesh.config.model import ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, UpdateFailed
from rolemesh.models.heads import ScoreModel
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.models.packed.load_probe import remove_padding
from rolemesh.models.sequence import token_values
from rolemesh.services.critic.worker import CriticWorker, value_objective

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.fixture(autouse=True)
def _in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles write checkpoints there alone."""
    monkeypatch.chdir(tmp_path)


def critic_job(
    model: Path, critic: dict[str, Any] | None = None, actor: dict[str, Any] | None = None
) -> JobConfig:
    base = {
        "model": {**WITHOUT_CHECKPOINTING},
        "ppo_micro_batch_size_per_gpu": 4,
        "optim": {"lr": 1e-3},
    }
    policy = {
        "model": {"path": str(model)},
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size_per_gpu": 4,
        **(actor or {}),
    }
    data = {"train_batch_size": 16}
    return make_job(
        {
            "data": data,
            "trainer": {"device": "cpu", "default_local_dir": "."},
            "actor": policy,
            "critic": base | (critic or {}),
        }
    )


async def test_values_are_the_heads_at_the_token_before(any_model: Path) -> None:
    """Against the library's own body, row by row and unpadded. A new head is small and differs by seed."""
    batch = sequence_batch(5)
    worker = CriticWorker(critic_job(any_model))
    values = (await worker.compute_values(batch))["values"]
    body = AutoModel.from_pretrained(any_model, dtype=torch.float32).eval()
    head = worker.model.score
    for row in range(5):
        seen = batch["attention_mask"][row].bool()
        with torch.no_grad():
            hidden = body(batch["input_ids"][row][seen][None]).last_hidden_state[0, :-1]
            predicted = hidden @ head.weight[0]
        length = int(batch["attention_mask"][row, 6:].sum())
        padded = torch.zeros(10)
        padded[:length] = predicted[-length:]
        assert_close(values[row], padded * batch["response_mask"][row], rtol=1e-4, atol=1e-6)
    assert 0 < values.abs().max() < 0.5
    other = (await CriticWorker(critic_job(any_model, {"seed": 1})).compute_values(batch))["values"]
    assert not torch.equal(values, other)


@pytest.mark.parametrize(("prompt", "response"), [(6, 10), (24, 31), (5, 3), (5, 1)])
async def test_a_rows_values_do_not_depend_on_its_neighbours(
    any_model: Path, prompt: int, response: int
) -> None:
    batch = sequence_batch(24, prompt=prompt, response=response)
    whole = (await CriticWorker(critic_job(any_model)).compute_values(batch))["values"]
    for size in (1, 8):
        worker = CriticWorker(critic_job(any_model, {"ppo_micro_batch_size_per_gpu": size}))
        pieces = [batch[at] for at in (slice(0, 1), slice(1, 4), slice(4, 11), slice(11, 24))]
        parts = DataProto.concat([await worker.compute_values(piece) for piece in pieces])
        assert torch.equal(whole, parts["values"])


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
async def test_a_reward_model_lends_body_and_head(tiny_model: Path, tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(0)
    theirs = kind.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    worker = CriticWorker(critic_job(tiny_model, {"model": {"path": str(tmp_path)}}))
    assert torch.equal(worker.model.score.weight, theirs.score.weight)
    for mine, other in zip(worker.model.body.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


async def test_a_critic_is_saved_as_a_token_classification_directory(any_model: Path, tmp_path: Path) -> None:
    worker = CriticWorker(critic_job(any_model))
    batch = sequence_batch(8)
    await worker.update(batch)
    await saved(worker, tmp_path / "critic")
    values = (await worker.compute_values(batch))["values"]
    theirs, found = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "critic", dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    with torch.no_grad():
        logits = theirs.eval()(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        ).logits[:, 5:-1, 0]
    assert_close(logits * batch["response_mask"], values, rtol=1e-4, atol=1e-5)
    again = CriticWorker(critic_job(any_model, {"model": {"path": str(tmp_path / "critic")}}))
    assert torch.equal((await again.compute_values(batch))["values"], values)


async def test_an_update_moves_values_to_returns(tiny_model: Path) -> None:
    worker = CriticWorker(critic_job(tiny_model, {"ppo_epochs": 4, "shuffle": True}))
    batch = sequence_batch(16)
    batch["returns"] = torch.ones_like(batch["returns"])
    mask = batch["response_mask"]
    before = batch["values"] = (await worker.compute_values(batch))["values"]
    first = await worker.update(batch)
    after = (await worker.compute_values(batch))["values"]
    assert (after - 1)[mask].square().mean() < 0.5 * (before - 1)[mask].square().mean()
    assert set(first) == {
        f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")
    }
    assert all(math.isfinite(value) for value in first.values())


async def test_a_critic_uses_the_actors_epochs_and_shuffle_unless_set(tiny_model: Path) -> None:
    """16 rows are two mini-batches. Two shuffled passes differ from two that are not."""

    async def trained(critic: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
        worker = CriticWorker(critic_job(tiny_model, critic, {"ppo_epochs": 2, "shuffle": True}))
        await worker.update(sequence_batch(16))
        return worker.optimizer.num_updates, worker.model.state_dict()

    follows, weights = await trained({})
    own, _ = await trained({"ppo_epochs": 3})
    _, unshuffled = await trained({"shuffle": False})
    assert (follows, own) == (4, 6)
    assert not all(torch.equal(weights[name], unshuffled[name]) for name in weights)


def test_a_critics_loss_is_aggregated_as_the_actors_unless_set() -> None:
    """Squared errors 4 and 16, half of them taken: 10 in all over 2 rows, and over the actor's divisor 5; a
    mode of its own adds them up."""
    rows = DataProto(
        {
            "response_mask": torch.tensor([[True, False], [True, False]]),
            "values": torch.zeros(2, 2),
            "returns": torch.tensor([[2.0, 9.0], [4.0, 9.0]]),
        }
    )
    actor = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 5}
    for own, expected in (({}, 10 / 2 / 5), ({"loss_agg_mode": "token-sum"}, 10)):
        config = make_job({"actor": actor, "critic": own}).critic
        loss, _ = value_objective(torch.zeros(2, 2), rows, BatchCounts.of(rows["response_mask"]), config)
        assert loss.item() == pytest.approx(expected)


def test_rejected_tokens_are_in_no_mean_that_a_critic_reports() -> None:
    """Values 1, 1 and 9, of which 9 is rejected. The second was 2: held at 1.5 it is further off."""
    rows = DataProto(
        {
            "response_mask": torch.tensor([[True, True], [True, False]]),
            "loss_mask": torch.tensor([[True, True], [False, False]]),
            "values": torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
            "returns": torch.tensor([[1.0, 0.0], [20.0, 0.0]]),
        }
    )
    values = torch.tensor([[1.0, 1.0], [9.0, 0.0]])
    _, shares = value_objective(values, rows, BatchCounts.of(rows["response_mask"]), make_job({}).critic)
    token_means = {name: share for name, share in shares.items() if isinstance(share, TokenMean)}
    means = {name: (share.total / share.num_tokens).item() for name, share in token_means.items()}
    assert means == {"vf_clipfrac": 1 / 2, "vpred_mean": 1.0}


async def test_the_first_mini_batch_reports_half_the_squared_error(tiny_model: Path) -> None:
    worker = CriticWorker(critic_job(tiny_model))
    batch = sequence_batch(8)
    batch["values"] = (await worker.compute_values(batch))["values"]
    mask = batch["response_mask"]
    metrics = await worker.update(batch)
    error = (batch["values"] - batch["returns"])[mask].square().mean()
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 * float(error), rel=1e-5)
    assert metrics["critic/vpred_mean"] == pytest.approx(float(batch["values"][mask].mean()), rel=1e-5)
    assert metrics["critic/vf_clipfrac"] == 0
    assert metrics["critic/lr"] == 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(tiny_model: Path, mode: str) -> None:
    config = CriticConfig(loss_agg_mode=mode)  # type: ignore[arg-type]
    models = [in_float64(ScoreModel.load(ModelConfig(path=str(tiny_model)), "critic")) for _ in range(2)]
    remove_padding(models[1].body, "critic")
    batch = sequence_batch(8)

    def loss_and_gradient(packed: bool, num_rows: int, max_tokens: int | None = None) -> list[torch.Tensor]:
        model, total = models[packed], torch.zeros((), dtype=torch.float64)
        model.zero_grad()
        for at in MicroBatches(num_rows, max_tokens, packed, balanced=True).cut(batch):
            rows = batch.select_idxs(at)
            loss, _ = value_objective(
                token_values(model, rows), rows, BatchCounts.of(batch["response_mask"]), config
            )
            loss.backward()
            total += loss.detach()
        return [total, *(parameter.grad.clone() for parameter in model.parameters())]

    whole = loss_and_gradient(False, 8)
    for cut in ((False, 1), (False, 3), (False, 8, 40), (True, 8), (True, 3), (True, 1), (True, 8, 17)):
        for mine, theirs in zip(loss_and_gradient(*cut), whole, strict=True):
            assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


async def test_nan_never_reaches_the_weights(tiny_model: Path) -> None:
    worker = CriticWorker(critic_job(tiny_model))
    before = [parameter.detach().clone() for parameter in worker.model.parameters()]
    batch = sequence_batch(8)
    batch["returns"] = batch["returns"] * float("inf")
    with pytest.raises(UpdateFailed, match=r"critic\.update: the gradient's norm is .* at optimizer step 1"):
        await worker.update(batch)
    assert all(torch.equal(*pair) for pair in zip(before, worker.model.parameters(), strict=True))


async def test_what_does_not_fit_is_refused(tiny_model: Path) -> None:
    worker = CriticWorker(critic_job(tiny_model))
    with pytest.raises(InvalidBatch, match="12 rows do not divide into mini-batches of 8"):
        await worker.update(sequence_batch(12))
