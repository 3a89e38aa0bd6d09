"""What actor and critic write into a directory, and read from it again.

    config.json, model.safetensors, …   the model, a Hugging Face directory; where an adapter is trained, that
                                        alone (rolemesh/models/lora.py)
    optimizer.safetensors               <parameter>.<moment> of AdamW
    training_state.json                 role, and num_updates: optimizer steps made, which is all that the
                                        learning rate's schedule and the shuffle depend on

There is no random state: models run without dropout, and nothing else in a training role draws. That the
directory appears whole or not at all is the caller's matter: it writes elsewhere and renames.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rolemesh.errors import CheckpointFailed, ModelNotFound
from rolemesh.home import Home, OutsideHome
from rolemesh.models.loading import load_state
from rolemesh.models.optimizer import Optimizer

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "training_state.json"


def save_checkpoint(
    home: Home, directory: Path, write_model: Callable[[Path], object], optimizer: Optimizer
) -> None:
    """Writes model and optimizer, and waits until the disk has them.

    Args:
        home: the directories that the role writes to.
        directory: one of them, made if absent; files in it are replaced.
        write_model: writes the model into a directory.

    Raises:
        CheckpointFailed: naming path, cause and free space; or the directory is none of the role's, and then
            the message is the same whether it is there or not.
    """
    into = directory
    try:
        with home.writing(directory) as into:
            write_model(into)
            save_file(optimizer.state_tensors(), into / OPTIMIZER_FILE)
            state = {"role": optimizer.role, "num_updates": optimizer.num_updates}
            (into / STATE_FILE).write_text(json.dumps(state) + "\n")
    except OutsideHome as error:
        raise CheckpointFailed(f"{optimizer.role}: the checkpoint was not written: {error}") from error
    except Exception as error:  # tokenizers and safetensors have exceptions of their own for a full disk
        why = str(error).replace(str(into), str(directory))
        raise CheckpointFailed(
            f"{optimizer.role}: the checkpoint {directory} could not be written: {why} "
            f"({home.free_bytes()} bytes free)"
        ) from error


def load_checkpoint(
    home: Home,
    directory: Path | None,
    weights: Mapping[str, Tensor],
    read_weights: Callable[[Path | None], Mapping[str, Tensor]],
    optimizer: Optimizer,
) -> None:
    """Takes up what save_checkpoint wrote, bit for bit. Where it fails, model and optimizer stay as they were.

    Args:
        home: the directories that the role reads.
        directory: one of them, what save_checkpoint was given; None: model and optimizer become what they were
            before the first update.
        weights: what is trained, as the model holds it; it is overwritten.
        read_weights: reads the same from a directory; None: what the job begins with.

    Raises:
        CheckpointFailed: a file is absent or damaged, or belongs to another model; or the directory is none of
            the role's, and then the message is the same whether it is there or not.
        ModelNotFound: the job's model directory is no longer usable.
    """
    if directory is None:
        if optimizer.num_updates:
            _overwrite(weights, read_weights(None))
            optimizer.load_state_tensors({}, 0)
        return
    files = directory
    try:
        with home.reading(directory) as files:
            state = json.loads((files / STATE_FILE).read_text())
            if state["role"] != optimizer.role:
                raise ValueError(f"it is the {state['role']}'s")
            num_updates = int(state["num_updates"])
            moments = load_state(files / OPTIMIZER_FILE)
            saved = read_weights(files)
        mine = {name: tensor.shape for name, tensor in weights.items()}
        if {name: tensor.shape for name, tensor in saved.items()} != mine:
            raise ValueError("its weights have other names or shapes than the model's")
        optimizer.load_state_tensors(moments, num_updates)
    except OutsideHome as error:
        raise CheckpointFailed(f"{optimizer.role}: the checkpoint was not taken up: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, ModelNotFound) as error:
        why = repr(error).replace(str(files), str(directory))
        raise CheckpointFailed(
            f"{optimizer.role}: the checkpoint {directory} cannot be taken up: {why}"
        ) from error
    _overwrite(weights, saved)


def _overwrite(weights: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        tensor.copy_(saved[name])
