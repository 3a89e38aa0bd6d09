"""One controller at a time has a trained role: LoadCheckpoint begins its term, and others are refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from saving import saved
from sequences import sequence_batch
from serving import served

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import NotPermitted, RoleFailed, RoleTaken
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import ActorClient, CriticClient, ReferenceClient
from rolemesh.rpc.contract import ACTOR, CRITIC, rpcs
from rolemesh.rpc.metadata import TERM_KEY
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.rpc.term import Term
from rolemesh.services.actor.servicer import ActorServicer
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.controller.run.run_dir import new_term
from rolemesh.services.critic.servicer import CriticServicer
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.telemetry import context
from rolemesh.wire.streams import send

LOCAL = "127.0.0.1:0"


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> JobConfig:
    trained = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4, "optim": {"lr": 1e-3}}
    return make_job(
        {
            "data": {"train_batch_size": 8, "max_prompt_length": 6, "max_response_length": 10},
            "trainer": {"device": "cpu", "experiment_name": "mine", "default_local_dir": str(tmp_path / "run")},
            "actor": {"model": {"path": str(tiny_model)}, **trained},
            "critic": trained,
        }
    )


def batch(seed: int) -> DataProto:
    return sequence_batch(8, seed=seed)


class Waiting(CriticServicer):
    """An update waits at first, as for its turn on a device."""

    def __init__(self, worker: CriticWorker) -> None:
        super().__init__(worker)
        self.begun, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def Update(self, batch: DataProto, context: Any) -> Any:
        self.begun.set()
        await self.may_go_on.wait()
        return await super().Update(batch, context)


@asynccontextmanager
async def waiting(job: JobConfig) -> AsyncIterator[tuple[str, Waiting]]:
    server, servicer = RoleServer({"critic": [CRITIC]}), Waiting(CriticWorker(job))
    address = await server.start(LOCAL)
    await server.ready({CRITIC: servicer})
    try:
        yield address, servicer
    finally:
        servicer.may_go_on.set()
        await server.drain(0)


async def refused(call: Awaitable[Any]) -> str:
    with pytest.raises(RoleTaken) as error:
        await call
    return str(error.value)


async def until_refused(client: CriticClient) -> None:
    """Call until a successor has come."""
    async with asyncio.timeout(60):
        while True:
            try:
                await client.compute_values(batch(1))
            except RoleTaken:
                return


async def test_another_run_directorys_controller_is_refused_by_name(job: JobConfig, tmp_path: Path) -> None:
    """The refused calls change nothing."""
    untouched = CriticWorker(job)
    expected = [await untouched.update(batch(seed)) for seed in (1, 2)]
    term, stranger = new_term(job.run_dir), new_term(tmp_path / "other")
    async with (
        served("critic", job) as addresses,
        CriticClient(addresses, methods(job), term=term) as mine,
        CriticClient(addresses, methods(job), term=stranger) as other,
        CriticClient(addresses, methods(job), term=Term("\0", 1, "no path")) as odd,
    ):
        await refused(odd.load_checkpoint(None))
        assert "no controller has it now" in await refused(
            other.load_checkpoint(None)
        )  # even if it comes first
        await mine.load_checkpoint(None)
        got = [await mine.update(batch(1))]
        said = await refused(other.load_checkpoint(None))
        await refused(other.update(batch(1)))
        got.append(await mine.update(batch(2)))
    assert got == expected
    assert f"critic.LoadCheckpoint at {addresses[0]}" in said
    for words in (str(term), str(stranger), f"of the run directory {str(job.run_dir)!r}"):
        assert words in said


async def test_a_successor_takes_over_and_its_predecessor_is_refused(job: JobConfig, tmp_path: Path) -> None:
    """The first is paused, or cut off by the network, and goes on when its successor has the role."""
    terms = [new_term(job.run_dir) for _ in range(3)]
    async with (
        served("actor", job) as addresses,
        ActorClient(addresses, methods(job), term=terms[0]) as first,
        ActorClient(addresses, methods(job), term=terms[1]) as second,
        ActorClient(addresses, methods(job), term=terms[2]) as third,
    ):
        await first.load_checkpoint(None)
        expected = await first.update(batch(1))
        await saved(first, job.run_dir / "1")
        after = await first.update(batch(2))
        await third.load_checkpoint(None)
        directory = job.run_dir / "2"
        for paused in (first, second):  # the second has not come in all the time, and comes too late
            calls = {
                "ComputeLogProbs": paused.compute_log_probs(batch(1)),
                "ComputeRefLogProbs": paused.compute_ref_log_probs(batch(1)),
                "Update": paused.update(batch(1)),
                "PublishWeights": paused.publish_weights(1),
                "BeginCheckpoint": paused.begin_checkpoint(directory),
                "FinishCheckpoint": paused.finish_checkpoint(directory),
                "LoadCheckpoint": paused.load_checkpoint(None),
            }
            assert set(calls) == {rpc.name for rpc in rpcs(ACTOR)}
            for name, call in calls.items():
                said = await refused(call)
                assert (
                    f"actor.{name}: {terms[2]} has the role; the call is from {terms[paused is second]}" in said
                )
        assert not directory.exists()
        assert await third.update(batch(1)) == expected
        await third.load_checkpoint(job.run_dir / "1")
        assert await third.update(batch(2)) == after


@asynccontextmanager
async def full_device(worker: ActorWorker) -> AsyncIterator[None]:
    """The second micro-batch of an update fails, when the first has left its gradients."""
    passes = itertools.count(1)

    def fail(*_: Any) -> None:
        if torch.is_grad_enabled() and next(passes) == 2:
            raise torch.OutOfMemoryError("the device is full")

    hook = worker.model.get_input_embeddings().register_forward_pre_hook(fail)
    yield
    hook.remove()


async def test_a_failed_update_leaves_no_trace_for_the_successor(
    job: JobConfig,
) -> None:
    """The actor outlives the controller: the next one loads the last checkpoint, or begins anew."""
    worker, untouched, server = ActorWorker(job), ActorWorker(job), RoleServer({"actor": [ACTOR]})
    expected = {seed: await untouched.update(batch(seed)) for seed in (1, 2)}
    address = await server.start(LOCAL)
    await server.ready({ACTOR: ActorServicer(worker)})

    def controller() -> ActorClient:
        return ActorClient([address], methods(job), term=new_term(job.run_dir))

    start = None
    for seed in (1, 2):
        async with controller() as first, full_device(worker):
            await first.load_checkpoint(start)
            with pytest.raises(RoleFailed, match="the device is full"):
                await first.update(batch(seed))
        async with controller() as second:
            await second.load_checkpoint(start)
            assert await second.update(batch(seed)) == expected[seed]
            start = job.run_dir / str(seed)
            await saved(second, start)
    for mine, theirs in zip(worker.model.parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    await server.drain(0)


async def test_a_call_that_runs_ends_before_a_successor_loads(job: JobConfig) -> None:
    expected = await CriticWorker(job).update(batch(1))
    async with (
        waiting(job) as (address, servicer),
        CriticClient([address], methods(job), term=new_term(job.run_dir)) as first,
        CriticClient([address], methods(job), term=new_term(job.run_dir)) as second,
    ):
        await first.load_checkpoint(None)
        running = asyncio.create_task(first.update(batch(1)))
        await servicer.begun.wait()
        loading = asyncio.create_task(second.load_checkpoint(None))
        await until_refused(first)
        assert not loading.done()
        servicer.may_go_on.set()
        assert await running == expected
        await loading
        assert await second.update(batch(1)) == expected


async def test_of_two_waiting_successors_only_the_last_one_loads(job: JobConfig) -> None:
    terms = [new_term(job.run_dir) for _ in range(3)]
    async with (
        waiting(job) as (address, servicer),
        CriticClient([address], methods(job), term=terms[0]) as first,
        CriticClient([address], methods(job), term=terms[1]) as second,
        CriticClient([address], methods(job), term=terms[2]) as third,
    ):
        running = asyncio.create_task(first.update(batch(1)))  # nobody has the role yet
        await servicer.begun.wait()
        loadings = []
        for earlier, later in ((first, second), (second, third)):
            loadings.append(asyncio.create_task(later.load_checkpoint(None)))
            await until_refused(earlier)
        servicer.may_go_on.set()
        await running
        assert f"{terms[2]} has the role" in await refused(loadings[0])
        await loadings[1]
        assert await third.update(batch(1)) == await running


async def test_an_update_in_transit_when_a_successor_loads_is_refused(job: JobConfig) -> None:
    old, [update] = new_term(job.run_dir), [rpc for rpc in rpcs(CRITIC) if rpc.name == "Update"]
    expected, half, rest = await CriticWorker(job).update(batch(1)), asyncio.Event(), asyncio.Event()

    async def frames() -> AsyncIterator[bytes]:
        rows = methods(job)["critic.update"].prune(batch(1))
        async for frame in send(rows):
            if half.is_set():
                await rest.wait()
            yield frame
            half.set()
        await rest.wait()

    async with (
        served("critic", job) as addresses,
        CriticClient(addresses, methods(job), term=old) as first,
        CriticClient(addresses, methods(job), term=new_term(job.run_dir)) as second,
        grpc.aio.insecure_channel(addresses[0]) as channel,
    ):
        await first.load_checkpoint(None)
        call: Any = channel.stream_unary(update.path)(frames(), metadata=((TERM_KEY, old.to_metadata()),))
        await half.wait()
        await second.load_checkpoint(None)
        rest.set()
        assert await call.code() is grpc.StatusCode.ABORTED, await call.details()
        assert await second.update(batch(1)) == expected


async def test_no_term_is_needed_until_a_controller_has_the_role(job: JobConfig) -> None:
    """Tools that ask for health or pull weights call no trained role, and are served always."""
    term = new_term(job.run_dir)
    async with (
        served("critic", job) as addresses,
        CriticClient(addresses, methods(job)) as tool,
        CriticClient(addresses, methods(job), term=term) as controller,
    ):
        await tool.load_checkpoint(None)
        await tool.compute_values(batch(1))
        await controller.load_checkpoint(None)
        for call in (tool.compute_values(batch(1)), tool.load_checkpoint(None)):
            assert f"{term} has the role; the call is from a caller without a term" in await refused(call)
        await tool.wait_until_ready(60)


@pytest.mark.parametrize(("role", "client"), [("critic", CriticClient), ("reference", ReferenceClient)])
async def test_a_call_of_another_job_is_refused_by_every_role(
    job: JobConfig, role: str, client: type[CriticClient | ReferenceClient]
) -> None:
    async with served(role, job) as addresses, client(addresses, methods(job)) as caller:
        compute = caller.compute_values if isinstance(caller, CriticClient) else caller.compute_log_probs
        context.job.set("other")
        with pytest.raises(NotPermitted, match="the role is of job 'mine', the call of job 'other'"):
            await compute(batch(1))
        for own in ("mine", ""):  # or none
            context.job.set(own)
            await compute(batch(1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "[" * 5000,
        "x" * 7000,
        "{%22run_dir%22: %22/a%22, %22number%22: 1}",
        "{%22run_dir%22: %22/a%22, %22number%22: true, %22controller%22: %22%22}",
        "{%22run_dir%22: 7, %22number%22: 1, %22controller%22: %22%22}",
    ],
)
async def test_metadata_that_is_no_term_is_an_error_of_the_caller(text: str, job: JobConfig) -> None:
    async with (
        waiting(job) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        path = f"/{CRITIC.full_name}/LoadCheckpoint"
        call: Any = channel.unary_unary(path)(b"", metadata=((TERM_KEY, text),))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, await call.details()
        assert TERM_KEY in await call.details()


def test_a_later_term_of_a_run_directory_has_a_larger_number(tmp_path: Path) -> None:
    """Whatever the clock says."""
    first = new_term(tmp_path / "run")
    assert new_term(tmp_path / "run").number > first.number
    (tmp_path / "run" / "term").write_text(f"{10**18}\n")  # written by a machine whose clock is ahead
    assert new_term(tmp_path / "run").number == 10**18 + 1
    (tmp_path / "run" / "term").unlink()
    assert new_term(tmp_path / "run").number > first.number
    assert Term.of_call(((TERM_KEY, first.to_metadata()),)) == first
