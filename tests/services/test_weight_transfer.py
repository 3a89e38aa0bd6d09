"""Weights pulled over real servers: every bit arrives, and what goes wrong is repaired or named."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rolemesh.config.job import make_job
from rolemesh.errors import WeightsUnavailable
from rolemesh.models.loading import named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.rpc.contract import WEIGHTS
from rolemesh.rpc.dtypes import TO_WIRE
from rolemesh.rpc.server import RoleServer
from rolemesh.weights.held import HeldWeights
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.service import WeightsServicer
from services.rollout.worker import RolloutWorker

MIB = 1 << 20


async def start(get: Callable[[], HeldWeights | None]) -> tuple[RoleServer, str]:
    server = RoleServer("actor", [WEIGHTS])
    address = await server.start("127.0.0.1:0")
    await server.ready({WEIGHTS: WeightsServicer(get)})
    return server, address


@asynccontextmanager
async def serving(get: Callable[[], HeldWeights | None]) -> AsyncIterator[str]:
    server, address = await start(get)
    yield address
    await server.drain(0)


def of_every_dtype() -> dict[str, Tensor]:
    """Random bits, so NaNs of all kinds too; bool takes 0 and 1 alone."""
    octets = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return {
        str(dtype): (octets % 2).bool() if dtype == torch.bool else octets.clone().view(dtype)
        for dtype in TO_WIRE
    }


def noise(num_bytes: int) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


async def test_every_bit_of_every_dtype_arrives():
    held = HeldWeights(7, {**of_every_dtype(), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)})
    async with serving(lambda: held) as address:
        source = RemoteWeights(address, 7)
        assert (source.version, source.address) == (7, address)
        tensors = await source.fetch()
    expected = await held.fetch()
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert tensors[name].data_ptr() % 64 == 0


async def test_a_version_of_several_parts_arrives():
    held = HeldWeights(1, {"a": noise(3 * MIB + 5), "b": noise(2 * MIB - 1)})
    async with serving(lambda: held) as address:
        tensors = await RemoteWeights(address, 1).fetch()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in (await held.fetch()).items())


async def test_a_version_that_is_not_held_is_named_with_the_one_that_is():
    held: list[HeldWeights | None] = [HeldWeights(2, {"a": torch.zeros(1)}), None]
    for now, message in zip(
        held, ["version 1 is not held here; version 2 is held", "none is held"], strict=True
    ):
        async with serving(lambda now=now: now) as address:
            with pytest.raises(WeightsUnavailable, match=f"from {address}.*{message}"):
                await RemoteWeights(address, 1).fetch()


async def test_a_version_that_goes_while_it_is_pulled_is_unavailable():
    versions = iter([HeldWeights(1, {"a": noise(100)}), HeldWeights(2, {"a": noise(100)})])
    async with serving(lambda: next(versions)) as address:
        with pytest.raises(WeightsUnavailable, match="version 2 is held"):
            await RemoteWeights(address, 1).fetch()


async def test_bytes_that_do_not_match_their_checksum_are_refused():
    held = HeldWeights(1, {"a": noise(100), "b": noise(200)})
    assert held.manifest.version == 1  # made now
    (await held.fetch())["b"][150] += 1
    async with serving(lambda: held) as address:
        with pytest.raises(WeightsUnavailable, match="checksum of 'b' is wrong, twice"):
            await RemoteWeights(address, 1).fetch()


async def test_a_damaged_tensor_is_fetched_again_once():
    held = HeldWeights(1, {"a": noise(100), "b": noise(200)})
    assert held.manifest.version == 1
    tensor, calls = (await held.fetch())["b"], 0
    tensor[150] += 1

    def get() -> HeldWeights:  # called for the manifest, the region, the tensor
        nonlocal calls
        calls += 1
        if calls == 3:
            tensor[150] -= 1
        return held

    async with serving(get) as address:
        tensors = await RemoteWeights(address, 1).fetch()
    assert calls == 3
    assert torch.equal(tensors["b"], noise(200))


async def test_nobody_there_and_nobody_answering_are_unavailable():
    async with serving(lambda: None) as address:
        pass
    with pytest.raises(WeightsUnavailable, match=f"from {address}.*UNAVAILABLE"):
        await RemoteWeights(address, 1).fetch()
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(WeightsUnavailable, match=r"UNAVAILABLE|DEADLINE_EXCEEDED"):
        await RemoteWeights(f"127.0.0.1:{port}", 1, timeout_s=0.2).fetch()
    silent.close()


class Cable:
    """A TCP cable to a server, which is cut once, after so many bytes from the server."""

    def __init__(self, address: str, cut_after: int) -> None:
        self.address, self.cut_after = address, cut_after
        self.cut, self.mended = asyncio.Event(), asyncio.Event()
        self.num_bytes = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut.is_set():
            await self.mended.wait()
        host, port = self.address.split(":")
        from_server, to_server = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pump(reader, to_server))
            both.create_task(self._pump(from_server, writer, count=True))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: bool = False
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
                self.num_bytes += len(data) * count
                if count and self.num_bytes >= self.cut_after and not self.cut.is_set():
                    self.cut.set()
                    break
        except ConnectionError:
            pass
        writer.close()


async def test_a_holder_stopped_in_mid_stream_and_started_again_is_resumed():
    held = HeldWeights(1, {"a": noise(12 * MIB), "b": noise(12 * MIB)})
    server, address = await start(lambda: held)
    cable = Cable(address, cut_after=10 * MIB)
    listener = await asyncio.start_server(cable.connect, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    fetching = asyncio.create_task(RemoteWeights(f"{host}:{port}", 1).fetch())
    await cable.cut.wait()
    await server.drain(0)
    server, cable.address = await start(lambda: held)
    cable.mended.set()
    tensors = await fetching
    assert torch.equal(tensors["a"], noise(12 * MIB))
    assert torch.equal(tensors["b"], noise(12 * MIB))
    # Begun anew it would be 34 MiB; what was under way when the cable was cut came twice.
    assert cable.num_bytes < 32 * MIB
    listener.close()
    await server.drain(0)


async def test_a_rollout_takes_pulled_weights_as_it_takes_held_ones(tiny_model: Path, tmp_path: Path):
    job = make_job(
        {
            "actor": {"model": {"path": str(tiny_model)}},
            "data": {"max_prompt_length": 4, "max_response_length": 4},
        }
    )
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, seed=5))
    held, worker = HeldWeights(3, named_weights(model)), RolloutWorker(job)
    async with serving(lambda: held) as address:
        await worker.update_weights(RemoteWeights(address, 3))
        with pytest.raises(WeightsUnavailable):
            await worker.update_weights(RemoteWeights(address, 4))
    assert worker.version == 3
    for name, tensor in named_weights(worker._engine.model).items():
        assert torch.equal(tensor, named_weights(model)[name])
    worker.close()
