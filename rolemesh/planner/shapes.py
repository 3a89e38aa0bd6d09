"""Reads the shape of a model from its directory, without loading it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rolemesh.config.model import ModelConfig, PolicyModelConfig, is_target
from rolemesh.errors import InvalidConfig, ModelNotFound, unreadable
from rolemesh.models.directory import described_directory, weight_files

# Prefixes of heads of causal LMs and of reward models. A role does not load a head that it does not use.
HEADS = ("lm_head.", "score.", "classifier.", "v_head.")

# Keys of config.json for each number, in order of preference.
NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
}
TYPES = {"BF16": "bfloat16", "F16": "float16"}  # in the header of a safetensors file
MLP_NAMES = ("intermediate_size", "n_inner", "ffn_dim")
EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that determine its memory and time.

    Args:
        body_parameters: parameters of the model without a head, embeddings included.
        head_parameters: parameters of the causal LM's own head; 0 if it is tied to the embedding.
        multiplied_parameters: parameters of the blocks' matrices by which one token is multiplied; of experts
            only those to which a token is routed.
        hidden: width of the residual stream.
        layers: transformer blocks.
        heads, kv_heads, head_dim: of the attention.
        intermediate: width of the MLP (of all experts together to which a token is routed).
        vocabulary: rows of the embedding.
        matrices: for each matrix of the blocks the module's name, and rows plus columns.
        routed_parameters: the part of `multiplied_parameters` in experts.
        unrouted_parameters: of the experts to which a token is not routed.
        stored: dtype of the embedding in the weight files, e.g. bfloat16; empty: not known.
    """

    body_parameters: int
    head_parameters: int
    multiplied_parameters: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    matrices: tuple[tuple[str, int], ...] = ()
    routed_parameters: int = 0
    unrouted_parameters: int = 0
    stored: str = ""

    @property
    def block_parameters(self) -> int:
        """Parameters of the blocks' matrices, those of all experts included."""
        return self.multiplied_parameters + self.unrouted_parameters

    @property
    def policy_parameters(self) -> int:
        """Parameters of the causal LM, with a tied head counted once."""
        return self.body_parameters + self.head_parameters

    @property
    def score_parameters(self) -> int:
        """Parameters of a value or reward model: the body, and a head with one output and a bias."""
        return self.body_parameters + self.hidden + 1

    def parameters(self, *, scores: bool) -> int:
        """Return the number of parameters: of a model with a head for scores, or of a policy."""
        return self.score_parameters if scores else self.policy_parameters

    def trained_parameters(self, model: PolicyModelConfig) -> int:
        """Return the number of a policy's trained parameters: all, or the adapter's.

        An adapter has r parameters for each row and column of an adapted matrix.

        Raises:
            InvalidConfig: a target module matches none of the model's modules.
        """
        if not model.lora_rank:
            return self.policy_parameters
        everywhere = model.target_modules == "all-linear"
        targets = model.target_modules
        names = [*(name for name, _ in self.matrices), "lm_head"]
        checked: list[str | list[str]] = []  # each has to match a module; "all-linear" names none
        if not isinstance(targets, str):
            checked.extend([target] for target in targets)
        elif not everywhere:
            checked.append(targets)
        for target in checked:
            if not any(is_target(name, target) for name in names):
                known = sorted({name.rpartition(".")[2] for name in names})
                raise InvalidConfig(
                    f"actor.model.target_modules: {target!r} matches no module; expected some of {known}"
                )
        return model.lora_rank * sum(
            size for name, size in self.matrices if everywhere or is_target(name, model.target_modules)
        )


def read_shape(config: ModelConfig, role: str) -> ModelShape:
    """Read the shape of a role's model.

    Parameters are counted in the headers of the weight files. If there are none, transformers builds the model
    from config.json without storage, which takes seconds because torch is imported.

    Args:
        config: has the model's path.
        role: for errors.

    Raises:
        ModelNotFound: there is no directory or config.json, or it does not describe a transformer.
    """
    directory = described_directory(config, role)
    settings = _settings(directory, role)
    hidden, layers, heads, vocabulary = (_number(settings, key, directory, role) for key in NAMES)
    stored = _stored(directory, settings)
    tensors = {name: shape for name, (shape, _) in stored.items()} or _built(directory, config, role)
    intermediate = next((settings[n] for n in MLP_NAMES if settings.get(n)), 4 * hidden)
    routed = settings.get("num_experts_per_tok") or 0
    experts = next((settings[name] for name in EXPERTS_NAMES if settings.get(name)), 0)
    share = routed / experts if routed and experts else 1.0
    if share < 1:
        intermediate = routed * (settings.get("moe_intermediate_size") or intermediate)
    sizes = {name: math.prod(shape) for name, shape in tensors.items()}
    body = {name: size for name, size in sizes.items() if not name.startswith(HEADS)}
    of_blocks = {
        name: size for name, size in body.items() if len(tensors[name]) > 1 and tensors[name][0] != vocabulary
    }
    in_experts = sum(size for name, size in of_blocks.items() if ".experts." in name)
    routed_to = round(share * in_experts)
    in_blocks = sum(of_blocks.values())
    tables = [kind for shape, kind in stored.values() if len(shape) > 1 and shape[0] == vocabulary]
    return ModelShape(
        body_parameters=sum(body.values()),
        head_parameters=sum(size for name, size in sizes.items() if name.startswith("lm_head.")),
        multiplied_parameters=in_blocks - in_experts + routed_to,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or hidden // heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        matrices=tuple(
            (name.removesuffix(".weight"), sum(tensors[name]))
            for name in body
            if len(tensors[name]) == 2 and tensors[name][0] != vocabulary
        ),
        routed_parameters=routed_to,
        unrouted_parameters=in_experts - routed_to,
        stored=TYPES.get(tables[0], "float32") if tables else "",
    )


def _settings(directory: Path, role: str) -> dict[str, Any]:
    """Read config.json. Keys of a multimodal model's `text_config` replace its own."""
    try:
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return {**settings, **settings.get("text_config", {})}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise unreadable(
            ModelNotFound, error, f"{role}: config.json of {directory} cannot be read: {error}"
        ) from error


def _number(settings: Mapping[str, Any], key: str, directory: Path, role: str) -> int:
    for name in NAMES[key]:
        if isinstance(settings.get(name), int):
            return int(settings[name])
    raise ModelNotFound(f"{role}: {directory / 'config.json'} has no {NAMES[key][0]}")


def _stored(directory: Path, settings: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Read names, shapes and types in the headers of the weight files; empty if there are none."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in weight_files(directory) or sorted(directory.glob("*.safetensors")):
        try:
            file.open("rb").close()  # if a file cannot be opened, safetensors always says that there is none
            with safe_open(file, framework="np") as opened:
                for name in list(opened.keys()):
                    tensor = opened.get_slice(name)
                    tensors[name] = tuple(tensor.get_shape()), tensor.get_dtype()
        except (OSError, SafetensorError) as error:
            raise unreadable(
                ModelNotFound,
                error,
                f"{file} cannot be read: {error}. If it is not the whole file, copy or download it again",
            ) from error
    if settings.get("tie_word_embeddings"):  # some writers store the tied head as well
        tensors.pop("lm_head.weight", None)
    return tensors


def _built(directory: Path, config: ModelConfig, role: str) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the library's parsers raise many kinds of errors
        raise unreadable(
            ModelNotFound, error, f"{role}: no causal LM can be made of {directory / 'config.json'}: {error}"
        ) from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
