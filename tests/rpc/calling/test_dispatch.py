"""How a call spreads over replicas, what becomes of it when one dies, and what is never tried again.
Real reward services with a reward function that waits when told to."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import torch
from serving import gate, reward_batch, reward_job, scored, serve_process, served

from rolemesh.dataproto import DataProto
from rolemesh.errors import (
    InvalidBatch,
    InvalidConfig,
    RewardFailed,
    RoleBusy,
    RoleFailed,
    RoleTimeout,
    RoleUnavailable,
)
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import ActorClient, RewardClient, RolloutClient
from rolemesh.rpc.calling.dispatch import ATTEMPTS_PER_REPLICA, piece_rows
from rolemesh.rpc.calling.replica import Replica
from rolemesh.rpc.contract import REWARD, ROLLOUT
from rolemesh.rpc.serving.memory_budget import MemoryBudget
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.processes.serve import load_group
from rolemesh.services.reward.servicer import RewardServicer
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.services.rollout.servicer import RolloutServicer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import context, metrics
from rolemesh.telemetry.logs import JsonFormatter


def index_scores(answer: DataProto) -> list[float]:
    return answer["token_level_scores"].sum(1).tolist()


@pytest.mark.parametrize(
    ("rows", "replicas", "size"),
    [(0, 2, 1), (1, 2, 1), (5, 1, 5), (5, 2, 3), (20, 2, 10), (70, 2, 9), (128, 1, 32), (999, 2, 125)],
)
def test_pieces_are_neither_few_nor_tiny(rows: int, replicas: int, size: int) -> None:
    assert piece_rows(rows, replicas) == size


async def test_scores_over_grpc_equal_those_in_process(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    batch = reward_batch(37)
    expected = await RewardWorker(job).compute_scores(batch)
    async with served("reward", job, job) as addresses:
        for used in (addresses[:1], addresses):
            async with RewardClient(used, methods(job)) as client:
                answer = await client.compute_scores(batch)
                for column in ("token_level_scores", "acc"):
                    assert torch.equal(answer[column], expected[column])
                    assert answer[column].dtype == expected[column].dtype


async def test_a_quicker_replica_gets_more_rows_and_the_order_stays(tiny_model: Path, tmp_path: Path) -> None:
    """The slow replica waits for a byte that the quick one writes after its 48th row of 64: without the rows
    that the slow one did not take, it would wait for ever."""
    slow_dir, quick_dir = tmp_path / "slow", tmp_path / "quick"
    with gate(tmp_path / "gate") as slow_gate:
        slow = reward_job(tiny_model, slow_dir, gate=str(slow_gate.path))
        quick = reward_job(tiny_model, quick_dir, opens=str(slow_gate.path), after=48)
        async with (
            served("reward", slow, quick) as addresses,
            RewardClient(addresses, methods(slow), timeout_s=120) as client,
        ):
            answer = await client.compute_scores(reward_batch(64))
    assert index_scores(answer) == list(range(64))
    assert len(scored(slow_dir)) <= 16
    assert sorted(scored(slow_dir) + scored(quick_dir)) == list(range(64))


async def test_equal_replicas_share_the_work(tiny_model: Path, tmp_path: Path) -> None:
    """One call after another: with nothing outstanding, turns decide."""
    jobs = [reward_job(tiny_model, tmp_path / str(i)) for i in range(3)]
    async with served("reward", *jobs) as addresses, RewardClient(addresses, methods(jobs[0])) as client:
        for _ in range(6):
            await client.compute_scores(reward_batch(1))
    assert [len(scored(tmp_path / str(i))) for i in range(3)] == [2, 2, 2]


async def test_a_killed_replica_loses_nothing_and_doubles_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as never:
        victim_job = reward_job(
            tiny_model, tmp_path / "victim", started=str(started.path), gate=str(never.path)
        )
        other_job = reward_job(tiny_model, tmp_path / "other")
        async with (
            serve_process("reward", victim_job, tmp_path / "victim") as victim,
            served("reward", other_job) as other,
            RewardClient([victim.address, *other], methods(other_job), timeout_s=60) as client,
        ):
            await client.wait_until_ready(120)
            call = asyncio.create_task(client.compute_scores(reward_batch(40)))
            await started.passed(call)
            victim.process.send_signal(signal.SIGKILL)
            answer = await call
            assert index_scores(answer) == list(range(40))
            assert sorted(scored(tmp_path / "other")) == list(range(40))
            # And goes on with the one that is left.
            assert index_scores(await client.compute_scores(reward_batch(4))) == [0, 1, 2, 3]


async def test_a_replica_that_comes_back_is_used_again(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with served("reward", job) as addresses:
        client = RewardClient(addresses, methods(job))
        await client.compute_scores(reward_batch(1))
        replica = client.pool.replicas[0]
        client.pool.suspect(replica, "a test says so")
        assert not replica.live
        assert index_scores(await client.compute_scores(reward_batch(2))) == [0, 1]
        assert replica.live
        await client.close()


async def test_a_call_fails_and_names_its_replicas_when_all_are_gone(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with served("reward", job) as addresses:
        pass
    async with RewardClient(addresses, methods(job), patience_s=0.3) as client:
        with pytest.raises(RoleUnavailable, match=rf"reward.*no replica has answered.*{addresses[0]}"):
            await client.compute_scores(reward_batch(1))


async def test_a_call_waits_for_a_replica_that_has_no_memory(tiny_model: Path, tmp_path: Path) -> None:
    """More often than it would ask one that is gone."""
    job, budget, returned = reward_job(tiny_model, tmp_path), MemoryBudget(1 << 20), list[Replica]()
    server = RoleServer({"reward": [REWARD]}, budget)
    address = await server.start("127.0.0.1:0")
    await server.ready((await load_group(["reward"], job))[1])
    retries = metrics.CLIENT_RETRIES.labels("reward", "ComputeScores")._value

    async def on_return(replica: Replica) -> None:
        returned.append(replica)

    async with RewardClient([address], methods(job), timeout_s=120) as client:
        await client.wait_until_ready(120)
        client.pool.on_return = on_return
        with budget.reserve() as other:
            other.resize(budget.total_bytes)
            before = retries.get()
            call = asyncio.create_task(client.compute_scores(reward_batch(8)))
            while retries.get() <= before + ATTEMPTS_PER_REPLICA:
                assert not call.done()
                assert client.pool.replicas[0].live
                await asyncio.sleep(0)
        assert index_scores(await call) == list(range(8))
    assert returned == []
    await server.drain(0)


async def test_a_call_waits_for_memory_within_its_deadline(tiny_model: Path, tmp_path: Path) -> None:
    job, budget = reward_job(tiny_model, tmp_path), MemoryBudget(1 << 20)
    server = RoleServer({"reward": [REWARD]}, budget)
    address = await server.start("127.0.0.1:0")
    await server.ready((await load_group(["reward"], job))[1])
    async with RewardClient([address], methods(job), timeout_s=0.5) as client:
        with budget.reserve() as other:
            other.resize(budget.total_bytes)
            with pytest.raises((RoleBusy, RoleTimeout), match=r"no room|deadline of 0.5 s"):
                await client.compute_scores(reward_batch(8))
    await server.drain(0)


class Passing(RewardWorker):
    """Asks a role that is busy, and passes that on."""

    num_calls = 0

    async def compute_scores(self, batch: DataProto) -> DataProto:
        self.num_calls += 1
        raise RoleBusy("another role has no room")


async def test_a_role_is_busy_only_before_its_method_begins(tiny_model: Path, tmp_path: Path) -> None:
    """For on that word an update is asked for again."""
    job = reward_job(tiny_model, tmp_path)
    worker, server = Passing(job), RoleServer({"reward": [REWARD]})
    address = await server.start("127.0.0.1:0")
    await server.ready({REWARD: RewardServicer(worker)})
    async with RewardClient([address], methods(job), timeout_s=60) as client:
        with pytest.raises(RoleUnavailable, match="another role has no room") as error:
            await client.compute_scores(reward_batch(8))
    assert (error.type, worker.num_calls) == (RoleUnavailable, ATTEMPTS_PER_REPLICA)
    await server.drain(0)


async def test_a_deadline_names_role_method_address_and_step(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "gate") as never:
        job = reward_job(tiny_model, tmp_path, gate=str(never.path))
        async with (
            served("reward", job) as addresses,
            RewardClient(addresses, methods(job), timeout_s=0.3) as client,
        ):
            context.step.set(7)
            with pytest.raises(
                RoleTimeout, match=rf"reward.ComputeScores at {addresses[0]}, step 7: .*deadline of 0.3 s"
            ):
                await client.compute_scores(reward_batch(1))
            never.open()


async def test_an_error_in_a_role_is_the_same_class_at_the_client(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path, gate="/no/such/fifo")
    async with served("reward", job) as addresses, RewardClient(addresses, methods(job)) as client:
        with pytest.raises(RewardFailed, match=rf"reward.ComputeScores at {addresses[0]}.*row-0"):
            await client.compute_scores(reward_batch(2))


async def test_job_and_step_reach_the_roles_log(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a job's name that is not ASCII, which gRPC's metadata are."""
    monkeypatch.setattr(caplog.handler, "formatter", JsonFormatter())  # the handler is that of all tests
    caplog.set_level("INFO")
    job = reward_job(tiny_model, tmp_path)
    trainer = job.trainer.model_copy(update={"experiment_name": "Größe 1"})
    job = job.model_copy(update={"trainer": trainer})
    context.job.set("Größe 1")
    context.step.set(12)
    async with served("reward", job) as addresses, RewardClient(addresses, methods(job)) as client:
        await client.compute_scores(reward_batch(1))
    [line] = [json.loads(line) for line in caplog.text.splitlines() if "ComputeScores OK" in line]
    assert (line["job"], line["role"], line["step"], line["level"]) == ("Größe 1", "reward", 12, "info")


async def test_a_batch_without_a_column_is_refused_before_it_is_sent(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with RewardClient(["127.0.0.1:1"], methods(job)) as client:
        with pytest.raises(InvalidBatch, match="prompt_mask"):
            await client.compute_scores(DataProto({"prompts": torch.zeros(1, 2)}))


async def test_a_column_that_the_method_does_not_read_is_not_sent(tiny_model: Path, tmp_path: Path) -> None:
    """It may even be one that could not be."""
    job = reward_job(tiny_model, tmp_path)
    async with served("reward", job) as addresses, RewardClient(addresses, methods(job)) as client:
        batch = reward_batch(2)
        batch["nobody's"] = [object(), object()]
        assert index_scores(await client.compute_scores(batch)) == [0, 1]


async def test_a_batch_that_has_no_place_on_the_wire_says_so(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with served("reward", job) as addresses, RewardClient(addresses, methods(job)) as client:
        batch = reward_batch(2)
        batch["extra_info"] = [{"index": object()}, {"index": object()}]
        with pytest.raises(InvalidBatch):
            await client.compute_scores(batch)


async def test_a_message_to_every_replica_fails_when_none_is_there(tiny_model: Path, tmp_path: Path) -> None:
    table = methods(reward_job(tiny_model, tmp_path))
    async with ActorClient(["127.0.0.1:1"], table, patience_s=0.2) as client:
        with pytest.raises(RoleUnavailable, match=r"actor.*127.0.0.1:1"):
            await client.publish_weights(1)


async def test_a_role_that_never_becomes_ready_is_named(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with RewardClient(["127.0.0.1:1"], methods(job)) as client:
        with pytest.raises(RoleUnavailable, match=r"reward was not ready within 0.2 s.*127.0.0.1:1"):
            await client.wait_until_ready(0.2)


async def test_the_address_of_another_role_is_an_error_at_once(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with served("reward", job) as addresses, ActorClient(addresses, methods(job)) as client:
        async with asyncio.timeout(120):
            with pytest.raises(InvalidConfig, match=r"actor at .*: another role serves there, not actor"):
                await client.wait_until_ready(600.0)


def test_a_role_that_is_trained_has_one_address(tiny_model: Path, tmp_path: Path) -> None:
    table = methods(reward_job(tiny_model, tmp_path))
    with pytest.raises(InvalidConfig, match="actor has exactly one replica; got 2"):
        ActorClient(["127.0.0.1:1", "127.0.0.1:2"], table)
    with pytest.raises(InvalidConfig, match="reward needs the address of each replica"):
        RewardClient([], table)


async def test_a_cancelled_call_ends_at_the_server_too(tiny_model: Path, tmp_path: Path) -> None:
    """The replica has room again at once: the next call is not held up by what nobody waits for."""
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as release:
        job = reward_job(tiny_model, tmp_path, started=str(started.path), gate=str(release.path))
        async with served("reward", job) as addresses, RewardClient(addresses, methods(job)) as client:
            call = asyncio.create_task(client.compute_scores(reward_batch(1)))
            await started.passed(call)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert client.pool.replicas[0].outstanding_rows == 0
            release.open()
            assert index_scores(await client.compute_scores(reward_batch(1))) == [0]


async def test_a_client_closed_during_a_call_raises_and_drops_no_rows(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as release:
        job = reward_job(tiny_model, tmp_path, started=str(started.path), gate=str(release.path))
        async with served("reward", job) as addresses, RewardClient(addresses, methods(job)) as client:
            call = asyncio.create_task(client.compute_scores(reward_batch(1)))
            await started.passed(call)
            await client.close()
            with pytest.raises(RoleFailed, match="the client was closed during the call"):
                await call
            release.open()


# --------------------------------------------------------------- roles that answer other rows


class Miscounting(RewardWorker):
    """Scores as it should, and gives other rows than it was asked for."""

    rows: Callable[[DataProto], DataProto]

    async def compute_scores(self, batch: DataProto) -> DataProto:
        return self.rows(await super().compute_scores(batch))


@pytest.mark.parametrize(
    ("rows", "came"),
    [(lambda answer: DataProto.concat([answer, answer]), 8), (lambda answer: answer[1:], 3)],
    ids=["doubled", "one lost"],
)
async def test_an_answer_of_other_rows_than_asked_is_refused(
    rows: Callable[[DataProto], DataProto], came: int, tiny_model: Path, tmp_path: Path
) -> None:
    job = reward_job(tiny_model, tmp_path)
    worker = Miscounting(job)
    worker.rows = rows
    server = RoleServer({"reward": [REWARD]})
    address = await server.start("127.0.0.1:0")
    await server.ready({REWARD: RewardServicer(worker)})
    async with RewardClient([address], methods(job)) as client:
        with pytest.raises(
            RoleFailed, match=rf"reward.ComputeScores at {address}.*4 rows .* asked for, {came} came"
        ):
            await client.compute_scores(reward_batch(4))
    await server.drain(0)


class Repeating(RolloutWorker):
    """Generates as it should; of the finished rows it gives others."""

    spoil: Callable[[DataProto], Sequence[DataProto]]

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        async for rows in super().generate(prompts):
            for given in self.spoil(rows):
                yield given


def renumbered(rows: DataProto) -> Sequence[DataProto]:
    rows["row"] = rows["row"] + 4
    return [rows]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rows: [rows.repeat(2)], "4 rows were asked for, 8 came"),
        (lambda rows: [rows, rows], "came before"),
        (renumbered, "not asked for"),
        (lambda rows: [rows[rows["row"] != 2]], r"ended without rows \[2\]"),
    ],
    ids=["doubled", "given again", "not asked for", "lost"],
)
async def test_a_stream_of_other_rows_than_asked_is_refused(
    spoil: Callable[[DataProto], Sequence[DataProto]], said: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = reward_job(tiny_model, tmp_path)
    worker = Repeating(job)
    worker.spoil = spoil
    server = RoleServer({"rollout": [ROLLOUT]})
    address = await server.start("127.0.0.1:0")
    await server.ready({ROLLOUT: RolloutServicer(worker)})
    prompts = reward_batch(4).select_columns(["prompts", "prompt_mask"])
    prompts["seeds"] = torch.arange(4)
    prompts.meta_info["sampling"] = "train"
    async with RolloutClient([address], methods(job)) as client:
        with pytest.raises(RoleFailed, match=rf"rollout.Generate at {address}.*{said}"):
            async for _ in client.generate(prompts):
                pass
    await server.drain(0)
