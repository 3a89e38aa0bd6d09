"""Checkpoints of a run: written in two phases, and resumed exactly.

    <run directory>/global_step_<n>/actor        the actor's (a Hugging Face directory and its optimizer)
                                   /critic       the critic's
                                   /controller.json
                                   /waiting_groups   if dynamic sampling has surplus groups
    <run directory>/latest                       the newest complete checkpoint, written last: its name, or
                                                 until the run has one the checkpoint that it began at
    <run directory>/best                         the name of the best one, with trainer.save_best

Roles copy their state to host memory, and write the copy into `global_step_<n>.partial` while steps go on. A
rename commits it. An interruption at any point leaves the last good checkpoint intact. An old checkpoint is
renamed, too, before its files are deleted. What cannot be deleted is logged and tried again with the next one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rolemesh.dataproto import DataProto
from rolemesh.errors import CheckpointFailed, InvalidBatch, InvalidConfig, RoleUnavailable
from rolemesh.roles import Actor, Critic, NoCritic, Roles
from rolemesh.services.controller.record import METRICS_FILE
from rolemesh.services.controller.run.durably import sync, write_durably
from rolemesh.services.controller.run.resume_compat import NUM_PROMPTS, RULES, compare
from rolemesh.tasks import gather
from rolemesh.wire.codec import dump, load_batch

log = logging.getLogger(__name__)

NAME = re.compile(r"global_step_(\d+)")
PARTIAL = ".partial"
# A client of a network file system may know an earlier list of a directory, NFS for up to 60 s (acdirmax).
ARRIVES_IN_S = 70.0
LOOKS_EVERY_S = 0.1
BEFORE_RULES = (
    ". Its built-in rules scored some answers differently, and a dtype that the job leaves out was float32; "
    "now it is auto, bfloat16 on a GPU. Set each dtype to float32 to go on as before. reward.rules has no "
    "value for the earlier rules"
)


@dataclass(frozen=True)
class ControllerState:
    """The controller's own state.

    All randomness is a function of seed and step. So the step number stands for every random state of the
    controller, and for the position in the data if a step takes one batch.

    Args:
        step: steps made.
        kl_controller: state of the KL coefficient.
        kept_settings: the settings that determine the rest of the run bit for bit; see `settings_to_keep`.
        num_batches: batches of prompts answered, with dynamic sampling; else 0.
        search: progress of the next step in filling its batch, if a stop interrupted it.
        waiting: surplus groups of answers that no step has trained on; in a file of its own.
    """

    step: int
    kl_controller: dict[str, float]
    kept_settings: dict[str, Any]
    num_batches: int = 0
    search: dict[str, Any] = field(default_factory=dict)
    waiting: DataProto = field(default_factory=DataProto, repr=False)

    def to_json(self) -> str:
        """Return everything except the waiting groups as JSON."""
        return json.dumps({name: value for name, value in vars(self).items() if name != "waiting"}, indent=1)


class Checkpoints:
    """The checkpoints in a run directory.

    Args:
        run_dir: the run directory.
        keep: number of complete checkpoints to keep, in addition to the best; None: all.
        spared: a checkpoint that is never deleted for its age, because the job names it.
    """

    def __init__(self, run_dir: Path, keep: int | None = None, spared: Path | None = None) -> None:
        self.run_dir = run_dir
        self.keep = keep
        self._spared = spared.resolve() if spared else None

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        found = [NAME.fullmatch(path.name) for path in self.run_dir.glob("global_step_*")]
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Path | None:
        """Return the checkpoint that `latest` names, from which the next start goes on; None without one.

        Raises:
            CheckpointFailed: `latest` names something that is not a checkpoint.
        """
        pointer = self.run_dir / "latest"
        if not pointer.exists():
            return None
        named = pointer.read_text(encoding="utf-8").strip()
        path = self.run_dir / named
        if path.parent == self.run_dir and not path.exists() and _aside(path).is_dir():
            _aside(path).rename(path)  # killed while it was being replaced by a new one of the same step
        if not path.is_dir() or not (NAME.fullmatch(path.name) or (path / "controller.json").is_file()):
            raise CheckpointFailed(
                f"{pointer} names {named!r}, which is not a checkpoint; there are checkpoints of steps "
                f"{self.steps()}. Write the name of one of them into the file, or select one with "
                "trainer.resume_mode=resume_path trainer.resume_from_path=…"
            )
        return path

    def best(self) -> Path | None:
        """Return the checkpoint that `best` names; None if the run keeps none."""
        name = self._best()
        return self.run_dir / name if name else None

    def clear_partial(self) -> None:
        """Delete the remains of interrupted writes and deletions. What cannot be deleted is logged."""
        for path in self.run_dir.glob(f"global_step_*{PARTIAL}"):
            with _logged(path):
                shutil.rmtree(path)

    async def load(
        self, path: Path, roles: Roles, settings: dict[str, Any], num_training_steps: int
    ) -> ControllerState:
        """Restore the roles, and return the controller's state. Raises as `read` and the roles do.

        Args:
            path: the checkpoint.
            roles: of whom actor and critic have a part in it.
            settings: as for `read`.
            num_training_steps: of the whole run.
        """
        state = self.read(path, settings)
        compared = compare(state.kept_settings, settings)
        if compared.changed:
            log.warning(
                "%s is resumed with other settings: %s. From here on the new ones hold%s",
                path,
                "; ".join(compared.changed),
                "".join(f". {hint}" for hint in compared.hints),
            )
        if compared.missing:
            log.warning(
                "%s is of an earlier version of Rolemesh, and lacks settings that were thus not compared: %s%s",
                path,
                "; ".join(compared.missing),
                BEFORE_RULES if RULES in compared.missing else "",
            )
        waiting = path / "waiting_groups"
        try:
            state = replace(state, waiting=load_batch(waiting)) if waiting.exists() else state
        except (OSError, InvalidBatch) as error:
            raise CheckpointFailed(f"{waiting} cannot be read: {error}") from error
        await gather(
            roles.actor.load_checkpoint(path / "actor", num_training_steps),
            roles.critic.load_checkpoint(path / "critic", num_training_steps),
        )
        return state

    @staticmethod
    def read(path: Path, settings: dict[str, Any], unknown: Collection[str] = ()) -> ControllerState:
        """Read the controller's state from a checkpoint, without the waiting groups.

        Args:
            path: the checkpoint.
            settings: `settings_to_keep` of the job.
            unknown: as for `compare`.

        Raises:
            CheckpointFailed: it is not readable.
            InvalidConfig: the job differs from the checkpoint's job in a setting of `settings_to_keep`.
        """
        try:
            fields = json.loads((path / "controller.json").read_text(encoding="utf-8"))
            if "same_course" in fields:  # its earlier name
                fields["kept_settings"] = fields.pop("same_course")
            state = ControllerState(**fields)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointFailed(f"{path / 'controller.json'} cannot be read: {error}") from error
        compared = compare(state.kept_settings, settings, unknown)
        if compared.refused:
            key = "lora_adapter_path" if (path / "actor" / "adapter_config.json").is_file() else "path"
            raise InvalidConfig(
                f"{path} cannot be resumed exactly: {'; '.join(compared.refused)}. Set them back, or start a "
                "new run from its weights: another trainer.experiment_name, and "
                f"actor.model.{key}={path / 'actor'}" + "".join(f". {hint}" for hint in compared.hints)
            )
        return state

    @staticmethod
    def warn_of_unknown_rows(path: Path, state: ControllerState, settings: Mapping[str, Any]) -> None:
        """Warn if the rows of a finished run, whose tools are not known, may have changed (`compare`)."""
        then = state.kept_settings.get(NUM_PROMPTS)
        now = settings.get(NUM_PROMPTS)
        if then != now:
            log.warning(
                "%s had %s prompts that are short enough with their tools, and data.train_files now has %s "
                "without tools; whether its rows have changed is not known",
                path,
                then,
                now,
            )

    @asynccontextmanager
    async def writing(self, roles: Roles, state: ControllerState, *, best: bool = False) -> AsyncIterator[None]:
        """Write a checkpoint: the roles have copied their state when the context begins. Commit it at the end.

        When the context ends, wait until the roles have written their copies, and commit, unless there was an
        error. To commit is to flush the records of its steps to disk, to rename it, and to point `latest` to it
        (and `best`, if it is). Then old checkpoints beyond `keep` are deleted, except the best and the one that
        the job names; a deletion that fails is logged.

        Raises:
            CheckpointFailed: a role or this process could not write, e.g. because the disk is full; or what a
                role has written is not here.
            RoleUnavailable: a role was unavailable.
        """
        path = self.run_dir / f"global_step_{state.step}"
        partial = path.with_name(path.name + PARTIAL)
        try:
            _make_way(partial)
            partial.mkdir(parents=True)
            trained: list[tuple[Actor | Critic, Path]] = [(roles.actor, partial / "actor")]
            if not isinstance(roles.critic, NoCritic):
                trained.append((roles.critic, partial / "critic"))
            try:
                await _all([role.begin_checkpoint(directory) for role, directory in trained])
                write_durably(partial / "controller.json", state.to_json())
                if len(state.waiting):
                    await asyncio.to_thread(_write_waiting, partial / "waiting_groups", state.waiting)
                yield
            except Exception:
                with suppress(Exception):
                    await _all([role.finish_checkpoint(directory) for role, directory in trained])
                raise
            await _all([role.finish_checkpoint(directory) for role, directory in trained])
            await _arrived([directory for _, directory in trained])
            await asyncio.to_thread(self._sync_records)
            await asyncio.to_thread(sync, partial)  # the names of what the roles have written
            if path.exists():  # abandoned by resuming from an earlier checkpoint
                _put_aside(path)
            partial.rename(path)
            sync(self.run_dir)
            if best:  # first: a run that ends between the two makes the step again
                write_durably(self.run_dir / "best", path.name + "\n")
            write_durably(self.run_dir / "latest", path.name + "\n")
        except RoleUnavailable:
            # It is an OSError too, but not of a disk. The launcher reports how the role ended.
            raise
        except OSError as error:
            raise CheckpointFailed(
                f"the checkpoint of step {state.step} could not be written: {error}. {self._last_good()}"
            ) from error
        except CheckpointFailed as error:
            raise CheckpointFailed(f"{error}. {self._last_good()}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # frees the disk; exists only after a failure
        await asyncio.to_thread(self._delete_old, state.step)

    def _sync_records(self) -> None:
        if (records := self.run_dir / METRICS_FILE).exists():
            sync(records)

    def _last_good(self) -> str:
        latest = self.latest()
        return f"The last good one is {latest}" if latest else "There is no earlier one"

    def _delete_old(self, newest: int) -> None:
        """Delete checkpoints beyond `keep`, and what earlier deletions left."""
        with _logged(f"old checkpoints in {self.run_dir}"):
            steps = [step for step in self.steps() if step <= newest]
            best = self._best()
            for step in steps[: -self.keep] if self.keep else []:
                path = self.run_dir / f"global_step_{step}"
                with _logged(path):
                    if path.name != best and path.resolve() != self._spared:
                        _put_aside(path)
            self.clear_partial()

    def _best(self) -> str | None:
        pointer = self.run_dir / "best"
        return pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None


def _write_waiting(path: Path, groups: DataProto) -> None:
    write_durably(path, dump(groups))


async def _all(calls: Sequence[Awaitable[None]]) -> None:
    """Wait for all calls even if one fails: a role that still writes would interfere with the cleanup."""
    for error in filter(None, await asyncio.gather(*calls, return_exceptions=True)):
        raise error


async def _arrived(directories: Sequence[Path]) -> None:
    """Wait until this process finds what the roles have written.

    Raises:
        CheckpointFailed: it finds nothing for ARRIVES_IN_S. A role may have another volume there.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + ARRIVES_IN_S
    for directory in directories:
        while not directory.is_dir():
            if clock() >= until:
                raise CheckpointFailed(
                    f"the {directory.name} has finished its part of a checkpoint, but the controller finds no "
                    f"{directory}: they have different file systems at that path, so mount the same one for "
                    f"both; or finish_checkpoint of the {directory.name} has written nothing"
                )
            await asyncio.sleep(LOOKS_EVERY_S)


def _put_aside(path: Path) -> None:
    """Rename a checkpoint before its deletion, so that an interruption leaves none that looks complete."""
    _make_way(_aside(path))
    path.rename(_aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".old" + PARTIAL)


def _make_way(path: Path) -> None:
    """Give a name of its own to a directory that could not be deleted."""
    with suppress(FileNotFoundError):
        path.rename(path.with_name(f"{path.name.removesuffix(PARTIAL)}.{secrets.token_hex(4)}{PARTIAL}"))


@contextmanager
def _logged(what: Path | str) -> Iterator[None]:
    """Log an error of the file system: what is deleted is not needed, and a step must not fail for it."""
    try:
        yield
    except OSError as error:
        log.warning("%s cannot be deleted: %s. The next checkpoint tries again", what, error)
