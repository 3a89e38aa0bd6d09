"""Loggers whose server is slow or away: they hold neither the run nor each other."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.roles import Metrics
from rolemesh.services.controller.display import loggers as module
from rolemesh.services.controller.display import own_thread
from rolemesh.services.controller.display.loggers import Loggers
from rolemesh.services.controller.display.own_thread import OwnThread

SCORE = "critic/score/mean"
API = "/api/2.0/mlflow/"
NOWHERE = Console(file=io.StringIO())
# What MLflow's server answers to these requests, as far as its client reads it.
ANSWERS: dict[str, dict[str, Any]] = {
    "experiments/get-by-name": {"experiment": {"experiment_id": "1", "name": "rolemesh"}},
    "runs/create": {"run": {"info": {"run_id": "a-run"}}},
    "runs/log-batch": {},
    "runs/get": {"run": {"info": {"run_id": "a-run"}}},
    "runs/update": {"run_info": {"run_id": "a-run"}},
}


def job_with(directory: Path, *loggers: str) -> JobConfig:
    trainer = {"logger": list(loggers), "default_local_dir": str(directory), "experiment_name": "try"}
    return make_job({"trainer": trainer})


def as_if_resumed(directory: Path) -> None:
    (directory / "mlflow").mkdir(parents=True)
    (directory / "mlflow" / "run_id").write_text("a-run\n")


@asynccontextmanager
async def server_on_this_loop(answers: bool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Any]]:
    """A metrics server that can answer only while the event loop is free, as the roles' streams are read.

    Yields the requests that it got: path and content. If it does not answer, clients wait until the end.
    """
    got: list[Any] = []
    over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).decode().split()[1].removeprefix(API).partition("?")[0]
        length = 0
        while (header := await reader.readline()).strip():
            name, _, value = header.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        got.append((path, json.loads(await reader.readexactly(length) or b"{}")))
        if answers:
            body = json.dumps(ANSWERS[path]).encode()
            headers = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
            writer.write("\r\n".join(("HTTP/1.1 200 OK", *headers, "", "")).encode() + body)
            await writer.drain()
        else:
            await over.wait()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
        try:
            yield got
        finally:
            over.set()


async def test_a_server_is_waited_for_while_the_event_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, in each step and at the end: a blocked loop could not run the server."""
    job = job_with(tmp_path / "run", "mlflow")
    async with server_on_this_loop(True, monkeypatch) as got, Loggers(job, None, NOWHERE) as loggers:
        for step in (1, 2, 3):
            loggers.log(step, {SCORE: step / 4})
    assert [path for path, _ in got][:2] == ["experiments/get-by-name", "runs/create"]
    logged = [content["metrics"][0] for path, content in got if path == "runs/log-batch"]
    assert [(each["step"], each["value"]) for each in logged] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    [ended] = [content for path, content in got if path == "runs/update"]
    assert ended["status"] == "FINISHED"
    assert "could not" not in caplog.text


async def test_a_silent_server_costs_no_other_logger_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs a warning, and gets no call after it was given up."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for library in ("mlflow", "torch.utils.tensorboard"):  # now, and not while the end of the run waits
        importlib.import_module(library)
    monkeypatch.setattr(module, "END_S", 3.0)
    job = job_with(tmp_path / "run", "mlflow", "tensorboard")
    as_if_resumed(job.run_dir)
    before = {*threading.enumerate()}
    async with server_on_this_loop(False, monkeypatch) as got:
        async with Loggers(job, 1, NOWHERE) as loggers:
            for step in (2, 3):
                loggers.log(step, {SCORE: step / 4})
            [left] = [each for each in {*threading.enumerate()} - before if each.name == "MlflowLogger"]
            async with asyncio.timeout(60):
                while not got:  # noqa: ASYNC110  # the end of the run waits for no first call
                    await asyncio.sleep(0.01)
        assert caplog.text.count("MlflowLogger could not be closed, and may lack the last steps") == 1
        assert [path for path, _ in got] == ["runs/log-batch"]
    await asyncio.to_thread(left.join)
    assert [content["metrics"][0]["step"] for _, content in got] == [2]  # no call after it was given up
    events = EventAccumulator(str(job.run_dir / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars(SCORE)] == [(2, 0.5), (3, 0.75)]


async def test_a_resumed_run_goes_on_while_a_logger_retries_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps so far would be lost for it. A new run has none to lose, and ends with the error."""
    importlib.import_module("mlflow")  # now, and not while the end of the run waits
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nosuch://server")
    job = job_with(tmp_path / "run", "mlflow")
    async with Loggers(job, 1, NOWHERE) as loggers:
        for step in (2, 3):
            loggers.log(step, {SCORE: 0.5})
    for step in (2, 3):
        assert f"MlflowLogger could not log step {step} (metrics.jsonl has it): " in caplog.text


class Held:
    """A library whose server answers when it is told to."""

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.asked, self.answers = threading.Event(), threading.Event()

    def begin(self) -> None:
        """Needs no server."""

    def log(self, step: int, metrics: Metrics) -> None:
        self.asked.set()
        assert self.answers.wait(60)
        self.logged.append(step)

    def close(self) -> None:
        self.logged.append(-1)


async def test_waiting_steps_are_bounded_and_logged_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_thread, "MOST_WAITING", 2)
    library = Held()
    async with Loggers(job_with(tmp_path / "run"), None, NOWHERE) as loggers:
        loggers._threads.append(OwnThread(library))
        loggers.log(1, {SCORE: 0.5})
        await asyncio.to_thread(library.asked.wait)  # the thread has taken step 1
        for step in (2, 3, 4):
            loggers.log(step, {SCORE: 0.5})
        library.answers.set()
    assert library.logged == [1, 2, 3, -1]
    assert caplog.text.count("Held could not log step 4 (metrics.jsonl has it): RolemeshError: 2 earlier") == 1


class Exiting:
    """A library that would end the process, as wandb's prompt for a key does."""

    def begin(self) -> None:
        """Does not exit yet."""

    def log(self, step: int, metrics: Metrics) -> None:
        raise SystemExit(1) if step == 1 else KeyboardInterrupt

    def close(self) -> None:
        raise SystemExit(1)


async def test_a_library_that_would_end_the_process_costs_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Loggers(job_with(tmp_path / "run"), None, NOWHERE) as loggers:
        loggers._threads.append(OwnThread(Exiting()))
        for step in (1, 2):
            loggers.log(step, {SCORE: 0.5})
    for step, error in ((1, "SystemExit: 1"), (2, "KeyboardInterrupt")):
        assert f"Exiting could not log step {step} (metrics.jsonl has it): {error}" in caplog.text
    assert re.search(r"Exiting could not be closed, and may lack the last steps .*: SystemExit: 1", caplog.text)
