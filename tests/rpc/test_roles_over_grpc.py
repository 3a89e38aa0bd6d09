"""A client is as good as a worker: the same bits come back over gRPC, from one replica or from two."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from saving import saved
from sequences import sequence_batch
from serving import served

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import (
    CheckpointFailed,
    InvalidBatch,
    RoleFailed,
    RoleUnavailable,
    WeightsUnavailable,
)
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import ActorClient, CriticClient, ReferenceClient, RolloutClient
from rolemesh.rpc.contract import ROLLOUT
from rolemesh.rpc.serving.memory_budget import MemoryBudget
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.processes.serve import group_server, load_group, services_of
from rolemesh.services.rollout.servicer import RolloutServicer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.remote import RemoteWeights

ROOT = Path(__file__).resolve().parents[2]
P, T, PAD = 6, 10, 256


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> JobConfig:
    trained = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4, "optim": {"lr": 1e-3}}
    return make_job(
        {
            "data": {"train_batch_size": 16, "max_prompt_length": P, "max_response_length": T},
            "trainer": {"device": "cpu", "default_local_dir": str(tmp_path)},
            "actor": {"model": {"path": str(tiny_model)}, **trained},
            "critic": trained,
            "rollout": {"max_num_seqs": 4},
        }
    )


def prompts_of(rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(P) >= P - torch.randint(1, P + 1, (rows, 1), generator=generator)
    ids = torch.randint(0, 256, (rows, P), generator=generator).where(mask, PAD)
    return DataProto(
        {"prompts": ids, "prompt_mask": mask, "seeds": torch.arange(rows) * 7919}, {}, {"sampling": "train"}
    )


async def in_row_order(stream: AsyncIterator[DataProto], rows: int) -> DataProto:
    answer = DataProto.concat([batch async for batch in stream])
    assert sorted(answer["row"].tolist()) == list(range(rows))
    return answer[answer["row"].argsort()]


def assert_equal(left: DataProto, right: DataProto) -> None:
    assert set(left.columns) == set(right.columns)
    for name, tensor in left.tensors.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


async def test_log_probs_over_grpc_equal_those_in_process(job: JobConfig) -> None:
    batch = sequence_batch(21)
    expected = await ReferenceWorker(job).compute_log_probs(batch)
    async with served("reference", job, job) as addresses:
        for used in (addresses[:1], addresses):
            async with ReferenceClient(used, methods(job)) as client:
                assert_equal(await client.compute_log_probs(batch), expected)


def listed_stops() -> dict[str, list[str]]:
    """The files that docs/architecture.md lists in "One call, file by file", each with the names of its row."""
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## One call, file by file")[2]
    rows = re.findall(r"^\| \d+ \| (.+) \| `([^`]+)` \|$", page.partition("\n## ")[0], re.MULTILINE)
    return {file: [name for name in re.findall("`([^`]+)`", text) if ".py" not in name] for text, file in rows}


@contextmanager
def noted() -> Iterator[tuple[dict[str, str], threading.Event]]:
    """Note what is called while the event is set, on this thread and new ones: files to qualified names."""
    names: dict[str, str] = {}
    on = threading.Event()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and on.is_set() and frame.f_code.co_filename.startswith(str(ROOT / "rolemesh")):
            file = str(Path(frame.f_code.co_filename).resolve().relative_to(ROOT))
            names[file] = f"{names.get(file, '')} .{frame.f_code.co_qualname}."

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield names, on
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)


async def test_one_call_passes_the_stops_that_the_documentation_lists(
    job: JobConfig,
) -> None:
    """In process it passes through few files."""
    batch, stops = sequence_batch(21), listed_stops()
    with noted() as (called, on):
        worker = ActorWorker(job)
        on.set()
        await worker.compute_log_probs(batch)
        on.clear()
        await asyncio.to_thread(worker.close)
        in_process = set(called)
        async with served("actor", job) as addresses, ActorClient(addresses, methods(job)) as client:
            on.set()
            await client.compute_log_probs(batch)
            on.clear()
    assert max(len(in_process), len(stops)) <= 20
    assert stops.keys() <= called.keys()
    assert {
        (file, name) for file, names in stops.items() for name in names if f".{name}." not in called[file]
    } == set()


async def test_generation_over_grpc_equals_generation_in_process(job: JobConfig) -> None:
    prompts = prompts_of(11)
    expected = await in_row_order(RolloutWorker(job).generate(prompts), 11)
    async with served("rollout", job, job) as addresses:
        for used in (addresses[:1], addresses):
            async with RolloutClient(used, methods(job)) as client:
                assert_equal(await in_row_order(client.generate(prompts), 11), expected)


@pytest.mark.parametrize(
    ("role", "worker", "client"), [("actor", ActorWorker, ActorClient), ("critic", CriticWorker, CriticClient)]
)
async def test_training_over_grpc_is_that_in_process(
    job: JobConfig, role: str, worker: Callable[[JobConfig], Any], client: Callable[..., Any], tmp_path: Path
) -> None:
    """Metrics of an update, and what is computed with the weights after it, before and after a checkpoint."""
    batch = sequence_batch(16)

    async def life(of: Any, directory: Path) -> tuple[dict[str, float], dict[str, float], DataProto]:
        compute = of.compute_log_probs if role == "actor" else of.compute_values
        first = await of.update(batch)
        await saved(of, directory)
        second = await of.update(batch)
        await of.load_checkpoint(directory)
        assert await of.update(batch) == second
        await of.load_checkpoint(None)
        assert await of.update(batch) == first
        return first, second, await compute(batch)

    local = await life(worker(job), tmp_path / "local")
    async with served(role, job) as addresses, client(addresses, methods(job)) as remote:
        over_grpc = await life(remote, tmp_path / "remote")
        with pytest.raises(CheckpointFailed, match=rf"{role}.LoadCheckpoint at {addresses[0]}"):
            await remote.load_checkpoint(tmp_path / "nowhere")
    assert over_grpc[:2] == local[:2]
    assert_equal(over_grpc[2], local[2])


@pytest.mark.parametrize("client", [ActorClient, CriticClient])
async def test_a_restarted_trained_role_is_an_error(
    job: JobConfig, client: type[ActorClient | CriticClient]
) -> None:
    """It lies idle while it is restarted, so that no call of the run fails."""
    batch, group = sequence_batch(16), [client.role]
    first, second = group_server(group), group_server(group)
    address = await first.start("127.0.0.1:0")
    await first.ready((await load_group(group, job))[1])
    async with client([address], methods(job)) as remote:
        await remote.update(batch)
        await first.drain(0)
        await second.start(address)
        await second.ready((await load_group(group, job))[1])
        compute = remote.compute_log_probs if isinstance(remote, ActorClient) else remote.compute_values
        with pytest.raises(RoleFailed, match=rf"{client.role}\..* at {address}.*was restarted"):
            await compute(batch)
    await second.drain(0)


async def test_published_weights_reach_every_rollout(job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two rollout services generate afterwards is what a worker with those weights generates."""
    prompts = prompts_of(8)
    async with (
        served("actor", job) as actors,
        served("rollout", job, job) as rollouts,
        ActorClient(actors, methods(job)) as actor,
        RolloutClient(rollouts, methods(job)) as rollout,
    ):
        before = await in_row_order(rollout.generate(prompts), 8)
        await actor.update(sequence_batch(16))
        source = await actor.publish_weights(1)
        assert source.version == 1
        await rollout.update_weights(source)
        after = await in_row_order(rollout.generate(prompts), 8)
        local = RolloutWorker(job)
        await local.update_weights(PublishedWeights(1, await source.fetch()))
        expected = await in_row_order(local.generate(prompts), 8)
        assert_equal(after, expected)
        assert not torch.equal(after["rollout_log_probs"], before["rollout_log_probs"])
        # A version that is not held: the error names who could not and why, and the old weights stay.
        await actor.publish_weights(2)
        await rollout.update_weights(source)  # taken twice is the same as once
        monkeypatch.setattr("rolemesh.weights.remote.RELAY_WAIT_S", 0.2)  # the first replica never learns of it
        with pytest.raises(
            WeightsUnavailable, match=r"rollout.UpdateWeights at .*version 1 .*version 2 is held"
        ):
            await rollout.update_weights(RemoteWeights(actors, 1, "0" * 64))


async def test_a_restarted_rollout_takes_the_version_in_use_first(job: JobConfig) -> None:
    """A restarted replica holds the model directory's weights. It refuses to generate for a client that counts
    on a later version; the client hands that over, and the answer is as if nothing had happened."""
    prompts = prompts_of(4)
    restarted = RolloutServicer(RolloutWorker(job))
    server = RoleServer({"rollout": [ROLLOUT]})
    address = await server.start("127.0.0.1:0")
    async with (
        served("actor", job) as actors,
        ActorClient(actors, methods(job)) as actor,
        RolloutClient([address], methods(job)) as rollout,
    ):
        await server.ready({ROLLOUT: RolloutServicer(RolloutWorker(job))})
        await actor.update(sequence_batch(16))
        await rollout.update_weights(await actor.publish_weights(1))
        expected = await in_row_order(rollout.generate(prompts), 4)
        await server.ready({ROLLOUT: restarted})
        assert_equal(await in_row_order(rollout.generate(prompts), 4), expected)
    await server.drain(0)


async def test_a_rollout_that_was_away_gets_the_version_on_its_return(job: JobConfig) -> None:
    prompts = prompts_of(8)
    servers = [RoleServer({"rollout": [ROLLOUT]}) for _ in range(2)]
    addresses = [await server.start("127.0.0.1:0") for server in servers]
    for server in servers:
        await server.ready({ROLLOUT: RolloutServicer(RolloutWorker(job))})
    async with (
        served("actor", job) as actors,
        ActorClient(actors, methods(job)) as actor,
        RolloutClient(addresses, methods(job)) as rollout,
    ):
        await actor.update(sequence_batch(16))
        await servers[1].drain(0)
        await rollout.update_weights(await actor.publish_weights(1))
        alone = await in_row_order(rollout.generate(prompts), 8)
        servers[1], returned = RoleServer({"rollout": [ROLLOUT]}), RolloutWorker(job)
        await servers[1].start(addresses[1])
        await servers[1].ready({ROLLOUT: RolloutServicer(returned)})
        await rollout.wait_until_ready(120)
        assert returned.version == 1
        assert_equal(await in_row_order(rollout.generate(prompts), 8), alone)
    for server in servers:
        await server.drain(0)


class StopsAfterTheFirst(RolloutWorker):
    """Gives the rows that finish first, and no other before its call is cancelled."""

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        async with aclosing(super().generate(prompts)) as finished:
            async for rows in finished:
                yield rows
                await asyncio.Event().wait()


async def test_a_rollout_that_stops_midway_loses_and_doubles_no_row(job: JobConfig) -> None:
    """One of two servers is stopped when the first of its rows have arrived; the other generates the rest."""
    prompts = prompts_of(16)
    expected = await in_row_order(RolloutWorker(job).generate(prompts), 16)
    servers = [RoleServer({"rollout": [ROLLOUT]}) for _ in range(2)]
    addresses = [await server.start("127.0.0.1:0") for server in servers]
    for server, worker in zip(servers, (StopsAfterTheFirst, RolloutWorker), strict=True):
        await server.ready({ROLLOUT: RolloutServicer(worker(job))})
    retries = metrics.CLIENT_RETRIES.labels("rollout", "Generate")
    before = retries._value.get()

    async def stopping(stream: AsyncIterator[DataProto]) -> AsyncIterator[DataProto]:
        stopped = False
        async for batch in stream:
            if not stopped and int(batch["row"].min()) < 8:  # the first replica has the first eight
                stopped = True
                await servers[0].drain(0)
            yield batch

    async with RolloutClient(addresses, methods(job)) as client:
        assert_equal(await in_row_order(stopping(client.generate(prompts)), 16), expected)
    assert retries._value.get() == before + 1
    await servers[1].drain(0)


async def test_an_update_that_failed_is_not_retried(job: JobConfig) -> None:
    """An actor that is not there: who asked for an update does not know whether it was made, and is told so."""

    def asked() -> float:
        """Calls that have left this client, however they ended."""
        codes = ("OK", "UNAVAILABLE", "INTERNAL")
        return sum(metrics.CLIENT_REQUESTS.labels("actor", "Update", code)._value.get() for code in codes)

    batch = sequence_batch(16)
    server = RoleServer({"actor": services_of("actor")})
    address = await server.start("127.0.0.1:0")  # and never loads
    before = asked()
    async with ActorClient([address], methods(job), patience_s=0.2) as client:
        with pytest.raises(RoleUnavailable, match=rf"actor.Update at {address}"):
            await client.update(batch)
    assert asked() == before + 1
    await server.drain(0)


async def test_weights_of_this_process_cannot_be_sent_to_a_service(job: JobConfig) -> None:
    async with RolloutClient(["127.0.0.1:1"], methods(job)) as client:
        with pytest.raises(WeightsUnavailable, match="version 3 are held only in this process"):
            await client.update_weights(PublishedWeights(3, {"w": torch.zeros(2)}))


async def test_a_wrong_shape_is_refused_by_the_role_and_named(job: JobConfig) -> None:
    async with served("rollout", job) as addresses, RolloutClient(addresses, methods(job)) as client:
        wrong = prompts_of(2)
        wrong["prompts"] = wrong["prompts"][:, 1:]
        with pytest.raises(
            InvalidBatch, match=rf"rollout.Generate at {addresses[0]}, step 0: .*max_prompt_length"
        ):
            await asyncio.wait_for(anext(client.generate(wrong)), 120)


async def test_an_update_without_memory_waits_and_is_made_once(job: JobConfig) -> None:
    """The role refuses it before its method sees it, so it may be asked for again."""
    budget, batch = MemoryBudget(64 << 20), sequence_batch(16)
    async with served("actor", job) as addresses, ActorClient(addresses, methods(job)) as actor:
        expected = await actor.update(batch)
    server = RoleServer({"actor": services_of("actor")}, budget)
    address = await server.start("127.0.0.1:0")
    await server.ready((await load_group(["actor"], job))[1])
    retries = metrics.CLIENT_RETRIES.labels("actor", "Update")._value
    before = retries.get()
    async with ActorClient([address], methods(job), timeout_s=120) as actor:
        with budget.reserve() as other:
            other.resize(budget.total_bytes)
            update = asyncio.create_task(actor.update(batch))
            while retries.get() < before + 2:
                assert not update.done()
                await asyncio.sleep(0)
        assert await update == expected
    await server.drain(0)
