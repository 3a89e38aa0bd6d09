"""When a call ends that nobody answers: time behind earlier calls does not count. Real servicers over real
channels; the event loop's clock is put forward, so no test waits for a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.descriptor import ServiceDescriptor
from sequences import sequence_batch
from serving import reward_batch, reward_job
from skipping import skip

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleTimeout
from rolemesh.methods import methods
from rolemesh.roles import Metrics
from rolemesh.rpc.calling.clients import CriticClient, RewardClient, RolloutClient
from rolemesh.rpc.calling.deadlines import Deadlines
from rolemesh.rpc.calling.dispatch import ATTEMPTS_PER_REPLICA
from rolemesh.rpc.contract import CRITIC, REWARD, ROLLOUT
from rolemesh.rpc.serving.memory_budget import MemoryBudget
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.critic.servicer import CriticServicer
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.reward.servicer import RewardServicer
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.services.rollout.servicer import RolloutServicer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics

NEVER_S = 1e9


@asynccontextmanager
async def serving(
    role: str, service: ServiceDescriptor, servicer: Any, budget: MemoryBudget
) -> AsyncIterator[str]:
    server = RoleServer({role: [service]}, budget)
    address = await server.start("127.0.0.1:0")
    try:
        await server.ready({service: servicer})
        yield address
    finally:
        await server.drain(0)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110  # the server's and the client's tasks
            await asyncio.sleep(0)


# ------------------------------------------------------------------------------------ the law


async def test_a_calls_time_begins_after_earlier_calls_or_at_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time begins when earlier calls have ended, or when rows of the call itself are answered."""
    deadlines = Deadlines(60.0)
    ends = [ExitStack() for _ in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: 0.0)
        first = ends[0].enter_context(deadlines.opened())
        skip(10)
        second, third = (end.enter_context(deadlines.opened()) for end in ends[1:3])
        skip(30)
        assert [call.left_s for call in (first, second, third)] == [20, 30, 30]
        deadlines.answered(first)
        assert [call.left_s for call in (first, second, third)] == [20, 60, 60]
        skip(10)
        deadlines.answered(third)
        assert [call.left_s for call in (first, second, third)] == [10, 50, 60]
        skip(5)
        deadlines.answered(first)
        deadlines.answered(third)
        assert [call.left_s for call in (first, second, third)] == [5, 60, 55]
        skip(5)
        ends[0].close()
        assert [call.left_s for call in (second, third)] == [60, 50]
        skip(20)
        fourth = ends[3].enter_context(deadlines.opened())
        skip(10)
        ends[2].close()
        assert [call.left_s for call in (second, fourth)] == [30, 60]
        skip(20)
        ends[1].close()
        assert fourth.left_s == 60
        skip(20)
        deadlines.answered(fourth)
        assert fourth.left_s == 40
        ends[3].close()


# ---------------------------------------------------------------------------- of generations


class Held(RolloutWorker):
    """Answers a call once the test lets it. A row's seed is ten times its call's number, and its index."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job)
        self.begun: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.may: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        number = int(prompts["seeds"][0]) // 10
        self.begun[number].set()
        await self.may[number].wait()
        async for rows in super().generate(prompts):
            yield rows


async def generated(client: RolloutClient, number: int) -> int:
    prompts = reward_batch(2).select_columns(["prompts", "prompt_mask"])
    prompts["seeds"] = 10 * number + torch.arange(2)
    prompts.meta_info["sampling"] = "train"
    return sum([len(rows) async for rows in client.generate(prompts)])


@pytest.fixture
async def rollout(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[Held, Callable[..., RolloutClient]]]:
    """A worker that is served, and how to make a client of it whose calls have 600 s."""
    job = reward_job(tiny_model, tmp_path)
    worker = Held(job)
    async with serving("rollout", ROLLOUT, RolloutServicer(worker), MemoryBudget(stall_s=NEVER_S)) as address:
        yield worker, lambda **options: RolloutClient([address], methods(job), timeout_s=600.0, **options)
    worker.close()


# Its rows wait at the replica; they wait in the pool, because the replica is full.
@pytest.mark.parametrize("options", [{}, {"may_grow": True, "rows_at_once": 1}], ids=["replica", "room"])
async def test_queued_generations_may_take_longer_than_one_deadline(
    rollout: tuple[Held, Callable[..., RolloutClient]], options: dict[str, Any]
) -> None:
    worker, client_of = rollout
    async with client_of(**options) as client:
        calls = [asyncio.create_task(generated(client, number)) for number in range(3)]
        for number, call in enumerate(calls):
            await until(lambda number=number, call=call: worker.begun[number].is_set() or call.done())
            skip(400)
            worker.may[number].set()
            assert await call == 2


async def test_a_call_queued_behind_one_that_hangs_ends_with_it(
    rollout: tuple[Held, Callable[..., RolloutClient]],
) -> None:
    worker, client_of = rollout
    async with client_of(may_grow=True, rows_at_once=1) as client:
        calls = [asyncio.create_task(generated(client, number)) for number in range(2)]
        await until(lambda: worker.begun[0].is_set() and len(client.pool._line) == 1)
        skip(601)
        hangs, waits = await asyncio.gather(*calls, return_exceptions=True)
        [replica] = client.pool.replicas
    assert not worker.begun[1].is_set()
    where = f"rollout.Generate at {replica.address}, step 0:"
    assert isinstance(hangs, RoleTimeout)
    assert str(hangs) == f"{where} no answer within the deadline of 600 s"
    assert isinstance(waits, RoleTimeout)
    assert str(waits) == f"{where} no replica had room within the deadline of 600 s"


# ------------------------------------------------------------------------- of a trained role


class Hanging(CriticWorker):
    """Answers nothing."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job)
        self.asked: Counter[str] = Counter()
        self.running: Counter[str] = Counter()

    async def compute_values(self, batch: DataProto) -> DataProto:
        with self._counted("compute_values"):
            await asyncio.Event().wait()
        return batch

    async def update(self, batch: DataProto) -> Metrics:
        with self._counted("update"):
            await asyncio.Event().wait()
        return {}

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        self.asked[name] += 1
        self.running[name] += 1
        try:
            yield
        finally:
            self.running[name] -= 1


@pytest.fixture
def critic_job(tiny_model: Path, tmp_path: Path) -> JobConfig:
    return make_job(
        {
            "data": {"max_prompt_length": 6, "max_response_length": 10},
            "trainer": {"device": "cpu", "default_local_dir": str(tmp_path)},
            "actor": {"model": {"path": str(tiny_model)}},
        }
    )


async def test_a_hung_call_and_the_update_behind_it_end_at_deadlines(
    critic_job: JobConfig,
) -> None:
    """Both end at the server, too, and neither is sent again. The update is sent at 100 s. Its time begins at
    601 s, when the first call ends."""
    worker, batch = Hanging(critic_job), sequence_batch(16)
    late = r"critic.{} at .* step 0: no answer within the deadline of 600 s$"
    async with (
        serving("critic", CRITIC, CriticServicer(worker), MemoryBudget(stall_s=NEVER_S)) as address,
        CriticClient([address], methods(critic_job), timeout_s=600.0) as client,
    ):
        first = asyncio.create_task(client.compute_values(batch))
        await until(lambda: worker.running["compute_values"] == 1)
        skip(100)
        update = asyncio.create_task(client.update(batch))
        await until(lambda: worker.running["update"] == 1)
        skip(501)
        with pytest.raises(RoleTimeout, match=late.format("ComputeValues")):
            await first
        await until(lambda: not worker.running["compute_values"])
        skip(500)
        assert await client.pool.replicas[0].health() == ""
        assert not update.done()
        skip(100)
        with pytest.raises(RoleTimeout, match=late.format("Update")):
            await update
        await until(lambda: not worker.running["update"])
    assert worker.asked == {"compute_values": 1, "update": 1}


# ------------------------------------------------------------- of requests that are not sent


@contextmanager
def silent_requests() -> Iterator[threading.Event]:
    """Large batches are not encoded until the event is set: the loop's one thread waits for it."""
    over, executor = threading.Event(), ThreadPoolExecutor(1)
    executor.submit(over.wait)
    asyncio.get_running_loop().set_default_executor(executor)
    try:
        yield over
    finally:
        over.set()


async def test_a_pure_call_is_retried_after_a_silent_request(tiny_model: Path, tmp_path: Path) -> None:
    """Its error has the server's words."""
    job, budget, batch = reward_job(tiny_model, tmp_path), MemoryBudget(stall_s=0.01), reward_batch(1000)
    retries = metrics.CLIENT_RETRIES.labels("reward", "ComputeScores")._value
    async with (
        serving("reward", REWARD, RewardServicer(RewardWorker(job)), budget) as address,
        RewardClient([address], methods(job), timeout_s=600.0) as client,
    ):
        with silent_requests() as over:
            before = retries.get()
            with pytest.raises(RoleTimeout, match=rf"reward.ComputeScores at {address}, .*silent for 0.01 s$"):
                await client.compute_scores(batch)
            assert retries.get() == before + ATTEMPTS_PER_REPLICA - 1
            before = retries.get()
            call = asyncio.create_task(client.compute_scores(batch))
            await until(lambda: retries.get() > before or call.done())
            budget.stall_s = NEVER_S
            over.set()
            assert (await call)["token_level_scores"].sum(1).tolist() == list(range(1000))


async def test_an_update_whose_request_was_silent_is_not_sent_again(critic_job: JobConfig) -> None:
    worker = Hanging(critic_job)
    async with (
        serving("critic", CRITIC, CriticServicer(worker), MemoryBudget(stall_s=0.01)) as address,
        CriticClient([address], methods(critic_job), timeout_s=600.0) as client,
    ):
        with (
            silent_requests(),
            pytest.raises(
                RoleTimeout, match=rf"critic.Update at {address}, .*the stream was silent for 0.01 s$"
            ),
        ):
            await client.update(sequence_batch(4000))
        assert not client.pool.replicas[0].in_flight
    assert not worker.asked
