"""Servers of weights, and some that fail."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from rolemesh.rpc.contract import WEIGHTS
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.wire.dtypes import TO_WIRE

MIB = 1 << 20


@asynccontextmanager
async def serving(*servicers: WeightsServicer) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(server_of(servicer)) for servicer in servicers]


@asynccontextmanager
async def server_of(servicer: WeightsServicer, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = RoleServer({"actor": [WEIGHTS]})
    address = await server.start(listen)
    await server.ready({WEIGHTS: servicer})
    try:
        yield address
    finally:
        await server.drain(0)


def stored(held: PublishedWeights) -> WeightStore:
    store = WeightStore()
    store.put(held.holding)
    return store


def of_every_dtype() -> dict[str, Tensor]:
    """Make tensors of random bits, so all kinds of NaN occur; bool has only 0 and 1."""
    octets = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return {
        str(dtype): (octets % 2).bool() if dtype == torch.bool else octets.clone().view(dtype)
        for dtype in TO_WIRE
    }


def noise(num_bytes: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def large(version: int = 1) -> PublishedWeights:
    """Make weights that are slightly larger than six pieces."""
    return PublishedWeights(version, {"a": noise(10 * MIB + 5), "b": noise(14 * MIB)})


async def assert_same(tensors: dict[str, Tensor], held: PublishedWeights) -> None:
    expected = await held.fetch()
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def pull(
    sources: Sequence[str], held: PublishedWeights, store: WeightStore | None = None, **arguments: Any
) -> RemoteWeights:
    return RemoteWeights(sources, held.version, held.holding.digest, store=store, **arguments)


def counted(counter: Any, *labels: str) -> Callable[[], int]:
    """Return a function that tells how much a counter has grown since this call."""
    value = counter.labels(*labels)._value
    before = value.get()
    return lambda: int(value.get() - before)


# ---------------------------------------------------------------------------- servers that fail


class Faulty(WeightsServicer):
    """The real service, with a hook that can change its frames. `starts` are the requested offsets."""

    def __init__(self, held: PublishedWeights) -> None:
        super().__init__(stored(held))
        self.starts: list[int] = []

    async def FetchRange(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.starts.append(request.offset)
        at = request.offset
        async for frame in super().FetchRange(request, context):
            yield await self.on_frame(at, frame)
            at += MIB

    async def on_frame(self, at: int, frame: bytes) -> bytes:
        return frame


class Flipping(Faulty):
    """Changes one bit of each frame at the offsets, the given number of times."""

    def __init__(self, held: PublishedWeights, *at: int, times: int) -> None:
        super().__init__(held)
        self._left = dict.fromkeys(at, times)

    async def on_frame(self, at: int, frame: bytes) -> bytes:
        if not self._left.get(at):
            return frame
        self._left[at] -= 1
        return frame[:-1] + bytes([frame[-1] ^ 1])


class Gated(Faulty):
    """Sends the bytes before an offset, and the rest after `open` is set."""

    def __init__(self, held: PublishedWeights, until: int) -> None:
        super().__init__(held)
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self._until = until

    async def on_frame(self, at: int, frame: bytes) -> bytes:
        if at >= self._until:
            self.reached.set()
            await self.open.wait()
        return frame


class Elsewhere(Gated):
    """The same as on another machine, whose memory cannot be shared."""

    async def GetManifest(self, request: Any, context: Any) -> Any:
        answer = await super().GetManifest(request, context)
        answer.ClearField("shared")
        return answer
