"""The pretended GPU: it keeps CUDA's rules, computes what a CPU computes, and notices faults."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_jobs import ROWS, gpu_job
from pretended_gpu import Budget, MixedDevices, PretendedGpu
from pretended_gpu.tensors import held
from sequences import sequence_batch
from torch import Tensor
from torch.testing import assert_close

from rolemesh.algos import covariance
from rolemesh.dataproto.transfer import on_device
from rolemesh.models import sequence
from rolemesh.models.packed import attention
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 32, with heads of 8."""
    return make_tiny_model(tmp_path_factory.mktemp("small"), hidden_size=32)


# ------------------------------------------------------------------------------- rules


def test_tensors_of_two_devices_are_refused_with_few_exceptions(
    gpu: PretendedGpu,
) -> None:
    """The exceptions are a number, an index and a copy."""
    with gpu.here():
        here, there = torch.ones(3, device="cuda"), torch.ones(3)
        refused: list[Callable[[], Any]] = [
            lambda: here + there,
            lambda: torch.where(here > 0, here, there),
            lambda: torch.cat([here, there]),
            lambda: here.index_select(0, torch.tensor([0])),
            lambda: there[torch.tensor([0], device="cuda")],
            lambda: there + torch.tensor(1.0, device="cuda"),
            lambda: here.masked_scatter(here > 0, there),
        ]
        for operation in refused:
            with pytest.raises(MixedDevices, match=r"cuda:0 and cpu.*devices/test_pretended_gpu\.py:\d+"):
                operation()
        assert (here * torch.tensor(2.0)).tolist() == [2, 2, 2]
        assert here[torch.tensor([0])].tolist() == [1]
        here.copy_(there * 5)
        assert here.sum().item() == 15


def test_numpy_reads_no_memory_of_a_gpu(gpu: PretendedGpu) -> None:
    with gpu.here(), pytest.raises(TypeError, match=r"can't convert cuda:0.*test_pretended_gpu\.py"):
        torch.ones(3, device="cuda").numpy()


def test_views_share_memory_and_cuda_means_the_first_device(gpu: PretendedGpu) -> None:
    with gpu.here():
        whole = torch.zeros(2, 3, device="cuda")
        part = whole[1].view(3)
        part.add_(1)
        assert whole.tolist() == [[0, 0, 0], [1, 1, 1]]
        assert (part.device, part.is_cuda, part.to("cuda") is part) == (torch.device("cuda:0"), True, True)


def test_work_is_counted_by_kind_bytes_and_line(gpu: PretendedGpu) -> None:
    with gpu.here():
        gpu.record.clear()
        x = torch.ones(10).to("cuda")  # 40 bytes
        half = x.to(torch.bfloat16)
        half[half > 0].view(-1).tolist()  # compared, a wait for the number of elements, 20 bytes
        found = torch.tensor([1.0, 2.0], device="cuda").sum().item()  # 8 bytes, one wait
    spent = gpu.record.spent()
    assert found == 3
    assert (spent.to_device, spent.to_device_bytes) == (2, 48)
    assert (spent.to_host, spent.to_host_bytes, spent.waits, spent.casts) == (1, 20, 2, 1)
    assert gpu.record.names("cast") == {"float32 -> bfloat16": 1}
    assert gpu.record.number("kernel") == 4  # cast, comparison, index, sum


def test_operations_over_a_budget_are_named_with_their_lines(gpu: PretendedGpu) -> None:
    with gpu.here():
        gpu.record.clear()
        x = torch.ones(10, device="cuda")
        x.sum().item()
    line = test_operations_over_a_budget_are_named_with_their_lines.__code__.co_firstlineno + 4
    spent = gpu.record.spent()
    assert gpu.record.over(spent) == ""
    report = gpu.record.over(replace(spent, waits=0))
    assert "waits: 1, of 0 at most" in report
    assert re.search(
        rf" 1 aten::_local_scalar_dense +devices/test_pretended_gpu\.py:{line}$", report, re.MULTILINE
    )
    assert "kernels: " not in report
    assert f"measured: Budget(kernels={spent.kernels}" in report


# ------------------------------------------------------------------------------- the CPU's numbers


@pytest.mark.parametrize(
    "way", [{}, {"packed": False, "checkpointing": True}], ids=["packed", "padded, checkpointing"]
)
async def test_in_float32_a_gpu_computes_and_learns_what_a_cpu_does(
    gpu: PretendedGpu, small_model: Path, way: dict[str, Any]
) -> None:
    """The moments are the clipped gradients."""
    batch, found = sequence_batch(ROWS), {}
    for device in ("cpu", "cuda"):
        job = gpu_job(small_model, dtype="float32", device=device, actor={"ppo_mini_batch_size": ROWS}, **way)
        if device == "cpu":
            worker = ActorWorker(job)
            judged, metrics = await worker.compute_log_probs(batch), await worker.update(batch)
            worker.close()
        else:
            with gpu.worker(ActorWorker, job) as worker:
                judged, metrics = await worker.compute_log_probs(batch), await worker.update(batch)
        with gpu.here():
            state = worker.optimizer.state_tensors()
        moments = held({name: tensor for name, tensor in state.items() if "exp_avg" in name})
        found[device] = (judged.tensors, moments, metrics)
    (judged, moments, metrics), of_cpu = found["cuda"], found["cpu"]
    assert_close(judged, of_cpu[0], rtol=1e-5, atol=1e-5)
    assert_close(moments, of_cpu[1], rtol=1e-4, atol=1e-7)
    learnt = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
    assert learnt == pytest.approx(of_cpu[2], rel=1e-4, abs=1e-6)


def test_a_token_attends_to_its_own_row_in_the_varlen_kernel(gpu: PretendedGpu) -> None:
    """With equal keys a token's result is the mean of the values up to its own, within the window."""
    with gpu.here():
        bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device="cuda")
        value = torch.tensor([1.0, 3, 10, 20, 60], device="cuda").bfloat16()[:, None, None].expand(-1, 1, 8)
        ones = torch.ones(5, 1, 8, dtype=torch.bfloat16, device="cuda")
        args = (ones, ones, value.contiguous(), bounds, bounds, 3, 3)
        whole, two = (
            attention.varlen_attn(*args, window_size=window)[:, 0, 0].tolist() for window in ((-1, 0), (1, 0))
        )
    assert whole == [1, 2, 10, 15, 30]
    assert two == [1, 2, 10, 15, 40]


# ------------------------------------------------------------------------------- faults


def scattered_on_the_host(cells: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=cells.dtype).masked_scatter(mask, cells)


def centred_by_the_host(values: Tensor, mask: Tensor) -> Tensor:
    return values.double() - values.double().cpu()[mask.cpu()].mean(0, keepdim=True)


def places_left_on_the_host(value: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    inputs, *others = on_device(value, device)
    segments = replace(inputs["segments"], rows=value[0]["segments"].rows)
    return ({**inputs, "segments": segments}, *others)


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "packing": (sequence, "on_device", places_left_on_the_host, r"packed/attention\.py:\d+"),
    "scatter": (sequence, "scatter", scattered_on_the_host, "masked_scatter"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_tensor_left_on_the_host_fails_in_the_line_using_it(
    gpu: PretendedGpu, small_model: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, wrong, line = FAULTS[fault]
    with gpu.worker(ReferenceWorker, gpu_job(small_model)) as worker:
        monkeypatch.setattr(owner, name, wrong)
        with pytest.raises(MixedDevices, match=line):
            await worker.compute_log_probs(sequence_batch(4))


def test_a_covariance_around_a_mean_of_the_host_fails(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = sequence_batch(4)
    columns = [batch[name] for name in ("old_log_probs", "advantages", "response_mask")]
    expected = covariance.token_covariances(*columns)
    with gpu.here():
        here = [column.to("cuda") for column in columns]
        assert_close(covariance.token_covariances(*here).cpu(), expected)
        monkeypatch.setattr(covariance, "_centred", centred_by_the_host)
        with pytest.raises(MixedDevices, match=r"aten::sub.*test_pretended_gpu\.py"):
            covariance.token_covariances(*here)


@pytest.mark.parametrize(
    ("fault", "demand"),
    [
        ({"longest": 3}, "the longest row"),
        ({"bounds": torch.tensor([0, 2, 4])}, "int32 bounds"),
        ({"bounds": torch.tensor([0, 2, 3], dtype=torch.int32)}, "bounds from 0"),
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"width": 12}, "multiple of 8"),
    ],
)
def test_the_kernel_for_uneven_lengths_refuses_what_a_gpus_would(
    gpu: PretendedGpu, fault: dict[str, Any], demand: str
) -> None:
    fine = {
        "longest": 2,
        "bounds": torch.tensor([0, 2, 4], dtype=torch.int32),
        "dtype": torch.bfloat16,
        "width": 8,
    }
    given = fine | fault
    with gpu.here():
        rows = torch.ones(4, 1, given["width"], dtype=given["dtype"], device="cuda")
        bounds = given["bounds"].to("cuda")
        with pytest.raises(RuntimeError, match=demand):
            attention.varlen_attn(rows, rows, rows, bounds, bounds, given["longest"], given["longest"])


async def test_a_wait_that_was_added_to_a_pass_is_over_its_budget(
    gpu: PretendedGpu, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = sequence_batch(4)
    with gpu.worker(ReferenceWorker, gpu_job(small_model)) as worker:
        gpu.record.clear()
        await worker.compute_log_probs(batch)
        budget: Budget = gpu.record.spent()

        def measured(value: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
            moved = on_device(value, device)
            assert math.isfinite(moved[1].float().mean().item())
            return moved

        monkeypatch.setattr(sequence, "on_device", measured)
        gpu.record.clear()
        await worker.compute_log_probs(batch)
    assert f"waits: {budget.waits + 1}, of {budget.waits} at most" in gpu.record.over(budget)
    assert "devices/test_pretended_gpu.py" in gpu.record.lines("wait")
