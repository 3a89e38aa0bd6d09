"""What loggers write, read back by the libraries' own readers; and the controller's service."""

from __future__ import annotations

import asyncio
import io
import json
import math
import shutil
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from in_process import small_job, workers
from rich.console import Console

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.errors import CheckpointFailed, InvalidConfig, RolemeshError
from rolemesh.models.loading import load_tokenizer
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.controller.display.loggers import OF_WANDB, Loggers, mlflow_name, numbers
from rolemesh.services.controller.display.progress import Display
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import MetricsFile, read_metrics
from rolemesh.services.controller.service.servicer import SERVICE, ControllerServicer
from rolemesh.telemetry.metrics import CONTROLLER
from rolemesh.v1 import controller_pb2 as pb
from rolemesh.v1.controller_pb2_grpc import ControllerServiceStub

SCORE, ACC = "critic/score/mean", "val-core/digits/acc/mean@1"


def job_with(directory: Path, *loggers: str) -> JobConfig:
    trainer = {"logger": list(loggers), "default_local_dir": str(directory), "experiment_name": "try"}
    trainer["total_training_steps"] = 3
    return make_job({"trainer": trainer})


async def write_three_steps(job: JobConfig, console: Console | None = None) -> None:
    """A run of two steps, and its resumption after the first, which makes step 2 again."""
    job.run_dir.mkdir(exist_ok=True)
    console = console or Console(file=io.StringIO())
    async with Loggers(job, None, console) as loggers:
        loggers.log(1, {SCORE: 0.25, ACC: 0.5})
        loggers.log(2, {SCORE: 99.0})
    async with Loggers(job, 1, console) as loggers:
        loggers.log(2, {SCORE: 0.5})
        loggers.log(3, {SCORE: 0.75})


async def test_tensorboard_reads_back_every_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    await write_three_steps(job_with(tmp_path / "run", "tensorboard"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars(SCORE)] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars(ACC)] == [(1, 0.5)]


async def test_a_run_that_only_validates_hides_no_step_of_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = job_with(tmp_path / "run", "tensorboard")
    await write_three_steps(job)
    validating = job.model_copy(update={"trainer": job.trainer.model_copy(update={"val_only": True})})
    async with Loggers(validating, 1, Console(file=io.StringIO())) as loggers:
        loggers.log(1, {ACC: 0.75})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars(SCORE)] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [event.value for event in events.Scalars(ACC)] == [0.5, 0.75]


async def test_mlflow_reads_back_one_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    await write_three_steps(job_with(tmp_path / "run", "mlflow"))
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "run" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("rolemesh")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "try"
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, SCORE)
    assert {(metric.step, metric.value) for metric in history} >= {(1, 0.25), (2, 0.5), (3, 0.75)}
    assert run.data.metrics["val-core/digits/acc/mean_at_1"] == 0.5
    job = job_with(tmp_path / "run", "mlflow")
    validating = job.model_copy(update={"trainer": job.trainer.model_copy(update={"val_only": True})})
    without_checkpoint = None
    async with Loggers(validating, without_checkpoint, Console(file=io.StringIO())) as loggers:
        loggers.log(0, {ACC: 0.75})
    assert len(client.search_runs([experiment.experiment_id])) == 1


ODD = {
    "val-core/digits/acc/mean@1": "val-core/digits/acc/mean_at_1",
    "val-core/deepmath(hard)/acc/mean@1": "val-core/deepmath_hard_/acc/mean_at_1_80fe3fbc",
    "reward/a>b/mean": "reward/a_b/mean_1fb10026",
    "reward/a+b/mean": "reward/a_b/mean_172f6489",
    "reward/a_b/mean": "reward/a_b/mean",
    "reward/Länge: 1.5-2/mean": "reward/Länge: 1.5-2/mean",
    "/a//../.b\n/": "_/a/_/__/.b_/__af7160f5",
    "reward/" + "é" * 200: None,
}


def test_mlflow_names_depend_on_the_metric_alone_and_are_unique() -> None:
    """So it is the same in whatever order metrics come, and after a resume. `@` alone costs no digest."""
    for name, given in ODD.items():
        assert given in (None, mlflow_name(name))
    alike = ["a@b@", "a_at_b@", "a@b_at_", "a_at_b_at_", "a@b+", "a_at_b+", "a+b", "a>b", "a_b", "\ud800"]
    assert len({mlflow_name(name) for name in alike}) == len(alike)
    long = ["é" * 200 + end for end in "ab"]
    assert len({mlflow_name(name) for name in long}) == 2
    assert all(len(mlflow_name(name).encode()) <= 250 for name in long)


WITH_A_BAD_ONE: Any = {"first": 3.0, "nan": math.nan, "bad": object(), "last": 4.0}


@pytest.mark.parametrize("logger", ["mlflow", "tensorboard"])
async def test_any_name_arrives_and_a_bad_value_costs_no_other(
    logger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    values: dict[str, Any] = dict(zip(ODD, range(len(ODD)), strict=True))
    job = job_with(tmp_path / "run", logger)
    job.run_dir.mkdir()
    async with Loggers(job, None, Console(file=io.StringIO())) as loggers:
        loggers.log(1, {"first": 1.0, **values, "last": 2.0})
        loggers.log(2, WITH_A_BAD_ONE)
    assert caplog.text.count("could not log step 2") == 2  # Prometheus could not, either
    assert "1 of 4 metrics are lost, first 'bad': " in caplog.text
    if logger == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
        assert {tag: events.Scalars(tag)[0].value for tag in ODD} == values
        assert [[each.value for each in events.Scalars(tag)] for tag in ("first", "last")] == [[1, 3], [2, 4]]
        assert math.isnan(events.Scalars("nan")[0].value)
        return
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "run" / "mlflow").as_uri())
    found = client.get_run((tmp_path / "run" / "mlflow" / "run_id").read_text().strip()).data.metrics
    assert (found.pop("first"), found.pop("last")) == (3, 4)
    assert math.isnan(found.pop("nan"))
    assert sorted(found.values()) == sorted(values.values())
    for name, given in ODD.items():
        if given:
            assert found[given] == values[name]


async def test_a_failing_close_changes_no_runs_end_and_no_other_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk, or without its server."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    job = job_with(tmp_path / "run", "mlflow", "tensorboard")
    job.run_dir.mkdir()

    async def log_a_step_and_fail() -> None:
        async with Loggers(job, None, Console(file=io.StringIO())) as loggers:
            shutil.rmtree(job.run_dir / "mlflow")
            loggers.log(1, {SCORE: 0.25})
            raise CheckpointFailed("no space left")

    with pytest.raises(CheckpointFailed, match="no space left"):
        await log_a_step_and_fail()
    assert "MlflowLogger could not be closed, and may lack the last steps" in caplog.text
    events = EventAccumulator(str(job.run_dir / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars(SCORE)] == [(1, 0.25)]


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file, a LevelDB log: blocks of 32 KiB, in them parts with a checksum (4 bytes),
    a length (2) and a kind (1): whole, first, middle, last. wandb has no public reader of its own files."""
    data, at, parts = file.read_bytes(), 7, b""  # after ":W&B", a magic number and a version
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


async def test_wandb_offline_keeps_any_name_despite_a_bad_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And after a crash the console says which steps are old."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    job = job_with(tmp_path / "run", "wandb")
    job.run_dir.mkdir()
    values = dict(zip(ODD, range(len(ODD)), strict=True))
    async with Loggers(job, None, Console(file=io.StringIO())) as loggers:
        loggers.log(1, {SCORE: 0.25, **values, "_step": 9})
        loggers.log(2, WITH_A_BAD_ONE)
        loggers.log(3, {SCORE: 0.5})
    assert "WandbLogger could not log step 2 (metrics.jsonl has it): RolemeshError: 1 of 4" in caplog.text
    # as at the end of the process: wandb's own process writes the file, and is waited for
    await asyncio.to_thread(wandb.teardown)
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    found = []
    for data in wandb_records(file):
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in Record.FromString(data).history.item
        }
        if items:
            found.append({name: value for name, value in items.items() if name not in OF_WANDB[1:]})
    assert math.isnan(found[1].pop("nan"))
    assert found == [
        {"_step": 1, "_step_": 9, SCORE: 0.25, **values},
        {"_step": 2, "first": 3, "last": 4},
        {"_step": 3, SCORE: 0.5},
    ]
    assert (tmp_path / "run" / "wandb" / "run_id").read_text().strip() in file.name

    steps, out = MetricsFile(job.run_dir / "metrics.jsonl", None), io.StringIO()
    for step in (1, 2):
        steps.log(step, {SCORE: 0.5})
    steps.close()
    async with Loggers(job, 1, Console(file=out, width=20)):  # after a crash, from the checkpoint of step 1
        pass
    await asyncio.to_thread(wandb.teardown)
    assert out.getvalue().startswith(
        "Weights & Biases keeps steps 2 to 2 as they were before this start, and drops "
    )


async def test_the_console_has_a_header_and_a_row_for_each_step(tmp_path: Path) -> None:
    out = io.StringIO()
    await write_three_steps(job_with(tmp_path / "run", "console"), Console(file=out, width=14))
    header = " step    score"
    begun, resumed = ["    1    0.250", "    2   99.000"], ["    2    0.500", "    3    0.750"]
    assert out.getvalue().splitlines() == [header, *begun, header, *resumed]


async def test_every_run_shows_its_steps_to_prometheus(tmp_path: Path) -> None:
    await write_three_steps(job_with(tmp_path / "run"))
    assert CONTROLLER.get_sample_value("rolemesh_training_step") == 3
    assert CONTROLLER.get_sample_value("rolemesh_training_steps_planned") == 3
    assert CONTROLLER.get_sample_value("rolemesh_step_metric", {"name": SCORE}) == 0.75


async def test_prometheus_shows_the_last_step_and_the_last_validation(tmp_path: Path) -> None:
    """And no seconds of a validation or a checkpoint at each step after it."""
    validated = {SCORE: 0.25, "timing_s/testing": 2400.0, "val-core/digits/acc/mean@1": 0.5}
    async with Loggers(job_with(tmp_path / "run"), None, Console(file=io.StringIO())) as loggers:
        loggers.log(1, validated)
        loggers.log(2, {SCORE: 0.5})
    shown = [CONTROLLER.get_sample_value("rolemesh_step_metric", {"name": name}) for name in validated]
    assert shown == [0.5, None, 0.5]


async def test_a_run_continued_in_process_shows_no_earlier_metric(tmp_path: Path) -> None:
    """Its roles were started anew after a step with a checkpoint."""
    saved = {SCORE: 0.25, "timing_s/save_checkpoint": 60.0, "val-core/digits/acc/mean@1": 0.5}
    for step, metrics in enumerate((saved, {SCORE: 0.5}), start=1):
        async with Loggers(job_with(tmp_path / "run"), step - 1, Console(file=io.StringIO())) as loggers:
            loggers.log(step, metrics)
    shown = [CONTROLLER.get_sample_value("rolemesh_step_metric", {"name": name}) for name in saved]
    assert shown == [0.5, None, None]


async def test_a_bad_value_costs_prometheus_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values: dict[str, Any] = {"timing_s/step": object(), "one": 1.0, "none": object(), "two": 2.0}
    async with Loggers(job_with(tmp_path / "run"), None, Console(file=io.StringIO())) as loggers:
        loggers.log(1, values)
    assert "2 of 4 metrics are lost, first 'timing_s/step': TypeError" in caplog.text
    shown = [CONTROLLER.get_sample_value("rolemesh_step_metric", {"name": name}) for name in values]
    assert shown[1:] == [1, None, 2]


def test_what_is_no_number_is_left_out_of_a_step_and_named(caplog: pytest.LogCaptureFixture) -> None:
    given = {"a": torch.tensor(1.5), math.nan: 2, "b": "3", "c": torch.ones(2), "d": None, "e\ud800": math.inf}
    assert numbers(7, given) == {"a": 1.5, "nan": 2, "e\\ud800": math.inf}
    assert "step 7 has metrics that are no numbers and are left out: " in caplog.text
    assert "'b' is a str, 'c' is a Tensor, 'd' is a NoneType" in caplog.text


def test_a_number_that_no_float_holds_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    given = {"count": 2**53, "is": True, "int": 10**300, "huge": 10**400, "ratio": Fraction(-(10**400), 3)}
    found = numbers(7, given)
    assert [*found.items()] == [("count", 2**53), ("is", True), ("int", 1e300)]
    assert [type(value) for value in found.values()] == [int, bool, float]
    assert "'huge' is a int larger than any float, 'ratio' is a Fraction larger than any float" in caplog.text
    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    file.log(7, found)
    file.close()


async def test_a_missing_library_names_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as Python marks a module that is not to be had
    with pytest.raises(InvalidConfig, match=r"pip install 'rolemesh\[wandb\]'"):
        await write_three_steps(job_with(tmp_path / "run", "wandb"))


async def test_a_logger_that_cannot_begin_says_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nosuch://server")
    with pytest.raises(RolemeshError, match=r"mlflow could not start: .*nosuch.* MLFLOW_TRACKING_URI names"):
        await write_three_steps(job_with(tmp_path / "run", "mlflow"))


# --------------------------------------------------------------------------------- metrics.jsonl


def test_resumed_metrics_hold_every_step_once_and_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, None)
    for step in (1, 2, 3):
        first.log(step, {SCORE: step / 10})
    first.close()
    # a power failure left zeros where a line had not reached the disk, and a later process was killed
    path.write_text(path.read_text() + "\0" * 40 + '\n{"training/global_step": 4, "crit')
    second = MetricsFile(path, 2)
    second.log(3, {SCORE: 0.9})
    second.close()
    assert [(r["training/global_step"], r[SCORE]) for r in read_metrics(path)] == [(1, 0.1), (2, 0.2), (3, 0.9)]


def test_a_new_run_keeps_the_old_metrics_beside_its_own(tmp_path: Path) -> None:
    for score in (0.1, 0.2):
        file = MetricsFile(tmp_path / "metrics.jsonl", None)
        file.log(1, {SCORE: score})
        file.close()
    (old,) = tmp_path.glob("metrics-until-*.jsonl")
    assert read_metrics(old)[0][SCORE] == 0.1
    assert read_metrics(tmp_path / "metrics.jsonl")[0][SCORE] == 0.2


def test_val_only_appends_to_the_metrics_of_an_earlier_run(tmp_path: Path) -> None:
    """Also where that run has no checkpoint."""
    path = tmp_path / "metrics.jsonl"
    for makes_steps, step in ((True, 100), (False, 0)):
        file = MetricsFile(path, None, makes_steps)
        file.log(step, {SCORE: 0.5})
        file.close()
    assert [r["training/global_step"] for r in read_metrics(path)] == [100, 0]
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_value_that_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    file.log(1, {SCORE: float("nan")})
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())[SCORE] is None


# ------------------------------------------------------------------------- the controller's service


async def test_the_service_reports_pauses_resumes_and_stops_a_run(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=100", "trainer.total_training_steps=50")
    with workers(job) as roles:
        run = Run(job, load_tokenizer(job.actor.model))
        server = RoleServer({"controller": [SERVICE]})
        address = await server.start("127.0.0.1:0")
        await server.ready({SERVICE: ControllerServicer(run.status)})
        async with grpc.aio.insecure_channel(address) as channel:
            controller = ControllerServiceStub(channel)
            assert (await controller.GetStatus(pb.GetStatusRequest())).state == pb.RUN_STATE_STARTING
            await controller.Pause(pb.PauseRequest())
            training = asyncio.create_task(run.train(roles))
            steps = controller.Watch(pb.WatchRequest())
            assert (await steps.read()).record.step == 0  # the validation before the first step
            status = await controller.GetStatus(pb.GetStatusRequest())
            assert (status.job, status.state, status.step) == ("run", pb.RUN_STATE_PAUSED, 0)
            assert status.total_steps == 50

            await controller.Resume(pb.ResumeRequest())
            response = await steps.read()
            assert response.record.step == 1
            assert response.record.metrics["timing_s/step"] > 0
            assert response.record.ended_at.seconds > 0
            last = 1
            await controller.Stop(pb.StopRequest())
            while (response := await steps.read()) is not grpc.aio.EOF:  # the stream ends with the run
                last = response.record.step
            await training

            status = await controller.GetStatus(pb.GetStatusRequest())
            assert status.state == pb.RUN_STATE_FINISHED
            assert status.step == status.last.step == last < 50
            assert (job.run_dir / f"global_step_{last}" / "controller.json").exists()
        await server.drain(5)


async def test_a_run_that_fails_says_so_and_ends_its_watchers(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.val_before_train=false")
    (tmp_path / "reward.py").write_text("def compute_score(**row):\n    raise KeyError('no such answer')\n")
    with workers(job) as roles:
        run = Run(job, load_tokenizer(job.actor.model))
        training = asyncio.create_task(run.train(roles))
        assert [record async for record in run.status.watch()] == []
        with pytest.raises(RuntimeError, match="no such answer"):
            await training
    assert (
        await ControllerServicer(run.status).GetStatus(pb.GetStatusRequest(), None)
    ).state == pb.RUN_STATE_FAILED


async def test_the_live_display_shows_step_phase_reward_and_accuracy(tiny_model: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=300)
    job = small_job(tmp_path, tiny_model, "run", "trainer.total_training_steps=2", "trainer.test_freq=1")
    display = Display(console)
    with workers(job) as roles:
        summary = await Run(job, load_tokenizer(job.actor.model), display).train(roles)
    display.summary(summary)
    shown = out.getvalue()
    for text in ("1/2", "reward 0.", "val accuracy 0.000", "tokens/s", "Validation answers", "metrics.jsonl"):
        assert text in shown


async def test_without_a_terminal_there_are_plain_lines_alone(tiny_model: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    job = small_job(tmp_path, tiny_model, "run", "trainer.total_training_steps=2", "trainer.logger=[console]")
    with workers(job) as roles:
        display = Display(Console(file=out, width=100))
        await Run(job, load_tokenizer(job.actor.model), display).train(roles)
    lines = out.getvalue().splitlines()
    assert [line[:5] for line in lines] == [" step", "    0", "    1", "    2"]
    assert "\x1b" not in out.getvalue()
