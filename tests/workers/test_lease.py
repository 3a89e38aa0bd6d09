"""Roles that share a device: one at a time, everybody in the end, whatever is cancelled or fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rolemesh.errors import RoleFailed
from rolemesh.workers.lease import Lease
from rolemesh.workers.local import LocalWorker, on_worker_thread
from rolemesh.workers.offloading import Offloader
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

ROLES = ("actor", "critic", "rollout")
FOREVER = float("inf")


async def ticks(count: int) -> None:
    """Lets the other tasks go on, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Device:
    """Who is on it and who computes; both are checked whenever they change."""

    awake: set[str] = field(default_factory=set)
    computing: list[str] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert len(self.awake) <= 1
        assert set(self.computing) <= self.awake


@dataclass
class Sleeper:
    """A role whose moves take time, and fail when it is told so."""

    role: str
    device: Device
    num_ticks: int
    fails: set[int] = field(default_factory=set)
    num_moves: int = 0

    async def sleep(self) -> int:
        assert self.device.computing == []
        await self._moves()
        self.device.awake.remove(self.role)
        return 1

    async def wake(self) -> int:
        assert self.device.awake == set()
        await self._moves()
        self.device.awake.add(self.role)
        self.device.turns.append(self.role)
        return 1

    async def _moves(self) -> None:
        self.num_moves += 1
        await ticks(self.num_ticks)
        if self.num_moves in self.fails:
            raise OSError("no space left")


@dataclass(frozen=True)
class Call:
    """When it is made, how long it takes, and after how many ticks its caller goes away (None: never)."""

    role: str
    begins: int
    takes: int
    cancelled: int | None = None


async def group(
    num_ticks: int, turn_s: float, fails: dict[str, set[int]] | None = None
) -> tuple[Lease, Device]:
    """Three roles, loaded one after another."""
    lease, device = Lease(turn_s), Device()
    for role in ROLES:
        await lease.vacate()
        device.awake.add(role)
        device.check()
        lease.add(Sleeper(role, device, num_ticks, (fails or {}).get(role, set())))
    device.turns = [ROLES[-1]]
    return lease, device


async def computes(lease: Lease, device: Device, role: str, takes: int) -> None:
    async with lease.turn(role):
        device.computing.append(role)
        try:
            for _ in range(takes):
                device.check()
                await ticks(1)
            device.check()
        finally:
            device.computing.remove(role)


async def made(lease: Lease, device: Device, call: Call) -> str:
    """The call's end: done, cancelled or failed."""
    await ticks(call.begins)
    task = asyncio.create_task(computes(lease, device, call.role, call.takes))
    if call.cancelled is not None:
        await ticks(call.cancelled)
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled"
    except RoleFailed:
        return "failed"
    return "done"


def within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    async def timed() -> Any:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(timed())


calls = st.lists(
    st.builds(
        Call,
        role=st.sampled_from(ROLES),
        begins=st.integers(0, 12),
        takes=st.integers(0, 4),
        cancelled=st.none() | st.integers(0, 12),
    ),
    max_size=14,
)


@given(calls, st.integers(0, 3), st.sampled_from([0.0, FOREVER]))
@settings(max_examples=300, deadline=None)
def test_one_role_at_a_time_and_everybody_in_the_end(calls: list[Call], num_ticks: int, turn_s: float) -> None:
    async def run() -> None:
        lease, device = await group(num_ticks, turn_s)
        ends = await asyncio.gather(*(made(lease, device, call) for call in calls))
        for call, end in zip(calls, ends, strict=True):
            assert end == "done" or (end == "cancelled" and call.cancelled is not None)
        for role in ROLES:  # nothing that was cancelled has left anything behind
            await computes(lease, device, role, 1)
            assert lease.resident == role
            assert device.awake == {role}

    within(100, run())


@given(
    calls,
    st.integers(0, 2),
    st.dictionaries(st.sampled_from(ROLES), st.sets(st.integers(2, 6), max_size=3)),
    st.sampled_from([0.0, FOREVER]),
)
@settings(max_examples=300, deadline=None)
def test_a_failed_move_fails_only_the_calls_that_waited_for_it(
    calls: list[Call], num_ticks: int, fails: dict[str, set[int]], turn_s: float
) -> None:
    async def run() -> None:
        lease, device = await group(num_ticks, turn_s, fails)
        ends = await asyncio.gather(*(made(lease, device, call) for call in calls))
        failed = ends.count("failed")
        assert failed == 0 or any(fails.values())
        for role in ROLES:
            for _ in range(1 + 3 * len(ROLES)):  # each failure is one call's; it may be tried again
                if await made(lease, device, Call(role, 0, 1)) == "done":
                    break
            else:
                raise AssertionError(f"{role} never got its turn again")

    within(100, run())


def test_an_error_says_who_failed_and_who_is_on_the_device() -> None:
    async def run() -> None:
        lease, device = await group(0, FOREVER, {"rollout": {1}, "actor": {2}})
        with pytest.raises(
            RoleFailed, match=r"actor could not take its turn .*rollout is still.*no space left"
        ):
            await computes(lease, device, "actor", 1)
        await computes(lease, device, "rollout", 1)
        with pytest.raises(
            RoleFailed, match=r"actor could not take its turn .*no role is on it.*no space left"
        ):
            await computes(lease, device, "actor", 1)
        assert device.awake == set()
        await computes(lease, device, "actor", 1)

    within(100, run())


def test_calls_during_a_stream_follow_with_one_switch_per_role() -> None:
    """As in a step: chunks are scored as they finish, in any order, some later than the stream ends."""

    async def run() -> None:
        lease, device = await group(2, FOREVER)
        stream = asyncio.create_task(computes(lease, device, "rollout", 50))
        chunks = [Call(role, 10 * i, 20) for i in range(7) for role in ("actor", "critic")]
        assert set(await asyncio.gather(*(made(lease, device, chunk) for chunk in chunks))) == {"done"}
        await stream
        assert device.turns == ["rollout", "actor", "critic"]

    within(100, run())


@pytest.mark.parametrize("busy", ROLES)
def test_a_busy_role_starves_no_other_once_its_turn_is_over(busy: str) -> None:
    async def run() -> None:
        lease, device = await group(1, turn_s=0.0)
        ended = asyncio.Event()

        async def again_and_again() -> None:
            while not ended.is_set():
                await computes(lease, device, busy, 3)

        # three overlapping: some call of the busy role runs at any time
        endless = [asyncio.create_task(made_later(again_and_again(), i)) for i in range(3)]
        await ticks(20)
        for other in ROLES:
            for _ in range(5):
                await computes(lease, device, other, 2)
        ended.set()
        await asyncio.gather(*endless)

    async def made_later(work: Coroutine[Any, Any, None], num_ticks: int) -> None:
        await ticks(num_ticks)
        await work

    within(100, run())


# ------------------------------------------------------------------- workers that take turns


class Adder(LocalWorker):
    """Adds to its tensor on its thread, and notes when."""

    def __init__(self, role: str, lease: Lease, directory: Path, spans: list[tuple[float, float, str]]) -> None:
        super().__init__(role, WorkerContext(ComputingThread(role), lease))
        self.total, self._spans = torch.zeros(1000), spans
        self.offloader = Offloader(lambda: [self.total], torch.device("cpu"), directory)

    @on_worker_thread
    def add(self, seconds: float) -> None:
        began = time.perf_counter()
        assert self.total.untyped_storage().nbytes(), f"{self.role} computes without its memory"
        threading.Event().wait(seconds)  # what a kernel's time is
        self.total += 1
        self._spans.append((began, time.perf_counter(), self.role))


@given(
    st.lists(
        st.tuples(st.sampled_from(ROLES), st.integers(0, 3), st.none() | st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
@example([("actor", 0, 1), ("critic", 0, None)])
@settings(max_examples=25, deadline=None)
def test_threads_of_two_roles_never_overlap_if_callers_leave(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, int, int | None]]
) -> None:
    """A thread cannot be stopped: what a cancelled caller has begun ends before another role begins."""
    directory, spans, lease = tmp_path_factory.mktemp("offloaded"), [], Lease()
    workers = {role: Adder(role, lease, directory, spans) for role in ROLES}

    async def called(role: str, after: int, cancelled: int | None) -> None:
        await asyncio.sleep(after / 500)
        task = asyncio.create_task(workers[role].add(0.002))
        if cancelled is not None:
            await asyncio.sleep(cancelled / 500)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if cancelled is None:
            task.result()

    async def run() -> None:
        for worker in workers.values():
            await lease.vacate()
            lease.add(worker)
        await asyncio.gather(*(called(*call) for call in plan))
        for worker in workers.values():
            await worker.add(0)

    within(100, run())
    for worker in workers.values():
        worker.close()
    for (_, end, one), (begin, _, other) in zip(sorted(spans), sorted(spans)[1:], strict=False):
        assert one == other or end <= begin
    for role, worker in workers.items():
        if worker.total.untyped_storage().nbytes() == 0:
            worker.offloader.reload()
        assert worker.total.eq(sum(span[2] == role for span in spans)).all()
