"""An actor that trains an adapter: what is learnt, published, saved and taken up, and the reference in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import lora_job
from peft import LoraConfig, PeftModel, get_peft_model
from saving import saved
from sequences import sequence_batch
from serving import served
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.errors import CheckpointFailed, Unsupported
from rolemesh.methods import methods
from rolemesh.models.loading import load_causal_lm, named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.ranks.ranks import Ranks
from rolemesh.rpc.calling.clients import ActorClient, ReferenceClient
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.weights.published import PublishedWeights


@pytest.fixture(autouse=True)
def _in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles write checkpoints there alone."""
    monkeypatch.chdir(tmp_path)


def everything(worker: ActorWorker) -> dict[str, Tensor]:
    """Weights and moments, as they are now."""
    tensors = {**worker.model.state_dict(), **worker.optimizer.state_tensors()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


async def trained(job: JobConfig, num_batches: int = 1) -> ActorWorker:
    worker = ActorWorker(job)
    for seed in range(num_batches):
        await worker.update(sequence_batch(16, seed=seed))
    return worker


async def published(worker: ActorWorker, model: Path) -> Any:
    """The model of the job's directory with the weights that the actor gives to the rollouts."""
    source = await worker.publish_weights(1)
    assert isinstance(source, PublishedWeights)
    weights = await source.fetch()
    plain = load_causal_lm(lora_job(model).reference_model, "actor")
    assert list(weights) == list(named_weights(plain))
    plain.load_state_dict(weights, strict=False)
    return plain


# ------------------------------------------------------------------------------------- training


async def test_only_the_adapter_is_trained_and_begins_as_nothing(any_model: Path) -> None:
    worker = ActorWorker(lora_job(any_model))
    before = everything(worker)
    base = named_weights(load_causal_lm(worker.config, "actor"))
    assert worker.adapter is not None
    assert same(worker.adapter.base_weights(), base)
    assert all(not tensor.any() for name, tensor in before.items() if ".lora_B." in name)
    await worker.update(sequence_batch(16))
    changed = {n for n, t in worker.model.state_dict().items() if not torch.equal(t, before[n])}
    adapters = {n for n in before if ".lora_A." in n or ".lora_B." in n}
    assert changed == adapters == worker.optimizer.parameters.keys()
    assert len(adapters) == 2 * 7 * 2  # A and B of q, k, v, o, gate, up and down, in two layers
    assert same(worker.adapter.base_weights(), base)


def test_a_new_adapter_is_a_function_of_the_seed(tiny_model: Path) -> None:
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first = everything(ActorWorker(lora_job(tiny_model)))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(8)
    assert same(everything(ActorWorker(lora_job(tiny_model))), first)
    assert not same(everything(ActorWorker(lora_job(tiny_model, seed=43))), first)
    drawn = [tensor for name, tensor in first.items() if ".lora_A." in name]
    for tensor in drawn:  # uniform in ±1/√in has a variance of 1/(3·in)
        assert tensor.abs().max() <= tensor.shape[1] ** -0.5
        assert_close(tensor.var() * tensor.shape[1], torch.tensor(1 / 3), rtol=0.25, atol=0)


async def test_gradient_checkpointing_changes_no_bit(two_layers: Path) -> None:
    with_it = await trained(lora_job(two_layers, enable_gradient_checkpointing=True))
    without = await trained(lora_job(two_layers, enable_gradient_checkpointing=False))
    assert with_it.model.is_gradient_checkpointing
    assert same(everything(with_it), everything(without))


async def test_a_rows_numbers_do_not_depend_on_its_neighbours(tiny_model: Path) -> None:
    worker, batch = await trained(lora_job(tiny_model, lora_rank=1)), sequence_batch(16, seed=5)
    whole = (await worker.compute_log_probs(batch))["old_log_probs"]
    for rows in (slice(0, 1), slice(3, 6), slice(5, 16)):
        assert torch.equal((await worker.compute_log_probs(batch[rows]))["old_log_probs"], whole[rows])


# ------------------------------------------------------------------------------------- weights


async def test_published_weights_add_the_scaled_adapter_to_the_base(
    tiny_model: Path,
) -> None:
    """W + B A alpha / r for the target modules; the others are the base model's."""
    worker = await trained(lora_job(tiny_model, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    base = named_weights(load_causal_lm(worker.config, "actor"))
    state = worker.model.state_dict()
    for name, tensor in named_weights(await published(worker, tiny_model)).items():
        module = name.removesuffix(".weight")
        if module.endswith(("q_proj", "down_proj")) and not name.endswith("bias"):
            a, b = (state[f"{module}.lora_{x}.default.weight"].double() for x in "AB")
            assert_close(tensor.double(), base[name].double() + b @ a * 6 / 4, rtol=0, atol=1e-7)
            assert not torch.equal(tensor, base[name])
        else:
            assert torch.equal(tensor, base[name])


async def test_a_rollout_of_published_weights_has_the_actors_log_probs(any_model: Path) -> None:
    worker, batch = await trained(lora_job(any_model), 2), sequence_batch(16, seed=9)
    mine = (await worker.compute_log_probs(batch))["old_log_probs"]
    plain = ReferenceWorker(lora_job(any_model, lora_rank=0))
    base = (await plain.compute_log_probs(batch))["ref_log_probs"]
    plain.root.model = await published(worker, any_model)
    assert_close((await plain.compute_log_probs(batch))["ref_log_probs"], mine, rtol=0, atol=1e-5)
    assert (base - mine).abs().max() > 0.01  # it has learnt something


async def test_an_actor_that_slept_goes_on_as_one_that_did_not(tiny_model: Path, tmp_path: Path) -> None:
    awake, slept = [await trained(lora_job(tiny_model)) for _ in range(2)]
    assert await slept.sleep() > 0
    await slept.wake()
    batch = sequence_batch(16, seed=1)
    assert await slept.update(batch) == await awake.update(batch)
    assert same(everything(slept), everything(awake))


# --------------------------------------------------------------------------------- checkpoints


async def test_a_resumed_adapter_ends_as_an_unbroken_one_does(tiny_model: Path, tmp_path: Path) -> None:
    unbroken = await trained(lora_job(tiny_model), 3)
    first = await trained(lora_job(tiny_model), 2)
    await saved(first, tmp_path)
    resumed = ActorWorker(lora_job(tiny_model))
    await resumed.update(sequence_batch(16, seed=9))  # leaves no trace
    await resumed.load_checkpoint(tmp_path)
    assert same(everything(resumed), everything(first))
    await resumed.update(sequence_batch(16, seed=2))
    assert same(everything(resumed), everything(unbroken))


async def test_the_copy_is_written_even_if_the_model_changes_meanwhile(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A checkpoint is written while other roles compute; a model that shares the device is then offloaded."""
    await saved(ActorWorker(lora_job(tiny_model)), tmp_path / "saved")
    adapter = ActorWorker(lora_job(tiny_model)).adapter
    assert adapter is not None
    write = adapter.copy()
    for tensor in (*adapter.base_weights().values(), *adapter.weights.values()):
        tensor.zero_()
    (tmp_path / "written").mkdir()
    write(tmp_path / "written", Ranks.alone())
    for name in ("adapter_model.safetensors", "adapter_config.json", "base_model.xxh3"):
        assert (tmp_path / "written" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


async def test_an_actor_that_begins_anew_has_its_first_adapter_again(tiny_model: Path, tmp_path: Path) -> None:
    untouched, worker = ActorWorker(lora_job(tiny_model)), await trained(lora_job(tiny_model))
    await worker.load_checkpoint(None)
    assert same(everything(worker), everything(untouched))
    await worker.update(sequence_batch(16))
    await saved(worker, tmp_path)
    started = lora_job(tiny_model, lora_adapter_path=str(tmp_path))
    untouched, worker = ActorWorker(started), await trained(started)
    await worker.load_checkpoint(None)
    assert same(everything(worker), everything(untouched))


async def test_peft_reads_a_checkpoint(any_model: Path, tmp_path: Path) -> None:
    worker = await trained(lora_job(any_model))
    await saved(worker, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(any_model)
    read = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32), tmp_path
    )
    assert worker.adapter is not None
    theirs = {name: p for name, p in read.base_model.model.named_parameters() if ".lora_" in name}
    assert same(theirs, worker.adapter.weights)
    assert same(named_weights(read.merge_and_unload()), named_weights(await published(worker, any_model)))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


async def test_an_actor_starts_from_an_adapter_of_its_own_or_of_pefts(tiny_model: Path, tmp_path: Path) -> None:
    batch = sequence_batch(4, seed=3)
    worker = await trained(lora_job(tiny_model, target_modules=["v_proj", "up_proj"]))
    await saved(worker, tmp_path / "ours")
    again = ActorWorker(lora_job(tiny_model, lora_adapter_path=str(tmp_path / "ours")))
    expected = (await worker.compute_log_probs(batch))["old_log_probs"]
    assert torch.equal((await again.compute_log_probs(batch))["old_log_probs"], expected)

    torch.manual_seed(3)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        LoraConfig(
            r=4,
            lora_alpha=16,
            target_modules=["k_proj"],
            lora_dropout=0.1,
            init_lora_weights=False,
            use_rslora=True,
        ),
    )
    theirs.save_pretrained(tmp_path / "theirs")
    actor = ActorWorker(lora_job(tiny_model, lora_adapter_path=str(tmp_path / "theirs")))
    before = named_weights(await published(actor, tiny_model))
    assert same(named_weights(theirs.merge_and_unload()), before)
    await actor.update(sequence_batch(16))
    merged = named_weights(await published(actor, tiny_model))
    a, b = (actor.model.state_dict()[f"model.layers.0.self_attn.k_proj.lora_{x}.default.weight"] for x in "AB")
    base = named_weights(load_causal_lm(actor.config, "actor"))
    name = "model.layers.0.self_attn.k_proj.weight"
    assert_close(merged[name], base[name] + b @ a * 16 / 4**0.5, rtol=0, atol=1e-6)  # rank-stabilised: alpha/√r


async def test_a_checkpoint_of_another_rank_is_refused_without_changes(
    tiny_model: Path, tmp_path: Path
) -> None:
    await saved(ActorWorker(lora_job(tiny_model, lora_rank=2)), tmp_path)
    worker = await trained(lora_job(tiny_model))
    before = everything(worker)
    with pytest.raises(CheckpointFailed, match="differ from the model's in names or shapes"):
        await worker.load_checkpoint(tmp_path)
    assert same(everything(worker), before)


async def test_an_adapter_resumes_on_a_moved_base_but_not_on_another(tiny_model: Path, tmp_path: Path) -> None:
    first = await trained(lora_job(tiny_model))
    await saved(first, tmp_path / "saved")
    moved, other = tmp_path / "moved", make_tiny_model(tmp_path / "other", "qwen2", num_layers=1, seed=1)
    shutil.copytree(tiny_model, moved)
    resumed = ActorWorker(lora_job(moved))
    await resumed.load_checkpoint(tmp_path / "saved")
    assert same(everything(resumed), everything(first))
    worker = ActorWorker(lora_job(other))
    before = everything(worker)
    with pytest.raises(CheckpointFailed, match=f"were not those of {other}"):
        await worker.load_checkpoint(tmp_path / "saved")
    assert same(everything(worker), before)


@pytest.mark.parametrize("change", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 32}}])
async def test_a_checkpoint_of_a_differently_scaled_adapter_is_refused(
    tiny_model: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    await saved(ActorWorker(lora_job(tiny_model)), tmp_path / "start")
    path = tmp_path / "start" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    started = lora_job(tiny_model, lora_adapter_path=str(tmp_path / "start"))
    await saved(ActorWorker(started), tmp_path / "saved")
    await ActorWorker(started).load_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointFailed, match=f"its adapter has {next(iter(change))}"):
        await ActorWorker(lora_job(tiny_model)).load_checkpoint(tmp_path / "saved")


# ----------------------------------------------------------------------------------- reference


def test_a_job_with_an_adapter_has_no_reference_of_its_own(tiny_model: Path) -> None:
    job = lora_job(tiny_model)
    assert (job.uses_reference, job.ref_in_actor) == (True, True)
    assert "reference" not in job.roles
    without_kl = make_job({"actor": {"model": {"lora_rank": 4}}})
    assert (without_kl.uses_reference, without_kl.ref_in_actor) == (False, False)
    assert "reference" in lora_job(tiny_model, lora_rank=0).roles


async def test_the_actors_reference_equals_a_separate_one_bit_for_bit(tiny_model: Path) -> None:
    worker, batch = await trained(lora_job(tiny_model)), sequence_batch(16, seed=4)
    reference = ReferenceWorker(lora_job(tiny_model, lora_rank=0))
    expected = (await reference.compute_log_probs(batch))["ref_log_probs"]
    answer = await worker.compute_ref_log_probs(batch)
    assert list(answer.columns) == ["ref_log_probs"]
    assert torch.equal(answer["ref_log_probs"], expected)
    assert not torch.equal((await worker.compute_log_probs(batch))["old_log_probs"], expected)
    before = everything(worker)
    await worker.update(sequence_batch(16, seed=1))  # the adapter is on again, and learns
    assert not same(everything(worker), before)


async def test_the_actors_reference_equals_a_separate_one_over_grpc(tiny_model: Path) -> None:
    with_adapter, without = lora_job(tiny_model), lora_job(tiny_model, lora_rank=0)
    batch = sequence_batch(16, seed=4)
    async with (
        served("actor", with_adapter) as actor_at,
        served("reference", without) as reference_at,
        ActorClient(actor_at, methods(with_adapter)) as actor,
        ReferenceClient(reference_at, methods(without)) as reference,
    ):
        await actor.update(batch)
        mine = (await actor.compute_ref_log_probs(batch))["ref_log_probs"]
        assert torch.equal(mine, (await reference.compute_log_probs(batch))["ref_log_probs"])


async def test_an_actor_without_an_adapter_says_so_over_grpc(tiny_model: Path) -> None:
    job = lora_job(tiny_model, lora_rank=0)
    async with served("actor", job) as address, ActorClient(address, methods(job)) as actor:
        with pytest.raises(Unsupported, match=r"actor.model.lora_rank is 0"):
            await actor.compute_ref_log_probs(sequence_batch(4))
