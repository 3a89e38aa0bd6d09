"""New weights for the hf engine in its worker, between two tokens and for a batch that waits; and its sleep."""

import asyncio
import gc
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import COLUMNS, P, generated, job_of, prompts_of, trained
from transformers import AutoModelForCausalLM

from rolemesh.dataproto import DataProto
from rolemesh.errors import WeightsUnavailable
from rolemesh.models.loading import named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.rollout.engines.sampling import log_distribution
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import CAN_SHARE
from rolemesh.workers.lease import Lease
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.offloading import Offloader


def other_weights(model: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    other = make_tiny_model(tmp_path / "other", num_layers=1, seed=1)
    return named_weights(AutoModelForCausalLM.from_pretrained(other))


async def test_after_an_update_it_generates_as_the_new_model_does(tiny_model: Path, tmp_path: Path):
    worker, prompts = RolloutWorker(job_of(tiny_model)), prompts_of(6)
    weights = other_weights(tiny_model, tmp_path)
    await worker.update_weights(PublishedWeights(3, weights))
    updated = await generated(worker, prompts)
    assert worker.version == 3
    assert torch.equal(updated["weight_versions"], torch.where(updated["response_mask"], 3, -1))
    fresh = RolloutWorker(job_of(tmp_path / "other"))
    expected = await generated(fresh, prompts)
    for name in COLUMNS:
        assert torch.equal(updated[name], expected[name])
    worker.close()
    fresh.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(2)}), "lm_head.weight is unknown"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"is \[3\] torch.float32, not \[64\]"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(64).half()}), "float16"),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(
    tiny_model: Path, tmp_path: Path, spoil: Any, message: str
):
    worker, prompts = RolloutWorker(job_of(tiny_model)), prompts_of(4)
    before = await generated(worker, prompts)
    weights = other_weights(tiny_model, tmp_path)
    spoil(weights)
    with pytest.raises(WeightsUnavailable, match=message):
        await worker.update_weights(PublishedWeights(1, weights))
    after = await generated(worker, prompts)
    assert worker.version == 0
    assert torch.equal(before["rollout_log_probs"], after["rollout_log_probs"])
    worker.close()


async def with_a_swap(
    worker: RolloutWorker, prompts: DataProto, version: int, weights: dict[str, torch.Tensor]
) -> DataProto:
    """All rows, in order; the weights are swapped once the first of them have ended."""
    async with aclosing(worker.generate(prompts)) as stream:
        answers = [await anext(stream)]
        await worker.update_weights(PublishedWeights(version, weights))
        answers += [rows async for rows in stream]
    answer = DataProto.concat(answers)
    assert sorted(answer["row"].tolist()) == list(range(len(prompts)))
    return answer[answer["row"].argsort()]


@pytest.mark.usefixtures("step_by_step")
async def test_after_a_swap_tokens_follow_the_weights_they_name(ending_model: Path):
    """Tokens before the swap are those of a run without one; those after it are drawn as if the new weights had
    read the whole row."""
    job, prompts = job_of(ending_model, top_k=20, top_p=0.9), prompts_of(13)
    new = trained(ending_model)
    worker = RolloutWorker(job)
    before = await generated(worker, prompts)
    answer = await with_a_swap(worker, prompts, 7, named_weights(new))
    worker.close()
    mask, versions = answer["response_mask"], answer["weight_versions"]
    assert torch.equal(versions >= 0, mask)
    assert set(versions[mask].tolist()) == {0, 7}
    swapped = int((versions == 7).any(0).nonzero()[0])
    assert swapped > 0
    assert (versions[:, swapped:][mask[:, swapped:]] == 7).all(), "all rows of a batch change at one token"
    for name in (*COLUMNS, "kept_ids"):
        assert torch.equal(answer[name][:, :swapped], before[name][:, :swapped]), name

    ids = torch.cat([prompts["prompts"], answer["responses"]], 1)
    seen = torch.cat([prompts["prompt_mask"], torch.ones_like(mask)], 1).long()
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = new(ids, attention_mask=seen, position_ids=positions).logits[:, P + swapped - 1 : -1]
    expected = log_distribution(logits.flatten(0, 1), job.rollout).view(*logits.shape)
    expected = expected.gather(2, answer["responses"][:, swapped:, None])[..., 0].float()
    difference = (answer["rollout_log_probs"][:, swapped:] - expected)[mask[:, swapped:]]
    assert difference.abs().max() < 1e-5


@pytest.mark.usefixtures("step_by_step")
async def test_the_same_weights_under_a_new_version_change_no_token(ending_model: Path):
    worker, prompts = RolloutWorker(job_of(ending_model, top_k=20, top_p=0.9)), prompts_of(13)
    same = {name: weight.clone() for name, weight in named_weights(worker._engine.model).items()}
    before = await generated(worker, prompts)
    after = await with_a_swap(worker, prompts, 1, same)
    for name in ("responses", "response_mask", "kept_ids"):
        assert torch.equal(before[name], after[name]), name
    # Keys and values that are made anew come from wider matrices.
    assert (before["rollout_log_probs"] - after["rollout_log_probs"]).abs().max() < 1e-5
    assert set(after["weight_versions"][after["response_mask"]].tolist()) == {0, 1}
    worker.close()


@pytest.mark.usefixtures("step_by_step")
async def test_rows_in_line_begin_with_the_weights_of_their_turn(ending_model: Path):
    """Those of a second call, for which the batch has no room."""
    worker, prompts = RolloutWorker(job_of(ending_model, max_num_seqs=13)), prompts_of(13)
    weights = named_weights(trained(ending_model))
    first, second = await asyncio.gather(with_a_swap(worker, prompts, 1, weights), generated(worker, prompts))
    assert set(first["weight_versions"][first["response_mask"]].tolist()) == {0, 1}
    assert set(second["weight_versions"][second["response_mask"]].tolist()) == {1}
    expected = await generated(worker, prompts)
    for name in COLUMNS:
        assert torch.equal(second[name], expected[name])
    worker.close()


@pytest.mark.usefixtures("step_by_step")
async def test_weights_that_do_not_fit_leave_a_decode_unchanged(ending_model: Path):
    worker, prompts = RolloutWorker(job_of(ending_model)), prompts_of(13)
    before = await generated(worker, prompts)
    async with aclosing(worker.generate(prompts)) as stream:
        answers = [await anext(stream)]
        with pytest.raises(WeightsUnavailable, match="is missing"):
            await worker.update_weights(PublishedWeights(1, {}))
        answers += [rows async for rows in stream]
    after = DataProto.concat(answers)
    after = after[after["row"].argsort()]
    for name in (*COLUMNS, "weight_versions"):
        assert torch.equal(before[name], after[name])
    worker.close()


# --------------------------------------------------------------------------------------- sleep


async def test_after_sleep_it_generates_as_before(ending_model: Path):
    worker, prompts = RolloutWorker(job_of(ending_model)), prompts_of(13)
    before = await generated(worker, prompts)
    weights = list(worker._engine.model.parameters())
    num_bytes = sum(weight.nbytes for weight in weights)
    moved = await worker.sleep()
    assert moved >= num_bytes
    assert not any(weight.untyped_storage().nbytes() for weight in weights)
    assert await worker.wake() == moved
    after = await generated(worker, prompts)
    for name in (*COLUMNS, "weight_versions"):
        assert torch.equal(before[name], after[name])
    worker.close()


def places(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in weights.items()}


async def test_adopted_weights_are_shared_not_copied_even_after_sleep(ending_model: Path):
    worker, prompts = RolloutWorker(job_of(ending_model)), prompts_of(13)
    model = worker._engine.model
    held = PublishedWeights(1, named_weights(trained(ending_model)))
    await worker.update_weights(held)
    assert places(named_weights(model)) == places(await held.fetch())
    before = await generated(worker, prompts)
    moved = await worker.sleep()
    assert moved <= sum(buffer.nbytes for buffer in model.buffers())  # the weights are not its to move
    assert await worker.wake() == moved
    assert places(named_weights(model)) == places(await held.fetch())
    after = await generated(worker, prompts)
    for name in (*COLUMNS, "weight_versions"):
        assert torch.equal(before[name], after[name])
    worker.close()


@pytest.mark.skipif(not CAN_SHARE, reason="regions are to be seen on Linux alone")
async def test_a_new_version_leaves_the_old_unchanged_and_releases_it(ending_model: Path):
    def num_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:rolemesh-weights")

    worker, prompts, before = RolloutWorker(job_of(ending_model)), prompts_of(13), num_mapped()
    weights = named_weights(trained(ending_model))
    held = PublishedWeights(1, weights)
    await worker.update_weights(held)
    await with_a_swap(worker, prompts, 2, {name: -weight for name, weight in weights.items()})
    assert num_mapped() == before + 2
    for name, weight in (await held.fetch()).items():
        assert torch.equal(weight, weights[name]), name
    del held, weight
    assert num_mapped() == before + 1
    worker.close()  # its thread ends: it no longer holds the engine of its last piece of work
    del worker
    assert num_mapped() == before


async def test_free_cache_engine_false_keeps_an_engines_memory(tiny_model: Path):
    worker = RolloutWorker(job_of(tiny_model, free_cache_engine=False))
    assert await worker.sleep() == await worker.wake() == 0
    assert len(await generated(worker, prompts_of(2))) == 2
    worker.close()


@pytest.mark.usefixtures("step_by_step")
async def test_a_stream_holds_the_device_and_new_weights_wait(ending_model: Path, tmp_path: Path):
    """Beside a role that wants the device while rows are made."""
    worker, prompts = RolloutWorker(job_of(ending_model)), prompts_of(13)
    alone = await generated(worker, prompts)
    other, lease = LocalWorker("actor"), Lease(turn_s=0)
    other.offloader = Offloader(lambda: [], torch.device("cpu"), tmp_path)
    for each in (other, worker):
        await lease.vacate()
        lease.add(each)
        each.worker_context = replace(each.worker_context, lease=lease)
    order = []

    async def train() -> None:
        async with other.turn():
            order.append("actor")
            assert all(w.untyped_storage().nbytes() == 0 for w in worker._engine.model.parameters())

    async with aclosing(worker.generate(prompts)) as stream:
        answers = [await anext(stream)]
        training = asyncio.create_task(train())
        async for rows in stream:
            answers.append(rows)
            order.append("rollout")
    await training
    assert order[-1] == "actor"
    assert "rollout" in order
    assert lease.resident == "actor"
    answer = DataProto.concat(answers)
    assert torch.equal(answer[answer["row"].argsort()]["responses"], alone["responses"])
    await worker.update_weights(PublishedWeights(2, named_weights(trained(ending_model))))
    assert lease.resident == "rollout"
    assert worker.version == 2
    worker.close()
    other.close()
