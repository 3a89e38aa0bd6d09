"""Checkpoints of a run: written in two phases, taken up again exactly.

    <run directory>/global_step_<n>/actor        the actor's (a Hugging Face directory and its optimizer)
                                   /critic       the critic's
                                   /controller.json
                                   /waiting_groups   where dynamic sampling has kept some
    <run directory>/latest                       the name of the newest whole one, written last

Roles write into `global_step_<n>.partial`; a rename makes it whole. Whatever is interrupted leaves the last
good checkpoint as it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import CheckpointFailed, InvalidBatch, InvalidConfig, RoleUnavailable
from rolemesh.roles import Roles
from rolemesh.tasks import gather
from rolemesh.wire.codec import dump, load_batch

NAME = re.compile(r"global_step_(\d+)")
PARTIAL = ".partial"


@dataclass(frozen=True)
class ControllerState:
    """What the controller itself must remember. All randomness is a function of seed and step, so a step
    number is every random state of the controller, and the data position where a step takes one batch.

    Args:
        step: steps made.
        kl_controller: the KL coefficient.
        same_course: the settings on which the further course depends bit for bit; see `course_of`.
        num_batches: of prompts that were answered, in dynamic sampling; 0 elsewhere.
        search: how far the next step has come to its batch, where a stop has broken it off there.
        waiting: groups of answers that no step has learnt from yet; a file of its own.
    """

    step: int
    kl_controller: dict[str, float]
    same_course: dict[str, Any]
    num_batches: int = 0
    search: dict[str, Any] = field(default_factory=dict)
    waiting: DataProto = field(default_factory=DataProto, repr=False)

    def to_json(self) -> str:
        """All but the groups that wait."""
        return json.dumps({name: value for name, value in vars(self).items() if name != "waiting"}, indent=1)


def course_of(job: JobConfig, num_prompts: int) -> dict[str, Any]:
    """The settings that decide which prompts a step sees, which tokens it draws, and what waiting groups hold.
    A resumed run with others would be neither the old run nor a new one."""
    data, rollout, filter_groups = job.data, job.rollout, job.algorithm.filter_groups
    model = job.actor.model
    return {
        "actor.model.lora_alpha": model.lora_alpha if model.lora_rank else None,
        "algorithm.adv_estimator": job.algorithm.adv_estimator,
        "algorithm.gdpo_reward_keys": list(job.algorithm.gdpo_reward_keys) or None,
        "algorithm.gdpo_reward_weights": list(job.algorithm.gdpo_reward_weights or ()) or None,
        "algorithm.filter_groups.metric": filter_groups.metric if filter_groups.enable else None,
        "data.train_files": [Path(file).name for file in data.train_files],
        "prompts in data.train_files": num_prompts,
        "data.train_batch_size": data.train_batch_size,
        "data.gen_batch_size": data.gen_batch_size,
        "data.shuffle": data.shuffle,
        "data.seed": data.seed,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "rollout.n": rollout.n,
        "rollout.seed": rollout.seed,
        "rollout.temperature": rollout.temperature,
        "rollout.top_k": rollout.top_k,
        "rollout.top_p": rollout.top_p,
    }


class Checkpoints:
    """The checkpoints in a run directory.

    Args:
        run_dir: where they lie.
        keep: how many whole ones to keep; None: all.
    """

    def __init__(self, run_dir: Path, keep: int | None = None) -> None:
        self.run_dir = run_dir
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, ascending."""
        found = [NAME.fullmatch(path.name) for path in self.run_dir.glob("global_step_*")]
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Path | None:
        """The checkpoint that `latest` names; None where none was ever written.

        Raises:
            CheckpointFailed: it names one that is not there.
        """
        pointer = self.run_dir / "latest"
        if not pointer.exists():
            return None
        path = self.run_dir / pointer.read_text(encoding="utf-8").strip()
        if not path.exists() and _aside(path).is_dir():  # killed while another of this step took its place
            _aside(path).rename(path)
        if not NAME.fullmatch(path.name) or not path.is_dir():
            raise CheckpointFailed(
                f"{pointer} names {path.name!r}, which is not there; there are {self.steps()}. "
                "Name another with trainer.resume_mode=resume_path trainer.resume_from_path=…"
            )
        return path

    def chosen(self, job: JobConfig) -> Path | None:
        """The checkpoint to begin from, by `trainer.resume_mode`; None to begin anew.

        Raises:
            InvalidConfig: a new run would overwrite checkpoints, or resume_from_path is not one.
        """
        trainer = job.trainer
        if trainer.resume_mode == "resume_path":
            path = Path(trainer.resume_from_path or "")
            if not (path / "controller.json").is_file():
                raise InvalidConfig(
                    f"trainer.resume_from_path {path} is not a checkpoint: it has no controller.json"
                )
            return path
        if trainer.resume_mode == "disable":
            if steps := self.steps():
                raise InvalidConfig(
                    f"trainer.resume_mode is disable, and {self.run_dir} holds checkpoints of steps {steps}; "
                    "choose another trainer.experiment_name or default_local_dir, delete the directory, or go "
                    "on with trainer.resume_mode=auto"
                )
            return None
        return self.latest()

    def clear_partial(self) -> None:
        """Deletes what interrupted writes and deletions left."""
        for path in self.run_dir.glob(f"global_step_*{PARTIAL}"):
            shutil.rmtree(path)

    async def load(self, path: Path, roles: Roles, course: dict[str, Any]) -> ControllerState:
        """Brings the roles to where they were at a checkpoint; raises what `read` does, and what they do."""
        state = self.read(path, course)
        waiting = path / "waiting_groups"
        try:
            state = replace(state, waiting=load_batch(waiting)) if waiting.exists() else state
        except (OSError, InvalidBatch) as error:
            raise CheckpointFailed(f"{waiting} cannot be read: {error}") from error
        await gather(roles.actor.load_checkpoint(path / "actor"), roles.critic.load_checkpoint(path / "critic"))
        return state

    @staticmethod
    def read(path: Path, course: dict[str, Any]) -> ControllerState:
        """What the controller was at a checkpoint.

        Raises:
            CheckpointFailed: it is not readable.
            InvalidConfig: the job differs from the one that wrote it in something that decides its course.
        """
        try:
            state = ControllerState(**json.loads((path / "controller.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointFailed(f"{path / 'controller.json'} cannot be read: {error}") from error
        differing = [
            f"{key} is {value!r} now and was {state.same_course.get(key)!r}"
            for key, value in course.items()
            if state.same_course.get(key) != value
        ]
        if differing:
            key = "lora_adapter_path" if (path / "actor" / "adapter_config.json").is_file() else "path"
            raise InvalidConfig(
                f"{path} cannot be resumed exactly: {'; '.join(differing)}. Set them back, or begin a new run "
                f"from its weights with actor.model.{key}={path / 'actor'}"
            )
        return state

    @asynccontextmanager
    async def writing(self, roles: Roles, state: ControllerState) -> AsyncIterator[None]:
        """Has the roles write; when the block ends well the checkpoint is whole and `latest` names it, and
        those beyond `keep` are deleted.

        Raises:
            CheckpointFailed: a role or this process could not write, e.g. on a full disk.
            RoleUnavailable: a role was gone.
        """
        path = self.run_dir / f"global_step_{state.step}"
        partial = path.with_name(path.name + PARTIAL)
        try:
            partial.mkdir(parents=True)
            # Both are waited for, also when one fails: a role that still writes would undo the clearing below.
            saves = await asyncio.gather(
                roles.actor.save_checkpoint(partial / "actor"),
                roles.critic.save_checkpoint(partial / "critic"),
                return_exceptions=True,
            )
            for error in filter(None, saves):
                raise error
            write_durably(partial / "controller.json", state.to_json())
            if len(state.waiting):
                write_durably(partial / "waiting_groups", dump(state.waiting))
            yield
            left = _put_aside(path) if path.exists() else None  # of a course left by resuming from before it
            partial.rename(path)
            _sync(self.run_dir)
            write_durably(self.run_dir / "latest", path.name + "\n")
            for old in [*([left] if left else []), *self._beyond_keep(state.step)]:
                shutil.rmtree(old)
        except RoleUnavailable:  # an OSError too, and no matter of disks: the launcher tells how the role ended
            raise
        except OSError as error:
            raise CheckpointFailed(
                f"the checkpoint of step {state.step} could not be written: {error}. {self._last_good()}"
            ) from error
        except CheckpointFailed as error:
            raise CheckpointFailed(f"{error}. {self._last_good()}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # frees the disk; there only after a failure

    def _last_good(self) -> str:
        latest = self.latest()
        return f"The last good one is {latest}" if latest else "There is no earlier one"

    def _beyond_keep(self, newest: int) -> list[Path]:
        steps = [step for step in self.steps() if step <= newest]
        old = steps[: -self.keep] if self.keep else []
        return [_put_aside(self.run_dir / f"global_step_{step}") for step in old]


def _put_aside(path: Path) -> Path:
    """Renames what is to be deleted: half a checkpoint must not look whole after an interruption."""
    return path.rename(_aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".old" + PARTIAL)


def write_durably(path: Path, content: str | bytes) -> None:
    """Replaces a file at once: a reader sees the old content or the new, also after a loss of power."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # of a writer that was killed, or a link, which is not to be followed
    with new.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
