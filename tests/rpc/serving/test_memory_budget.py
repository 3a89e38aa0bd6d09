"""What all streams of a process hold together is bounded, and a stream that stands still keeps nothing from the
others. Real servicers, real channels; bytes as the server and the interpreter's allocator count them."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from held_streams import METHOD, Held, all_but_the_end, ended, error_class, occupied, score, until
from serving import reward_batch, reward_job

from rolemesh.dataproto import DataProto
from rolemesh.rpc.channels import CHANNEL_OPTIONS
from rolemesh.rpc.contract import REWARD
from rolemesh.rpc.serving import memory_budget
from rolemesh.rpc.serving.memory_budget import MemoryBudget
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.processes.serve import load_group
from rolemesh.telemetry import metrics
from rolemesh.threads import run_on
from rolemesh.v1 import data_pb2, frame_pb2
from rolemesh.wire.codec import Encoded, encode
from rolemesh.wire.frame import join_frame
from rolemesh.wire.limits import MAX_STREAMS
from rolemesh.wire.streams import receive, send

ROWS = 2000
NEVER_S = 3600.0


@pytest.fixture(scope="module")
def batch() -> DataProto:
    return reward_batch(ROWS)


@pytest.fixture(scope="module")
def encoded(batch: DataProto) -> Encoded:
    return encode(batch)


@pytest.fixture
def threads() -> dict[str, ThreadPoolExecutor]:
    """Of the server that runs."""
    return {}


@pytest.fixture
async def reward(
    tiny_model: Path, tmp_path: Path, threads: dict[str, ThreadPoolExecutor]
) -> Callable[[MemoryBudget], Any]:
    job = reward_job(tiny_model, tmp_path / "job")

    @asynccontextmanager
    async def with_budget(budget: MemoryBudget) -> AsyncIterator[grpc.aio.Channel]:
        server = RoleServer({"reward": [REWARD]}, budget)
        address = await server.start("127.0.0.1:0")
        try:
            workers, servicers = await load_group(["reward"], job)
            threads["worker"] = workers[0].worker_context.thread
            await server.ready(servicers)
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                yield channel
        finally:
            await server.drain(0)

    return with_budget


async def test_held_streams_share_a_bound_and_an_honest_call_passes(
    reward: Callable[[MemoryBudget], Any], batch: DataProto, encoded: Encoded
) -> None:
    """Each of twelve holds all of a batch but its last byte; there is room for four batches. A stream that is
    held gives way to whatever moves."""
    size = encoded.region_bytes
    budget = MemoryBudget(4 * size + size // 2, stall_s=NEVER_S, idle_s=0.0)
    async with reward(budget) as channel:
        held = [Held(channel, *all_but_the_end(encoded)) for _ in range(12)]
        assert await ended(held, 8) == [("RESOURCE_EXHAUSTED", "RoleBusy")] * 8
        await until(lambda: budget.held_bytes == 4 * size)
        await score(channel, batch)
        assert len([call for call in held if call.refused.done()]) > 8
        assert budget.held_bytes <= 3 * size
        for call in held:
            call.cancel()
        await until(lambda: budget.held_bytes == 0)


async def test_without_a_silent_stream_the_one_without_room_is_refused(
    reward: Callable[[MemoryBudget], Any], batch: DataProto, encoded: Encoded
) -> None:
    size = encoded.region_bytes
    budget = MemoryBudget(3 * size - 1, stall_s=NEVER_S, idle_s=NEVER_S)
    async with reward(budget) as channel:
        held = [Held(channel, *all_but_the_end(encoded)) for _ in range(2)]
        await until(lambda: budget.held_bytes == 2 * size)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await score(channel, batch)
        assert (error.value.code().name, error_class(error.value)) == ("RESOURCE_EXHAUSTED", "RoleBusy")
        assert (budget.held_bytes, any(call.refused.done() for call in held)) == (2 * size, False)
        for call in held:
            call.cancel()
        await until(lambda: budget.held_bytes == 0)
        await score(channel, batch)
        assert budget.held_bytes == 0


async def test_a_batch_counts_its_unpacked_bytes_while_it_is_used(
    reward: Callable[[MemoryBudget], Any], batch: DataProto, encoded: Encoded
) -> None:
    """prompts and responses travel in one byte an id, and take eight; the masks take nothing and one."""
    seen: list[int] = []

    class Watched(MemoryBudget):
        def free(self, num_bytes: int) -> None:
            super().free(num_bytes)
            seen.append(self.held_bytes + num_bytes)

    async with reward(Watched(1 << 30)) as channel:
        await score(channel, batch)
    tensors = sum(tensor.nbytes for tensor in batch.tensors.values())
    assert seen[-1] == encoded.region_bytes + tensors


@pytest.mark.parametrize("waits_for", ["decoder", "worker"])
async def test_a_cancelled_call_counts_while_a_thread_holds_its_batch(
    waits_for: str,
    reward: Callable[[MemoryBudget], Any],
    threads: dict[str, ThreadPoolExecutor],
    batch: DataProto,
    encoded: Encoded,
) -> None:
    """There is room for one batch and not for two. A caller that cancels, be it at once, gets no more."""
    size = encoded.region_bytes + sum(tensor.nbytes for tensor in batch.tensors.values())
    budget, in_flight = (
        MemoryBudget(2 * size - 1),
        metrics.SERVER_IN_FLIGHT.labels("reward", "ComputeScores")._value,
    )
    frames = [bytes(frame) async for frame in send(batch)]
    threads["decoder"] = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads["decoder"])
    async with reward(budget) as channel:

        async def sent() -> AsyncIterator[bytes]:
            for frame in frames:
                yield frame

        with occupied(threads[waits_for]):
            call = channel.stream_stream(METHOD)(sent(), timeout=120)
            await until(lambda: budget.held_bytes == size and not threads[waits_for]._work_queue.empty())
            call.cancel()
            await until(lambda: in_flight.get() == 0)
            assert budget.held_bytes == size
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await receive(channel.stream_stream(METHOD)(sent(), timeout=120))
            assert error_class(error.value) == "RoleBusy"
        await until(lambda: budget.held_bytes == 0)
        await score(channel, batch)


async def test_work_that_nobody_waits_for_any_more_is_skipped() -> None:
    done: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        with occupied(executor):
            unwanted = asyncio.create_task(run_on(executor, done.append, "unwanted"))
            wanted = asyncio.create_task(run_on(executor, done.append, "wanted"))
            await until(lambda: executor._work_queue.qsize() == 2)
            unwanted.cancel()
            await asyncio.wait({unwanted})
        await wanted
    assert (unwanted.cancelled(), done) == (True, ["wanted"])


async def test_a_stalled_stream_is_ended_and_its_bytes_are_released(
    reward: Callable[[MemoryBudget], Any], batch: DataProto, encoded: Encoded
) -> None:
    budget = MemoryBudget(1 << 30, stall_s=3.0)
    async with reward(budget) as channel:
        await score(channel, batch)  # whatever is made on first use
        frames = all_but_the_end(encoded)
        tracemalloc.start()
        try:
            held = [Held(channel, *frames) for _ in range(16)]
            assert await ended(held, 16) == [("DEADLINE_EXCEEDED", "RoleTimeout")] * 16
            await until(lambda: budget.held_bytes == 0)
            left, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most > 8 * encoded.region_bytes  # they were held
        # Of sixteen regions; some 20 to 30 KB a call are its status and its log line, whatever it had sent.
        assert left < 4 * encoded.region_bytes
        await score(channel, batch)


def claiming(encoded: Encoded, change: Callable[[frame_pb2.FrameHeader], object]) -> bytes:
    """The first frame of a batch of 32 GiB, without a byte of its region."""
    header = frame_pb2.FrameHeader.FromString(encoded.header)
    header.region_bytes = 32 << 30
    change(header)
    return join_frame(header.SerializeToString(), (), 0)


def spec_of(header: frame_pb2.FrameHeader, name: str) -> frame_pb2.TensorSpec:
    return next(spec for spec in header.tensors if spec.name == name)


def wide(header: frame_pb2.FrameHeader) -> None:
    spec = spec_of(header, "responses")
    spec.shape[1], spec.layout, spec.data.num_bytes = 1 << 20, data_pb2.LAYOUT_DENSE, ROWS << 20


def floats(header: frame_pb2.FrameHeader) -> None:
    spec = spec_of(header, "responses")
    spec.dtype = spec.wire_dtype = data_pb2.DTYPE_FLOAT32


def no_rows(header: frame_pb2.FrameHeader) -> None:
    header.num_rows = 0
    for spec in header.tensors:
        spec.shape[0] = 0


def cells(header: frame_pb2.FrameHeader) -> None:
    spec = header.tensors.add()
    spec.CopyFrom(spec_of(header, "responses"))
    spec.name = "uid"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wide, r"column 'responses' is torch.int64 \[2000, 1048576\]; torch.int64 \[2000, 8\] expected"),
        (floats, r"column 'responses' is torch.float32 \[2000, 8\]; torch.int64"),
        (no_rows, "needs at least one row"),
        (cells, "column 'uid' is a tensor; a str for each row expected"),
        (lambda header: header.ClearField("tensors"), r"needs tensors \['prompts', 'prompt_mask', 'responses'"),
    ],
)
async def test_a_foreign_header_is_refused_before_its_region_is_sent(
    change: Callable[[frame_pb2.FrameHeader], object],
    words: str,
    reward: Callable[[MemoryBudget], Any],
    encoded: Encoded,
) -> None:
    budget = MemoryBudget(64 << 30, stall_s=NEVER_S, idle_s=0.01)
    async with reward(budget) as channel:
        held = Held(channel, claiming(encoded, change))
        assert await held.refused == ("INVALID_ARGUMENT", "InvalidBatch")
        with pytest.raises(grpc.aio.AioRpcError, match="reward.compute_scores.*" + words) as error:
            await anext(aiter(held._call))
        assert str(error.value.details()).count("compute_scores") == 1
        assert budget.held_bytes == 0


async def test_a_caller_refused_at_its_header_mid_send_gets_the_reason(
    reward: Callable[[MemoryBudget], Any], batch: DataProto
) -> None:
    """A configuration may differ at the two ends. Every attempt gets the reason."""
    batch = DataProto(batch.tensors, batch.non_tensors)
    batch["responses"] = torch.randint(0, 1 << 40, (ROWS, 1500))  # 24 MB
    async with reward(MemoryBudget(64 << 30, idle_s=NEVER_S)) as channel:
        for _ in range(8):
            with pytest.raises(grpc.aio.AioRpcError, match=r"\[2000, 8\] expected") as error:
                await score(channel, batch)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_caller_without_room_gets_role_busy_at_any_batch_size(
    reward: Callable[[MemoryBudget], Any], encoded: Encoded
) -> None:
    """Every time: grpc.aio says of most calls that end while they write that they could not write, and an
    Update may be asked again only where the role says that it was busy."""
    large = reward_batch(ROWS)
    large["responses"] = torch.randint(0, 1 << 40, (ROWS, 8))
    large["extra_info"] = [{"index": row, "text": f"{row:x}" * 3000} for row in range(ROWS)]
    assert encode(large).region_bytes > 16 << 20
    budget = MemoryBudget(encode(large).region_bytes * 2, stall_s=NEVER_S, idle_s=NEVER_S)
    with budget.reserve() as other:
        async with reward(budget) as channel:
            other.resize(budget.total_bytes - (1 << 20))
            for _ in range(8):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await score(channel, large)
                assert error_class(error.value) == "RoleBusy"


async def test_a_batch_that_never_has_room_is_refused_by_its_header(
    reward: Callable[[MemoryBudget], Any], batch: DataProto, encoded: Encoded
) -> None:
    unpacked = sum(tensor.nbytes for tensor in batch.tensors.values())
    first = join_frame(encoded.header, (), 0)
    async with reward(
        MemoryBudget(encoded.region_bytes + unpacked - 1, stall_s=NEVER_S, idle_s=0.01)
    ) as channel:
        held = Held(channel, first)
        assert await held.refused == ("INVALID_ARGUMENT", "InvalidBatch")
        with pytest.raises(grpc.aio.AioRpcError, match=f"unpacks to {unpacked} more; this process has room"):
            await anext(aiter(held._call))
    async with reward(MemoryBudget(encoded.region_bytes + unpacked)) as channel:
        await score(channel, batch)


async def test_a_claim_without_bytes_costs_nothing(
    reward: Callable[[MemoryBudget], Any], encoded: Encoded
) -> None:
    """A hundred streams that each claim 32 GiB."""
    budget = MemoryBudget(64 << 30, stall_s=NEVER_S)
    async with reward(budget) as channel:
        tracemalloc.start()
        try:
            held = [Held(channel, claiming(encoded, lambda header: None)) for _ in range(100)]
            await until(lambda: len(budget._reservations) == 100)
            other = Held(channel, claiming(encoded, no_rows))
            await other.refused  # it came after them
            assert (budget.held_bytes, tracemalloc.get_traced_memory()[1] < 64 << 20) == (0, True)
        finally:
            tracemalloc.stop()
        for call in held:
            call.cancel()


async def test_a_connection_has_a_bounded_number_of_calls_at_once(
    reward: Callable[[MemoryBudget], Any], batch: DataProto, encoded: Encoded
) -> None:
    """One call more waits until another ends."""
    budget = MemoryBudget(64 << 30, stall_s=NEVER_S)
    async with reward(budget) as channel:
        held = [Held(channel, claiming(encoded, lambda header: None)) for _ in range(MAX_STREAMS)]
        await until(lambda: len(budget._reservations) == MAX_STREAMS)
        more = [asyncio.create_task(score(channel, batch)) for _ in range(4)]
        for _ in range(1000):
            await asyncio.sleep(0)
            assert len(budget._reservations) == MAX_STREAMS
        held[0].cancel()
        await asyncio.gather(*more)
        for call in held:
            call.cancel()


def test_a_containers_limit_counts_if_it_is_below_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 of cgroups says max where there is none, version 1 a number beyond any machine's memory."""
    versions = [tmp_path / path.name for path in memory_budget.CGROUP_LIMITS]
    monkeypatch.setattr(memory_budget, "CGROUP_LIMITS", versions)
    machine = memory_budget.memory_bytes()
    for path in versions:
        for text, expected in (("1073741824\n", 1 << 30), ("max\n", machine), (f"{2**63 - 4096}\n", machine)):
            path.write_text(text)
            assert memory_budget.memory_bytes() == expected
    assert MemoryBudget().total_bytes == machine // 2
