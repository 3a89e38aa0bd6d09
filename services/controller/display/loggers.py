"""Where step metrics go: one small class for each of `trainer.logger`, in a table.

metrics.jsonl is not among them: every run writes it (run_dir.py), which is what `file` stands for.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, RolemeshError
from rolemesh.roles import Metrics
from rolemesh.services.controller.display.summary import accuracy_by_step
from rolemesh.services.controller.display.table import ACCURACY, StepTable
from rolemesh.services.controller.record import STEP
from rolemesh.telemetry.metrics import (
    STEP_ENDED,
    STEP_METRIC,
    STEP_SECONDS,
    TRAINING_STEP,
    TRAINING_STEPS_PLANNED,
)

log = logging.getLogger(__name__)


class Logger(Protocol):
    """A place for step metrics."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Takes one step's metrics."""
        ...

    def close(self) -> None:
        """Writes out what is held back."""
        ...


class Loggers:
    """All loggers of a job. A context manager: closed at the end, however the run ends.

    Args:
        job: names them in trainer.logger.
        start: the step that the run goes on from.
        console: where the console logger prints.

    Raises:
        InvalidConfig: a library is not installed (names the extra that brings it), or does not begin, e.g.
            for want of a login.
    """

    def __init__(self, job: JobConfig, start: int, console: Console) -> None:
        require_libraries(job)
        self._loggers: list[Logger] = [PrometheusLogger(job, start)]
        try:
            for name in dict.fromkeys(job.trainer.logger):
                if name in LOGGERS:
                    self._loggers.append(_begun(name, job, start, console))
        except BaseException:
            self.__exit__()
            raise

    def log(self, step: int, metrics: Metrics) -> None:
        for logger in self._loggers:
            try:
                logger.log(step, metrics)
            except Exception as error:  # a board that is away for a while must not end the training
                log.warning(
                    "%s did not take step %d (metrics.jsonl has it): %s: %s",
                    *(type(logger).__name__, step, type(error).__name__, error),
                )

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *error: object) -> None:
        for logger in self._loggers:
            logger.close()


class ConsoleLogger:
    """A row of a table for each step: the numbers that people look at first."""

    def __init__(self, job: JobConfig, start: int, console: Console) -> None:
        self._table = StepTable(job, console)

    def log(self, step: int, metrics: Metrics) -> None:
        numbers = dict(metrics)
        for _, accuracy in accuracy_by_step([{STEP: step, **metrics}]):
            numbers[ACCURACY] = accuracy
        self._table.add(step, numbers)

    def close(self) -> None:
        """Nothing is held back."""


class PrometheusLogger:
    """The gauges of /metrics; every run has them."""

    def __init__(self, job: JobConfig, start: int) -> None:
        STEP_ENDED.set_to_current_time()
        TRAINING_STEP.set(start)
        TRAINING_STEPS_PLANNED.set(job.trainer.total_training_steps or 0)

    def log(self, step: int, metrics: Metrics) -> None:
        STEP_ENDED.set_to_current_time()
        TRAINING_STEP.set(step)
        if "timing_s/step" in metrics:
            STEP_SECONDS.observe(metrics["timing_s/step"])
        for name, value in metrics.items():
            STEP_METRIC.labels(name).set(value)

    def close(self) -> None:
        """Nothing is held back."""


class TensorboardLogger:
    """Event files under <run directory>/tensorboard. Steps that a resumed run makes again replace the old."""

    def __init__(self, job: JobConfig, start: int, console: Console) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(job.run_dir / "tensorboard"), purge_step=start + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Weights & Biases; WANDB_MODE=offline keeps everything under <run directory>/wandb."""

    def __init__(self, job: JobConfig, start: int, console: Console) -> None:
        import wandb

        trainer = job.trainer
        run_id = _kept_id(job.run_dir / "wandb" / "run_id", start, lambda: secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=trainer.project_name,
            name=trainer.experiment_name,
            dir=str(job.run_dir),
            config=job.model_dump(mode="json"),
            id=run_id,
            resume="allow",
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """MLflow; MLFLOW_TRACKING_URI names a server, else files under <run directory>/mlflow."""

    def __init__(self, job: JobConfig, start: int, console: Console) -> None:
        import mlflow

        directory = job.run_dir / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            directory.mkdir(parents=True, exist_ok=True)
            # MLflow would rather have a database, which the skinny client cannot open
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = directory.as_uri()
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        trainer = job.trainer

        def new_run() -> str:
            known = self._client.get_experiment_by_name(trainer.project_name)
            experiment = known.experiment_id if known else self._client.create_experiment(trainer.project_name)
            run_id: str = self._client.create_run(experiment, run_name=trainer.experiment_name).info.run_id
            return run_id

        self._run_id = _kept_id(directory / "run_id", start, new_run)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            # MLflow's names have no '@'.
            self._client.log_metric(self._run_id, name.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


BEGIN_HINTS = {
    "wandb": " WANDB_MODE=offline keeps everything in the run directory.",
    "mlflow": " MLFLOW_TRACKING_URI names the server; unset, everything stays in the run directory.",
}

LOGGERS: dict[str, Callable[[JobConfig, int, Console], Logger]] = {
    "console": ConsoleLogger,
    "tensorboard": TensorboardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}
OPTIONAL = ("tensorboard", "wandb", "mlflow")  # extras of the package, under the names of their modules


def require_libraries(job: JobConfig) -> None:
    """Raises InvalidConfig where a library that trainer.logger needs is not installed; so do `Loggers`, but
    this may be asked before any role starts."""
    for name in job.trainer.logger:
        if name in OPTIONAL and importlib.util.find_spec(name) is None:
            raise InvalidConfig(
                f"trainer.logger names {name}, which is not installed: pip install 'rolemesh[{name}]'"
            )


def _begun(name: str, job: JobConfig, start: int, console: Console) -> Logger:
    try:
        return LOGGERS[name](job, start, console)
    except Exception as error:  # each library has its own for a missing login and a server that is away
        # Not InvalidConfig: the server may be there again when a controller that was restarted tries again.
        raise RolemeshError(
            f"trainer.logger {name} could not begin: {type(error).__name__}: {error}{BEGIN_HINTS.get(name, '')}"
        ) from error


def _kept_id(path: Path, start: int, make: Callable[[], str]) -> str:
    """The run's name on a board: a resumed run goes on under the one it had."""
    if start and path.exists():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    run_id = make()
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id
