"""`rolemesh serve` with several ranks: loading, draining, and an end of all ranks however one of them ends."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM, Signals

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ranked import DRILL, DrillClient, Group, drill_job, group

from rolemesh.catalog.role_specs import ROLES
from rolemesh.errors import RolemeshError, RoleUnavailable, UpdateFailed
from rolemesh.methods import methods
from rolemesh.rpc.calling.replica import Replica
from rolemesh.services.processes.shutdown import LOG_FLUSH_S, ORPHAN_DRAIN_S
from rolemesh.telemetry import timeline
from rolemesh.workers.broken_device import EXIT_CODE

KEEPALIVE_S = 3.0  # of these groups, in place of ten seconds: both until a rank is asked, and until it answers
NOTICED_S = 2 * KEEPALIVE_S  # until a rank that is silent is known to be
OTHERS_S = 2.0  # of these groups, too
ENDS_S = ORPHAN_DRAIN_S + LOG_FLUSH_S
BUSY_S = 20  # that a machine with other work may take longer
READY = "rolemesh_role_ready"


@pytest.fixture(autouse=True)
def drill() -> Iterator[None]:
    with ROLES.adding(DRILL):
        yield


@asynccontextmanager
async def client_of(started: Group) -> AsyncIterator[DrillClient]:
    client = DrillClient([await started.address()], methods(drill_job(started.directory)), patience_s=0.1)
    async with client:
        await client.wait_until_ready(120)
        yield client


def are_ready(rank: int, value: int) -> list[str]:
    """What a rank shows of its one role."""
    return [f'{READY}{{rank="{rank}",role="drill"}} {value:.1f}']


async def said(started: Group, rank: int, words: str) -> None:
    """Wait for a line in a rank's log."""
    async with asyncio.timeout(120):
        while words not in started.log(rank):  # noqa: ASYNC110  # another process's file
            await asyncio.sleep(0.05)


async def test_ranks_compute_together_and_drain_together(tmp_path: Path) -> None:
    with group(tmp_path, 3) as started:
        async with client_of(started) as client:
            seen: list[timeline.TimedCall] = []
            recording = timeline.calls.set(seen)
            await client.drill(meets=[0, 1, 2])
            timeline.calls.reset(recording)
            assert {part.rank for call in seen for part in call.parts} == {None, 0, 1, 2}
            with pytest.raises(UpdateFailed, match="UpdateFailed on purpose on rank 0"):
                await client.drill(raises=[0, 1, 2], error="UpdateFailed")
            for rank in range(3):
                assert await started.shown(rank, READY) == are_ready(rank, 1)
            # A follower that is asked to end goes on until rank 0 ends: it drains, and calls may still run.
            started.kill(1, SIGTERM)
            await said(started, 1, "following until rank 0 ends")
            await client.drill(meets=[0, 1, 2])
            assert await started.shown(1, READY) == are_ready(1, 0)
        started.kill(0, SIGTERM)
        assert await started.ended() == [0, 0, 0]
        assert started.notes(0) == started.notes(1) == started.notes(2)
        assert "run/drill rank 2: rank 0 drained" in started.log(2)


async def test_a_group_serves_once_every_rank_has_loaded(
    tmp_path: Path,
) -> None:
    """Until then it names the ranks that it waits for."""
    loads = json.dumps({"starts": [1], "blocks": [1]})
    with group(tmp_path / "slow", 2, DRILL_LOAD=loads) as slow, group(tmp_path / "few", 3, ranks=2) as few:
        for started, words in (
            (slow, "waiting for rank 1 of 2 of drill in drill.load (order 1)"),
            (few, "waiting for rank 2 of 3 of drill"),
        ):
            async with grpc.aio.insecure_channel(await started.address()) as channel:
                await said(started, 0, words)
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(service="drill"))
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            replica = Replica(await started.address(), "drill")
            assert words.replace("waiting", "waits") in await replica.health()
            await replica.close()
            assert [await started.shown(rank, READY) for rank in (0, 1)] == [are_ready(0, 0), are_ready(1, 0)]


async def test_a_rank_that_cannot_load_ends_the_group_with_its_reason(tmp_path: Path) -> None:
    loads = json.dumps({"raises": [1], "error": "ModelNotFound"})
    with group(tmp_path, 2, DRILL_LOAD=loads) as started:
        assert await started.ended() == [1, 1]
        words = "rank 1 of 2 of drill failed in drill.load (order 1): ModelNotFound: ModelNotFound on purpose"
        assert words in started.log(0)
        assert words in started.log(1)


# What the ranks do when one of them ends: each begins, then waits for ever or computes with the others.
STATES = {
    "waiting": {},
    "computing": {"starts": [0, 1], "blocks": [0, 1]},
    "in a collective with rank 1": {"starts": [0, 1], "blocks": [1], "meets": [0]},
    "in a collective with rank 0": {"starts": [0, 1], "blocks": [0], "meets": [1]},
}


async def test_when_one_rank_ends_all_end_in_time(tmp_path: Path) -> None:
    """Killed or stopped, whichever rank it is and whatever the ranks do."""
    cases = [(state, rank, number) for state in STATES for rank in (0, 1) for number in (SIGKILL, SIGSTOP)]
    problems = await asyncio.gather(*(one_ends(tmp_path / str(i), *case) for i, case in enumerate(cases)))
    assert [*filter(None, problems)] == []


async def one_ends(directory: Path, state: str, rank: int, number: Signals) -> str:
    with group(directory, 2, keepalive_s=KEEPALIVE_S) as started:
        async with client_of(started) as client:
            call = asyncio.create_task(client.drill(**STATES[state]))
            if state == "waiting":
                await call
            else:
                await started.started(2)
            began = time.monotonic()
            started.kill(rank, number)
            codes = await started.ended(1 - rank)
            seconds = time.monotonic() - began
            if number == SIGSTOP:
                started.kill(rank, SIGKILL)
            with suppress(RolemeshError):
                await call
        log = started.log(1 - rank)
    where = f"{state}, rank {rank}, {number.name}"
    at_most = NOTICED_S + ENDS_S + BUSY_S
    named = f"rank {rank} of 2 of drill" in log
    well = codes == [1] and seconds < at_most and named
    return "" if well else f"{where}: {codes} after {seconds:.1f} s; its log:\n{log}"


async def test_an_error_on_one_rank_ends_all_while_others_wait(tmp_path: Path) -> None:
    with group(tmp_path, 2, DRILL_OTHERS_S=str(OTHERS_S)) as started:
        async with client_of(started) as client:
            began = time.monotonic()
            words = r"rank 0 of 2 of drill failed in drill.drill \(order 2\): InvalidBatch: .*; "
            words += f"rank 1 of 2 of drill did not answer within {OTHERS_S:.0f} s of it"
            with pytest.raises(RoleUnavailable):
                await client.drill(raises=[0], error="InvalidBatch", meets=[1])
        assert await started.ended() == [1, 1]
        assert re.search(words, started.log(0))
        assert re.search(words, started.log(1))
        assert time.monotonic() - began < OTHERS_S + ENDS_S + BUSY_S


async def test_a_broken_device_of_one_rank_ends_all_and_is_reported(tmp_path: Path) -> None:
    """Before the time in which other ranks may raise the same error, though they wait in a collective."""

    error = "AcceleratorError: misaligned address"

    async def breaks(rank: int) -> None:
        with group(tmp_path / str(rank), 2) as started:
            async with client_of(started) as client:
                began = time.monotonic()
                with pytest.raises(RoleUnavailable):
                    await client.drill(raises=[rank], error=error, meets=[1 - rank])
            codes = await started.ended()
            assert codes == ([EXIT_CODE, 1] if rank == 0 else [1, EXIT_CODE])
            assert time.monotonic() - began < ENDS_S + BUSY_S
            assert f"only a new process can use it again: {error} on purpose" in started.log(rank)
            assert f"rank {rank} of 2 of drill" in started.log(1 - rank)

    await asyncio.gather(breaks(0), breaks(1))
