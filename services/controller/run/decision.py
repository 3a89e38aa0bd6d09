"""Where a run starts: `trainer.resume_mode` decides it once for a run directory.

    <run directory>/resume_decision.json    the last decision: the mode, and the path of resume_path
                   /latest                  the checkpoint from which the next start goes on

`disable` (a new run) and `resume_path` are decisions. A start follows a decision if it differs from the one in
the file. Otherwise it goes on from `latest`. `auto` always goes on, and decides nothing. So a controller that
restarts with the same job goes on, and another `resume_from_path` leads to another checkpoint.

`latest` is moved before the decision is written. An interruption between the two changes nothing: the next
start follows the decision again, from the same checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rolemesh.config import JobConfig
from rolemesh.config.base import absolute_path
from rolemesh.errors import CheckpointFailed, InvalidConfig
from rolemesh.services.controller.run.checkpoints import NAME, Checkpoints
from rolemesh.services.controller.run.durably import write_durably

FILE = "resume_decision.json"


@dataclass(frozen=True)
class Decision:
    """A job's settings for its start.

    Args:
        resume_mode: disable or resume_path.
        resume_from_path: with resume_path. It is relative to the run directory if the checkpoint is there, so
            the decision stays the same when the directory moves; otherwise it is absolute.
    """

    resume_mode: str
    resume_from_path: str | None = None

    @classmethod
    def of(cls, job: JobConfig) -> Decision | None:
        """Return the decision of a job; None with `auto`."""
        if named := named_checkpoint(job):
            real = named.resolve()
            home = job.run_dir.resolve()
            if real.is_relative_to(home):
                return cls("resume_path", str(real.relative_to(home)))
            return cls("resume_path", str(absolute_path(named)))
        return None if job.trainer.resume_mode == "auto" else cls(job.trainer.resume_mode)

    @classmethod
    def read(cls, run_dir: Path) -> Decision | None:
        """Return the decision in a run directory; None if there is none.

        Raises:
            CheckpointFailed: the file is not readable.
        """
        path = run_dir / FILE
        if not path.exists():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointFailed(
                f"{path} cannot be read: {error}. Delete it: trainer.resume_mode then decides anew"
            ) from error


@dataclass(frozen=True)
class Start:
    """Where one start of a run begins.

    Args:
        run_dir: the run directory.
        checkpoint: the roles restore it; None: the run begins with step 1.
        decision: the job's; None with `auto`, and for a run that only validates.
        is_new: this start follows the decision; False: an earlier one did.
    """

    run_dir: Path
    checkpoint: Path | None
    decision: Decision | None = None
    is_new: bool = False

    def describe(self, step: int) -> str:
        """Return a line for the log: the checkpoint, its step, and what became of the job's decision."""
        words = f"resuming from {self.checkpoint} after step {step}"
        if self.decision is None:
            return words
        if self.is_new:
            return f"{words}; later starts go on from the newest checkpoint of this run"
        if self.decision.resume_from_path is None:
            return f"{words}; an earlier start began this run (trainer.resume_mode: disable)"
        return (
            f"{words}; an earlier start went to {self.decision.resume_from_path}. To go there again, delete "
            f"{self.run_dir / FILE}"
        )

    def write_down(self) -> None:
        """Point `latest` to the checkpoint and write the decision, if this start follows one.

        `best` is forgotten unless it is on the way to the checkpoint.
        """
        if self.decision is None or not self.is_new:
            return
        if self.decision.resume_from_path is None:
            (self.run_dir / "latest").unlink(
                missing_ok=True
            )  # left by somebody who deleted the checkpoints alone
        else:
            write_durably(self.run_dir / "latest", self.decision.resume_from_path + "\n")
        best = Checkpoints(self.run_dir).best()
        start = self.checkpoint
        if best and not (start and start.parent == best.parent and _step(best) <= _step(start)):
            (self.run_dir / "best").unlink()
        write_durably(self.run_dir / FILE, json.dumps(asdict(self.decision), indent=1) + "\n")


def _step(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name; of one that was renamed, the step in its file."""
    if match := NAME.fullmatch(checkpoint.name):
        return int(match[1])
    step: int = json.loads((checkpoint / "controller.json").read_text(encoding="utf-8"))["step"]
    return step


def named_checkpoint(job: JobConfig) -> Path | None:
    """Return the checkpoint that the job names; None if it names none."""
    trainer = job.trainer
    return Path(trainer.resume_from_path or "") if trainer.resume_mode == "resume_path" else None


def start_of(job: JobConfig, checkpoints: Checkpoints) -> Start:
    """Return where a start of the job begins. Nothing is written.

    A run that only validates always takes the checkpoint that the job names, and leaves the decision alone.

    Raises:
        InvalidConfig: resume_from_path is not a checkpoint; a new run would overwrite checkpoints; or `auto`
            would go on from a checkpoint outside the run directory, which the roles do not read.
        CheckpointFailed: as Checkpoints.latest, or the file with the decision is not readable.
    """
    run_dir = checkpoints.run_dir
    val_only = job.trainer.val_only
    decision = Decision.of(job)
    is_new = decision is not None and decision != Decision.read(run_dir)
    if decision and decision.resume_mode == "disable" and not checkpoints.steps():
        is_new = True  # there is nothing to go on from
    if decision and decision.resume_from_path and (is_new or val_only):
        checkpoint = run_dir / decision.resume_from_path
        if not (checkpoint / "controller.json").is_file():
            raise InvalidConfig(
                f"trainer.resume_from_path {job.trainer.resume_from_path} is not a checkpoint: it has no "
                "controller.json"
            )
        return Start(run_dir, checkpoint, None if val_only else decision, is_new)
    if is_new:
        if steps := checkpoints.steps():
            raise InvalidConfig(
                f"trainer.resume_mode is disable, but {run_dir} holds checkpoints of steps {steps} of an "
                "earlier run; choose another trainer.experiment_name or default_local_dir, delete the "
                "directory, or resume with trainer.resume_mode=auto"
            )
        return Start(run_dir, None, None if val_only else decision, is_new)
    latest = checkpoints.latest()
    if latest and decision is None and not latest.is_relative_to(run_dir):
        raise InvalidConfig(
            f"the run in {run_dir} began at {latest} and has no checkpoint of its own yet; until it has one, "
            f"keep trainer.resume_mode=resume_path trainer.resume_from_path={latest}"
        )
    return Start(run_dir, latest, decision)
