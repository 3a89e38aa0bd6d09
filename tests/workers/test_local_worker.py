"""A worker's thread: one function after another, who waits for it, and what is computed together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, RoleUnavailable
from rolemesh.threads import progress
from rolemesh.workers.broken_device import error_of_device
from rolemesh.workers.lease import Lease
from rolemesh.workers.local import LocalWorker, by_rows
from rolemesh.workers.worker_context import ComputingThread, WorkerContext


def test_a_thread_is_waited_for_while_queued_and_at_its_end() -> None:
    thread, began, go_on = ComputingThread("actor"), threading.Event(), threading.Event()

    def hold() -> bool:
        began.set()
        assert go_on.wait(60)
        return thread.is_waited_for

    holding = thread.submit(hold)
    assert began.wait(60)
    alone = thread.is_waited_for
    last = thread.submit(lambda: thread.is_waited_for)
    go_on.set()
    assert (alone, holding.result(), last.result()) == (False, True, False)
    began.clear()
    go_on.clear()
    ending = thread.submit(hold)
    assert began.wait(60)
    thread.shutdown(wait=False)
    go_on.set()
    assert ending.result()


class Squarer(LocalWorker):
    """Squares numbers, of which none may be negative; tells how many came at a time."""

    def __init__(self, worker_context: WorkerContext | None = None) -> None:
        super().__init__("critic", worker_context)
        self.sizes: list[int] = []

    @by_rows
    def square(self, batch: DataProto) -> DataProto:
        self.sizes.append(len(batch))
        if (batch["x"] < 0).any():
            raise InvalidBatch(f"{batch['x'].tolist()}")
        return DataProto({"squares": batch["x"].square()})

    @by_rows
    def double(self, batch: DataProto) -> DataProto:
        return DataProto({"doubles": 2 * batch["x"]})

    @asynccontextmanager
    async def is_busy(self) -> AsyncIterator[None]:
        """Hold the worker's thread, so that calls wait until the context ends."""
        began, end = threading.Event(), threading.Event()

        def hold() -> None:
            began.set()
            assert end.wait(60)

        holding = self.worker_context.thread.submit(hold)
        try:
            assert await asyncio.to_thread(began.wait, 60)
            yield
        finally:
            end.set()
            holding.result()


def test_a_thread_is_silent_since_its_last_progress() -> None:
    thread, began, go_on = ComputingThread("actor"), threading.Event(), threading.Event()

    def compute() -> None:
        began.set()
        assert go_on.wait(60)
        at = time.monotonic()
        progress()
        assert thread.silent_s <= time.monotonic() - at

    assert thread.silent_s == 0
    computing = thread.submit(compute)
    assert began.wait(60)
    before = thread.silent_s
    assert 0 < before < thread.silent_s
    go_on.set()
    computing.result(60)
    assert thread.silent_s == 0
    thread.shutdown()


def test_a_broken_device_is_a_lost_role_and_a_live_one_is_not() -> None:
    """An error that another one led to counts, too."""
    thread = ComputingThread("actor")

    def fail(error: Exception, cause: Exception | None = None) -> None:
        raise error from cause

    broken = torch.AcceleratorError("CUDA error: device-side assert triggered")
    for errors in ((broken,), (InvalidBatch("in a plug-in"), broken)):
        with pytest.raises(RoleUnavailable, match="device of actor is broken: CUDA error: device-side assert"):
            thread.submit(fail, *errors).result(60)
    harmless = [torch.OutOfMemoryError("full")] + [
        torch.AcceleratorError(f"CUDA error: {text}")
        for text in (
            "out of memory",
            "no kernel image is available for execution on the device",
            "invalid configuration argument",
        )
    ]
    for error in harmless:
        with pytest.raises(type(error)) as raised:
            thread.submit(fail, error).result(60)
        assert raised.value is error
    thread.shutdown()


def test_a_suspect_error_breaks_a_device_that_no_longer_answers() -> None:
    uncertain = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    assert error_of_device(uncertain, lambda: False) is uncertain
    assert error_of_device(uncertain, lambda: True) is None
    assert error_of_device(ValueError("no error of a device"), lambda: False) is None


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle, opa, opb)`",
        "CUDA driver error: unknown error",
        "CUDA error: the function failed to launch on the GPU when calling `cusparseSpMM(handle)`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "cuDNN Frontend error: [cudnn_frontend] Error: CUDNN_STATUS_EXECUTION_FAILED",
        "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT error: CUFFT_EXEC_FAILED",
        "Triton Error [CUDA]: invalid argument",
    ],
)
def test_a_cuda_library_error_counts_if_the_device_is_silent(text: str) -> None:
    """A kernel that failed before is often reported by the next matrix product."""
    of_library = RuntimeError(text)
    assert error_of_device(of_library, lambda: False) is of_library
    assert error_of_device(of_library, lambda: True) is None
    assert error_of_device(RuntimeError(f"in a plug-in: {text}"), lambda: False) is None


def test_an_nccl_error_may_blame_the_device_if_it_names_cudas() -> None:
    """Others are of another rank, or of the network, also if a path or a frame of C++ has the word."""
    for text in ("unhandled cuda error (run with NCCL_DEBUG", "Call to CUDA function failed."):
        failed = dist.DistBackendError(f"NCCL error in: NCCLUtils.cpp:95, {text}")
        assert error_of_device(failed, lambda: False) is failed
        assert error_of_device(failed, lambda: True) is None
    illegal = dist.DistBackendError("Cuda failure 700 'an illegal memory access was encountered'")
    assert error_of_device(illegal, lambda: True) is illegal
    frame = "frame #3: c10d::ProcessGroupNCCL::initNCCLComm() + 0x1 (0x7f in /torch/lib/libtorch_cuda.so)"
    for where in ("NCCLUtils.cpp:95", f"/usr/local/cuda/nccl.h:95\n{frame}\nframe #4: c10::cuda::set_device()"):
        lost = dist.DistBackendError(f"NCCL error in: {where}, remote process exited or there")
        assert error_of_device(lost, lambda: False) is None


def numbers(*values: float, **columns: Any) -> DataProto:
    return DataProto({"x": torch.tensor(values, dtype=torch.float32)} | columns)


async def begun(worker: Squarer, *batches: DataProto) -> list[asyncio.Task[DataProto]]:
    """Calls that are in line."""
    calls = [asyncio.create_task(worker.square(batch)) for batch in batches]
    await asyncio.sleep(0)  # each comes as far as the thread
    assert worker.worker_context.thread.is_waited_for
    return calls


async def test_waiting_calls_are_batched_and_each_gets_its_own_rows() -> None:
    worker = Squarer()
    async with asyncio.timeout(60):
        async with worker.is_busy():
            calls = await begun(worker, numbers(1, 2), numbers(), numbers(3), numbers(4, 5, 6))
        answers = [call["squares"].tolist() for call in await asyncio.gather(*calls)]
        assert answers == [[1, 4], [], [9], [16, 25, 36]]
        assert worker.sizes == [6]
        assert (await worker.square(numbers(7)))["squares"].tolist() == [49]
        assert worker.sizes == [6, 1]


async def test_one_calls_error_is_nobody_elses() -> None:
    worker = Squarer()
    async with asyncio.timeout(60):
        async with worker.is_busy():
            calls = await begun(worker, numbers(1), numbers(-2, 3), numbers(4))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answers[at]["squares"].tolist() for at in (0, 2)] == [[1], [16]]  # type: ignore[index]
        with pytest.raises(InvalidBatch, match=r"^\[-2.0, 3.0\]$"):
            calls[1].result()
        assert worker.sizes == [4, 1, 2, 1]  # together once, then each alone


async def test_calls_of_other_columns_are_answered_too() -> None:
    worker = Squarer()
    async with asyncio.timeout(60):
        async with worker.is_busy():
            calls = await begun(worker, numbers(1), numbers(2, y=torch.ones(1)))
        assert [(await call)["squares"].tolist() for call in calls] == [[1], [4]]


async def test_each_method_has_a_line_of_its_own() -> None:
    worker = Squarer()
    async with asyncio.timeout(60):
        async with worker.is_busy():
            [square] = await begun(worker, numbers(3))
            double = asyncio.create_task(worker.double(numbers(4)))
            await asyncio.sleep(0)
        assert ((await square)["squares"].tolist(), (await double)["doubles"].tolist()) == ([9], [8])
        assert worker.sizes == [1]


async def test_an_answer_of_too_few_rows_is_nobodys() -> None:
    class Forgetful(Squarer):
        @by_rows
        def square(self, batch: DataProto) -> DataProto:
            return DataProto({"squares": batch["x"].square()})[:1]

    worker = Forgetful()
    async with asyncio.timeout(60):
        async with worker.is_busy():
            calls = await begun(worker, numbers(1), numbers(2))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert str(answers[0]).startswith("square: 1 rows answer 2")
        assert isinstance(answers[1], AssertionError) or answers[1]["squares"].tolist() == [4]  # type: ignore[index]


async def test_a_call_that_is_cancelled_in_line_is_not_computed() -> None:
    worker = Squarer()
    async with asyncio.timeout(60):
        async with worker.is_busy():
            calls = await begun(worker, numbers(1), numbers(2, 2), numbers(3))
            calls[1].cancel()
            await asyncio.wait(calls[1:2])
        assert [(await calls[at])["squares"].tolist() for at in (0, 2)] == [[1], [9]]
        assert worker.sizes == [2]


async def test_calls_that_wait_for_a_turn_are_computed_together() -> None:
    """As chunks do, while another role generates."""

    class Staying:
        def __init__(self, role: str) -> None:
            self.role = role

        async def sleep(self) -> int:
            return 0

        async def wake(self) -> int:
            return 0

    lease = Lease()
    worker = Squarer(WorkerContext(ComputingThread("critic"), lease))
    lease.add(Staying("critic"))
    await lease.vacate()
    lease.add(Staying("rollout"))
    async with asyncio.timeout(60):
        async with lease.turn("rollout"):
            calls = [asyncio.create_task(worker.square(numbers(x))) for x in (1, 2, 3)]
            await asyncio.sleep(0)  # each comes as far as its turn
            assert worker.sizes == []
        assert [(await call)["squares"].tolist() for call in calls] == [[1], [4], [9]]
    assert worker.sizes == [3]
