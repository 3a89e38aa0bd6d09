"""Profiled steps: the timeline across roles and each role's trace, of real runs in process and over gRPC."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import recorded, small_job
from observed import in_process, over_grpc, run
from serving import served_group

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.pages.choice import check_step
from rolemesh.services.controller.run.loop import Run
from rolemesh.telemetry import timeline

CLOCKS = 1000  # microseconds, between torch's clock and the controller's
TWO_STEPS = ("trainer.total_training_steps=2", "trainer.val_before_train=false")
WHERE = {"in process": in_process, "over gRPC": over_grpc}
Slice = dict[str, Any]


def profiled_job(directory: Path, model: Path, *overrides: str) -> JobConfig:
    return small_job(directory, model, "run", *TWO_STEPS, "trainer.profile_steps=[2]", *overrides)


@pytest.fixture(scope="module")
async def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """The same run without a profile."""
    job = small_job(tmp_path_factory.mktemp("plain"), tiny_model, "run", *TWO_STEPS)
    async with in_process(job) as roles:
        assert roles.actor.worker_context.traces is None  # type: ignore[attr-defined]
        await run(job, roles)
    return job


def events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


def slices(found: list[dict[str, Any]]) -> list[Slice]:
    return [event for event in found if event["ph"] == "X"]


def named(found: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    """The names of processes or rows."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == what}


async def methods_of(job: JobConfig) -> set[str]:
    """Of the step graph, but for what no call writes."""
    return {node.name for node in (await check_step(job)).nodes if "." in node.name}


def end(event: Slice) -> float:
    return float(event["ts"] + event["dur"])


def check_rows_nest(found: list[dict[str, Any]]) -> None:
    """Two slices of one row lie one after the other or one within the other."""
    rows: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for event in slices(found):
        rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        for one, other in itertools.combinations(sorted(row, key=lambda e: (e["ts"], -e["dur"])), 2):
            assert other["ts"] >= end(one) or end(other) <= end(one), (one, other)


def check_timeline(found: list[dict[str, Any]], methods: set[str]) -> None:
    [step] = [e for e in slices(found) if e["name"].startswith("step ")]
    assert step["name"] == "step 2"
    assert all(step["ts"] <= e["ts"] and end(e) <= end(step) for e in slices(found))
    assert methods <= {e["name"] for e in slices(found)}
    check_rows_nest(found)
    groups = {pid: name for (pid, _), name in named(found, "process_name").items()}
    rows = named(found, "thread_name")
    for event in slices(found):
        assert (event["pid"], event["tid"]) in rows
        role, dot, _ = event["name"].partition(".")
        assert groups[event["pid"]].startswith(role) or not dot


@pytest.mark.parametrize("where", WHERE)
async def test_a_profiled_step_has_a_timeline_and_a_trace_of_each_role(
    where: str, plain: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = profiled_job(tmp_path, tiny_model)
    async with WHERE[where](job) as roles:
        await run(job, roles)
    assert recorded(job) == recorded(plain)
    directory = job.profile_dir(2)
    assert [path.name for path in directory.parent.iterdir()] == ["step_2"]

    methods = await methods_of(job)
    found = events(directory / "timeline.json")
    check_timeline(found, methods | {"actor.publish_weights"})
    generated = [e for e in slices(found) if e["name"] == "rollout.generate" and e["args"]]
    assert sum(e["args"]["rows"] for e in generated) == 2 * 8  # as the device sees them, and as the caller does
    calls = [e for e in slices(found) if named(found, "thread_name")[e["pid"], e["tid"]] == "calls"]
    [update] = [e for e in calls if e["name"] == "critic.update" and e["args"]]
    assert update["args"]["rows"] == 8
    parts = {e["name"] for e in slices(found) if (e["pid"], e["tid"]) == (update["pid"], update["tid"])}
    assert {"computes", "writes its trace"} <= parts
    assert ("transfer" in parts) == (where == "over gRPC")

    traced = {path.name.partition(".")[0].partition("-")[0]: events(path) for path in directory.glob("*.gz")}
    assert traced.keys() == set(job.roles)
    of_role = {role: {name for name in methods if name.startswith(f"{role}.")} for role in job.roles}
    for role, its in traced.items():
        ops = slices(its)
        assert of_role[role] <= {e["name"] for e in ops}
        assert role in named(its, "process_name").values()
        [step] = [e for e in slices(found) if e["name"] == "step 2"]
        for event in ops:
            if event["name"] in of_role[role]:
                assert step["ts"] - CLOCKS <= event["ts"]
                assert end(event) <= end(step) + CLOCKS
    for role in ("actor", "critic", "reference", "rollout"):
        inside = [e for e in slices(traced[role]) if e["name"] in of_role[role]]
        products = [e for e in slices(traced[role]) if e["name"] in ("aten::mm", "aten::addmm")]
        assert any(i["ts"] <= p["ts"] and end(p) <= end(i) for i in inside for p in products)


async def test_the_timeline_shows_which_role_waits_on_a_shared_device(tiny_model: Path, tmp_path: Path) -> None:
    job = profiled_job(tmp_path, tiny_model, "placement.strategy=collocate")
    async with served_group(job.plan.grouping["all"], job) as address:
        addresses = {role: [address] for role in job.roles}
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, "127.0.0.1:0", None)
    found = events(job.profile_dir(2) / "timeline.json")
    check_timeline(found, await methods_of(job))
    waits = {(e["name"]) for e in slices(found) if e["name"].startswith("waits for ")}
    assert "waits for rollout" in waits  # the roles that score its rows, while it generates
    computed = sorted(on_device(found), key=lambda each: each[0]["ts"])
    assert len({name for _, name, _ in computed}) == 4
    for (one, role, slack), (next_one, other, its_slack) in itertools.pairwise(computed):
        assert role == other or next_one["ts"] >= end(one) - slack - its_slack - CLOCKS  # one role at a time


def on_device(found: list[dict[str, Any]]) -> Iterator[tuple[Slice, str, float]]:
    """What a call computed, for which role, and by how many microseconds it may have been earlier or later: as
    much as the way there may have been shorter or longer than the way back."""
    rows = named(found, "thread_name")
    in_rows = [e for e in slices(found) if rows[e["pid"], e["tid"]] == "calls"]
    for call in in_rows:
        role, dot, _ = call["name"].partition(".")
        if dot and role not in ("reward", "controller"):
            row = [e for e in in_rows if (e["pid"], e["tid"]) == (call["pid"], call["tid"])]
            parts = [e for e in row if call["ts"] <= e["ts"] and end(e) <= end(call)]
            slack = sum(e["dur"] for e in parts if e["name"] == timeline.TRANSFER) / 2
            yield from ((e, role, slack) for e in parts if e["name"] == timeline.COMPUTES)


def test_a_run_without_profile_steps_writes_and_records_nothing(plain: JobConfig) -> None:
    assert not (plain.run_dir / "profile").exists()
    assert timeline.calls.get() is None


def test_a_step_that_is_never_made_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    job = profiled_job(tmp_path, tiny_model, "trainer.profile_steps=[1, 9]")
    with pytest.raises(InvalidConfig, match=r"trainer.profile_steps names step 9, but the job has 2"):
        Run(job, load_tokenizer(job.actor.model))
    with pytest.raises(InvalidConfig, match="profile_steps"):
        profiled_job(tmp_path, tiny_model, "trainer.profile_steps=[0]")
