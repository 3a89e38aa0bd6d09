"""Loads weights into vLLM's layers by its own reload, and makes an incomplete load an error.

If a layer gets no weights, it keeps the old ones, and vLLM only warns. If a layer gets some of its elements,
vLLM is silent, and the others are whatever the memory holds.

This file relies on private parts of vLLM (`PRIVATE`), which `check_reload` looks up at start.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rolemesh.errors import InvalidConfig

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

Weights = Iterable[tuple[str, Tensor]]

RELOAD = "model_executor/model_loader/reload"
# File below vLLM's folder, a name there, and the parameters or fields that it must have.
PRIVATE = (
    ("v1/worker/gpu_worker.py", "Worker.reload_weights", ()),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights", ("weights_iterator",)),
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner.reload_weights", ("weights_iterator",)),
    (f"{RELOAD}/layerwise.py", "get_layerwise_info", ("layer",)),
    (f"{RELOAD}/types.py", "LayerReloadingInfo", ("load_numel", "kernel_tensors")),
    (f"{RELOAD}/types.py", "LayerReloadingInfo.can_load", ()),
    (f"{RELOAD}/meta.py", "SKIP_TENSORS", ()),
)


def check_reload(folder: Path, version: str) -> None:
    """Check that vLLM has the private parts that an update needs.

    The source is parsed, because importing it takes seconds.

    Args:
        folder: of the package vllm.
        version: of vLLM, for the message.

    Raises:
        InvalidConfig: a part is missing or has other parameters.
    """
    for file, name, parameters in PRIVATE:
        found = _found(folder / file, name.split("."))
        if found is None or not _has(found, parameters):
            wanted = f"{name}({', '.join(parameters)})"
            raise InvalidConfig(
                f"rollout: vLLM {version} has no {wanted} in {file}, by which it takes new weights; install a "
                "version in the bounds of `rolemesh[vllm]`"
            )


def _found(file: Path, path: list[str]) -> ast.AST | None:
    if not file.is_file():
        return None
    node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for name in path:
        inside = [each for each in getattr(node, "body", ()) if _name_of(each) == name]
        if not inside:
            return None
        node = inside[-1]
    return node


def _has(node: ast.AST, wanted: Iterable[str]) -> bool:
    """Whether a function takes these parameters by name, or a class has these fields."""
    if isinstance(node, ast.FunctionDef):
        parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        return node.args.kwarg is not None or {each.arg for each in parameters}.issuperset(wanted)
    return {_name_of(each) for each in getattr(node, "body", ())}.issuperset(wanted)


def _name_of(statement: ast.AST) -> str:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return statement.name if isinstance(statement, ast.FunctionDef | ast.ClassDef) else ""


@contextmanager
def whole_loads(model: Any) -> Iterator[None]:
    """Raise ValueError from each reload of this vLLM model that leaves an element of a parameter unset.

    It looks after loading and before vLLM completes such layers, because afterwards they cannot be recognised.
    """
    load: Callable[[Weights], set[str]] = model.load_weights

    def checked(weights: Weights) -> set[str]:
        loaded = load(weights)
        if lacking := _incomplete(model):
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise ValueError(f"an update left weights of vLLM's layers unset: {'; '.join(lacking[:3])}{more}")
        return loaded

    model.load_weights = checked
    try:
        yield
    finally:
        del model.load_weights  # the class's own is left


def _incomplete(model: nn.Module) -> list[str]:
    """Return what is missing in each layer of a model that is being loaded.

    A layer whose parameters are all another layer's (a head that is tied to the embedding) misses nothing.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    lacking: list[tuple[str, set[int]]] = []
    loaded: set[int] = set()
    for name, layer in model.named_modules():
        info: LayerReloadingInfo = get_layerwise_info(layer)
        waits = info.can_load() and info.kernel_tensors is not None
        # A layer that waits has placeholders; its own parameters were put aside.
        own = {id(each) for each in (info.kernel_tensors[0].values() if waits else layer.parameters(False))}
        if waits and info.load_numel < (wanted := _num_wanted(layer)):
            lacking.append((f"{name} got {info.load_numel} of {wanted} elements", own))
        else:
            loaded |= own
    return [text for text, own in lacking if own - loaded]


def _num_wanted(layer: nn.Module) -> int:
    """Return how many elements a load must set: all of the parameters' without padding."""
    try:
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS as NEVER_LOADED
    except ImportError:  # vLLM 0.25
        from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS as NEVER_LOADED

    vocabulary = getattr(layer, "shard_indices", None)
    wanted = 0
    for name, parameter in layer.named_parameters(recurse=False):
        if vocabulary is not None:
            wanted += parameter.numel() // len(parameter) * vocabulary.num_org_elements
        elif name not in NEVER_LOADED:
            wanted += getattr(parameter, "weight_loader_numel", parameter.numel())
    return wanted
