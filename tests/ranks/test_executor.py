"""Orders from rank 0 to followers in processes of their own: sequence, errors, and who may follow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from certificates import Authority, swap
from ranked import Recorder, exit_codes, follower, forked

from rolemesh import threads
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, NotPermitted, RolemeshError, RoleUnavailable, UpdateFailed
from rolemesh.ranks.executor import OneRank, RankExecutor
from rolemesh.ranks.follower import follow
from rolemesh.ranks.leader import OTHERS_S, Leader
from rolemesh.ranks.rank_messages import (
    KEEPALIVE_S,
    KEEPALIVE_TIMEOUT_S,
    LEADER_KEY,
    RPC,
    RankAnswer,
    is_last,
)
from rolemesh.ranks.rendezvous import Rendezvous, local_store
from rolemesh.rpc import tls
from rolemesh.rpc.channels import open_channel
from rolemesh.rpc.metadata import RANK_KEY, SECRET_KEY
from rolemesh.rpc.status_codes import from_status
from rolemesh.telemetry import context
from rolemesh.wire.streams import CARRIER, receive_batches

SIZE = 3


@dataclass
class Role:
    """A role on rank 0: its thread, its orders and its part."""

    thread: ThreadPoolExecutor
    executor: RankExecutor
    own: Recorder

    async def run(self, name: str, *parts: DataProto) -> list[DataProto]:
        return await threads.run_on(self.thread, self.executor.run, name, getattr(self.own, name), parts)

    async def note(self, number: int) -> list[DataProto]:
        return await self.run("note", *[DataProto(meta_info={"id": number})] * SIZE)

    async def fail(self, *names: str) -> list[DataProto]:
        return await self.run("fail", *[DataProto(meta_info={"errors": [*names]})] * SIZE)


@dataclass
class Led:
    leader: Leader
    roles: dict[str, Role]
    processes: list[Any]
    directory: Path

    async def ended(self) -> list[int | None]:
        """Exit codes of the followers."""
        return await exit_codes(self.processes)

    def notes(self, role: str, rank: int) -> list[str]:
        return (self.directory / f"notes-{role}-{rank}").read_text().splitlines()


@asynccontextmanager
async def led(directory: Path) -> AsyncIterator[Led]:
    """Rank 0 in this process, with roles a and b; its followers in theirs."""
    store = local_store(SIZE)
    ranks = [Rendezvous(rank, SIZE, "127.0.0.1", store.port, "0") for rank in range(SIZE)]
    leader = Leader("ab", ranks[0])
    await leader.start()
    with forked(follower, [(directory, rank) for rank in ranks[1:]]) as processes:
        roles = {
            role: Role(ThreadPoolExecutor(1), leader.executor(role), Recorder(directory, role, 0))
            for role in "ab"
        }
        async with asyncio.timeout(120):
            await leader.gather()
        try:
            yield Led(leader, roles, processes, directory)
        finally:
            await leader.close()


def test_a_role_of_one_rank_orders_itself() -> None:
    part = DataProto(meta_info={"x": 1})
    assert OneRank().run("echo", lambda rows: rows, [part]) == [part]


async def test_every_rank_runs_a_roles_commands_in_the_order_of_rank_0(tmp_path: Path) -> None:
    """Thousands of calls of two roles, permuted; many are cancelled before, while or after they run."""
    rng = random.Random(0)

    async def call(role: Role, number: int) -> None:
        context.step.set(number + 1)
        answers = await role.note(number)
        assert [answer.meta_info["rank"] for answer in answers] == [0, 1, 2]

    async with led(tmp_path) as group:
        numbers = [(role, number) for role in "ab" for number in range(1000)]
        rng.shuffle(numbers)
        calls = []
        for role, number in numbers:
            calls.append(asyncio.create_task(call(group.roles[role], number)))
            for _ in range(rng.choice([0, 0, 0, 3])):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                rng.choice(calls[-50:]).cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(result) for result in ended} == {type(None), asyncio.CancelledError}
        for role in group.roles.values():
            role.thread.shutdown()  # after what was cancelled while it ran
        await group.leader.close()
        assert await group.ended() == [0, 0]
        for role in "ab":
            noted = [group.notes(role, rank) for rank in range(SIZE)]
            assert noted[0] == noted[1] == noted[2]
            assert len(noted[0]) == len(set(noted[0])) > 500
            assert all(int(step) == int(number) + 1 for number, step in map(str.split, noted[0]))


@pytest.mark.parametrize("skipped", [1, -1], ids=["gap", "repeat"])
async def test_a_gap_or_repeat_in_order_numbers_ends_the_group(tmp_path: Path, skipped: int) -> None:
    async with led(tmp_path) as group:
        role: Any = group.roles["a"]
        await role.note(1)
        role.executor._number += skipped
        words = rf"rank [12] of 3 of a,b failed in a.note .*refused order {2 + skipped} of a; expected 2"
        with pytest.raises(RoleUnavailable, match=words):
            await role.note(2)
        with pytest.raises(RoleUnavailable, match=words):
            await group.leader.watch()
        assert await group.ended() == [1, 1]
        assert [group.notes("a", rank) for rank in (1, 2)] == [["1 0"], ["1 0"]]


async def test_an_error_of_one_rank_ends_the_group_and_of_all_the_call(tmp_path: Path) -> None:
    async with led(tmp_path) as group:
        role = group.roles["a"]
        with pytest.raises(UpdateFailed, match=r"^UpdateFailed on purpose on rank 0$"):
            await role.fail(*["UpdateFailed"] * 3)
        with pytest.raises(InvalidBatch, match="tuple"):  # before any rank has the order
            await role.run("echo", *[DataProto(meta_info={"x": (1,)})] * 3)
        await role.note(1)
        words = r"^rank 2 of 3 of a,b failed in a.fail \(order 3\): InvalidBatch: .* on rank 2; "
        words += "ranks 0, 1 of 3 of a,b did not fail$"
        with pytest.raises(RoleUnavailable, match=words):
            await role.fail("", "", "InvalidBatch")
        with pytest.raises(RoleUnavailable, match=words):
            await group.roles["b"].note(1)
        assert await group.ended() == [1, 1]
        assert "InvalidBatch on purpose on rank 2" in (tmp_path / "log-1").read_text()  # why it ended


@pytest.mark.parametrize(
    "names",
    [("InvalidBatch", "UpdateFailed", "InvalidBatch"), ("KeyError",) * 3, ("InvalidBatch", "", "InvalidBatch")],
    ids=["differ", "unexpected", "one is well"],
)
async def test_any_other_errors_end_the_group(tmp_path: Path, names: tuple[str, ...]) -> None:
    """An unexpected error may have left a model half changed."""
    async with led(tmp_path) as group:
        with pytest.raises(RoleUnavailable, match=r"of 3 of a,b failed in a.fail \(order 1\)"):
            await group.roles["a"].fail(*names)
        assert await group.ended() == [1, 1]


async def test_parts_of_100_mib_pass(tmp_path: Path) -> None:
    parts = [DataProto.from_dict({"x": torch.rand(100, 1 << 18)}, meta_info={"rank": r}) for r in range(SIZE)]
    async with led(tmp_path) as group:
        answers = await group.roles["a"].run("echo", *parts)
    for part, answer in zip(parts, answers, strict=True):
        assert torch.equal(part["x"], answer["x"])
        assert part.meta_info == answer.meta_info


async def test_only_the_followers_of_the_group_may_follow(tmp_path: Path) -> None:
    async with led(tmp_path) as group:
        store = group.leader.rendezvous.store
        port, secret = (await asyncio.to_thread(store.get, LEADER_KEY)).decode().split()
        for metadata in (
            {},
            {RANK_KEY: "1"},
            {RANK_KEY: "1", SECRET_KEY: secret[:-1]},
            {RANK_KEY: "1", SECRET_KEY: secret},  # it follows already
            {RANK_KEY: "0", SECRET_KEY: secret},
            {RANK_KEY: "3", SECRET_KEY: secret},
            {RANK_KEY: "-1", SECRET_KEY: secret},
        ):
            with pytest.raises(NotPermitted, match=r"secret|cannot follow as rank"):
                await called(f"127.0.0.1:{port}", metadata)
        await group.roles["a"].note(1)


async def called(address: str, metadata: dict[str, str]) -> None:
    async with open_channel(address, "a") as channel:
        start: Any = channel.stream_stream
        try:
            async for _ in start(RPC.path)(metadata=tuple(metadata.items())):
                raise AssertionError("an order went to a stranger")
        except grpc.aio.AioRpcError as error:
            raise from_status(error, "here") from error


@asynccontextmanager
async def called_by_a_follower() -> AsyncIterator[tuple[Leader, Any]]:
    """Rank 0 of two, and the bare call of rank 1."""
    store = local_store(2)
    leader = Leader(["a"], Rendezvous(0, 2, "127.0.0.1", store.port, "0"))
    await leader.start()
    port, secret = (await asyncio.to_thread(leader.rendezvous.store.get, LEADER_KEY)).decode().split()
    async with open_channel(f"127.0.0.1:{port}", "a") as channel, asyncio.timeout(120):
        start: Any = channel.stream_stream
        yield leader, start(RPC.path)(metadata=((RANK_KEY, "1"), (SECRET_KEY, secret)))


async def test_a_follower_that_sends_no_answer_ends_the_group() -> None:
    async with called_by_a_follower() as (leader, call):
        await call.write(b"no frame")
        with pytest.raises(RoleUnavailable, match="rank 1 of 2 of a broke its stream of orders: InvalidBatch"):
            await leader.watch()
    await leader.close()


async def test_a_call_ends_after_what_its_follower_still_sends() -> None:
    """Ended earlier, it would break a message that is on its way, and the follower would call rank 0 lost."""
    async with called_by_a_follower() as (leader, call):
        batches = receive_batches(call)
        await leader.gather()
        closing = asyncio.create_task(leader.close())
        assert is_last(await anext(batches))
        for number in range(200):  # rank 0 takes them, and they mean nothing to it any more
            for message in CARRIER.send(RankAnswer(number, "a", DataProto()).encoded()):
                await call.write(message)
        assert not call.done()
        await call.done_writing()
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        assert await call.code() is grpc.StatusCode.OK
        await closing


async def test_a_follower_that_does_not_end_its_stream_holds_no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolemesh.ranks.leader.CLOSE_S", 0.1)
    async with called_by_a_follower() as (leader, call):
        await leader.gather()
        await leader.close()
        with pytest.raises(grpc.aio.AioRpcError):
            [_ async for _ in call]


async def test_with_keys_a_follower_needs_every_role_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward's process, which may run anybody's code, cannot follow the actor; nor without keys."""
    monkeypatch.setattr("rolemesh.ranks.follower.CONNECT_S", 0.2)  # without keys it never connects
    authority, store = Authority(), local_store(2)
    rendezvous = Rendezvous(0, 2, "127.0.0.1", store.port, "0")
    tls.use_keys(swap(tmp_path / "leader", authority.keys("my-job", "actor", "critic")))
    leader = Leader(["actor", "critic"], rendezvous)
    await leader.start()

    async def join(*roles: str) -> None:
        tls.use_keys(swap(tmp_path / "-".join(roles), authority.keys("my-job", *roles)) if roles else None)
        thread = ThreadPoolExecutor(1)
        await follow(["actor", "critic"], replace(rendezvous, rank=1), {"actor": thread}, lambda *_: echo)

    def echo(rows: DataProto) -> DataProto:
        return rows

    plain = "it hangs up|Socket closed|reset by peer|failed to connect"
    lacking = {("reward",): "lacks ..actor., .critic..$", ("actor",): "lacks ..critic..$", (): plain}
    for roles, words in lacking.items():
        with pytest.raises(RolemeshError, match=words):
            await asyncio.create_task(join(*roles))  # a task has a context, and so keys, of its own
    following = asyncio.create_task(join("actor", "critic"))
    await leader.gather()
    executor = leader.executor("actor")
    assert len(await asyncio.to_thread(executor.run, "echo", echo, [DataProto()] * 2)) == 2
    await leader.close()
    with suppress(RoleUnavailable):
        await following


def test_a_group_ends_within_the_seconds_that_the_docs_state() -> None:
    """Tests of the end itself wait less long for a silent rank."""
    text = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text()
    assert f"rank 0 notices within {KEEPALIVE_S + KEEPALIVE_TIMEOUT_S} s" in text
    assert f"the group ends after {OTHERS_S:.0f} s at most" in text
