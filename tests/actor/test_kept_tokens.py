"""Actor and reference with truncated sampling: a token has the probability that it had among its kept ids."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import actor_job
from sequences import sequence_batch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.models.distribution import WantedStatistics
from rolemesh.models.sequence import token_stats
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.controller.stages.experience import join
from rolemesh.services.rollout.worker import RolloutWorker


@pytest.fixture(autouse=True)
def _in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles write checkpoints there alone."""
    monkeypatch.chdir(tmp_path)


TRUNCATED = {"temperature": 0.7, "top_k": 12, "top_p": 0.9}


def keeping(batch: DataProto, num_kept: int = 12) -> DataProto:
    """The batch as if each token had been drawn from it and a few others, -1 where no token was."""
    generator = torch.Generator().manual_seed(5)
    mask = batch["response_mask"]
    drawn = batch["input_ids"][:, -mask.shape[1] :, None]
    others = torch.rand(*mask.shape, 250, generator=generator).argsort(-1)[..., 1:num_kept]
    others = others.masked_fill((others == drawn) | (torch.rand(others.shape, generator=generator) < 0.3), -1)
    batch["kept_ids"] = torch.cat([drawn, others], -1).masked_fill(~mask[..., None], -1).int()
    return batch


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, TRUNCATED, {"top_k": 5}, {"top_k": 400, "top_p": 0.6}]
)
async def test_old_and_ref_log_probs_match_the_engines_distribution(
    any_model: Path, sampling: dict[str, Any]
) -> None:
    job = actor_job(
        any_model,
        {"use_kl_loss": True},
        rollout=sampling,
        data={"train_batch_size": 16, "max_prompt_length": 6, "max_response_length": 10},
    )
    mask = torch.arange(6) >= torch.arange(8)[:, None] % 6
    prompts = DataProto(
        {
            "prompts": torch.randint(0, 250, (8, 6), generator=torch.Generator().manual_seed(0)),
            "prompt_mask": mask,
            "seeds": torch.arange(8),
        },
        {},
        {"sampling": "train"},
    )
    rollout = RolloutWorker(job)
    finished = DataProto.concat([rows async for rows in rollout.generate(prompts)])
    rollout.close()
    batch = join(prompts.select_idxs(finished["row"]).union(finished))
    old = await ActorWorker(job).compute_log_probs(batch)
    assert (old["old_log_probs"] - batch["rollout_log_probs"]).abs().max() < 1e-5
    if "kept_ids" in batch:
        assert old["entropys"].max() <= math.log(job.rollout.num_kept)
    reference = await ReferenceWorker(job).compute_log_probs(batch)
    assert torch.equal(reference["ref_log_probs"], old["old_log_probs"])


def test_statistics_over_kept_tokens_give_the_others_no_mass(
    tiny_model: Path,
) -> None:
    """The same numbers as from a distribution in which every other token has no mass."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    batch = keeping(sequence_batch(6))
    mask, kept = batch["response_mask"], batch["kept_ids"].long()
    log_probs, entropys, _ = token_stats(model, batch, temperature=0.7)
    assert entropys is not None
    assert log_probs.isfinite().all()
    assert entropys.isfinite().all()
    logits = model(
        batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits[:, 5:-1]
    allowed = (kept[..., None] == torch.arange(logits.shape[-1])).any(-2)
    softmax = (logits / 0.7).masked_fill(~allowed, -torch.inf)[mask].softmax(-1)
    expected = softmax.gather(-1, batch["input_ids"][:, 6:][mask][:, None])[:, 0].log()
    assert_close(log_probs[mask], expected)
    assert_close(entropys[mask], torch.special.entr(softmax).sum(-1))


def test_the_gradient_of_replay_matches_finite_differences() -> None:
    """Of a table of bigrams: inside a transformers model norms compute in float32, too coarse to differ."""
    batch = keeping(sequence_batch(4))
    mask, ids = batch["response_mask"], batch["input_ids"]
    wanted = WantedStatistics(temperature=0.7, entropy=True, entropy_gradient=True, sum_pi_squared=False)

    def replayed(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return wanted.of(table[ids[:, 5:-1][mask]], ids[:, 6:][mask], batch["kept_ids"][mask].long())[:2]

    table = torch.randn(257, 257, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(replayed, 3 * table.requires_grad_(), fast_mode=True)


def test_cells_without_a_token_have_no_gradient(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    batch = keeping(sequence_batch(4))
    log_probs, entropys, _ = token_stats(model, batch, temperature=0.7, entropy_gradient=True)
    assert entropys is not None
    (3 * log_probs + 3 * entropys)[~batch["response_mask"]].sum().backward()
    assert all((weight.grad == 0).all() for weight in model.parameters())


async def test_an_update_replays_the_kept_tokens(tiny_model: Path) -> None:
    """The first mini-batch finds no change of policy, and what the padding's kept ids are changes no bit."""
    job = actor_job(tiny_model, {"entropy_coeff": 0.01}, rollout=TRUNCATED)
    worker, batch = ActorWorker(job), keeping(sequence_batch(8))
    batch["old_log_probs"] = (await worker.compute_log_probs(batch))["old_log_probs"]
    metrics = await worker.update(batch)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0
    mine = await (await worker.publish_weights(1)).fetch()
    batch["kept_ids"] = torch.where(batch["response_mask"][..., None], batch["kept_ids"], 7)
    other = ActorWorker(job)
    await other.update(batch)
    theirs = await (await other.publish_weights(1)).fetch()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


async def test_kept_tokens_that_do_not_fit_are_refused(tiny_model: Path) -> None:
    worker, batch = ActorWorker(actor_job(tiny_model, rollout=TRUNCATED)), keeping(sequence_batch(4))
    kept = batch["kept_ids"]
    batch["kept_ids"] = kept[:, 1:]
    with pytest.raises(InvalidBatch, match=r"kept_ids \[B, T, K\]"):
        await worker.compute_log_probs(batch)
    batch["kept_ids"] = torch.where(batch["response_mask"][..., None], kept, -1)
    batch["kept_ids"][1, 0] = -1
    with pytest.raises(InvalidBatch, match=r"response token 0 of row 1 is .* not among the kept_ids"):
        await worker.compute_log_probs(batch)
    batch.pop(["kept_ids"])
    with pytest.raises(InvalidBatch, match="needs columns"):
        await worker.compute_log_probs(batch)
