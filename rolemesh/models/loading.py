"""Load models and tokenizers from Hugging Face directories; anything missing is an error.

A fault in a directory is ModelNotFound. An I/O error of its file system stays an OSError, because it may pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from rolemesh.config.model import AMPERE, ModelConfig, PolicyModelConfig, chosen_dtype
from rolemesh.errors import ModelNotFound, unreadable
from rolemesh.models.directory import described_directory, existing_directory
from rolemesh.models.supported import SCORE_HEADS, attention_of, check_unread
from rolemesh.ranks.sharded_files import reading

log = logging.getLogger(__name__)

M = TypeVar("M", bound=ModelConfig)

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # it warns of missing weights, which are an error here

# transformers patches torch and its own classes while it loads a model. Two loads at once on two threads would
# leave a model without its tied weights, and the patches in place.
_LOADING = threading.Lock()


def resolve_dtype(dtype: str, key: str, device: torch.device) -> str:
    """Return the type in which a model computes on a device, and log it.

    Args:
        dtype: float32, bfloat16, float16 or auto.
        key: its key in the job file.
        device: of this process.

    Raises:
        InvalidConfig: the GPU has no matrix products in this type.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else AMPERE
    chosen = chosen_dtype(dtype, key, device.type, capability)
    log.info("%s is %s: %s on %s", key, dtype, chosen, device.type)
    return chosen


def with_dtype(config: M, role: str, device: torch.device) -> M:
    """Return the model section of a role with its dtype decided for the device, by resolve_dtype.

    Raises:
        InvalidConfig: as resolve_dtype.
    """
    return config.model_copy(update={"dtype": resolve_dtype(config.dtype, f"{role}.model.dtype", device)})


def model_directory(config: ModelConfig, role: str) -> Path:
    """Return the directory of a role's model, checked to hold a configuration and safetensors weights.

    Args:
        config: the role's model section, with its path filled in.
        role: for the message, e.g. "actor".

    Raises:
        ModelNotFound: the directory or a file in it is missing; the message says which.
    """
    directory = described_directory(config, role, weights=True)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = [path.name for path in directory.glob("*.bin")]
        pickles = f" ({others[0]} is a pickle and never read: convert it to safetensors)" if others else ""
        raise ModelNotFound(f"{role}: {directory} has no weights: no *.safetensors file{pickles}")
    for file in files:
        with reading(file):
            file.open("rb").close()
    return directory


def load_causal_lm(config: ModelConfig, role: str) -> Any:
    """Load a causal LM with float32 weights, on the CPU, in evaluation mode.

    Raises:
        ModelNotFound: the directory is absent, incomplete, or not a causal LM.
    """
    return _load(AutoModelForCausalLM, model_directory(config, role), config, role)


def load_whole(auto_class: Any, config: ModelConfig, role: str, dtype: torch.dtype) -> Any:
    """Load a model with its head, on the CPU, in evaluation mode.

    Args:
        auto_class: of transformers, such as AutoModelForCausalLM.
        config, role: as everywhere.
        dtype: of its weights.

    Raises:
        ModelNotFound: the directory is absent, incomplete, or of another class.
    """
    return _load(auto_class, model_directory(config, role), config, role, dtype)


def load_outline(config: ModelConfig, role: str) -> Any:
    """Make a causal LM without reading its weights, e.g. to list them with `named_weights`.

    Its tensors are float32 on the device `meta`.

    Raises:
        ModelNotFound: the directory is absent or not a causal LM.
    """
    return _outline(AutoModelForCausalLM, config, role)


def load_body_outline(config: ModelConfig, role: str) -> Any:
    """Make what load_body makes, without reading its weights, as load_outline does.

    Raises:
        ModelNotFound: the directory is absent or has no such model.
    """
    return _outline(AutoModel, config, role)


def load_body(config: ModelConfig, role: str) -> Any:
    """Load a causal LM or a classification model without its head: float32, on the CPU, in evaluation mode.

    Raises:
        ModelNotFound: the directory is absent or incomplete.
    """
    return _load(AutoModel, model_directory(config, role), config, role)


def load_score_head(directory: Path, hidden_size: int) -> tuple[Tensor, Tensor | None] | None:
    """Load the head of a reward model: weight [hidden_size], and bias [1] or None. Return None without a head.

    Raises:
        ModelNotFound: the head has more than one output, or another width than the body.
    """
    for file in sorted(directory.glob("*.safetensors")):
        with reading(file), safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for head in SCORE_HEADS:
                if f"{head}.weight" not in names:
                    continue
                weight = tensors.get_tensor(f"{head}.weight").float()
                if weight.shape != (1, hidden_size):
                    raise ModelNotFound(
                        f"{directory}: expected a reward model's head of shape [1, {hidden_size}]; "
                        f"{head}.weight has {list(weight.shape)}"
                    )
                bias = tensors.get_tensor(f"{head}.bias").float() if f"{head}.bias" in names else None
                return weight[0], bias
    return None


def has_tokenizer(directory: Path) -> bool:
    """Return whether a model directory has files of a tokenizer."""
    return any(directory.glob("tokenizer*")) or (directory / "vocab.json").is_file()


def load_tokenizer(config: ModelConfig, role: str = "actor") -> Any:
    """Load the tokenizer of a model directory, with actor.model.custom_chat_template if it is the policy's.

    Raises:
        ModelNotFound: the directory has none, or it cannot be read.
    """
    directory = existing_directory(config, role)
    if not has_tokenizer(directory):
        raise ModelNotFound(f"{role}: {directory} has no tokenizer: no tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # the library's parsers raise many kinds of errors
        raise unreadable(
            ModelNotFound, error, f"{role}: the tokenizer in {directory} cannot be read: {error}"
        ) from error
    if isinstance(config, PolicyModelConfig) and config.custom_chat_template is not None:
        tokenizer.chat_template = config.custom_chat_template
    return tokenizer


def load_state(file: Path) -> dict[str, Tensor]:
    """Load all tensors of a safetensors file.

    Raises:
        ModelNotFound: the file is absent or damaged.
    """
    with reading(file), safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in list(tensors.keys())}


@torch.no_grad()
def hold_frozen(model: nn.Module, dtype: str) -> None:
    """Freeze a model, and hold its matrices in the type of its products: 2 bytes a parameter, and no casts.

    Under autocast it computes the same bits as with float32 weights. Autocast would round the weights of linear
    layers in every pass; here they are rounded once. Weights that it leaves in float32 stay so: norms,
    heads for scores, and experts that are one tensor. An embedding is held in `dtype` only if no number in it
    changes, as in a model that was saved in `dtype`; the rows that it returns are float32. If it would change,
    a head that is tied to it becomes a copy.

    Args:
        model: its weights are float32.
        dtype: a ModelConfig's; with float32 the weights stay as they are.
    """
    model.requires_grad_(False)
    _hold(model, getattr(torch, dtype))


@torch.no_grad()
def hold_base(model: nn.Module, dtype: str) -> None:
    """Hold the frozen weights below an adapter as hold_frozen does, each only if no number in it changes.

    Published and exported weights are sums of these and of the adapter's products, so nothing is rounded.

    Args:
        model: its weights are float32; those of the adapter require gradients.
        dtype: as hold_frozen's.
    """
    _hold(model, getattr(torch, dtype), exactly=True)


def _hold(model: nn.Module, kind: torch.dtype, *, exactly: bool = False) -> None:
    if kind == torch.float32:
        return
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            users.setdefault(id(weight), []).append(module)
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.requires_grad:
                continue
            if all(map(_is_linear, users[id(weight)])):
                if not exactly or torch.equal(weight.to(kind).float(), weight):
                    weight.data = weight.data.to(kind)
            elif not exactly and _is_linear(module) and not _is_exact(weight, users[id(weight)], kind):
                setattr(module, name, nn.Parameter(weight.to(kind), requires_grad=False))
    for module in model.modules():
        if type(module) is nn.Embedding and _is_exact(module.weight, users[id(module.weight)], kind):
            module.weight.data = module.weight.data.to(kind)
            module.register_forward_hook(lambda _module, _inputs, rows: rows.float())


def hold_frozen_blocks(model: nn.Module, dtype: str, parts: Sequence[nn.Module]) -> None:
    """Freeze a model that will be sharded, and hold the linear layers of these blocks as hold_frozen does.

    The model may be on the device `meta`. The numbers of its embedding are unknown there, so it stays float32,
    with everything else outside of the blocks.
    """
    model.requires_grad_(False)
    for linear in filter(_is_linear, (module for part in parts for module in part.modules())):
        for weight in linear.parameters(recurse=False):
            weight.data = weight.data.to(getattr(torch, dtype))


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D)  # a subclass may use its weights in another way


def _is_exact(table: Tensor, users: Sequence[nn.Module], dtype: torch.dtype) -> bool:
    """Return whether modules compute the same with their embedding table in another type."""
    is_plain = all(type(user) in (nn.Embedding, nn.Linear) for user in users)
    return is_plain and torch.equal(table.to(dtype).float(), table.float())


def _load(
    auto_class: Any, directory: Path, config: ModelConfig, role: str, dtype: torch.dtype = torch.float32
) -> Any:
    try:
        settings = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        _without_dropout(settings)
        with (
            _LOADING,
            torch.random.fork_rng(devices=[]),
        ):  # a constructor draws random initial weights before any are read
            model, found = auto_class.from_pretrained(
                directory,
                config=settings,
                dtype=dtype,
                attn_implementation=attention_of(settings),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # OSError, ValueError, SafetensorError, JSON's
        raise unreadable(
            ModelNotFound, error, f"{role}: the model in {directory} cannot be read: {error}"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ModelNotFound(
            f"{role}: {directory} lacks {len(missing)} of the model's weights, e.g. {missing[0]!r}; "
            "transformers would make them random"
        )
    if getattr(settings, "quantization_config", None) is None:
        check_unread(model, found["unexpected_keys"], directory, role)
    return model.eval()


def _outline(auto_class: Any, config: ModelConfig, role: str) -> Any:
    directory = described_directory(config, role, weights=True)  # a folder of one's own needs none
    try:
        settings = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        _without_dropout(settings)
        with _LOADING, torch.device("meta"):
            model = auto_class.from_config(
                settings,
                dtype=torch.float32,
                attn_implementation=attention_of(settings),
                trust_remote_code=config.trust_remote_code,
            )
        if model.can_generate() and (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # as in _load
        raise unreadable(
            ModelNotFound, error, f"{role}: the model in {directory} cannot be read: {error}"
        ) from error
    return model.eval()


def _without_dropout(settings: Any) -> None:
    """Set every dropout in a configuration to 0, also in the configurations of its parts.

    With dropout, old log-probabilities and the update would be of different policies. Without it, a role also
    has no random state to save. Blocks apply dropout themselves, and are in training mode during an update; the
    modules inside them are not (rolemesh/training/update_loop.py), so other noise is off.
    """
    for key, value in settings.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(settings, key, 0.0)
        elif isinstance(part := getattr(settings, key, None), PreTrainedConfig):
            _without_dropout(part)


def vocabulary_in(config: ModelConfig, role: str) -> int:
    """Return the vocabulary size of a directory's model from its config.json, without reading weights.

    Raises:
        ModelNotFound: the directory is absent, or its configuration has no vocabulary size.
    """
    directory = described_directory(config, role)
    try:
        settings = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        return int(settings.get_text_config().vocab_size)
    except Exception as error:  # as in _load
        raise unreadable(
            ModelNotFound, error, f"{role}: cannot read the vocabulary size of {directory}: {error}"
        ) from error


def vocabulary_of(model: Any) -> int:
    """Return the number of token ids that a transformers model accepts, and can output if it has a head."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(len(table.weight) for table in tables if table is not None)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by Hugging Face name; tied ones only under the first name."""
    state = model.state_dict()
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    tied = {name for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}
    return {name: tensor for name, tensor in state.items() if name not in tied}
