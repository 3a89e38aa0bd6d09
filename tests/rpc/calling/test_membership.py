"""Replicas that come and go, also in the midst of a call: who gets which rows, and that none is lost."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from membership import Listed, until
from prometheus_client import REGISTRY
from rollouts import generated, job_of, prompts_of
from sequences import sequence_batch
from serving import gate, reward_batch, reward_job, scored, serve_process, served

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleFailed, RoleUnavailable
from rolemesh.methods import methods
from rolemesh.rpc.calling import discovery, pool
from rolemesh.rpc.calling.clients import ActorClient, RewardClient, RolloutClient
from rolemesh.rpc.calling.dispatch import Dispatcher
from rolemesh.rpc.calling.replica import Replica
from rolemesh.rpc.contract import ACTOR
from rolemesh.services.processes.serve import group_server
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics


def index_scores(answer: DataProto) -> list[float]:
    return answer["token_level_scores"].sum(1).tolist()


async def test_a_replica_that_joins_during_a_call_gets_remaining_rows(tiny_model: Path, tmp_path: Path) -> None:
    """The first one waits in its first row for a byte, which the second one writes when it has scored 32 rows:
    all but the two pieces that the first one has."""
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as release:
        first = reward_job(tiny_model, tmp_path / "1", started=str(started.path), gate=str(release.path))
        second = reward_job(tiny_model, tmp_path / "2", opens=str(release.path), after=32)
        async with served("reward", first, second) as addresses:
            listed = Listed(addresses[0])
            async with RewardClient(listed, methods(first), timeout_s=120, may_grow=True) as client:
                call = asyncio.create_task(client.compute_scores(reward_batch(64)))
                await started.passed(call)
                listed.tell(*addresses)
                assert index_scores(await call) == list(range(64))
    assert len(scored(tmp_path / "1")) == len(scored(tmp_path / "2")) == 32


async def test_a_leaving_replica_finishes_its_rows_and_gets_no_more(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as release:
        leaving = reward_job(tiny_model, tmp_path / "1", started=str(started.path), gate=str(release.path))
        staying = reward_job(tiny_model, tmp_path / "2")
        async with served("reward", leaving, staying) as addresses:
            listed = Listed(addresses[0])
            async with RewardClient(listed, methods(staying), timeout_s=120, may_grow=True) as client:
                call = asyncio.create_task(client.compute_scores(reward_batch(64)))
                await started.passed(call)
                [replica] = client.pool.replicas
                listed.tell(addresses[1])
                await until(client.pool, lambda: replica not in client.pool.replicas)
                release.open()
                assert index_scores(await call) == list(range(64))
                assert sorted(scored(tmp_path / "1")) == list(range(32))  # once: nothing was asked again
                assert sorted(scored(tmp_path / "2")) == list(range(32, 64))
                shown = [s.labels for s in metrics.CLIENT_OUTSTANDING_ROWS.collect()[0].samples]
                assert {"role": "reward", "address": addresses[0]} not in shown  # others' stay
                assert REGISTRY.get_sample_value("rolemesh_replicas_live", {"role": "reward"}) == 1
                assert REGISTRY.get_sample_value("rolemesh_rpc_client_pending_rows", {"role": "reward"}) == 0


async def test_a_replica_that_leaves_and_dies_has_its_rows_asked_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as never:
        victim_job = reward_job(tiny_model, tmp_path / "1", started=str(started.path), gate=str(never.path))
        other_job = reward_job(tiny_model, tmp_path / "2")
        async with (
            serve_process("reward", victim_job, tmp_path / "1") as victim,
            served("reward", other_job) as [other],
        ):
            listed = Listed(victim.address)
            async with RewardClient(listed, methods(other_job), timeout_s=60, may_grow=True) as client:
                await client.wait_until_ready(60)
                call = asyncio.create_task(client.compute_scores(reward_batch(40)))
                await started.passed(call)
                listed.tell(other)
                victim.process.kill()
                assert index_scores(await call) == list(range(40))
                assert [r.address for r in client.pool.replicas] == [other]


async def test_a_call_waits_for_a_replica_that_is_yet_to_come(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with served("reward", job) as addresses:
        listed = Listed()
        async with RewardClient(listed, methods(job), patience_s=30, may_grow=True) as client:
            ready = asyncio.create_task(client.wait_until_ready(120))
            await until(client.pool, lambda: client.pool.pending_rows)  # so that a scaler starts one
            listed.tell("127.0.0.1:1", *addresses)  # one is enough
            await ready
            assert [r.address for r in client.pool.live] == addresses
            listed.tell()
            await until(client.pool, lambda: not client.pool.replicas)
            call = asyncio.create_task(client.compute_scores(reward_batch(4)))
            await until(client.pool, lambda: client.pool.pending_rows == 4)
            listed.tell(*addresses)
            assert index_scores(await call) == [0, 1, 2, 3]


async def test_when_nobody_comes_the_error_says_what_was_last_known(tiny_model: Path, tmp_path: Path) -> None:
    table = methods(reward_job(tiny_model, tmp_path))
    async with RewardClient(Listed(), table) as client:
        with pytest.raises(
            RoleUnavailable, match=r"reward: no replica has answered for 0.1 s \(at no address\)"
        ):
            await client.wait_until_ready(0.1)
    async with RewardClient(Listed("127.0.0.1:1"), table) as client:
        with pytest.raises(RoleUnavailable, match=r"reward: no replica has answered.*127.0.0.1:1"):
            await client.wait_until_ready(1.0)


class Lost(Listed):
    async def watch(self):  # type: ignore[no-untyped-def]
        raise InvalidConfig("nobody tells who is there")
        yield


async def test_a_call_that_waits_in_vain_for_a_replica_gets_the_reason(
    tiny_model: Path, tmp_path: Path
) -> None:
    table = methods(reward_job(tiny_model, tmp_path))
    async with RewardClient(Lost(), table) as client:
        with pytest.raises(InvalidConfig, match="nobody tells"):
            await client.wait_until_ready(120)


class Failing(Listed):
    """Fails as often as there are errors, and only then tells; None: it ends without an error."""

    def __init__(self, errors: list[Exception | None], *addresses: str) -> None:
        super().__init__(*addresses)
        self._errors = errors

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        if self._errors:
            if error := self._errors.pop(0):
                raise error
            return
        async for reported in super().watch():
            yield reported


async def test_an_address_watch_that_ends_is_logged_and_begins_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "FOLLOW_S", 0.0)
    members = Failing([OSError(errno.EMFILE, "Too many open files"), None, KeyError("addresses")], "10.0.0.1:1")
    async with RewardClient(members, methods(reward_job(tiny_model, tmp_path))) as client:
        await until(client.pool, lambda: [r.address for r in client.pool.replicas] == ["10.0.0.1:1"])
    assert "reward: the watch of its addresses failed" in caplog.text
    assert "Too many open files" in caplog.text
    assert "reward: the watch of its addresses ended" in caplog.text
    assert "KeyError: 'addresses'" in caplog.text


async def test_an_address_that_means_nothing_is_named(tiny_model: Path, tmp_path: Path) -> None:
    async with RewardClient(Listed("fe80::1:50051"), methods(reward_job(tiny_model, tmp_path))) as client:
        with pytest.raises(RoleUnavailable, match=r"at fe80::1:50051: .*is not an address; write host:port"):
            await client.wait_until_ready(1.0)


# ------------------------------------------------------------------------------ several addresses of one server


def by_name(address: str) -> str:
    """Return a second address of a server at 127.0.0.1."""
    return address.replace("127.0.0.1", "localhost")


async def test_several_addresses_of_a_trained_role_are_one_replica(tiny_model: Path) -> None:
    """All calls go to it, whole, also while an address is dead, and when the one in use has left."""
    job = job_of(tiny_model)
    batch = sequence_batch(16)
    async with served("actor", job) as [address]:
        listed = Listed(address, by_name(address), "127.0.0.1:1")
        async with ActorClient(listed, methods(job)) as actor:
            await actor.wait_until_ready(120)
            first = await actor.update(batch)
            source = await actor.publish_weights(1)
            [used] = source.sources
            assert used != "127.0.0.1:1"
            [other] = {address, by_name(address)} - {used}
            listed.tell(other, "127.0.0.1:1")
            await until(actor.pool, lambda: [r.address for r in actor.pool.live] == [other])
            await actor.load_checkpoint(None)
            assert await actor.update(batch) == first


async def test_several_addresses_of_a_stateless_server_are_one_replica(
    tiny_model: Path, tmp_path: Path
) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with (
        served("reward", job) as [address],
        RewardClient(Listed(address, by_name(address)), methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        [used] = client.pool.live
        [other] = {*client.pool.replicas} - {used}
        assert await client.pool._try_return(other) == f"work goes to the same server at {used.address}"
        assert client.pool.live == [used]
        assert not client.pool.has_choice


@pytest.mark.parametrize("when", ["at the start", "later"])
async def test_a_second_server_of_a_trained_role_ends_the_run(tiny_model: Path, when: str) -> None:
    """Also while the second server still loads."""
    job = job_of(tiny_model)
    loading = group_server(["actor"])
    second = await loading.start("127.0.0.1:0")
    try:
        async with served("actor", job) as [first]:
            listed = Listed(first, second) if when == "at the start" else Listed(first)
            async with ActorClient(listed, methods(job)) as actor:
                if when == "later":
                    await actor.publish_weights(1)
                    listed.tell(first, second)
                await until(actor.pool, lambda: actor.pool._lost)
                both = f"({first} and at {second}|{second} and at {first})"
                for call in (
                    actor.wait_until_ready(60),
                    actor.update(sequence_batch(8)),
                    actor.compute_log_probs(sequence_batch(8)),
                    actor.load_checkpoint(None),
                    actor.begin_checkpoint(Path("unused")),
                    actor.publish_weights(2),
                ):
                    with pytest.raises(
                        InvalidConfig, match=f"actor has exactly one replica; two answer, at {both}; scale"
                    ):
                        await call
    finally:
        await loading.drain(0)


async def test_two_servers_differ_from_one_restarted_and_from_one_gone() -> None:
    one, two = group_server(["actor"]), group_server(["actor"])
    address = await one.start("127.0.0.1:0")
    here, by_its_name = Replica(address, "actor"), Replica(by_name(address), "actor")
    there = Replica(await two.start("127.0.0.1:0"), "actor")
    try:
        for replica in (here, by_its_name, there):
            await replica.health()
        assert here.life == by_its_name.life != there.life
        assert await here.is_another_server(there)
        assert not await here.is_another_server(by_its_name)
        by_its_name.life = "before a restart"
        assert not await here.is_another_server(by_its_name)
        assert not await by_its_name.is_another_server(here)
        await two.drain(0)
        assert not await here.is_another_server(there)
    finally:
        for replica in (here, by_its_name, there):
            await replica.close()
        await one.drain(0)
        await two.drain(0)


async def test_rows_of_a_method_that_is_not_pure_are_never_cut(tiny_model: Path) -> None:
    """Whatever there is to choose from: a piece of an update would be an update of its own."""
    job = job_of(tiny_model)
    update = methods(job)["actor.update"]
    async with served("actor", job) as [address]:
        choice = pool.ReplicaPool("actor", [address], patience_s=60, may_grow=True)
        answer = await Dispatcher(choice, ACTOR, 120).call(update.rpc, update.prune(sequence_batch(16)))
        await choice.close()
        async with ActorClient([address], methods(job)) as actor:
            await actor.load_checkpoint(None)
            assert dict(answer.metrics) == await actor.update(sequence_batch(16))


async def test_calls_are_served_in_the_order_in_which_they_were_begun(tiny_model: Path, tmp_path: Path) -> None:
    """The second call's rows come after all of the first one's, though most of these had to wait, too."""
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as release:
        job = reward_job(tiny_model, tmp_path / "1", started=str(started.path), gate=str(release.path))
        async with served("reward", job) as addresses:
            listed = Listed(*addresses)
            async with RewardClient(listed, methods(job), timeout_s=120, may_grow=True) as client:
                batch = reward_batch(80)
                calls = [asyncio.create_task(client.compute_scores(batch[:64]))]
                await started.passed(calls[0])
                calls.append(asyncio.create_task(client.compute_scores(batch[64:])))
                await until(client.pool, lambda: client.pool.pending_rows == 80)
                release.open()
                await asyncio.gather(*calls)
    assert scored(tmp_path / "1") == list(range(80))


async def test_an_actor_in_another_place_is_another_life(tiny_model: Path) -> None:
    job = job_of(tiny_model)
    async with served("actor", job) as before, served("actor", job) as after:
        listed = Listed(*before)
        async with ActorClient(listed, methods(job)) as actor:
            source = await actor.publish_weights(1)
            assert source.sources == before
            listed.tell(*after)
            await until(actor.pool, lambda: [r.address for r in actor.pool.live] == after)
            with pytest.raises(RoleFailed, match="the role was restarted"):
                await actor.publish_weights(2)


async def test_a_rollout_that_joins_takes_weights_and_rows_of_the_call(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the weights first, then rows of the running call."""
    job = job_of(tiny_model)  # of 4 rows at once
    prompts = prompts_of(40)
    worker = RolloutWorker(job)
    alone = DataProto.concat([rows async for rows in worker.generate(prompts)])
    worker.close()
    has_joined, generate = asyncio.Event(), RolloutWorker.generate

    async def held(worker: RolloutWorker, prompts: DataProto) -> AsyncIterator[DataProto]:
        async for rows in generate(worker, prompts):
            yield rows
            await has_joined.wait()

    monkeypatch.setattr(RolloutWorker, "generate", held)
    async with AsyncExitStack() as stack:
        rollouts = await stack.enter_async_context(served("rollout", job, job))
        actor = ActorClient(await stack.enter_async_context(served("actor", job)), methods(job))
        await stack.enter_async_context(actor)
        listed = Listed(rollouts[0])
        client = RolloutClient(listed, methods(job), timeout_s=60, may_grow=True, rows_at_once=4)
        await stack.enter_async_context(client)
        await client.update_weights(await actor.publish_weights(1))

        finished, joined = [], None
        async for rows in client.generate(prompts):
            finished.append(rows)
            if joined is None:
                assert client.pool.replicas[0].outstanding_rows <= 12  # most wait here
                listed.tell(*rollouts)
                await until(client.pool, lambda: len(client.pool.live) == 2)
                joined = next(r for r in client.pool.replicas if r.address == rollouts[1])
                has_joined.set()
        assert joined is not None
        assert joined.last_turn  # it was given rows
        answer = DataProto.concat(finished)
        answer = answer[answer["row"].argsort()]
        assert answer["row"].tolist() == list(range(40))
        assert set(answer["weight_versions"][answer["response_mask"]].tolist()) == {1}
        expected = alone[alone["row"].argsort()]  # the actor has not been trained: version 1 is the model's
        for column in ("responses", "response_mask", "rollout_log_probs"):
            assert torch.equal(answer[column], expected[column])
        # And the next versions reach both.
        await client.update_weights(await actor.publish_weights(2))
        assert len(client.pool.live) == 2
        assert len(await generated(client)) == 4
