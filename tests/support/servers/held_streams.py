"""Calls of the reward that send a part and then nothing, and what a test waits for around them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import grpc

from rolemesh.dataproto import DataProto
from rolemesh.rpc.status_codes import ERROR_KEY
from rolemesh.wire.codec import Encoded
from rolemesh.wire.frame import join_frame
from rolemesh.wire.streams import receive, send

METHOD = "/rolemesh.v1.RewardService/ComputeScores"


async def score(channel: grpc.aio.Channel, batch: DataProto) -> None:
    """An honest call."""
    answer = await receive(channel.stream_stream(METHOD)(send(batch), timeout=120))
    assert len(answer) == len(batch)


class Held:
    """A call that sends some frames and then nothing, without an end."""

    def __init__(self, channel: grpc.aio.Channel, *frames: bytes) -> None:
        self._call = channel.stream_stream(METHOD)(self._send(frames), timeout=120)
        self.refused = asyncio.create_task(self._refusal())

    async def _send(self, frames: tuple[bytes, ...]) -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame
        await asyncio.Event().wait()

    async def _refusal(self) -> tuple[str, str]:
        await self._call.wait_for_connection()
        status = (await self._call.code()).name
        return status, dict(await self._call.trailing_metadata() or ()).get(ERROR_KEY, "")

    def cancel(self) -> None:
        self._call.cancel()


def error_class(error: grpc.aio.AioRpcError) -> str:
    return str(dict(error.trailing_metadata() or ()).get(ERROR_KEY, ""))


@contextmanager
def occupied(executor: Executor) -> Iterator[None]:
    """Its one thread does something else, and has begun to: its queue holds nothing but what comes after."""
    began, over = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        over.wait()

    executor.submit(work)
    began.wait()
    try:
        yield
    finally:
        over.set()


def all_but_the_end(encoded: Encoded) -> list[bytes]:
    region = b"".join(encoded.buffers)
    return [join_frame(encoded.header, [region[:-1]], len(region) - 1)]


async def until(is_so: Callable[[], bool]) -> None:
    """Lets the event loop, on which the server lives too, go on until something is so."""
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def ended(held: list[Held], count: int) -> list[tuple[str, str]]:
    """How so many of the calls end, those that end first."""
    waiting = {call.refused for call in held}
    while len(waiting) > len(held) - count:
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    return [call.refused.result() for call in held if call.refused.done()]
