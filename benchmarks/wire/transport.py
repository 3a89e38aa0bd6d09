"""A batch there and back between two processes over loopback, in one run with its peers.

    python -m benchmarks.wire.transport [--repeats N]

Every contestant has its own client and server process, so that none inherits another's heap. They take turns,
size by size, and the fastest and the median turn are kept. A turn is a whole exchange of a DataProto: written,
carried, read into tensors on the other side, and the same on the way back; only the raw socket moves bare
bytes. The peers run as a program that uses them would; `protobuf unary, tuned` shows how much of the
difference is the allocator's (rolemesh/wire/allocator.py).

Writes benchmarks/results/transport.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle  # a contestant, between two processes of this benchmark; the project itself never unpickles
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import IO, Any, cast

import grpc
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from rich.console import Console
from rich.table import Table

from rolemesh.dataproto import DataProto
from rolemesh.rpc.channels import CHANNEL_OPTIONS
from rolemesh.wire import allocator, streams
from rolemesh.wire.codec import encode

RESULTS = Path(__file__).parents[1] / "results" / "transport.json"
SIZES = {"16 MiB": 16 << 20, "256 MiB": 256 << 20}
RAW_TCP = "raw TCP, 4 MiB sends"
FRAMES = "frame stream"
PICKLE = "pickle unary"
PROTOBUF = "protobuf unary"
PROTOBUF_TUNED = "protobuf unary, tuned"
CONTESTANTS = (RAW_TCP, FRAMES, PICKLE, PROTOBUF, PROTOBUF_TUNED)
TUNED = (FRAMES, PROTOBUF_TUNED)
SEND_BYTES = 4 << 20
# Unary contestants need the whole batch in one message; everything else is as Rolemesh sets it.
UNLIMITED = {"grpc.max_send_message_length": -1, "grpc.max_receive_message_length": -1}
OPTIONS = list((dict(CHANNEL_OPTIONS) | UNLIMITED).items())
METHOD = "/rolemesh.benchmark.Echo/Exchange"

Exchange = Callable[[DataProto], Awaitable[DataProto]]


def dense_batch(num_bytes: int) -> DataProto:
    """Random float32 and bfloat16 columns [256, N]: nothing to unpad, nothing to narrow."""
    torch.manual_seed(0)
    rows = 256
    quarter = num_bytes // 4
    return DataProto(
        {
            "old_log_probs": torch.randn(rows, quarter // rows // 4),
            "values": torch.randn(rows, quarter // rows // 4),
            "hidden": torch.randn(rows, quarter // rows // 2).bfloat16(),
            "embeddings": torch.randn(rows, quarter // rows // 2).bfloat16(),
        }
    )


def ppo_batch() -> DataProto:
    """What an update reads, 512 rows of 512 + 1024 tokens of which 40 % are not padding."""
    torch.manual_seed(0)
    rows = 512
    prompt = 512
    response = 1024
    prompt_lengths = torch.randint(60, 340, (rows, 1))
    response_lengths = torch.randint(20, 780, (rows, 1))
    prompt_mask = torch.arange(prompt) >= prompt - prompt_lengths
    response_mask = torch.arange(response) < response_lengths
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    ids = torch.randint(0, 151_643, (rows, prompt + response))
    noise = torch.randn(2, rows, response).where(
        response_mask, 0.0
    )  # a product would leave -0.0 in the padding
    return DataProto(
        {
            "input_ids": ids.where(attention_mask.bool(), 151_643),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "old_log_probs": noise[0],
            "advantages": noise[1],
        }
    )


# ----------------------------------------------------------------------------------- contestants


def protobuf_batch() -> Any:
    """A message class as one would write it: repeated columns of name, dtype, shape and bytes."""
    file = descriptor_pb2.FileDescriptorProto(name="benchmark.proto", package="benchmark", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    column = file.message_type.add(name="Column")
    for number, (name, kind) in enumerate(
        [("name", kinds.TYPE_STRING), ("dtype", kinds.TYPE_STRING), ("shape", kinds.TYPE_INT64),
         ("data", kinds.TYPE_BYTES)], start=1):  # fmt: skip
        label = kinds.LABEL_REPEATED if name == "shape" else kinds.LABEL_OPTIONAL
        column.field.add(name=name, number=number, type=kind, label=label)
    file.message_type.add(name="Batch").field.add(
        name="columns",
        number=1,
        type=kinds.TYPE_MESSAGE,
        label=kinds.LABEL_REPEATED,
        type_name=".benchmark.Column",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("benchmark.Batch"))


Batch = protobuf_batch()


def to_protobuf(batch: DataProto) -> bytes:
    message = Batch()
    for name, tensor in batch.tensors.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        message.columns.add(name=name, dtype=dtype, shape=tensor.shape, data=data)
    return cast(bytes, message.SerializeToString())


def from_protobuf(data: bytes) -> DataProto:
    return DataProto(
        {
            column.name: torch.frombuffer(bytearray(column.data), dtype=getattr(torch, column.dtype)).reshape(
                tuple(column.shape)
            )
            for column in Batch.FromString(data).columns
        }
    )


def unary_codec(contestant: str) -> tuple[Callable[[DataProto], bytes], Callable[[bytes], DataProto]]:
    if contestant == PICKLE:
        return (
            lambda batch: pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL),
            lambda data: cast(DataProto, pickle.loads(data)),  # noqa: S301  what our own server process wrote
        )
    return to_protobuf, from_protobuf


# --------------------------------------------------------------------------------------- servers


async def serve(contestant: str) -> None:
    """Sends back what comes, decoded and encoded again, until standard input closes."""
    if contestant == RAW_TCP:
        await asyncio.to_thread(serve_tcp)
        return
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((handler(contestant),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def handler(contestant: str) -> grpc.GenericRpcHandler[bytes, bytes]:
    async def exchange_frames(frames: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for frame in streams.send(await streams.receive(frames)):
            yield frame

    to_bytes, from_bytes = unary_codec(contestant)

    async def exchange_unary(data: bytes, context: object) -> bytes:
        return to_bytes(from_bytes(data))

    frame_stream = contestant == FRAMES
    method = (
        grpc.stream_stream_rpc_method_handler(exchange_frames)
        if frame_stream
        else grpc.unary_unary_rpc_method_handler(exchange_unary)
    )
    _, service, name = METHOD.split("/")
    return grpc.method_handlers_generic_handler(service, {name: method})


def serve_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        buffer = memoryview(bytearray(max(SIZES.values())))
        with connection:
            while size := int.from_bytes(connection.recv(8), "little"):
                receive_tcp(connection, buffer[:size])
                send_tcp(connection, buffer[:size])


def send_tcp(connection: socket.socket, data: memoryview) -> None:
    for start in range(0, len(data), SEND_BYTES):
        connection.sendall(data[start : start + SEND_BYTES])


def receive_tcp(connection: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        into = into[connection.recv_into(into) :]


# --------------------------------------------------------------------------------------- clients


async def take_turns(contestant: str) -> None:
    """Reads a size a line from standard input and answers with the seconds that an exchange took."""
    if contestant in TUNED:
        allocator.tune()
    server = start("serve", contestant)
    port = read_line(server)
    batches = {size: dense_batch(size) for size in SIZES.values()}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        exchange = client(contestant, int(port), channel)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            batch = batches[int(line)]
            begun = time.perf_counter()
            back = await exchange(batch)
            seconds = time.perf_counter() - begun
            assert all(torch.equal(back[name], batch[name]) for name in back.columns)
            print(seconds, flush=True)
            del back
    server.kill()  # it holds nothing, and a socket's server would wait for the next batch
    server.wait()


def client(contestant: str, port: int, channel: grpc.aio.Channel) -> Exchange:
    if contestant == RAW_TCP:
        return tcp_client(port)
    if contestant == FRAMES:
        stream: Any = channel.stream_stream(METHOD, None, None)

        async def exchange_frames(batch: DataProto) -> DataProto:
            return await streams.receive(stream(streams.send(batch)))

        return exchange_frames
    unary: Any = channel.unary_unary(METHOD, None, None)
    to_bytes, from_bytes = unary_codec(contestant)

    async def exchange_unary(batch: DataProto) -> DataProto:
        return from_bytes(await unary(to_bytes(batch)))

    return exchange_unary


def tcp_client(port: int) -> Exchange:
    connection = socket.create_connection(("127.0.0.1", port))
    into = memoryview(bytearray(max(SIZES.values())))
    data = {size: memoryview(bytes(os.urandom(size))) for size in SIZES.values()}

    async def exchange(batch: DataProto) -> DataProto:
        size = sum(tensor.nbytes for tensor in batch.tensors.values())
        connection.sendall(size.to_bytes(8, "little"))
        send_tcp(connection, data[size])
        receive_tcp(connection, into[:size])
        return DataProto()

    return exchange


# ------------------------------------------------------------------------------------------- run


def start(task: str, contestant: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.wire.transport", "--task", task, "--contestant", contestant]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def stop(process: subprocess.Popen[str]) -> None:
    """Closes the process's standard input, upon which it ends."""
    process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    line = cast(IO[str], process.stdout).readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended before it answered")
    return line.strip()


def measure(repeats: int, console: Console) -> dict[str, dict[str, list[float]]]:
    """Seconds by size, contestant and turn, after one turn that is not counted."""
    clients = {contestant: start("turns", contestant) for contestant in CONTESTANTS}
    for process in clients.values():
        read_line(process)
    seconds: dict[str, dict[str, list[float]]] = {}
    for label, size in SIZES.items():
        turns: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
        for repeat in range(repeats + 1):
            with console.status(f"{label}, turn {repeat} of {repeats}"):
                for contestant, process in clients.items():
                    print(size, file=process.stdin, flush=True)
                    turns[contestant].append(float(read_line(process)))
        seconds[label] = {contestant: taken[1:] for contestant, taken in turns.items()}
    for process in clients.values():
        stop(process)
    return seconds


def summary(seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """GB/s each way and ratios of medians."""
    result: dict[str, Any] = {}
    for label, taken in seconds.items():
        medians = {contestant: statistics.median(turns) for contestant, turns in taken.items()}
        result[label] = {
            contestant: {
                "min_s": min(taken[contestant]),
                "median_s": median,
                "gb_per_s": 2 * SIZES[label] / median / 1e9,
                "of_raw_tcp": medians[RAW_TCP] / median,
                "times_protobuf_unary": medians[PROTOBUF] / median,
            }
            for contestant, median in medians.items()
        }
    batch = ppo_batch()
    padded = sum(tensor.nbytes for tensor in batch.tensors.values())
    sent = encode(batch).region_bytes
    filled = float(batch["attention_mask"].float().mean())
    result["ppo_batch"] = {"filled": filled, "padded_bytes": padded, "sent_bytes": sent, "ratio": padded / sent}
    return result


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("batch", "contestant", "min s", "median s", "GB/s", "of raw TCP", "x protobuf unary")
    for label in SIZES:
        for contestant, row in result[label].items():
            numbers = (row[key] for key in ("min_s", "median_s", "gb_per_s"))
            ratios = (row[key] for key in ("of_raw_tcp", "times_protobuf_unary"))
            table.add_row(label, contestant, *(f"{x:.3f}" for x in numbers), *(f"{x:.2f}" for x in ratios))
    console.print(table)
    ppo = result["ppo_batch"]
    console.print(
        f"PPO batch {ppo['filled']:.0%} filled: {ppo['sent_bytes']:,} bytes of {ppo['padded_bytes']:,}, "
        f"{ppo['ratio']:.1f} times fewer"
    )
    console.print("wanted: frame stream >= 0.40 of raw TCP and >= 5 x protobuf unary")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--task", choices=("serve", "turns"), help=argparse.SUPPRESS)
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task == "serve":
        if arguments.contestant in TUNED:
            allocator.tune()
        asyncio.run(serve(arguments.contestant))
    elif arguments.task == "turns":
        asyncio.run(take_turns(arguments.contestant))
    else:
        console = Console(width=110)
        result = summary(measure(arguments.repeats, console))
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
        show(result, console)


if __name__ == "__main__":
    main()
