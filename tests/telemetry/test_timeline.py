"""The timeline by hand: what a server told, laid into what its client saw; rows; the step's ends."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import reward_batch, reward_job, served

from rolemesh.dataproto import DataProto
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import RewardClient
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.telemetry import timeline
from rolemesh.telemetry.timeline import COMPUTES, MOST_PARTS, Part, TimedCall, recorded, report_of, to_chrome


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> float:
    """The seconds that timeline reads, which do not go on."""
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    return 100.0


def test_a_servers_parts_are_in_the_middle_of_its_clients_call(clock: float) -> None:
    # Ten seconds for the client, six for the server: two on the way there and two on the way back.
    call = TimedCall("actor 10.0.0.7:1", "actor.update", clock - 10)
    call.heard(json.dumps([6.0, [["waits for critic", 1.0, 2.0, None], ["computes", 2.0, 5.0, None]]]))
    spans = [(part.name, part.began - call.began, part.ended - call.began) for part in call.parts]
    expected = [("transfer", 0, 3), ("waits for critic", 3, 4), ("computes", 4, 7), ("transfer", 7, 10)]
    assert spans == expected


@pytest.mark.parametrize(
    "report",
    [
        "x",
        "[1, 2]",
        "[1]",
        "[1e999, []]",
        '[1, [["a", 0, NaN, null]]]',
        "[" * 100_000,
        "[1, [[0]]]",
        '[1, [["a", 0, 1, Infinity]]]',
        f'[1, [["a", 1{"0" * 400}, 1, 0]]]',
        f"[1{'0' * 400}, []]",
    ],
)
def test_a_report_that_is_none_is_left_out_of_the_drawing(
    report: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = TimedCall("reward 10.0.0.7:1", "reward.compute_scores", time.perf_counter() - 10)
    call.heard(report)
    assert call.parts == []
    [said] = caplog.messages
    assert said.startswith("reward 10.0.0.7:1: its timeline of reward.compute_scores cannot be read: ")


def test_a_server_reports_seconds_since_the_request_came(clock: float) -> None:
    began = clock - 3
    parts = [Part("computes", began + 1, began + 2)]
    seconds, spans = json.loads(report_of([TimedCall("actor", "actor.update", began, parts=parts)], began))
    assert (seconds, spans) == (3.0, [["computes", 1.0, 2.0, None]])


async def test_a_call_with_too_many_parts_is_answered_with_the_longest(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an update of 64 mini-batches on 64 ranks, of which each computes a little less than the one before."""
    score = RewardWorker.compute_scores

    async def compute_scores(worker: RewardWorker, batch: DataProto) -> DataProto:
        with recorded("reward", "reward.compute_scores"):
            for _ in range(64):
                timeline.add_ranks(time.perf_counter() - 9, [(8 - rank / 100, 1.0) for rank in range(64)])
        return await score(worker, batch)

    monkeypatch.setattr(RewardWorker, "compute_scores", compute_scores)
    job = reward_job(tiny_model, tmp_path)
    async with served("reward", job) as addresses, RewardClient(addresses, methods(job)) as client:
        seen: list[TimedCall] = []
        token = timeline.calls.set(seen)
        answer = await client.compute_scores(reward_batch(1))
        timeline.calls.reset(token)
    assert len(answer) == 1
    parts = [part for call in seen for part in call.parts]
    of_ranks = [part for part in parts if part.rank is not None]
    assert COMPUTES in {part.name for part in parts if part.rank is None}
    assert MOST_PARTS - 20 < len(of_ranks) < MOST_PARTS
    assert {part.name for part in of_ranks} == {COMPUTES}
    assert {part.rank for part in of_ranks} == {*range(32)}  # 31 of them whole


def test_a_call_is_written_down_where_somebody_records() -> None:
    with recorded("actor", "actor.update"):
        pass
    written: list[TimedCall] = []
    token = timeline.calls.set(written)
    with suppress(ValueError), recorded("actor", "actor.update", waits_for="critic") as call:
        call.began -= 2
        call.computed(int)("not a number")
    timeline.calls.reset(token)
    assert written == [call]
    assert call.parts[0].name == "waits for critic"
    assert call.ended - call.began >= 2


def test_overlapping_calls_have_separate_rows_within_the_step() -> None:
    step = TimedCall("controller", "step 3", 100.0, 110.0)
    calls = [
        TimedCall("actor", "actor.a", 101, 104, parts=[Part("computes", 102, 103)]),
        TimedCall("actor", "actor.b", 103, 105, parts=[Part("computes", 103, 105)]),
        TimedCall("actor", "actor.c", 104, 112, parts=[Part("computes", 106, 112)]),  # goes on beyond the step
        TimedCall("actor", "actor.d", 95, 99),  # was over before it
    ]
    events = to_chrome(calls, step)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    [zero] = [event["ts"] for event in slices if event["name"] == "step 3"]
    seen = [
        (e["name"], e["tid"], (e["ts"] - zero) / 1e6, e["dur"] / 1e6) for e in slices if e["name"] != "step 3"
    ]
    assert seen == [
        ("actor.a", 0, 2, 1),
        ("actor.b", 0, 3, 2),
        ("actor.c", 0, 6, 4),
        ("actor.a", 1, 1, 3),
        ("computes", 1, 2, 1),
        ("actor.b", 2, 3, 2),
        ("computes", 2, 3, 2),
        ("actor.c", 1, 4, 6),
        ("computes", 1, 6, 4),
    ]


def test_each_rank_has_a_row_and_leaves_callers_parts_unchanged() -> None:
    step = TimedCall("controller", "step 3", 100.0, 110.0)
    call = TimedCall("actor 10.0.0.7:1", "actor.update", 100.0)
    at = time.perf_counter()
    parts = [
        ["computes", 1.0, 7.0, None],
        ["computes", 1.0, 5.0, 0],
        ["collectives", 5.0, 7.0, 0],
        ["computes", 1.0, 3.0, 1],
        ["collectives", 3.0, 7.0, 1],
    ]
    call.began = at - 8
    call.heard(json.dumps([8.0, parts]))
    assert [part.name for part in call.parts if part.rank is None] == ["transfer", "computes", "transfer"]
    step.began, step.ended, call.ended = call.began, at, at
    events = to_chrome([call], step)["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    named = {
        (rows[e["tid"]], e["name"]): round(e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X" and rows[e["tid"]].startswith("rank")
    }
    assert named == {
        ("rank 0", "actor.update"): 4,
        ("rank 0", "collectives"): 2,
        ("rank 1", "actor.update"): 2,
        ("rank 1", "collectives"): 4,
    }
