"""Supervised training: the loss is the cross-entropy, the actor is alone, a resumed run is an unbroken one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from float64 import in_float64
from in_process import recorded, train
from transformers import AutoModelForCausalLM

from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.data.parquet import write_rows
from rolemesh.data.supervised import SupervisedDataset
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from rolemesh.models import sharded
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.controller.pages.choice import check_step
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.stages.experience import join


def rows(number: int) -> list[dict[str, Any]]:
    """Conversations of one to three turns, of uneven lengths."""
    return [
        {
            "messages": [
                message
                for turn in range(1 + i % 3)
                for message in (
                    {"role": "user", "content": f"{i}+{turn}="},
                    {"role": "assistant", "content": str(i + turn) * (1 + i % 4)},
                )
            ],
            "data_source": "sums" if i % 2 else "more sums",
        }
        for i in range(number)
    ]


def sft_job(directory: Path, model: Path, run: str = "run", **sections: Any) -> JobConfig:
    for name, number in (("train", 20), ("val", 5)):
        write_rows(directory / f"{name}.parquet", rows(number))
    base: dict[str, Any] = {
        "algorithm": {"page": "sft"},
        "data": {
            "train_files": str(directory / "train.parquet"),
            "val_files": str(directory / "val.parquet"),
            "train_batch_size": 8,
            "val_batch_size": 2,
            "max_length": 128,
        },
        "actor": {
            "model": {"path": str(model)},
            "optim": {"lr": 1e-3},
            "ppo_mini_batch_size": 4,
            "ppo_micro_batch_size_per_gpu": 2,
        },
        "trainer": {
            "device": "cpu",
            "total_epochs": 2,
            "save_freq": 1,
            "test_freq": 2,
            "default_local_dir": str(directory / run),
        },
    }
    return make_job(merge(base, sections))


def batch_of(job: JobConfig, number: int) -> DataProto:
    data = SupervisedDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    return join(data.batch(range(number)))


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
async def test_loss_and_gradient_are_those_of_the_cross_entropy(
    tiny_model: Path, tmp_path: Path, micro: int, packed: bool
) -> None:
    actor = {
        "model": {
            "path": str(tiny_model),
            "use_remove_padding": packed,
            "enable_gradient_checkpointing": False,
        },
        "ppo_mini_batch_size": 4,
        "ppo_micro_batch_size_per_gpu": micro,
        "grad_clip": 1e9,
    }
    job = sft_job(tmp_path, tiny_model, actor=actor)
    batch = batch_of(job, 4)

    model = in_float64(AutoModelForCausalLM.from_pretrained(tiny_model))
    labels = torch.full_like(batch["input_ids"], -100)
    learned = batch["response_mask"]
    labels[:, -learned.shape[1] :][learned] = batch["input_ids"][:, -learned.shape[1] :][learned]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])

    load = sharded.load_causal_lm
    with patch.object(sharded, "load_causal_lm", lambda *args: in_float64(load(*args))):
        worker = ActorWorker(job)
    found: list[torch.Tensor] = []
    step = worker.optimizer.step

    def seen() -> Any:
        found.append(torch.cat([p.grad.flatten() for p in worker.model.parameters()]))
        return step()

    with patch.object(worker.optimizer, "step", seen):
        metrics = await worker.update(batch)
    worker.close()
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert (found[0] - gradient).norm() <= 1e-10 * gradient.norm()


async def test_validation_is_the_mean_over_tokens_of_all_batches(tiny_model: Path, tmp_path: Path) -> None:
    job = sft_job(
        tmp_path,
        tiny_model,
        trainer={"val_only": True},
    )
    await train(job)
    [record] = recorded(job)
    data = SupervisedDataset(job.data.val_files, job.data, load_tokenizer(job.actor.model), split="val")
    batch = join(data.batch(range(5)))
    worker = ActorWorker(job)
    log_probs = (await worker.compute_log_probs(batch))["old_log_probs"].double()
    worker.close()
    mask = batch["response_mask"]
    assert record["val/loss"] == pytest.approx(-(log_probs.sum() / mask.sum()).item(), rel=1e-12)
    odd = torch.tensor([source == "sums" for source in batch["data_source"]])
    expected = -(log_probs[odd].sum() / mask[odd].sum()).item()
    assert record["val/sums/loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("lora_rank", [0, 4])
async def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(
    tiny_model: Path, tmp_path: Path, lora_rank: int
) -> None:
    model = {"path": str(tiny_model), "lora_rank": lora_rank}
    actor = {"model": model, "ppo_mini_batch_size": 4, "optim": {"lr": 1e-2}}
    job, cut = (sft_job(tmp_path, tiny_model, run, actor=actor) for run in ("whole", "cut"))
    await train(job)
    short = cut.model_copy(update={"trainer": cut.trainer.model_copy(update={"total_training_steps": 3})})
    await train(short)
    await train(cut)
    records = recorded(job)
    assert [record["training/global_step"] for record in records] == [0, 1, 2, 3, 4, 5]
    losses = [record["val/loss"] for record in records if "val/loss" in record]
    assert losses[-1] != losses[0]  # its weights have changed
    assert records[-1] == recorded(cut)[-1]
    weights = "adapter_model.safetensors" if lora_rank else "model.safetensors"
    ends = [(each.run_dir / "global_step_5/actor" / weights).read_bytes() for each in (job, cut)]
    assert ends[0] == ends[1]


def test_the_job_has_the_actor_alone_under_every_placement(tiny_model: Path, tmp_path: Path) -> None:
    for strategy in ("standalone", "collocate", "hybrid", "split-collocate"):
        job = sft_job(tmp_path, tiny_model, placement={"strategy": strategy})
        assert job.roles == ("actor",)
        assert list(job.plan.grouping.values()) == [("actor",)]


def test_a_job_that_wants_several_answers_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"rollout\.n is 4, but page sft answers no prompts"):
        sft_job(tmp_path, tiny_model, rollout={"n": 4})


async def test_keys_for_generated_answers_have_no_effect_and_warn(tiny_model: Path, tmp_path: Path) -> None:
    """The engine's log-probabilities, and conversations: no engine answers here."""
    trainer = {"total_training_steps": 1, "test_freq": 1}
    plain = sft_job(tmp_path, tiny_model, "plain", trainer=trainer)
    correction = {"bypass_mode": True, "rollout_rs": "token_k2", "rollout_rs_threshold": 9}
    job = sft_job(
        tmp_path,
        tiny_model,
        "merged",
        trainer=trainer | {"max_rollout_kl": 0.1},
        algorithm={"rollout_correction": correction},
        rollout={"multi_turn": {"enable": True}},
    )
    warned = {unused.key: unused.reason for unused in job.unused_keys() if unused.is_set}
    keys = {
        "trainer.max_rollout_kl",
        "rollout.multi_turn.enable",
        *(f"algorithm.rollout_correction.{key}" for key in correction),
    }
    assert warned == dict.fromkeys(keys, "algorithm.page sft answers no prompts")
    for each in (plain, job):
        await train(each)
    assert recorded(job) == recorded(plain)
    assert "val/loss" in recorded(job)[0]
    weights = [(each.run_dir / "global_step_1/actor/model.safetensors").read_bytes() for each in (plain, job)]
    assert weights[0] == weights[1]
    await check_step(sft_job(tmp_path, tiny_model, algorithm={"rollout_correction": {"rollout_is": "token"}}))


@pytest.mark.parametrize("name", [spec.name for spec in ESTIMATORS.values() if spec.compares])
def test_no_estimator_requires_several_responses_in_sft(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """So a recipe of sft can be merged over a job of any algorithm."""
    components = {"gdpo_reward_keys": ["first", "second"]} if name == "gdpo" else {}
    merged = {"algorithm": {"adv_estimator": name, **components}, "rollout": {"do_sample": False}}
    assert sft_job(tmp_path, tiny_model, **merged).roles == ("actor",)
    with pytest.raises(InvalidConfig, match=r"critic_warmup is 2, but a job .* has no critic"):
        sft_job(tmp_path, tiny_model, **merged, trainer={"critic_warmup": 2})


def test_use_kl_loss_is_refused_where_the_page_has_no_reference(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfig, match=r"actor\.use_kl_loss is true, but page sft calls no reference policy"
    ):
        sft_job(tmp_path, tiny_model, actor={"use_kl_loss": True})


@pytest.mark.parametrize(
    ("name", "is_known"), [("val/loss", True), ("val/sums/loss", True), ("val/sum/loss", False)]
)
def test_a_loss_that_validation_lacks_is_refused(
    name: str, is_known: bool, tiny_model: Path, tmp_path: Path
) -> None:
    job = sft_job(tmp_path, tiny_model, trainer={"save_best": name})
    with nullcontext() if is_known else pytest.raises(InvalidConfig, match=r"only val/loss, .*, val/sums/loss"):
        Run(job, load_tokenizer(job.actor.model))
