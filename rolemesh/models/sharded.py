"""Loads models into shards: each rank reads its own rows from the safetensors files, and never the whole model.

The model is made on the device `meta`, sharded, and filled. That needs files whose tensors are those of the
model, one to one. transformers converts the files of some architectures while it loads them; such a model is
loaded whole in each rank's host memory, and sharded afterwards.

With one rank a model is loaded as in rolemesh/models/loading.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rolemesh.config.model import FsdpConfig, ModelConfig
from rolemesh.models.heads import ScoreHead, ScoreModel
from rolemesh.models.loading import (
    hold_base,
    hold_frozen,
    hold_frozen_blocks,
    load_causal_lm,
    load_outline,
    model_directory,
    named_weights,
)
from rolemesh.models.lora import Adapter
from rolemesh.models.saving import save_model
from rolemesh.models.sequence import DTYPES
from rolemesh.models.supported import check_unread
from rolemesh.ranks.collective_errors import on_first
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharded_files import TensorFiles, copied, write_rows
from rolemesh.ranks.sharding import Root, blocks, local, own_rows, reshard, shard, whole

log = logging.getLogger(__name__)
WEIGHTS_FILE = "model.safetensors"


def load_policy(
    config: ModelConfig,
    role: str,
    ranks: Ranks,
    fsdp: FsdpConfig,
    device: torch.device,
    adapt: Callable[[Any], Adapter] | None = None,
    *,
    frozen: bool = False,
) -> tuple[Root, Adapter | None]:
    """Load a causal LM with float32 weights in evaluation mode, sharded over the ranks.

    Args:
        config: the role's model section.
        role: for messages.
        ranks: the role's.
        fsdp: how to shard.
        device: of this rank.
        adapt: adds an adapter to the model, which may be on the device `meta`.
        frozen: it is never trained, so its matrices are held in the type of their products (hold_frozen). With
            one rank the model below an adapter is held so, too (hold_base).

    Raises:
        ModelNotFound: the directory is absent, incomplete, or not a causal LM.
        InvalidConfig: the adapter does not fit the model; or as `shard`.
    """
    if ranks.size == 1:
        root = Root(load_causal_lm(config, role))
        adapter = adapt(root.model) if adapt else None
        if frozen or adapter:
            (hold_frozen if frozen else hold_base)(root, config.dtype)
        return root.to(device), adapter
    outline = load_outline(config, role)
    source = _source_of(outline, model_directory(config, role), role)
    filled = _Filling.of(outline, source, ranks)
    root = Root(outline if filled else load_causal_lm(config, role))
    adapter = adapt(root.model) if adapt else None
    if frozen:
        hold_frozen_blocks(root, config.dtype, blocks(root.model))
    _shard(root, ranks, fsdp, config.dtype, device, filled)
    if adapter:
        adapter.begin()
    return root, adapter


def load_score_model(
    config: ModelConfig,
    role: str,
    ranks: Ranks,
    fsdp: FsdpConfig,
    device: torch.device,
    seed: int,
    *,
    frozen: bool = False,
) -> Root:
    """Load a ScoreModel in evaluation mode, sharded over the ranks.

    Args:
        config, role, ranks, fsdp, device, frozen: as load_policy's.
        seed: of a new head.

    Raises:
        ModelNotFound: the directory is absent or incomplete, or its head has several outputs.
        InvalidConfig: as `shard`.
    """
    if ranks.size == 1:
        root = Root(ScoreModel.load(config, role, seed=seed))
        if frozen:
            hold_frozen(root, config.dtype)
        return root.to(device)
    outline = ScoreModel.outline(config, role)
    head = ScoreHead(outline.score.weight.shape[1], seed)
    outline.has_trained_head = head.load(model_directory(config, role))
    source = _score_source(outline, model_directory(config, role), head, role)
    filled = _Filling.of(outline, source, ranks)
    root = Root(outline if filled else ScoreModel.load(config, role, seed=seed))
    if frozen:
        hold_frozen_blocks(root, config.dtype, blocks(root.model))
    _shard(root, ranks, fsdp, config.dtype, device, filled)
    return root


def read_policy(model: nn.Module, config: ModelConfig, role: str) -> dict[str, Tensor]:
    """Read this rank's rows of a causal LM's weights, as named_weights lists them, on the CPU.

    Args:
        model: as loaded by load_policy, without an adapter.
        config: its section, with the directory to read in `path`.
        role: for messages.

    Raises:
        ModelNotFound: the directory is absent or damaged.
        ValueError: it has another model.
    """
    weights = _weights(model)
    source = _source_of(model, model_directory(config, role), role) if _is_sharded(weights) else None
    return _rows(weights, source, lambda: load_causal_lm(config, role))


def read_score_model(model: ScoreModel, config: ModelConfig, role: str, seed: int) -> dict[str, Tensor]:
    """Read this rank's rows of a ScoreModel's weights; see read_policy. `seed` is of a new head."""
    weights = _weights(model)
    source = None
    if _is_sharded(weights):
        head = ScoreHead(model.body.config.get_text_config().hidden_size, seed)
        head.load(model_directory(config, role))
        source = _score_source(model, model_directory(config, role), head, role)
    return _rows(weights, source, lambda: ScoreModel.load(config, role, seed=seed))


def copy_policy(model: Any, ranks: Ranks) -> Callable[[Path, Ranks], None]:
    """Copy a causal LM's weights to host memory. Return what writes the copy as save_pretrained does.

    Every rank calls both.
    """
    if getattr(model, "_weight_conversions", None):  # it has other names and tensors on disk
        state = {}
        for name, tensor in _weights(model).items():
            gathered = whole(tensor)
            if ranks.rank == 0:
                state[name] = gathered.to("cpu", copy=True)
        return lambda into, ranks: on_first(ranks, lambda: save_model(model, into, state_dict=state))
    weights = copied(_weights(model), ranks)

    def write(into: Path, ranks: Ranks) -> None:
        on_first(ranks, lambda: save_model(model, into, state_dict={}))  # all but the weights
        write_rows(into / WEIGHTS_FILE, weights, ranks, {"format": "pt"})

    return write


# ------------------------------------------------------------------------------------------ parts


@dataclass(frozen=True)
class _WeightsLocation:
    """Where the weights of a model are.

    Args:
        files: a directory's.
        names: the model's name to the files' name.
        given: by the model's name, whole; these are not in the files.
    """

    files: TensorFiles
    names: Mapping[str, str]
    given: Mapping[str, Tensor] = field(default_factory=dict)

    def rows(self, name: str, like: Tensor) -> Tensor:
        if name in self.given:
            return own_rows(self.given[name], like)
        return self.files.rows(self.names[name], like)


def _source_of(model: Any, directory: Path, role: str) -> _WeightsLocation | None:
    """Find the weights of a transformers model; None if the files have others, or in another form.

    Raises:
        ModelNotFound: as check_unread.
    """
    files = TensorFiles.of_model(directory)
    names = {}
    for name, tensor in _weights(model).items():
        on_disk = (name, f"{model.base_model_prefix}.{name}")
        found = next((other for other in on_disk if other in files.names), None)
        if found is None or files.shape(found) != tensor.shape or not files.is_float(found):
            return None
        names[name] = found
    if getattr(model.config, "quantization_config", None):
        return None
    check_unread(model, files.names - set(names.values()), directory, role)
    return _WeightsLocation(files, names)


def _score_source(model: ScoreModel, directory: Path, head: ScoreHead, role: str) -> _WeightsLocation | None:
    body = _source_of(model.body, directory, role)
    given = {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    return body and _WeightsLocation(body.files, {f"body.{name}": n for name, n in body.names.items()}, given)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights without those of an adapter, by their names without one."""
    named = {name: tensor for name, tensor in named_weights(model).items() if ".lora_" not in name}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in named.items()}


def _is_sharded(weights: Mapping[str, Tensor]) -> bool:
    return any(local(tensor) is not tensor for tensor in weights.values())


def _rows(
    weights: Mapping[str, Tensor], source: _WeightsLocation | None, load_whole: Callable[[], Any]
) -> dict[str, Tensor]:
    if source is not None:
        return {name: source.rows(name, tensor) for name, tensor in weights.items()}
    state = named_weights(load_whole())
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in weights.items()}:
        raise ValueError("its weights differ from the model's in names or shapes")
    return {name: own_rows(state[name], tensor) for name, tensor in weights.items()}


@dataclass(frozen=True)
class _Filling:
    """What a model on the device `meta` is filled with.

    Args:
        source: of its weights.
        buffers: those that are computed and never saved, by name.
    """

    source: _WeightsLocation
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, outline: nn.Module, source: _WeightsLocation | None, ranks: Ranks) -> _Filling | None:
        """Return None, and log it, if the model must be loaded whole."""
        buffers = _computed_buffers(outline)
        if source is None or buffers is None or not _ties_hold(outline, source.files, ranks):
            log.info("the model is loaded whole by every rank, because transformers converts its files")
            return None
        return cls(source, buffers)


def _computed_buffers(outline: nn.Module) -> dict[str, Tensor] | None:
    """Compute the buffers that are not saved, such as rotary frequencies; None if a model cannot."""
    values: dict[str, Tensor] = {}
    owner: Any = next(part for part in outline.modules() if hasattr(part, "_init_weights"))
    for prefix, module in outline.named_modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        for name in (computed := [name for name in names if name in module._non_persistent_buffers_set]):
            buffer = getattr(module, name)
            if not buffer.is_floating_point():
                return None
            setattr(module, name, torch.full_like(buffer, torch.nan, device="cpu"))
        if computed:
            with torch.no_grad():
                owner._init_weights(module)
        values |= {f"{prefix}.{name}".lstrip("."): getattr(module, name) for name in computed}
    return None if any(tensor.isnan().any() for tensor in values.values()) else values


def _ties_hold(outline: nn.Module, files: TensorFiles, ranks: Ranks) -> bool:
    """Return whether weights that the model ties are equal in the files, or there once. Every rank calls it."""
    ties = getattr(getattr(outline, "body", outline), "all_tied_weights_keys", {})
    both = [(a, b) for a, b in ties.items() if a in files.names and b in files.names]
    differ = any(not files.are_equal(a, b, ranks.rank, ranks.size) for a, b in both)
    return not ranks.most(int(differ))


def _shard(
    root: Root, ranks: Ranks, fsdp: FsdpConfig, dtype: str, device: torch.device, filling: _Filling | None
) -> None:
    shard(root, ranks, fsdp, None if dtype == "float32" else DTYPES[dtype])
    if filling is None:
        return
    root.to_empty(device="cpu" if fsdp.param_offload else device)
    for name, buffer in root.model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        computed = filling.buffers.get(name)
        value = filling.source.rows(name, buffer) if computed is None else computed
        setattr(root.model.get_submodule(owner), leaf, value.to(device))
    reshard(root)
    with torch.no_grad():
        for name, tensor in _weights(root.model).items():
            local(tensor).copy_(filling.source.rows(name, tensor))
