"""Models and tokenizers out of Hugging Face directories, whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rolemesh.config.model import ModelConfig
from rolemesh.errors import InvalidConfig, ModelNotFound
from rolemesh.models.directory import described_directory, existing_directory

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # what it warns of, missing weights, is an error here

# transformers loads a model by patching torch and its own classes for the while: two loads on two threads leave
# a model without its tied weights, and the patches in place.
_LOADING = threading.Lock()

SCORE_HEADS = ("score", "classifier", "v_head")  # what Hugging Face's classes call a head with one number


def resolve_device(name: str) -> torch.device:
    """trainer.device as a device; auto is cuda where there is one.

    Raises:
        InvalidConfig: cuda is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("trainer.device is cuda, and this machine has no CUDA device; cpu or auto would do")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def model_directory(config: ModelConfig, role: str) -> Path:
    """The directory of a role's model, checked to hold a configuration and safetensors weights.

    Args:
        config: the role's model section, its path filled in.
        role: for the message, e.g. "actor".

    Raises:
        ModelNotFound: what is missing, and where.
    """
    directory = described_directory(config, role)
    if not any(directory.glob("*.safetensors")):
        others = [path.name for path in directory.glob("*.bin")]
        pickles = f" ({others[0]} is a pickle, which is never read: convert it)" if others else ""
        raise ModelNotFound(f"{role}: {directory} has no weights: no *.safetensors file{pickles}")
    return directory


def load_causal_lm(config: ModelConfig, role: str) -> Any:
    """A causal LM with float32 weights, on the CPU, in evaluation mode.

    Raises:
        ModelNotFound: the directory is not there, not whole, or not a causal LM.
    """
    return _load(AutoModelForCausalLM, model_directory(config, role), config, role)


def load_outline(config: ModelConfig, role: str) -> Any:
    """A causal LM without its numbers: `named_weights` of it says what the directory's model consists of. Its
    tensors are float32 on the device `meta`.

    Raises:
        ModelNotFound: the directory is not there or not a causal LM.
    """
    directory = model_directory(config, role)
    try:
        settings = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        with _LOADING, torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                settings, dtype=torch.float32, trust_remote_code=config.trust_remote_code
            )
    except Exception as error:  # as in _load
        raise ModelNotFound(f"{role}: the model in {directory} cannot be read: {error}") from error


def load_body(config: ModelConfig, role: str) -> Any:
    """The same without its head, of a causal LM or of a classification model.

    Raises:
        ModelNotFound: the directory is not there or not whole.
    """
    return _load(AutoModel, model_directory(config, role), config, role)


def load_score_head(directory: Path, hidden_size: int) -> tuple[Tensor, Tensor | None] | None:
    """The head of a reward model: weight [hidden_size] and bias [1] or None; None where there is no head.

    Raises:
        ModelNotFound: the head gives more than one number, or is of another width than the body.
    """
    for file in sorted(directory.glob("*.safetensors")):
        with _reading(file), safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for head in SCORE_HEADS:
                if f"{head}.weight" not in names:
                    continue
                weight = tensors.get_tensor(f"{head}.weight").float()
                if weight.shape != (1, hidden_size):
                    raise ModelNotFound(
                        f"{directory}: a reward model's head has the shape [1, {hidden_size}]; {head}.weight "
                        f"has {list(weight.shape)}"
                    )
                bias = tensors.get_tensor(f"{head}.bias").float() if f"{head}.bias" in names else None
                return weight[0], bias
    return None


def load_tokenizer(config: ModelConfig, role: str = "actor") -> Any:
    """The tokenizer of a model directory.

    Raises:
        ModelNotFound: the directory has none, or it cannot be read.
    """
    directory = existing_directory(config, role)
    if not any(directory.glob("tokenizer*")) and not (directory / "vocab.json").is_file():
        raise ModelNotFound(f"{role}: {directory} has no tokenizer: no tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # the library raises whatever its parsers raise
        raise ModelNotFound(f"{role}: the tokenizer in {directory} cannot be read: {error}") from error


def load_state(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file.

    Raises:
        ModelNotFound: no such file, or it is damaged.
    """
    with _reading(file), safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in list(tensors.keys())}


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Errors of a weights file under their meaning."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from error


def _load(auto_class: Any, directory: Path, config: ModelConfig, role: str) -> Any:
    try:
        settings = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        _without_dropout(settings)
        with (
            _LOADING,
            torch.random.fork_rng(devices=[]),
        ):  # a constructor draws initial weights before it reads any
            model, found = auto_class.from_pretrained(
                directory,
                config=settings,
                dtype=torch.float32,
                attn_implementation="sdpa",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # OSError, ValueError, SafetensorError, JSON's: any of them means the same here
        raise ModelNotFound(f"{role}: the model in {directory} cannot be read: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise ModelNotFound(
            f"{role}: {directory} lacks {len(missing)} of the model's weights, e.g. {missing[0]!r}; they would "
            "be random"
        )
    return model.eval()


def _without_dropout(settings: Any) -> None:
    """Old log-probabilities and the update must be of one policy, so nothing random may stand between them.
    It also leaves a role without a random state of its own."""
    for key, value in settings.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(settings, key, 0.0)


def vocabulary_in(config: ModelConfig, role: str) -> int:
    """How many token ids the model of a directory knows, by its config.json: no weights are read.

    Raises:
        ModelNotFound: the directory is not there, or its configuration does not say.
    """
    directory = described_directory(config, role)
    try:
        settings = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        return int(settings.get_text_config().vocab_size)
    except Exception as error:  # as in _load
        raise ModelNotFound(f"{role}: {directory} does not say how large its vocabulary is: {error}") from error


def vocabulary_of(model: Any) -> int:
    """How many token ids a transformers model can be given, and can answer with where it has a head."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(len(table.weight) for table in tables if table is not None)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers under their Hugging Face names; of tied ones the first name alone."""
    state = model.state_dict()
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    tied = {name for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}
    return {name: tensor for name, tensor in state.items() if name not in tied}
