"""Checkpoints of actor and critic: bit for bit, or a clear error."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import WITHOUT_CHECKPOINTING
from full_disk import files_of_at_most
from saving import saved
from sequences import sequence_batch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.errors import CheckpointFailed, InvalidConfig
from rolemesh.models.tiny import make_tiny_model
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharded_files import HostRows, copied
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.training import checkpoint


def training_job(model: Path, run_dir: Path, **optim: Any) -> JobConfig:
    """Passes shuffled by a seed below 0, a warm-up that is under way when the run is cut."""
    trained = {
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size_per_gpu": 4,
        "shuffle": True,
        "seed": -1,
        "optim": {"lr": 1e-3, "lr_warmup_steps": 3} | optim,
        "model": {"path": str(model)} | WITHOUT_CHECKPOINTING,
    }
    return make_job(
        {
            "data": {"train_batch_size": 16},
            "trainer": {"device": "cpu", "default_local_dir": str(run_dir), "total_training_steps": 4},
            "actor": trained | {"use_kl_loss": True, "entropy_coeff": 0.01},
            "critic": trained,
        }
    )


def everything(worker: Any) -> dict[str, torch.Tensor]:
    """Weights and moments."""
    return {**worker.model.state_dict(), **worker.optimizer.state_tensors()}


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
async def test_a_resumed_run_ends_as_an_unbroken_one_does(any_model: Path, tmp_path: Path, role: Any) -> None:
    batches = [sequence_batch(16, seed=seed) for seed in range(4)]
    unbroken = role(training_job(any_model, tmp_path))
    expected = [await unbroken.update(batch) for batch in batches]

    first = role(training_job(any_model, tmp_path))
    for batch in batches[:2]:
        await first.update(batch)
    await saved(first, tmp_path / "saved")
    resumed = role(training_job(any_model, tmp_path))
    await resumed.update(batches[3])  # what it did before it took the checkpoint up leaves no trace
    await resumed.load_checkpoint(tmp_path / "saved")

    assert [await resumed.update(batch) for batch in batches[2:]] == expected[2:]
    mine, theirs = everything(resumed), everything(unbroken)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert any(name.endswith(".exp_avg_sq") for name in theirs)


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
@pytest.mark.parametrize("shape", ["linear", "cosine"])
async def test_a_resumed_schedule_goes_on_where_it_was_cut(
    tiny_model: Path, tmp_path: Path, role: Any, shape: str
) -> None:
    """Cut after the first step of four, with the rate at its greatest. Linear down to a tenth leaves 0.7 and
    0.4 of it, a half cosine 0.775 and 0.325."""
    warm_up = {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.25}
    job = training_job(tiny_model, tmp_path, lr_scheduler_type=shape, min_lr_ratio=0.1, **warm_up)
    batches = [sequence_batch(16, seed=seed) for seed in range(4)]
    unbroken = role(job)
    expected = [await unbroken.update(batch) for batch in batches]

    first, resumed = role(job), role(job)
    for batch in batches[:1]:
        await first.update(batch)
    await saved(first, tmp_path / "saved")
    await resumed.load_checkpoint(tmp_path / "saved")
    assert [await resumed.update(batch) for batch in batches[1:]] == expected[1:]
    mine, theirs = everything(resumed), everything(unbroken)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    falls = {"linear": (0.7, 0.4), "cosine": (0.775, 0.325)}[shape]
    rates = [metrics[f"{unbroken.optimizer.role}/lr"] for metrics in expected]
    assert rates == pytest.approx([0, 1e-3, falls[0] * 1e-3, falls[1] * 1e-3])


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
async def test_a_schedule_ends_with_the_run_that_loads_the_role(
    tiny_model: Path, tmp_path: Path, role: Any
) -> None:
    """Linear from 1e-3: in a run of two steps the second has half of it, in one of four three quarters."""
    job = training_job(tiny_model, tmp_path, lr_scheduler_type="linear", lr_warmup_steps=-1)
    worker, batches = role(job), [sequence_batch(16, seed=seed) for seed in range(2)]
    for num_steps, second in ((2, 0.5e-3), (None, 0.75e-3)):
        await worker.load_checkpoint(None, num_steps)
        rates = [(await worker.update(batch))[f"{worker.optimizer.role}/lr"] for batch in batches]
        assert rates == pytest.approx([1e-3, second])


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
async def test_a_role_begins_anew_as_before_its_first_update(
    tiny_model: Path, tmp_path: Path, role: Any
) -> None:
    worker, untouched = role(training_job(tiny_model, tmp_path)), role(training_job(tiny_model, tmp_path))
    await worker.load_checkpoint(None)  # as it is
    await worker.update(sequence_batch(16, seed=1))
    await saved(worker, tmp_path)
    await worker.load_checkpoint(tmp_path)
    await worker.load_checkpoint(None)
    mine, theirs = everything(worker), everything(untouched)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    batch = sequence_batch(16, seed=2)
    assert await worker.update(batch) == await untouched.update(batch)


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
async def test_a_role_begins_anew_after_another_runs_checkpoint(
    tiny_model: Path, tmp_path: Path, role: Any
) -> None:
    """The other run made no update before it saved."""
    other = make_tiny_model(tmp_path / "other", num_layers=1, seed=1)
    await saved(role(training_job(other, tmp_path)), tmp_path / "saved")
    worker, untouched = role(training_job(tiny_model, tmp_path)), role(training_job(tiny_model, tmp_path))
    await worker.load_checkpoint(tmp_path / "saved")
    mine, theirs = everything(worker), everything(untouched)
    assert mine.keys() == theirs.keys()
    assert not all(torch.equal(mine[name], theirs[name]) for name in theirs)
    await worker.load_checkpoint(None)
    mine = everything(worker)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
async def test_a_run_may_be_saved_before_its_first_update(tiny_model: Path, tmp_path: Path, role: Any) -> None:
    batch = sequence_batch(16)
    worker = role(training_job(tiny_model, tmp_path))
    await saved(worker, tmp_path)
    resumed = role(training_job(tiny_model, tmp_path))
    await resumed.load_checkpoint(tmp_path)
    assert await resumed.update(batch) == await worker.update(batch)


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
async def test_a_role_trains_on_while_its_checkpoint_is_written(
    tiny_model: Path, tmp_path: Path, role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still until the next update is made. A load and a second checkpoint wait."""
    turns, write = threading.Event(), os.pwrite

    def when_it_turns(*written: Any) -> int:
        assert turns.wait(60)
        return write(*written)

    worker = role(training_job(tiny_model, tmp_path))
    await worker.update(sequence_batch(16, seed=1))
    before = {name: tensor.clone() for name, tensor in everything(worker).items()}
    monkeypatch.setattr(os, "pwrite", when_it_turns)
    await worker.begin_checkpoint(tmp_path / "first")
    await worker.update(sequence_batch(16, seed=2))
    with pytest.raises(CheckpointFailed, match="no checkpoint was begun in the directory"):
        await worker.finish_checkpoint(tmp_path / "another")
    second = asyncio.create_task(worker.begin_checkpoint(tmp_path / "second"))
    loading = asyncio.create_task(worker.load_checkpoint(tmp_path / "first"))
    assert not (await asyncio.wait({second, loading}, timeout=0.05))[0]
    assert not (tmp_path / "first" / "training_state.json").exists()
    turns.set()
    await second
    await loading
    after = everything(worker)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    await worker.finish_checkpoint(tmp_path / "second")
    worker.close()


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
async def test_offloaded_moments_leave_the_device_and_change_no_bit(
    tiny_model: Path, tmp_path: Path, role: Any
) -> None:
    """The role sleeps in between, too; and saves and loads what the other one does."""
    offloads = {"actor": {"fsdp_config": {"optimizer_offload": True}}}
    offloads["critic"] = {"model": offloads["actor"]}
    sections = training_job(tiny_model, tmp_path / "run").model_dump(exclude_unset=True)
    worker, plain = role(make_job(merge(sections, offloads))), role(make_job(sections))
    for seed in range(2):
        batch = sequence_batch(16, seed=seed)
        assert await worker.update(batch) == await plain.update(batch)
        assert sum(moment.untyped_storage().nbytes() for moment in worker.optimizer.tensors()) == 0
        num_bytes = await worker.sleep()
        assert num_bytes < await plain.sleep()
        assert await worker.wake() == num_bytes
        await plain.wake()
        await saved(worker, tmp_path / "run" / "True")
        await saved(plain, tmp_path / "run" / "False")
    for each in (worker, plain):
        assert await each.update(batch)
        await each.load_checkpoint(tmp_path / "run" / "True")
    files = {file.name: file.read_bytes() for file in (tmp_path / "run" / "True").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "run" / "False").iterdir()}
    assert await worker.update(batch) == await plain.update(batch)
    with worker.optimizer.on_device():
        mine, theirs = everything(worker), everything(plain)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


async def test_an_actors_checkpoint_is_a_hugging_face_directory(any_model: Path, tmp_path: Path) -> None:
    worker = ActorWorker(training_job(any_model, tmp_path))
    await worker.update(sequence_batch(16))
    await saved(worker, tmp_path / "actor")
    model, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "actor", dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    mine = worker.model.state_dict()
    assert all(torch.equal(mine[name], tensor) for name, tensor in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "actor")
    assert tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    again = ActorWorker(training_job(tmp_path / "actor", tmp_path))
    assert torch.equal(
        (await again.compute_log_probs(sequence_batch(4)))["old_log_probs"],
        (await worker.compute_log_probs(sequence_batch(4)))["old_log_probs"],
    )


async def test_generation_settings_that_transformers_rejects_are_saved(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A temperature without do_sample, as many published models have."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.6}))
    await saved(ActorWorker(training_job(model, tmp_path)), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["temperature"] == 0.6


async def test_nothing_in_a_checkpoint_is_a_pickle(tiny_model: Path, tmp_path: Path) -> None:
    worker = ActorWorker(training_job(tiny_model, tmp_path))
    await worker.update(sequence_batch(16))
    await saved(worker, tmp_path)
    assert {Path(name).suffix for name in os.listdir(tmp_path)} <= {".safetensors", ".json", ".jinja"}


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
@pytest.mark.parametrize("room", [0, 50_000])
async def test_no_room_on_the_disk_is_a_clear_error(
    tiny_model: Path, tmp_path: Path, role: Any, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the role keeps no copy of what it could not write, which is 12 bytes for each parameter."""
    copies: list[weakref.ref[HostRows]] = []

    def watched(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, HostRows]:
        rows = copied(tensors, ranks)
        copies.extend(map(weakref.ref, rows.values()))
        return rows

    monkeypatch.setattr(checkpoint, "copied", watched)
    worker = role(training_job(tiny_model, tmp_path))
    await worker.update(sequence_batch(16))
    with (
        files_of_at_most(room),
        pytest.raises(CheckpointFailed, match=r"could not be written.*bytes free") as error,
    ):
        await saved(worker, tmp_path / "saved")
    assert str(tmp_path / "saved") in str(error.value)
    assert copies
    # The writing thread tells of the failure before it has left the call that failed.
    await asyncio.get_running_loop().run_in_executor(worker._checkpoints._thread, lambda: None)
    gc.collect()
    assert [copy for copy in copies if copy() is not None] == []
    await saved(worker, tmp_path / "saved")  # with room again, the same directory will do
    await role(training_job(tiny_model, tmp_path)).load_checkpoint(tmp_path / "saved")


async def test_a_directory_that_cannot_be_made_is_a_clear_error(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed, match="could not be written"):
        await saved(ActorWorker(training_job(tiny_model, tmp_path)), tmp_path / "file" / "saved")


@pytest.mark.parametrize(
    ("role", "file", "damage"),
    [
        (ActorWorker, "model.safetensors", "cut"),
        (CriticWorker, "model.safetensors", "absent"),
        (CriticWorker, "optimizer.safetensors", "cut"),
        (CriticWorker, "optimizer.safetensors", "absent"),
        (CriticWorker, "training_state.json", "garbage"),
        (CriticWorker, "training_state.json", "absent"),
    ],
)
async def test_a_damaged_checkpoint_is_refused_and_nothing_changes(
    tiny_model: Path, tmp_path: Path, role: Any, file: str, damage: str
) -> None:
    worker = role(training_job(tiny_model, tmp_path))
    await saved(worker, tmp_path)
    await worker.update(sequence_batch(16))
    before = {name: tensor.clone() for name, tensor in everything(worker).items()}
    path = tmp_path / file
    content = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"\xff" * len(content))
    with pytest.raises(CheckpointFailed, match=str(tmp_path)):
        await worker.load_checkpoint(tmp_path)
    after = everything(worker)
    assert worker.optimizer.num_updates == 2
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("role", "name"), [(ActorWorker, "actor"), (CriticWorker, "critic")])
async def test_a_checkpoint_of_another_dtype_is_refused(
    tiny_model: Path, tmp_path: Path, role: Any, name: str
) -> None:
    """One that names no dtype, as earlier versions wrote it, is loaded."""
    sections = training_job(tiny_model, tmp_path).model_dump(exclude_unset=True)
    first = role(make_job(sections))
    await first.update(sequence_batch(16))
    await saved(first, tmp_path / "saved")
    model = {"path": str(tiny_model), "dtype": "bfloat16"}
    worker = role(make_job(merge(sections, {name: {"model": model}})))
    with pytest.raises(InvalidConfig, match=rf"{name}\.model\.dtype is bfloat16 here and was float32"):
        await worker.load_checkpoint(tmp_path / "saved")
    assert worker.optimizer.num_updates == 0
    state = tmp_path / "saved" / "training_state.json"  # as earlier versions wrote it
    written = json.loads(state.read_text())
    assert written.pop("dtype") == "float32"
    state.write_text(json.dumps(written))
    await worker.load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(tensor, everything(worker)[at]) for at, tensor in everything(first).items())


async def test_a_checkpoint_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    wider = make_tiny_model(tmp_path / "wider", hidden_size=72, num_layers=1)
    await saved(ActorWorker(training_job(wider, tmp_path)), tmp_path / "wide")
    await saved(CriticWorker(training_job(tiny_model, tmp_path)), tmp_path / "critic")
    worker = ActorWorker(training_job(tiny_model, tmp_path))
    for name, reason in (
        ("wide", "differ from the model's in names or shapes"),
        ("critic", "it is a checkpoint of role critic"),
    ):
        with pytest.raises(CheckpointFailed, match=f"{tmp_path / name}.*{reason}"):
            await worker.load_checkpoint(tmp_path / name)
