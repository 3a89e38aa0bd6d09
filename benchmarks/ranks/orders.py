"""What an order to the ranks of a role costs: an empty command, beside one gRPC call to one process."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rolemesh import threads
from rolemesh.dataproto import DataProto
from rolemesh.ranks.follower import follow
from rolemesh.ranks.leader import Leader
from rolemesh.ranks.rendezvous import Rendezvous, local_store

GATHER_S = 120.0
PROCESSES = multiprocessing.get_context("spawn")


def nothing(rows: DataProto) -> DataProto:
    return rows


def follower(rendezvous: Rendezvous) -> None:
    asyncio.run(follow(["actor"], rendezvous, {"actor": ThreadPoolExecutor(1)}, lambda *_: nothing))


def callee(pipe: Any) -> None:
    asyncio.run(_serve_health(pipe))


async def _serve_health(pipe: Any) -> None:
    server = grpc.aio.server()
    servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # absent from the stubs
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    started = PROCESSES.Process(target=target, args=arguments)
    started.start()
    try:
        yield
    finally:
        started.kill()
        started.join()


async def p50(call: Callable[[], Awaitable[Any]], number: int) -> float:
    """Median seconds of a call, after a few that are not counted."""
    seconds = []
    for i in range(number + 20):
        began = time.perf_counter()
        await call()
        if i >= 20:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


async def round_trip(size: int, number: int) -> float:
    """Median seconds of an empty command to `size` ranks, from the event loop to all answers and back."""
    store = local_store(size)
    ranks = [Rendezvous(rank, size, "127.0.0.1", store.port, "0") for rank in range(size)]
    leader = Leader(["actor"], ranks[0])
    await leader.start()
    thread = ThreadPoolExecutor(1)
    run = leader.executor("actor").run
    with ExitStack() as followers:
        for rank in ranks[1:]:
            followers.enter_context(process(follower, rank))
        async with asyncio.timeout(GATHER_S):
            await leader.gather()
        parts = [DataProto()] * size
        seconds = await p50(partial(threads.run_on, thread, run, "nothing", nothing, parts), number)
        await leader.close()
    return seconds


async def calls(number: int) -> float:
    """Median seconds of a gRPC call that carries nothing."""
    here, there = PROCESSES.Pipe()
    with process(callee, there):
        port = await asyncio.to_thread(here.recv)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return await p50(lambda: stub.Check(health_pb2.HealthCheckRequest()), number)


async def measure(number: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each contestant: the best round's median, since other work only adds time."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        seconds.setdefault("one gRPC call", []).append(await calls(number))
        for size in (2, 3):
            seconds.setdefault(f"an empty command to {size} ranks", []).append(await round_trip(size, number))
    return {name: 1000 * min(values) for name, values in seconds.items()}
