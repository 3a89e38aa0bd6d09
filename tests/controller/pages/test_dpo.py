"""Preference training: loss and gradient are those of the two answers as sequences of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from float64 import in_float64
from in_process import recorded, train, workers
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from rolemesh.algos.job_loss import token_losses
from rolemesh.algos.policy_loss import row_mean
from rolemesh.catalog.plugin_imports import forget
from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.data.pairs import PairDataset
from rolemesh.data.parquet import write_rows
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleFailed
from rolemesh.models import sharded
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.controller.stages.experience import join
from rolemesh.services.controller.stages.validation import validate_pairs

BETA = 0.3


def rows(number: int) -> list[dict[str, Any]]:
    """Pairs of uneven lengths."""
    return [
        {"prompt": f"{i}+{i}=", "chosen": str(2 * i) * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
        for i in range(number)
    ]


def dpo_job(directory: Path, model: Path, run: str = "run", **sections: Any) -> JobConfig:
    for name, number in (("train", 12), ("val", 5)):
        write_rows(directory / f"{name}.parquet", rows(number))
    base: dict[str, Any] = {
        "algorithm": {"page": "dpo"},
        "data": {
            "train_files": str(directory / "train.parquet"),
            "val_files": str(directory / "val.parquet"),
            "train_batch_size": 4,
            "val_batch_size": 2,
            "max_length": 128,
        },
        "actor": {
            "model": {"path": str(model)},
            "optim": {"lr": 1e-3},
            "policy_loss": {"dpo_beta": BETA},
            "ppo_mini_batch_size": 4,
            "ppo_micro_batch_size_per_gpu": 2,
        },
        "reference": {"log_prob_micro_batch_size_per_gpu": 2},
        "trainer": {
            "device": "cpu",
            "total_epochs": 1,
            "save_freq": 1,
            "test_freq": 1,
            "default_local_dir": str(directory / run),
        },
    }
    return make_job(merge(base, sections))


def log_ratio(model: Any, reference: Any, ids: Tensor, learned: Tensor) -> Tensor:
    """The log-ratios [tokens] of what is learned of one sequence, without padding."""
    found = []
    for each in (model, reference):
        log_probs = each(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(log_probs.gather(1, ids[1:, None])[:, 0][learned[1:]])
    return found[0] - found[1].detach()


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("loss", ["dpo", "dpo_norm", "ipo"])
async def test_loss_and_gradient_match_answers_as_separate_sequences(
    tiny_model: Path, tmp_path: Path, micro: int, packed: bool, loss: str
) -> None:
    actor = {
        "model": {"use_remove_padding": packed},
        "policy_loss": {"loss_mode": loss},
        "ppo_micro_batch_size_per_gpu": micro,
        "grad_clip": 1e9,
    }
    job = dpo_job(tmp_path, tiny_model, actor=actor)
    data = PairDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    batch = join(data.batch(range(4)))

    reference = in_float64(AutoModelForCausalLM.from_pretrained(tiny_model))
    model = in_float64(AutoModelForCausalLM.from_pretrained(tiny_model))
    moved = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in reference.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=moved, dtype=weight.dtype)
    batch["ref_log_probs"] = torch.zeros(batch["response_mask"].shape, dtype=torch.float64)
    margins = []
    for row in range(4):
        sides = []
        ids, attended = batch["input_ids"][row], batch["attention_mask"][row].bool()
        learned = torch.cat([torch.zeros(1).bool(), batch["response_mask"][row]])
        contexts = torch.cat([torch.zeros(1).long(), batch["contexts"][row]])
        for which in (0, 1):
            own = attended & (contexts == which)
            ratio = log_ratio(model, reference, ids[own], learned[own])
            with torch.no_grad():
                log_probs = reference(input_ids=ids[own][None]).logits[0, :-1].log_softmax(-1)
                of_tokens = log_probs.gather(1, ids[own][1:, None])[:, 0][learned[own][1:]]
            batch["ref_log_probs"][row, (own & learned)[1:]] = of_tokens
            sides.append(ratio.sum() if loss == "dpo" else ratio.mean())
        margins.append(sides[0] - sides[1])
    margin = torch.stack(margins)
    expected = (margin - 1 / (2 * BETA)).square() if loss == "ipo" else -logsigmoid(BETA * margin)
    expected.mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])

    load = sharded.load_causal_lm
    with patch.object(sharded, "load_causal_lm", lambda *args: in_float64(load(*args))):
        worker = ActorWorker(job)
    found: list[Tensor] = []
    step = worker.optimizer.step

    def seen() -> Any:
        found.append(torch.cat([p.grad.flatten() for p in worker.model.parameters()]))
        return step()

    with patch.object(worker.optimizer, "step", seen):
        metrics = await worker.update(batch)
    worker.close()
    assert metrics["actor/loss"] == pytest.approx(expected.mean().item(), rel=1e-10)
    assert metrics["rewards/accuracies"] == (margin > 0).double().mean()
    assert (found[0] - gradient).norm() <= 1e-10 * gradient.norm()


@pytest.mark.parametrize("lora_rank", [0, 4])
async def test_a_run_learns_the_preference_and_resumes_bit_for_bit(
    tiny_model: Path, tmp_path: Path, lora_rank: int
) -> None:
    actor = {"model": {"lora_rank": lora_rank}, "optim": {"lr": 1e-2}}
    job, cut = (dpo_job(tmp_path, tiny_model, run, actor=actor) for run in ("whole", "cut"))
    assert job.roles == (("actor",) if lora_rank else ("actor", "reference"))
    await train(job)
    short = cut.model_copy(update={"trainer": cut.trainer.model_copy(update={"total_training_steps": 2})})
    await train(short)
    await train(cut)
    records = recorded(job)
    assert records[-1] == recorded(cut)[-1]
    assert records[0]["val/loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item())
    assert records[-1]["val/loss"] < records[0]["val/loss"]
    assert records[-1]["val/rewards/margins"] > 0


PLUGIN = """
from pydantic import Field

from rolemesh.algos.policy_loss import TokenLosses
from rolemesh.plugins import Options, page, policy_loss
from rolemesh.services.controller.stages.experience import join


class Margin(Options):
    margin: float = Field(1.0)


@policy_loss("margins", reads=("contexts",), options=Margin)
def margins(log_probs, contexts, response_mask, *, margin):
    if margin < 0:
        raise KeyError("margin")
    return TokenLosses(margin * (contexts == 1) + 0 * log_probs)


@page("own_pairs", learns_from="pairs", losses=("margins",), roles=("actor", "reference"))
async def own_pairs(prompts, roles, step):
    batch = join(prompts)
    return step.report(batch, await roles.actor.update(batch))
"""


async def test_a_plugin_loss_is_validated_with_its_options_over_pairs(tiny_model: Path, tmp_path: Path) -> None:
    """The loss is the margin on the rejected answer's tokens, and 0 on those of the chosen one before it."""
    file = tmp_path / "own.py"
    file.write_text(PLUGIN)

    def job_of(margin: float) -> JobConfig:
        loss = {"loss_mode": "margins", "options": {"margin": margin}}
        sections = {"plugins": [str(file)], "algorithm": {"page": "own_pairs"}, "actor": {"policy_loss": loss}}
        return dpo_job(tmp_path, tiny_model, **sections)

    try:
        job = job_of(3.0)
        with workers(job) as roles:
            data = PairDataset(job.data.val_files, job.data, load_tokenizer(job.actor.model))
            found = await validate_pairs(data.batches(2), roles, job)
            batch = join(data.batch(range(5)))
            mask, rejected = batch["response_mask"], batch["contexts"] == 1
            shares = (mask & rejected).sum(1) / mask.sum(1)
            assert len(set(shares.tolist())) > 2
            assert found == {"val/loss": pytest.approx(3 * shares.mean().item())}
            with pytest.raises(
                RoleFailed, match=r"policy loss margins of .* raised KeyError: 'margin' \(own\.py"
            ):
                await validate_pairs(data.batches(2), roles, job_of(-1.0))
    finally:
        forget(str(file))


@pytest.mark.parametrize("loss", ["dpo", "dpo_norm", "ipo"])
def test_a_pair_loss_has_the_bits_of_the_mean_over_its_tokens(loss: str) -> None:
    """So val/loss of a built-in loss, which stands at each token, is what it was from the first token."""
    torch.manual_seed(0)
    mask = torch.rand(200, 37) < 0.6
    rows = DataProto(
        {"ref_log_probs": -torch.rand(200, 37), "contexts": (torch.arange(37) > 15).long().expand(200, 37)}
    )
    job = make_job({"algorithm": {"page": "dpo"}, "actor": {"policy_loss": {"loss_mode": loss}}})
    losses = token_losses(-torch.rand(200, 37), rows, mask, job).losses
    assert torch.equal(row_mean(losses.double(), mask)[:, 0].float(), losses[:, 0])


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"algorithm": {"page": "grpo"}}, "actor.policy_loss.loss_mode is ipo, a loss of page dpo"),
        ({"algorithm": {"page": "sft"}}, "actor.policy_loss.loss_mode is ipo, a loss of page dpo"),
    ],
)
def test_a_loss_of_pairs_is_of_its_page_alone(
    tiny_model: Path, tmp_path: Path, sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidConfig, match=says):
        dpo_job(tmp_path, tiny_model, actor={"policy_loss": {"loss_mode": "ipo"}}, **sections)
