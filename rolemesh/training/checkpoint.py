"""Write and read the checkpoint directory of an actor or a critic.

    config.json, model.safetensors, …   the model, a Hugging Face directory; if an adapter is trained, only
                                        the adapter (rolemesh/models/lora.py)
    optimizer.safetensors               <parameter>.<moment> of AdamW
    training_state.json                 role, dtype of its matrix products, and num_updates: optimizer steps
                                        made. The learning rate and the shuffle depend on num_updates alone.

There is no random state: models run without dropout and other noise, and nothing else in a training role draws
random numbers.
A checkpoint is written while the role computes on: only the copy to host memory takes the role's time. Nothing
here commits a checkpoint: the caller has it written to a new directory, and renames that.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from rolemesh.errors import CheckpointFailed, InvalidConfig, ModelNotFound, RoleUnavailable
from rolemesh.home import Home, OutsideHome
from rolemesh.ranks.collective_errors import on_first, raise_on_all_ranks
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharded_files import HostRows, copied, write_rows, writing
from rolemesh.ranks.sharding import local
from rolemesh.telemetry.logs import drop_frames
from rolemesh.training.optimizer import Optimizer

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "training_state.json"

# Writes a copy of a model into a directory. Every rank calls it.
WriteModel = Callable[[Path, Ranks], object]


class CheckpointWriter:
    """Writes the checkpoints of a role on a thread of its own, one after another. Every rank has one.

    Args:
        home: the directories that the role may write to.
        role: for messages.
        ranks: of the role. The files do not depend on their number.
        dtype: in which the role computes, decided for its device.
    """

    def __init__(self, home: Home, role: str, ranks: Ranks | None = None, *, dtype: str = "float32") -> None:
        self._home = home
        self._role = role
        self._dtype = dtype
        self._ranks = (ranks or Ranks.alone()).beside
        self._thread = ThreadPoolExecutor(1, f"{role}-checkpoints")
        self._directory = Path()
        self._written: Future[None] | None = None

    def begin(self, directory: Path, copy_model: Callable[[], WriteModel], optimizer: Optimizer) -> None:
        """Copy model and optimizer to host memory, and begin to write the copy. Every rank calls it.

        Each rank copies the rows that it writes: for float32 weights and moments 12 bytes for each parameter,
        divided by the number of ranks. The copy is freed when it is written, or could not be. An earlier
        checkpoint is written first.

        Args:
            directory: a directory inside the role's, created if absent; files in it are replaced.
            copy_model: copies the model, and returns what writes the copy.
            optimizer: its state is written too.

        Raises:
            CheckpointFailed: the directory is outside the role's (then the message does not reveal whether it
                exists), or no file can be created in it.
        """
        self.wait()
        self._directory = directory
        self._written = None
        opened = ExitStack()
        with raise_on_all_ranks(self._ranks), self._explained(directory):
            with raise_on_all_ranks(self._ranks), optimizer.on_device():
                write_model = copy_model()
                moments = copied(optimizer.state_tensors(), self._ranks)
            into = opened.enter_context(writing(self._home, directory, self._ranks))
        state = {"role": optimizer.role, "dtype": self._dtype, "num_updates": optimizer.num_updates}
        self._written = self._thread.submit(self._write, into, opened, write_model, moments, state)

    def _write(
        self,
        into: Path,
        opened: ExitStack,
        write_model: WriteModel,
        moments: Mapping[str, HostRows],
        state: Mapping[str, object],
    ) -> None:
        ranks = self._ranks
        try:
            with raise_on_all_ranks(ranks), self._explained(into), opened:
                write_model(into, ranks)
                write_rows(into / OPTIMIZER_FILE, moments, ranks)
                on_first(ranks, (into / STATE_FILE).write_text, json.dumps(state) + "\n")
        except Exception as error:
            drop_frames(error)  # they have the copy, and `finish` may ask for the error much later
            del write_model, moments
            if isinstance(error, CheckpointFailed):
                log.error("%s", error)  # the caller may be gone
                raise
            raise RoleUnavailable(  # a collective failed
                f"{self._role}: a rank was lost while the checkpoint {self._directory} was written: {error}"
            ) from error

    @contextmanager
    def _explained(self, into: Path) -> Iterator[None]:
        """Turn every error into CheckpointFailed; tokenizers and safetensors raise their own on a full disk."""
        try:
            yield
        except OutsideHome as error:
            raise CheckpointFailed(f"{self._role}: the checkpoint was not written: {error}") from error
        except Exception as error:
            why = str(error).replace(str(into), str(self._directory))
            raise CheckpointFailed(
                f"{self._role}: the checkpoint {self._directory} could not be written: {why} "
                f"({self._home.free_bytes()} bytes free)"
            ) from error

    async def finish(self, directory: Path) -> None:
        """Wait until the checkpoint that was begun last is on disk.

        Raises:
            CheckpointFailed: writing failed, on any rank; the message names path, cause and free space. Also if
                `directory` is not the one of the last `begin`.
            RoleUnavailable: a rank was lost.
        """
        if self._written is None or directory != self._directory:
            raise CheckpointFailed(
                f"{self._role}: no checkpoint was begun in the directory, so none can be finished"
            )
        await asyncio.shield(asyncio.wrap_future(self._written))

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._written is not None:
            wait([self._written])

    def close(self) -> None:
        """Write to the end, and end the thread."""
        self._thread.shutdown(wait=True)


def load_checkpoint(
    home: Home,
    directory: Path | None,
    weights: Mapping[str, Tensor],
    read_weights: Callable[[Path | None], Mapping[str, Tensor]],
    optimizer: Optimizer,
    ranks: Ranks | None = None,
    *,
    dtype: str = "float32",
) -> None:
    """Restore what a CheckpointWriter wrote, bit for bit. If it fails, model and optimizer stay unchanged.

    Every rank calls it. The checkpoint may be of another number of ranks.

    Args:
        home: the directories that the role may read.
        directory: the checkpoint's; None: reset model and optimizer to their state before
            the first update.
        weights: the trained weights as the model holds them; they are overwritten.
        read_weights: reads this rank's rows of the trained weights from a directory; given None, of the job's
            initial ones. It has no collectives.
        optimizer: its state is overwritten.
        ranks: of the role.
        dtype: in which the role computes, decided for its device.

    Raises:
        InvalidConfig: the role that wrote the checkpoint computed in another dtype. A checkpoint that does not
            say its dtype is loaded: it is of an earlier version, and the controller warns of those.
        CheckpointFailed: a file is absent or damaged, or belongs to another model or role. Also if the
            directory is outside the role's; then the message does not reveal whether it exists.
        ModelNotFound: the job's model directory is no longer usable.
    """
    if directory is None and optimizer.is_untouched:
        return
    moments: Mapping[str, Tensor] = {}
    num_updates = 0
    with raise_on_all_ranks(ranks or Ranks.alone()):
        if directory is None:
            saved = read_weights(None)
        else:
            saved, moments, num_updates = _read(home, directory, weights, read_weights, optimizer, dtype)
    optimizer.load_state_tensors(moments, num_updates)
    for name, tensor in weights.items():
        local(tensor).copy_(saved[name])
    optimizer.is_untouched = directory is None


def _read(
    home: Home,
    directory: Path,
    weights: Mapping[str, Tensor],
    read_weights: Callable[[Path | None], Mapping[str, Tensor]],
    optimizer: Optimizer,
    dtype: str,
) -> tuple[Mapping[str, Tensor], dict[str, Tensor], int]:
    """Return this rank's rows of weights and moments, and num_updates."""
    files = directory
    try:
        with home.reading(directory) as files:
            state = json.loads((files / STATE_FILE).read_text())
            if state["role"] != optimizer.role:
                raise ValueError(f"it is a checkpoint of role {state['role']}")
            _check_dtype(str(state.get("dtype", dtype)), dtype, optimizer.role, directory)
            num_updates = int(state["num_updates"])
            moments = optimizer.read_state(files / OPTIMIZER_FILE)
            saved = read_weights(files)
        mine = {name: local(tensor).shape for name, tensor in weights.items()}
        if {name: tensor.shape for name, tensor in saved.items()} != mine:
            raise ValueError("its weights differ from the model's in names or shapes")
        return saved, moments, num_updates
    except OutsideHome as error:
        raise CheckpointFailed(f"{optimizer.role}: the checkpoint was not loaded: {error}") from error
    except InvalidConfig:
        raise
    except (OSError, ValueError, KeyError, TypeError, ModelNotFound) as error:
        why = repr(error).replace(str(files), str(directory))
        raise CheckpointFailed(
            f"{optimizer.role}: the checkpoint {directory} cannot be loaded: {why}"
        ) from error


def _check_dtype(was: str, dtype: str, role: str, directory: Path) -> None:
    if was != dtype:
        raise InvalidConfig(
            f"{role}: {directory} cannot be resumed exactly: {role}.model.dtype is {dtype} here and was {was}. "
            f"Set it to {was}, and the dtypes of the other roles to what they were, or start a new run from "
            "its weights, with another trainer.experiment_name"
        )
