"""Batches over a real gRPC channel on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
import torch

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.rpc.channels import CHANNEL_OPTIONS
from rolemesh.wire.carrier import FRAME_BYTES
from rolemesh.wire.limits import MAX_MESSAGE_BYTES
from rolemesh.wire.streams import receive, receive_batches, send

STREAMS = "rolemesh.test.Streams"


async def echo(frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    try:
        batch = await receive(frames)
    except InvalidBatch as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    async for frame in send(batch):
        yield frame


async def rows(frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    batch = await receive(frames)
    for row in batch.split(1):
        async for frame in send(row):
            yield frame


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    methods = {
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        "Rows": grpc.stream_stream_rpc_method_handler(rows),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(STREAMS, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        yield channel
    await server.stop(None)


def assert_same(back: DataProto, batch: DataProto) -> None:
    assert back.columns == batch.columns
    for name, tensor in batch.tensors.items():
        assert torch.equal(back[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
    for name, column in batch.non_tensors.items():
        assert back[name].tolist() == column.tolist()
    assert back.meta_info == batch.meta_info


async def test_a_batch_goes_there_and_back_in_frames_of_a_mebibyte(channel: grpc.aio.Channel):
    batch = DataProto.from_dict(
        {"values": torch.randn(64, 40_000), "hidden": torch.randn(64, 999).bfloat16()},
        {"uid": [f"prompt {i}" for i in range(64)], "chat": [[{"content": i}] for i in range(64)]},
        {"step": 7, "sampling": "train"},
    )
    frames = [frame async for frame in send(batch)]
    assert len(frames) == 10
    assert all(len(frame) <= FRAME_BYTES + 2048 for frame in frames)
    back = await receive(channel.stream_stream(f"/{STREAMS}/Echo")(send(batch)))
    assert_same(back, batch)


async def test_a_batch_larger_than_any_message_is_streamed(channel: grpc.aio.Channel):
    batch = DataProto({"x": torch.randn(MAX_MESSAGE_BYTES // 4 + 1)})
    assert_same(await receive(channel.stream_stream(f"/{STREAMS}/Echo")(send(batch))), batch)


async def test_small_and_empty_batches_are_one_frame(channel: grpc.aio.Channel):
    for batch in (
        DataProto(),
        DataProto({"x": torch.ones(3)}),
        DataProto.from_dict({"x": torch.zeros(0, 2)}, {"c": []}),
    ):
        assert len([frame async for frame in send(batch)]) == 1
        assert_same(await receive(channel.stream_stream(f"/{STREAMS}/Echo")(send(batch))), batch)


async def test_a_sequence_of_batches_arrives_as_one(channel: grpc.aio.Channel):
    batch = DataProto.from_dict({"x": torch.randn(3, 400_000)}, {"uid": ["a", "b", "c"]})
    call = channel.stream_stream(f"/{STREAMS}/Rows")(send(batch))
    back = [row async for row in receive_batches(call)]
    assert [row["uid"].tolist() for row in back] == [["a"], ["b"], ["c"]]
    assert_same(DataProto.concat(back), batch)


async def test_a_request_that_ends_early_is_answered_with_the_reason(channel: grpc.aio.Channel):
    frames = [frame async for frame in send(DataProto({"x": torch.randn(1 << 20)}))]

    async def cut() -> AsyncIterator[bytes]:
        for frame in frames[:-1]:
            yield frame

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await receive(channel.stream_stream(f"/{STREAMS}/Echo")(cut()))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "ended after 3145728" in raised.value.details()
