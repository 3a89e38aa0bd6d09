"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): a matrix W stays as it is and computes as
W + B·A·alpha/r, of which A [r, in] and B [out, r] alone are trained. The layers are peft's.

On disk an adapter is what peft lays out and reads:

    adapter_model.safetensors   A and B of each module
    adapter_config.json         rank, alpha, target modules, the base model's directory
    base_model.xxh3             ours: a checksum of the base model's weights
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rolemesh.config.model import PolicyModelConfig, is_target
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_state, named_weights

ALL_LINEAR = "all-linear"
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
BASE_FILE = "base_model.xxh3"
# What of an adapter's configuration, beside the rank, says how much A and B count.
SCALING = ("lora_alpha", "use_rslora", "alpha_pattern")
# What another adapter's configuration may say beside the job's. Any other key changes what the layers compute.
ITS_OWN = {
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "use_rslora", "lora_dropout", "task_type", "inference_mode", "base_model_name_or_path",
    "revision", "peft_version", "auto_mapping",
}  # fmt: skip


class Adapter:
    """The adapter of a policy. With it the model's other weights do not require gradients.

    Args:
        model: a transformers causal LM; its target modules are wrapped where they are.
        config: rank, alpha and target modules, or the adapter to start from.
        seed: of A, which is uniform in ±1/√in; B is 0, so that the policy begins as the base model.

    Raises:
        InvalidConfig: a target module that is none of the model's matrices, or an adapter to start from that
            is not there, of another rank or alpha, or of another kind.
    """

    def __init__(self, model: Any, config: PolicyModelConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._lora = _read_config(config) if config.lora_adapter_path else _new_config(config)
        _check_targets(model, self._lora)
        with torch.random.fork_rng(devices=[]):  # A is drawn here, and drawn again below
            inject_adapter_in_model(self._lora, model)
        self._model = model
        self._layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        self.weights: dict[str, Tensor] = {  # by parameter, as the model holds them
            name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        initial = self.read(None)
        if {n: t.shape for n, t in initial.items()} != {n: t.shape for n, t in self.weights.items()}:
            raise InvalidConfig(
                f"actor.model.lora_adapter_path: {config.lora_adapter_path} is of another model than "
                f"actor.model.path {config.path}: its matrices have other names or shapes"
            )
        for name, tensor in initial.items():
            self.weights[name].copy_(tensor)

    @contextmanager
    def off(self) -> Iterator[None]:
        """While it is entered, the model is the base model, bit for bit."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, on: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(on)

    def base_weights(self) -> dict[str, Tensor]:
        """The base model's weights under their Hugging Face names, without the adapter."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in named_weights(self._model).items()
            if name not in self.weights
        }

    def deltas(self) -> dict[str, Callable[[], Tensor]]:
        """Hugging Face name to B·A·alpha/r, of the weight's shape, computed when it is called."""
        return {
            f"{name}.weight": lambda layer=layer: layer.get_delta_weight("default").detach()  # type: ignore[misc]
            for name, layer in self._layers.items()
        }

    def save(self, directory: Path) -> None:
        """Writes the adapter as peft lays it out."""
        tensors = {_on_disk(name): tensor.cpu().contiguous() for name, tensor in self.weights.items()}
        save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        (directory / BASE_FILE).write_text(self._base_checksum + "\n")
        base = str(Path(self._config.path).absolute())
        settings = {**_settings(self._lora), "base_model_name_or_path": base, "inference_mode": True}
        text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)  # a set has no order to save
        (directory / CONFIG_FILE).write_text(text + "\n")

    def read(self, directory: Path | None) -> dict[str, Tensor]:
        """A and B, by parameter, that `save` wrote there; None: those that training begins with.

        Raises:
            ModelNotFound: the file is not there or damaged.
            ValueError: what was saved there counts otherwise, or lies on a base of other weights.
        """
        if directory is None and not self._config.lora_adapter_path:
            return self._drawn()
        tensors = load_state((directory or Path(self._config.lora_adapter_path)) / WEIGHTS_FILE)
        if directory is not None:
            self._check_same(directory)
        of_file = {_on_disk(name): name for name in self.weights}
        return {of_file.get(name, name): tensor.float() for name, tensor in tensors.items()}

    def _check_same(self, directory: Path) -> None:
        saved, mine = json.loads((directory / CONFIG_FILE).read_text()), _settings(self._lora)
        for name in SCALING:
            if saved[name] != mine[name]:
                raise ValueError(f"its adapter has {name} {saved[name]!r}, and the job's has {mine[name]!r}")
        if (directory / BASE_FILE).read_text().strip() != self._base_checksum:
            raise ValueError(f"the base model's weights were not those of actor.model.path {self._config.path}")

    @cached_property
    def _base_checksum(self) -> str:
        """Of weights and not of a path, which may change: hexadecimal."""
        checksum = xxhash.xxh3_64()
        for name, tensor in self.base_weights().items():
            checksum.update(name.encode())
            checksum.update(tensor.detach().cpu().contiguous().numpy().data)
        return checksum.hexdigest()

    def _drawn(self) -> dict[str, Tensor]:
        generator, tensors = torch.Generator().manual_seed(self._seed), {}
        for name, weight in self.weights.items():
            tensors[name] = torch.zeros(weight.shape)
            if ".lora_A." in name:
                bound = 1 / math.sqrt(weight.shape[1])
                tensors[name].uniform_(-bound, bound, generator=generator)
        return tensors


def _on_disk(parameter: str) -> str:
    """peft's name of it: below two wrappers, and without the adapter's own name."""
    return "base_model.model." + parameter.replace(".default.", ".")


def _settings(config: LoraConfig) -> dict[str, Any]:
    return dict(config.to_dict())  # type: ignore[no-untyped-call]


def _new_config(config: PolicyModelConfig) -> LoraConfig:
    targets = config.target_modules
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def _read_config(config: PolicyModelConfig) -> LoraConfig:
    directory, key = Path(config.lora_adapter_path), "actor.model.lora_adapter_path"
    if not ((directory / CONFIG_FILE).is_file() and (directory / WEIGHTS_FILE).is_file()):
        raise InvalidConfig(f"{key}: {directory} is not an adapter: it needs {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        found = PeftConfig.from_pretrained(str(directory))
    except Exception as error:  # JSON's, and whatever peft's classes raise
        raise InvalidConfig(f"{key}: {directory / CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(found, LoraConfig):
        raise InvalidConfig(f"{key}: {directory} holds a {found.peft_type} adapter; LoRA is the kind there is")
    own = (found.r, found.lora_alpha)
    if not all(isinstance(number, int | float) for number in own):
        raise InvalidConfig(
            f"{key}: {directory / CONFIG_FILE} has r {own[0]!r} and lora_alpha {own[1]!r}: numbers?"
        )
    if own != (config.lora_rank, config.lora_alpha):
        raise InvalidConfig(
            f"{key}: {directory} has rank {own[0]} and alpha {own[1]:g}; actor.model.lora_rank is "
            f"{config.lora_rank} and lora_alpha {config.lora_alpha:g}; set them to the adapter's"
        )
    plain, its = _settings(_new_config(config)), _settings(found)
    its["init_lora_weights"] = its["init_lora_weights"] in (True, False, "gaussian")  # others change the base
    if strange := [name for name in its if name not in ITS_OWN and its[name] != plain.get(name)]:
        raise InvalidConfig(
            f"{key}: {directory} has {strange[0]} {getattr(found, strange[0])!r}, which plain LoRA has not"
        )
    found.lora_dropout, found.inference_mode = 0.0, False  # nothing random: rolemesh/models/loading.py
    return found


def _check_targets(model: Any, lora: LoraConfig) -> None:
    """peft passes over a target that matches nothing where another one matches; and an embedding that is the
    head too has no merged weight that both could use."""
    targets = lora.target_modules
    if targets == ALL_LINEAR:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
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
            + (f"{other}, which is no matrix of its own" if other else "no module")
            + f"; there are {sorted({name.rpartition('.')[2] for name in usable})}, or {ALL_LINEAR} for every "
            "matrix but the head. A name is written as a list; a string is a pattern of the whole name"
        )
