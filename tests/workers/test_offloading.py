"""What sleeps leaves the device, and comes back bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import sequence_batch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rolemesh.config.job import make_job
from rolemesh.config.model import ModelConfig, OptimConfig
from rolemesh.models.heads import ScoreModel
from rolemesh.models.loading import load_causal_lm
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.training.optimizer import Optimizer
from rolemesh.workers import offloading as module
from rolemesh.workers.offloading import PIECE_BYTES, HostBuffer, OffloadBuffer, Offloader, model_tensors

CPU = torch.device("cpu")


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors
    ]


def num_bytes_in_memory(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def check_offloads(
    tensors: list[Tensor], directory: Path, device: torch.device = CPU, buffer: OffloadBuffer | None = None
) -> None:
    before, identities = bits(tensors), [id(tensor) for tensor in tensors]
    offloader, moved = Offloader(lambda: tensors, device, directory, buffer=buffer), 0
    for _ in range(2):
        copied = offloader.offload()
        assert copied == (0 if offloader._buffer.keeps else moved) if moved else copied > 0
        moved = moved or copied
        assert num_bytes_in_memory(tensors) == 0
        assert offloader.offload() == 0
        assert offloader.reload() == moved
        assert offloader.reload() == 0
        assert bits(tensors) == before
    assert [id(tensor) for tensor in tensors] == identities
    assert list(directory.rglob("*")) == []


def test_an_offloaded_model_from_a_file_keeps_its_tied_weights(any_model: Path, tmp_path: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(any_model)), "actor")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    check_offloads(list(model_tensors(model)), tmp_path)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert [id(p) for p in after.values()] == [id(p) for p in parameters.values()]
    assert (after["lm_head.weight"] is after["model.embed_tokens.weight"]) == model.config.tie_word_embeddings


def test_a_value_model_comes_back_from_offloading_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    check_offloads(list(model_tensors(ScoreModel.load(ModelConfig(path=str(tiny_model)), "critic"))), tmp_path)


@pytest.mark.gpu
def test_a_model_on_a_gpu_leaves_its_memory(tmp_path: Path) -> None:
    model = nn.Linear(5000, 5001).cuda()  # no multiple of a piece
    allocated = torch.cuda.memory_allocated()
    offloader = Offloader(lambda: model_tensors(model), torch.device("cuda"), tmp_path)
    before, moved = bits(list(model.parameters())), offloader.offload()
    assert torch.cuda.memory_allocated() <= allocated - moved
    assert torch.cuda.memory_reserved() < moved
    assert offloader.reload() == moved
    assert bits(list(model.parameters())) == before
    check_offloads(list(model.parameters()), tmp_path, torch.device("cuda"))


def test_tensors_that_share_memory_move_once_and_still_share(tmp_path: Path) -> None:
    whole = torch.arange(PIECE_BYTES // 4 + 3.0)
    half, odd = whole[: len(whole) // 2], whole[1::2]
    check_offloads([whole, half, odd], tmp_path)
    check_offloads([torch.ones(7), whole, half, odd], tmp_path, buffer=HostBuffer(pinned=False))
    offloader = Offloader(lambda: [half, whole, odd], CPU, tmp_path)
    assert offloader.offload() == whole.nbytes
    offloader.reload()
    whole[1] = -7
    assert half[1] == odd[0] == -7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.float8_e4m3fn])
def test_offloaded_tensors_of_every_dtype_return_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    check_offloads(
        [torch.arange(-3, 4).to(dtype), torch.ones((), dtype=dtype), torch.ones(0, dtype=dtype)], tmp_path
    )


def test_an_optimizer_that_slept_takes_the_same_steps(tmp_path: Path) -> None:
    def trained(sleeps: bool) -> list[bytes]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = Optimizer(model, OptimConfig(lr=0.1), grad_clip=1.0, role="actor")
        offloader = Offloader(lambda: [*model_tensors(model), *optimizer.tensors()], CPU, tmp_path)
        moved = []
        for _ in range(3):
            torch.autograd.backward(model(torch.rand(4, 8)).sum())
            optimizer.step()
            if sleeps:
                moved.append(offloader.offload())
                assert num_bytes_in_memory([*model_tensors(model), *optimizer.tensors()]) == 0
                offloader.reload()
        weights = sum(p.nbytes for p in model.parameters())
        assert not sleeps or moved == [3 * weights + 4 * len(list(model.parameters()))] * 3  # moments and steps
        return bits([*model.parameters(), *optimizer.tensors()])

    assert trained(sleeps=True) == trained(sleeps=False)


def test_gradients_leave_and_return_with_their_weights(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    torch.autograd.backward(model(torch.rand(3, 4)).sum())
    assert len(list(model_tensors(model))) == 4
    check_offloads(list(model_tensors(model)), tmp_path)


def test_an_unwritable_directory_leaves_everything_in_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = nn.Linear(4, 2)
    before = bits(list(model.parameters()))
    offloader = Offloader(lambda: model_tensors(model), CPU, tmp_path / "file" / "below")
    with pytest.raises(OSError, match="below"):
        offloader.offload()
    assert bits(list(model.parameters())) == before
    assert offloader.reload() == 0


def test_a_lack_of_memory_leaves_everything_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What numpy has seen gets other memory at its first offload; there is some for the first tensor alone."""
    tensors = [torch.arange(n, dtype=torch.float32) for n in (1000, 2000)]
    before, empty = bits(tensors), torch.empty

    def short(size: int, **kwargs: Any) -> Tensor:
        if size == tensors[1].nbytes:
            raise RuntimeError("can't allocate memory")
        return empty(size, **kwargs)

    offloader = Offloader(lambda: tensors, CPU, tmp_path)
    with monkeypatch.context() as scarce:
        scarce.setattr(torch, "empty", short)
        with pytest.raises(RuntimeError, match="allocate"):
            offloader.offload()
    assert bits(tensors) == before
    assert offloader.reload() == 0
    assert offloader.offload() == 12000
    offloader.reload()
    assert bits(tensors) == before


def test_memory_keeps_what_has_not_changed(tmp_path: Path) -> None:
    """A piece and more, a small tensor, and one that is there now and then, as gradients are."""
    large, small = torch.arange(PIECE_BYTES // 4 + 5.0), torch.ones(1000)
    tensors = [large, small]
    memory = HostBuffer(pinned=False)
    offloader = Offloader(lambda: tensors, CPU, tmp_path, buffer=memory)

    def slept() -> int:
        before = bits(tensors)
        copied = offloader.offload()
        assert num_bytes_in_memory(tensors) == 0
        assert offloader.reload() == sum(len(each) for each in before)
        assert bits(tensors) == before
        return copied

    assert [slept(), slept()] == [large.nbytes + small.nbytes, 0]
    small += 1
    assert [slept(), slept()] == [small.nbytes, 0]
    for _ in range(2):  # two that get the same address, and have the same number of writes
        tensors.append(torch.rand(1000))
        assert [slept(), slept()] == [4000, 0]
        tensors.pop()
        assert slept() == 0
    small.data.zero_()  # torch does not count it
    increment_version(small)
    assert [slept(), slept()] == [small.nbytes, 0]
    small.data = torch.full((1000,), 3.0)
    assert [slept(), slept()] == [small.nbytes, 0]
    tensors.reverse()
    assert [slept(), slept()] == [large.nbytes + small.nbytes, 0]


def test_a_frozen_weight_is_copied_once_while_the_others_learn(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(100, 10).requires_grad_(False), nn.Linear(10, 1))
    optimizer = Optimizer(model, OptimConfig(lr=0.1), grad_clip=1.0, role="actor")
    tensors, memory = lambda: [*model_tensors(model), *optimizer.tensors()], HostBuffer(pinned=False)
    offloader, copied = Offloader(tensors, CPU, tmp_path, buffer=memory), []
    for _ in range(3):
        torch.autograd.backward(model(torch.ones(4, 100)).sum())
        optimizer.step()
        before = bits(tensors())
        copied.append(offloader.offload())
        offloader.reload()
        assert bits(tensors()) == before
    trained = 4 * (3 * 11 + 2)  # 11 weights with two moments each; the steps of two parameters
    assert copied == [4 * 1010 + trained, trained, trained]


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker, ReferenceWorker])
async def test_a_scoring_role_moves_no_optimizer_and_leaves_uncopied(
    role: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory that keeps its copies, as on a GPU."""
    monkeypatch.setattr(module, "_File", lambda directory: HostBuffer(pinned=False))
    sections = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4}
    job = make_job(
        {
            "algorithm": {"use_kl_in_reward": True},
            "data": {"train_batch_size": 16, "max_prompt_length": 6, "max_response_length": 10},
            "trainer": {"device": "cpu", "default_local_dir": str(tmp_path)},
            "actor": {"model": {"path": str(tiny_model)}, **sections},
            "critic": sections,
        }
    )
    worker, awake, batch = role(job), role(job), sequence_batch(16)
    weights = num_bytes_in_memory(list({id(t): t for t in model_tensors(worker.root)}.values()))
    buffers = num_bytes_in_memory(list(worker.model.buffers()))
    moments, slept = 0, False

    async def scored() -> None:
        name = "compute_values" if role is CriticWorker else "compute_log_probs"
        mine, theirs = [(await getattr(each, name)(batch)).tensors for each in (worker, awake)]
        assert all(torch.equal(mine[column], theirs[column]) for column in theirs)

    for _ in range(2):
        if role is not ReferenceWorker:
            assert await worker.update(batch) == await awake.update(batch)
            moments = num_bytes_in_memory(worker.optimizer.tensors())
            assert moments > 2 * (weights - buffers)
        assert await worker.sleep() == (weights + moments - slept * buffers if moments or not slept else 0)
        slept = True
        for _ in range(2):
            assert await worker.wake() == weights
            await scored()
            assert role is ReferenceWorker or num_bytes_in_memory(worker.optimizer.tensors()) == 0
            assert await worker.sleep() == 0
        await worker.wake()
    if role is not ReferenceWorker:
        for each in (worker, awake):
            await each.load_checkpoint(None)
        assert await worker.sleep() == weights - buffers
        await worker.wake()
        await scored()
        assert await worker.update(batch) == await awake.update(batch)
    worker.close()
    awake.close()


RESIDENT = """
import os, sys
from pathlib import Path
import torch
from rolemesh.config.model import OptimConfig
from rolemesh.training.optimizer import Optimizer
from rolemesh.wire.allocator import tune
from rolemesh.workers.offloading import Offloader, model_tensors

def resident():  # what is its own, and not pages of files, which come and go with the machine's memory
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

tune()  # as in a role's process, where freed memory is kept
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6)))
optimizer = Optimizer(model, OptimConfig(), grad_clip=1.0, role="actor")
torch.autograd.backward(model(torch.ones(1, 2048)).sum())
optimizer.step()
tensors = lambda: [*model_tensors(model), *optimizer.tensors()]
offloader = Offloader(tensors, torch.device("cpu"), Path(sys.argv[1]))
awake = resident()
for _ in range(3):
    moved = offloader.offload()
    asleep = resident()
    offloader.reload()
    print(moved, awake, asleep, resident())
"""


def test_a_sleeping_models_memory_is_the_systems_again(tmp_path: Path) -> None:
    """300 MB of weights and moments, in a process that keeps freed memory for its transport."""
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for line in done.stdout.splitlines():
        moved, awake, asleep, again = map(int, line.split())
        assert moved > 300e6
        assert awake - asleep > 0.95 * moved
        assert again < awake + 0.05 * moved
