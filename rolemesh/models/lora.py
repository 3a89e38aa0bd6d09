"""Low-rank adaptation (LoRA, Hu et al. 2021, arXiv:2106.09685).

A matrix W is frozen and replaced by W + B·A·alpha/r. Only A [r, in] and B [out, r] are trained. The layers are
peft's. On disk an adapter has peft's layout:

    adapter_model.safetensors   A and B of each module
    adapter_config.json         rank, alpha, target modules, the base model's directory
    base_model.xxh3             added by Rolemesh: a checksum of the base model's weights
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rolemesh.config.model import PolicyModelConfig, is_target
from rolemesh.errors import InvalidConfig, unreadable
from rolemesh.hub import is_name
from rolemesh.models.directory import ADAPTER_FILE
from rolemesh.models.loading import load_state, named_weights
from rolemesh.ranks.collective_errors import on_first
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharded_files import copied, write_rows
from rolemesh.ranks.sharding import local, memory_of, own_rows, whole

if TYPE_CHECKING:
    from peft import LoraConfig  # imported where there is an adapter: it takes a second

ALL_LINEAR = "all-linear"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = ADAPTER_FILE
BASE_FILE = "base_model.xxh3"
# Keys of an adapter's configuration that, with the rank, determine the scale of B·A.
SCALING = ("lora_alpha", "use_rslora", "alpha_pattern")
# Keys in which the adapter to start from may differ from the job. Any other key changes what the layers
# compute. peft sets fan_in_fan_out by the kind of each layer.
ITS_OWN = {
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "use_rslora", "lora_dropout", "task_type", "inference_mode", "base_model_name_or_path",
    "revision", "peft_version", "auto_mapping", "fan_in_fan_out",
}  # fmt: skip


class Adapter:
    """Adds a trainable adapter to a policy. The model's other weights then do not require gradients.

    Args:
        model: a transformers causal LM; its target modules are wrapped in place.
        config: rank, alpha and target modules, or the adapter to start from.
        seed: of A, which is uniform in ±1/√in; B is 0, so the policy starts equal to the base model.
        ranks: over which the model will be sharded. If it is on the device `meta`, call `begin` once it is not.

    Raises:
        InvalidConfig: a target module is not a matrix of the model, or it is experts; or the adapter to start
            from is absent or has another rank, alpha, kind or base model.
    """

    def __init__(self, model: Any, config: PolicyModelConfig, seed: int, ranks: Ranks | None = None) -> None:
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self._config = config
        self._seed = seed
        self._ranks = ranks or Ranks.alone()
        self._lora = _read_config(config) if config.lora_adapter_path else _new_config(config)
        _check_targets(model, self._lora)
        with torch.random.fork_rng(devices=[]):  # A is drawn here, and drawn again below
            try:
                inject_adapter_in_model(self._lora, model)
            except ValueError as error:
                raise InvalidConfig(f"actor.model.target_modules: {error}") from error
        self._model = model
        self._layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        _check_layers(self._layers)
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        shapes = {name: tensor.shape for name, tensor in self.weights.items()}
        if {name: tensor.shape for name, tensor in self._initial(shapes).items()} != shapes:
            raise InvalidConfig(
                f"actor.model.lora_adapter_path: {config.lora_adapter_path} does not fit "
                f"actor.model.path {config.path}: its matrices have other names or shapes"
            )
        if not any(tensor.is_meta for tensor in self.weights.values()):
            self.begin()

    def begin(self) -> None:
        """Set A and B to what training starts with."""
        weights = self.weights
        for name, rows in self.read(None).items():
            local(weights[name]).copy_(rows)
        if self._ranks.size > 1:
            self._base_checksum  # noqa: B018  # here, where all ranks are, because it gathers the weights

    @property
    def weights(self) -> dict[str, Tensor]:
        """A and B, by parameter, as the model holds them."""
        state = self._model.state_dict()
        return {name: state[name] for name in self._names}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapter within the context: the model then equals the base model, bit for bit."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, on: bool) -> None:
        for layer in self._layers.values():
            # enable_adapters would change requires_grad too, of the gathered weights or of the shards.
            layer._disable_adapters = not on

    def base_weights(self) -> dict[str, Tensor]:
        """Return the base model's weights by Hugging Face name, without the adapter."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in named_weights(self._model).items()
            if name not in self._names
        }

    def deltas(self) -> dict[str, Callable[[], Tensor]]:
        """Map Hugging Face names to functions that compute B·A·alpha/r, in the weight's shape.

        Every rank calls each of them, in the same order, since they gather A and B.
        """
        return {f"{name}.weight": partial(_delta, layer) for name, layer in self._layers.items()}

    @torch.no_grad()
    def merge(self) -> None:
        """Add B·A·alpha/r to the model's weights, and take the adapter's layers out of the model.

        The weights are then those that rollouts get, bit for bit. For a model that is not sharded.
        """
        for name, layer in self._layers.items():
            plain = layer.get_base_layer()
            plain.weight.add_(_delta(layer))
            self._model.set_submodule(name, plain)

    def copy(self) -> Callable[[Path, Ranks], None]:
        """Copy the adapter to host memory. Return what writes the copy in peft's layout, with the base model's
        checksum. Every rank calls both."""
        tensors = copied({_on_disk(name): tensor for name, tensor in self.weights.items()}, self._ranks)
        checksum = self._base_checksum  # computed here: the model may be offloaded while the copy is written

        def write(into: Path, ranks: Ranks) -> None:
            write_rows(into / WEIGHTS_FILE, tensors, ranks, {"format": "pt"})
            on_first(ranks, self._save_texts, into, checksum)

        return write

    def _save_texts(self, directory: Path, base_checksum: str) -> None:
        (directory / BASE_FILE).write_text(base_checksum + "\n")
        path = self._config.path
        revision = self._config.revision or None
        base = path if is_name(path) else str(Path(path).absolute())
        settings = {**_settings(self._lora), "base_model_name_or_path": base, "inference_mode": True}
        settings["revision"] = revision
        text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)  # a set has no order to save
        (directory / CONFIG_FILE).write_text(text + "\n")

    def read(self, directory: Path | None) -> dict[str, Tensor]:
        """Read this rank's rows of A and B, by parameter, that `copy` wrote. None: what training starts with.

        Raises:
            ModelNotFound: the file is absent or damaged.
            ValueError: the saved adapter has another scale, or another base model.
        """
        weights = self.weights
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        if directory is None:
            found = self._initial(shapes)
        else:
            found = self._read(directory)
            self._check_same(directory)
        if {name: tensor.shape for name, tensor in found.items()} != shapes:
            raise ValueError("its weights differ from the model's in names or shapes")
        return {name: own_rows(tensor, weights[name]) for name, tensor in found.items()}

    def _initial(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        path = self._config.lora_adapter_path
        return self._read(Path(path)) if path else self._drawn(shapes)

    def _read(self, directory: Path) -> dict[str, Tensor]:
        tensors = load_state(directory / WEIGHTS_FILE)
        of_file = {_on_disk(name): name for name in self._names}
        return {of_file.get(name, name): tensor.float() for name, tensor in tensors.items()}

    def _check_same(self, directory: Path) -> None:
        saved = json.loads((directory / CONFIG_FILE).read_text())
        mine = _settings(self._lora)
        for name in SCALING:
            if saved[name] != mine[name]:
                raise ValueError(f"its adapter has {name} {saved[name]!r}; the job's has {mine[name]!r}")
        self.check_base(directory)

    def check_base(self, directory: Path) -> None:
        """Check by its checksum that an adapter on disk is of this base model. Raises ValueError if not."""
        if (directory / BASE_FILE).read_text().strip() != self._base_checksum:
            raise ValueError(f"the base model's weights were not those of {self._config.path}")

    @cached_property
    def _base_checksum(self) -> str:
        """Checksum of the base model's weights, hexadecimal. Independent of their path, which may change."""
        checksum = xxhash.xxh3_64()
        for name, tensor in self.base_weights().items():
            checksum.update(name.encode())
            rows = whole(tensor).detach().cpu().contiguous()
            if rows.dtype in (torch.bfloat16, torch.float16):  # held so (rolemesh.models.loading.hold_base)
                rows = rows.float()
            checksum.update(memory_of(rows))
        return checksum.hexdigest()

    def _drawn(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        tensors = {}
        for name, shape in shapes.items():
            tensors[name] = torch.zeros(shape)
            if ".lora_A." in name:
                bound = 1 / math.sqrt(shape[1])
                tensors[name].uniform_(-bound, bound, generator=generator)
        return tensors


def _delta(layer: Any) -> Tensor:
    """Compute B·A·alpha/r as peft's get_delta_weight does, of whole A and B."""
    a, b = (whole(part["default"].weight).detach() for part in (layer.lora_A, layer.lora_B))
    product = b @ a
    delta: Tensor = product.T if layer.fan_in_fan_out else product
    return delta.mul_(layer.scaling["default"])  # in place: a whole matrix is large


def _on_disk(parameter: str) -> str:
    """Return peft's name of a parameter on disk: inside two wrappers, without the name of the adapter."""
    return "base_model.model." + parameter.replace(".default.", ".")


def _settings(config: LoraConfig) -> dict[str, Any]:
    return dict(config.to_dict())  # type: ignore[no-untyped-call]


def _new_config(config: PolicyModelConfig) -> LoraConfig:
    from peft import LoraConfig

    targets = config.target_modules
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def _read_config(config: PolicyModelConfig) -> LoraConfig:
    from peft import LoraConfig, PeftConfig

    directory = Path(config.lora_adapter_path)
    key = "actor.model.lora_adapter_path"
    if not ((directory / CONFIG_FILE).is_file() and (directory / WEIGHTS_FILE).is_file()):
        raise InvalidConfig(f"{key}: {directory} is not an adapter: it needs {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        found = PeftConfig.from_pretrained(str(directory))
    except Exception as error:  # JSON errors, and any error of peft's classes
        raise unreadable(
            InvalidConfig, error, f"{key}: {directory / CONFIG_FILE} cannot be read: {error}"
        ) from error
    if not isinstance(found, LoraConfig):
        raise InvalidConfig(f"{key}: {directory} holds a {found.peft_type} adapter; expected LoRA")
    own = (found.r, found.lora_alpha)
    if not all(isinstance(number, int | float) for number in own):
        raise InvalidConfig(
            f"{key}: {directory / CONFIG_FILE} has r {own[0]!r} and lora_alpha {own[1]!r}; expected numbers"
        )
    if own != (config.lora_rank, config.lora_alpha):
        raise InvalidConfig(
            f"{key}: {directory} has rank {own[0]} and alpha {own[1]:g}, but actor.model.lora_rank is "
            f"{config.lora_rank} and lora_alpha {config.lora_alpha:g}; set them to the adapter's"
        )
    plain = _settings(_new_config(config))
    its = _settings(found)
    its["init_lora_weights"] = its["init_lora_weights"] in (
        True,
        False,
        "gaussian",
    )  # other values change the base model
    its["target_parameters"] = its["target_parameters"] or None  # peft makes it an empty list for some models
    if strange := [name for name in its if name not in ITS_OWN and its[name] != plain.get(name)]:
        raise InvalidConfig(
            f"{key}: {directory} has {strange[0]} {getattr(found, strange[0])!r}; only plain LoRA is supported"
        )
    # nothing random: rolemesh/models/loading.py
    found.lora_dropout = 0.0
    found.inference_mode = False
    return found


def _check_layers(layers: Mapping[str, Any]) -> None:
    """Check that every adapted layer is a matrix, to which its product can be added.

    peft also adapts parameters that are none: the experts that are one tensor for all, and their router.
    """
    from peft.tuners.lora import ParamWrapper

    wrapped = [name for name, layer in layers.items() if isinstance(layer, ParamWrapper)]
    if wrapped:
        others = sorted({name.rpartition(".")[2] for name in layers.keys() - set(wrapped)})
        raise InvalidConfig(
            f"actor.model.target_modules includes {wrapped[0]}. Experts that are one tensor for all, and their "
            f"router, cannot have an adapter; set actor.model.target_modules to {others}"
        )


def _check_targets(model: Any, lora: LoraConfig) -> None:
    """Check that every target module matches, and only matrices that can have an adapter.

    peft ignores a target without a match if another target matches. An embedding that is tied to the head
    cannot have an adapter: there is no merged weight that both could use.
    """
    targets = lora.target_modules
    if targets == ALL_LINEAR:
        return
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    modules = dict(model.named_modules())
    usable = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and not (is_tied and module is head)
    }
    for target in [targets] if isinstance(targets, str) else [[name] for name in targets or ()]:
        matched = [name for name in modules if is_target(name, target)]
        if matched and usable.issuperset(matched):
            continue
        other = next((name or "the model itself" for name in matched if name not in usable), "")
        raise InvalidConfig(
            f"actor.model.target_modules: {target!r} matches "
            + (f"{other}, which is not a separate matrix" if other else "no module")
            + f"; expected some of {sorted({name.rpartition('.')[2] for name in usable})}, or {ALL_LINEAR} for "
            "every matrix but the head. Write names as a list; a string is a pattern of the whole name"
        )
