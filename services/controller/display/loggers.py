"""Writes step metrics to the targets of `trainer.logger`: a small class for each, in one table.

metrics.jsonl is not among them: every run writes it (run_dir.py), so `file` in trainer.logger needs no class
here.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, RolemeshError
from rolemesh.roles import Metrics
from rolemesh.services.controller.display.own_thread import END_S, LibraryLogger, OwnThread, warn_of_step
from rolemesh.services.controller.display.summary import accuracy_by_step
from rolemesh.services.controller.display.table import ACCURACY, StepTable
from rolemesh.services.controller.record import METRICS_FILE, STEP
from rolemesh.services.controller.run.durably import write_durably
from rolemesh.services.controller.run.run_dir import read_metrics
from rolemesh.telemetry.metrics import (
    STEP_ENDED,
    STEP_METRIC,
    STEP_SECONDS,
    TRAINING_STEP,
    TRAINING_STEPS_PLANNED,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

EXACT_INT = 1 << 53  # a float holds every int up to here
MLFLOW_BATCH = 1000  # most metrics of a request
MLFLOW_BYTES = 250  # of a name
OF_WANDB = ("_step", "_timestamp", "_runtime", "_wandb")  # which it writes itself
# Of a request: up to 28 s of waits between five tries, 103 s if the server accepts them and does not answer. By
# itself MLflow tries for four minutes, up to twenty.
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
MLFLOW_INVALID = "INVALID_PARAMETER_VALUE"  # MLflow's code where a metric, not the server, is the cause


class Logger(Protocol):
    """A target for step metrics that takes them at once."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Write one step's metrics. One that cannot be written keeps no other from being written."""
        ...


class Loggers:
    """All loggers of a job. Use it as an async context manager, so that they are closed however the run ends.

    Prometheus and the console get a step at once. Each library's logger has a thread of its own: a server that
    is slow or away holds neither the run nor another logger. Only a new run waits for loggers to start, and
    ends if one cannot. At the end of a run, the loggers have END_S to log the steps that are waiting.

    An error of one logger is logged. It changes neither the run nor how it ends.

    Args:
        job: names the loggers in trainer.logger.
        start: the step that the run resumes from; None: a new run.
        console: where the console logger prints.

    Raises:
        InvalidConfig: a library is not installed; the message names the extra to install.
        RolemeshError: a logger of a new run could not start, e.g. because of a missing login.
    """

    def __init__(self, job: JobConfig, start: int | None, console: Console) -> None:
        require_libraries(job)
        self._job = job
        self._start = start
        self._console = console
        self._at_once: list[Logger] = [PrometheusLogger(job, start)]
        if "console" in job.trainer.logger:
            self._at_once.append(ConsoleLogger(job, console))
        self._threads: list[OwnThread] = []

    def log(self, step: int, metrics: Metrics) -> None:
        for logger in (*self._at_once, *self._threads):
            try:
                logger.log(step, metrics)
            except Exception as error:  # a temporary failure of a metrics server must not end the training
                name = logger.name if isinstance(logger, OwnThread) else type(logger).__name__
                warn_of_step(name, step, error)

    async def __aenter__(self) -> Loggers:
        try:
            for name in dict.fromkeys(self._job.trainer.logger):
                if name in LIBRARIES:
                    thread = OwnThread(LIBRARIES[name](self._job, self._start, self._console))
                    self._threads.append(thread)
                    if self._start is None:
                        await _begun(name, thread)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.finish()
        try:
            await asyncio.to_thread(self._wait, time.monotonic() + END_S)
        finally:
            for thread in self._threads:
                thread.give_up()

    def _wait(self, until: float) -> None:
        for thread in self._threads:
            thread.wait(until)


def write_each(metrics: Mapping[str, T], write: Callable[[str, T], object]) -> None:
    """Write every metric, and only then raise the first error.

    Raises:
        RolemeshError: some could not be written.
    """
    errors = []
    for name, value in metrics.items():
        try:
            write(name, value)
        except Exception as error:  # each library has its own
            errors.append(f"{name!r:.100}: {type(error).__name__}: {error}")
    if errors:
        raise RolemeshError(f"{len(errors)} of {len(metrics)} metrics are lost, first {errors[0]}")


def numbers(step: int, metrics: Mapping[Any, Any]) -> Metrics:
    """Return a step's metrics. Values that are not numbers, or too large, are dropped with a warning.

    Values become floats, except bools and ints that a float holds exactly. A name becomes text that can be
    sent: one lone surrogate would cost every scrape of /metrics.
    """
    found: Metrics = {}
    others = []
    for name, value in metrics.items():
        try:
            if isinstance(value, str):  # float() would read it
                raise TypeError
            text = str(name).encode(errors="backslashreplace").decode()
            is_exact = isinstance(value, int) and abs(value) <= EXACT_INT
            found[text] = value if is_exact else float(value)
        except OverflowError:
            others.append(f"{name!r:.100} is a {type(value).__name__} larger than any float")
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: of a tensor with several cells
            others.append(f"{name!r:.100} is a {type(value).__name__}")
    if others:
        log.warning("step %d has metrics that are no numbers and are left out: %s", step, ", ".join(others))
    return found


class ConsoleLogger:
    """Prints the most important numbers of each step as a row of a table."""

    def __init__(self, job: JobConfig, console: Console) -> None:
        self._table = StepTable(job, console)

    def log(self, step: int, metrics: Metrics) -> None:
        numbers = dict(metrics)
        for _, accuracy in accuracy_by_step([{STEP: step, **metrics}]):
            numbers[ACCURACY] = accuracy
        self._table.add(step, numbers)


class PrometheusLogger:
    """Sets the metrics of a step at /metrics. Every run has this logger."""

    def __init__(self, job: JobConfig, start: int | None) -> None:
        STEP_ENDED.set_to_current_time()
        TRAINING_STEP.set(start or 0)
        TRAINING_STEPS_PLANNED.set(job.trainer.total_training_steps or 0)
        STEP_METRIC.clear()  # of an earlier run in this process, e.g. before a role was lost
        self._of_step: set[str] = set()

    def log(self, step: int, metrics: Metrics) -> None:
        STEP_ENDED.set_to_current_time()
        TRAINING_STEP.set(step)
        for name in self._of_step - metrics.keys():
            STEP_METRIC.remove(name)  # e.g. the seconds of a validation, which most steps do not have
        self._of_step = {name for name in metrics if not name.startswith("val")}
        write_each(metrics, _show)


def _show(name: str, value: float) -> None:
    number = float(value)  # before labels(), which alone would show 0
    STEP_METRIC.labels(name).set(number)
    if name == "timing_s/step":
        STEP_SECONDS.observe(number)


class TensorboardLogger:
    """Writes event files to <run directory>/tensorboard. Steps that a resumed run repeats replace old ones."""

    _writer: Any

    def __init__(self, job: JobConfig, start: int | None, console: Console) -> None:
        self._directory = job.run_dir / "tensorboard"
        self._purged = None if job.trainer.val_only else (start or 0) + 1  # no step is made again

    def begin(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=self._purged)

    def log(self, step: int, metrics: Metrics) -> None:
        write_each(metrics, lambda name, value: self._writer.add_scalar(name, value, step))

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Logs to Weights & Biases. WANDB_MODE=offline keeps everything in <run directory>/wandb.

    The server refuses a step that it already has. So steps that a resumed run repeats keep their earlier values
    there, and the console names these steps.
    """

    _run: Any

    def __init__(self, job: JobConfig, start: int | None, console: Console) -> None:
        self._job = job
        self._start = start
        self._console = console
        self._file = job.run_dir / "wandb" / "run_id"
        self._known = self._file.exists()
        logged = read_metrics(job.run_dir / METRICS_FILE)  # of steps that the run is about to make again, too
        self._newest = max((int(record[STEP] or 0) for record in logged), default=-1)

    def begin(self) -> None:
        import wandb

        # Else it uploads without limit, also when the process ends. Its files remain for `wandb sync`.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{END_S - 5:.0f}")
        trainer = self._job.trainer
        start = self._start
        goes_on = start is not None or trainer.val_only
        run_id = _kept_id(self._file, lambda: secrets.token_hex(4), goes_on=goes_on)
        self._run = wandb.init(
            project=trainer.project_name,
            name=trainer.experiment_name,
            dir=str(self._job.run_dir),
            config=self._job.model_dump(mode="json"),
            id=run_id,
            resume="allow",
        )
        newest = max(self._newest, self._run.step - 1)
        if self._known and start is not None and newest > start and not trainer.val_only:
            self._console.print(
                f"Weights & Biases keeps steps {start + 1} to {newest} as they were before this start, and "
                "drops them as they are made again; metrics.jsonl has the new ones",
                style="dim", highlight=False, soft_wrap=True,
            )  # fmt: skip

    def log(self, step: int, metrics: Metrics) -> None:
        metrics = {f"{name}_" if name in OF_WANDB else name: value for name, value in metrics.items()}
        try:
            self._run.log(metrics, step=step)
        except Exception:  # of one value
            write_each(metrics, lambda name, value: self._run.log({name: value}, step=step))

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """Logs to the MLflow server named by MLFLOW_TRACKING_URI, or to files in <run directory>/mlflow."""

    _client: Any
    _run_id: str

    def __init__(self, job: JobConfig, start: int | None, console: Console) -> None:
        self._directory = job.run_dir / "mlflow"
        self._trainer = job.trainer
        self._goes_on = start is not None or job.trainer.val_only

    def begin(self) -> None:
        import mlflow

        for name, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            self._directory.mkdir(parents=True, exist_ok=True)
            # MLflow prefers a database, which the skinny client cannot open, and asks for this consent to
            # files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = self._directory.as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        trainer = self._trainer

        def new_run() -> str:
            known = self._client.get_experiment_by_name(trainer.project_name)
            experiment = known.experiment_id if known else self._client.create_experiment(trainer.project_name)
            run_id: str = self._client.create_run(experiment, run_name=trainer.experiment_name).info.run_id
            return run_id

        self._run_id = _kept_id(self._directory / "run_id", new_run, goes_on=self._goes_on)

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        named = [(name, Metric(mlflow_name(name), value, now, step)) for name, value in metrics.items()]
        for at in range(0, len(named), MLFLOW_BATCH):
            some = dict(named[at : at + MLFLOW_BATCH])
            try:
                self._client.log_batch(self._run_id, [*some.values()])
            except Exception as error:
                if getattr(error, "error_code", MLFLOW_INVALID) != MLFLOW_INVALID:
                    raise  # the server's: each metric alone would wait for it, too
                write_each(some, lambda _, metric: self._client.log_batch(self._run_id, [metric]))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def mlflow_name(name: str) -> str:
    """Change a metric's name as little as MLflow requires: letters, digits and _-. :/, as a path of 250 bytes.

    `@` becomes `_at_`, and every other character `_`. A name that is changed ends with a digest of the metric's
    own, so no two metrics have the same, in whatever order they come. Only `@` alone needs no digest, because a
    name that has `_at_` itself ends with one.
    """
    parts = [re.sub(r"[^\w.\- :]", "_", part) for part in name.replace("@", "_at_").split("/")]
    given = "/".join("_" * max(1, len(part)) if part in ("", ".", "..") else part for part in parts)
    is_own = given == name.replace("@", "_at_") and "_at_" not in name
    if is_own and len(given.encode()) <= MLFLOW_BYTES:
        return given
    digest = f"_{hashlib.sha256(name.encode(errors='backslashreplace')).hexdigest()[:8]}"
    return given.encode()[: MLFLOW_BYTES - len(digest)].decode(errors="ignore") + digest


START_HINTS = {
    "wandb": " WANDB_MODE=offline keeps everything in the run directory.",
    "mlflow": " MLFLOW_TRACKING_URI names the server; if it is unset, everything stays in the run directory.",
}

LIBRARIES: dict[str, Callable[[JobConfig, int | None, Console], LibraryLogger]] = {  # extras of the package
    "tensorboard": TensorboardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def require_libraries(job: JobConfig) -> None:
    """Raise InvalidConfig if trainer.logger needs a library that is not installed.

    `Loggers` checks this too; call this function to check before any role starts.
    """
    for name in job.trainer.logger:
        if name in LIBRARIES and importlib.util.find_spec(name) is None:
            raise InvalidConfig(
                f"trainer.logger names {name}, which is not installed: pip install 'rolemesh[{name}]'"
            )


async def _begun(name: str, thread: OwnThread) -> None:
    try:
        await asyncio.wrap_future(thread.begun)
    except Exception as error:  # each library has its own errors for a missing login or an unreachable server
        # Not InvalidConfig: a restarted controller may succeed once the server is back.
        raise RolemeshError(
            f"trainer.logger {name} could not start: {type(error).__name__}: {error}{START_HINTS.get(name, '')}"
        ) from error


def _kept_id(path: Path, make: Callable[[], str], *, goes_on: bool) -> str:
    """Return the run's id at a metrics server. A run that is resumed or only validated keeps its earlier id."""
    if goes_on and path.exists():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    run_id = make()
    write_durably(path, run_id + "\n")
    return run_id
