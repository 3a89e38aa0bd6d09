"""Shards a model over the ranks of a role with FSDP2, and finds the rows that a rank holds of a tensor.

A weight is split along its first axis: rank r of R holds rows [r·n, r·n + n) with n = ⌈rows / R⌉. So these are
one contiguous range of bytes, in a file and in a published version. Gradients are sums over the ranks, never
means: every rank divides its loss by the mini-batch's whole token count.

With one rank every function here is an identity.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from rolemesh.config.model import FsdpConfig
from rolemesh.errors import InvalidConfig
from rolemesh.ranks.rank_load import TimedAllGather, TimedReduceScatter
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.rendezvous import COLLECTIVE_TIMEOUT

log = logging.getLogger(__name__)
T = TypeVar("T")


class Root(nn.Module):
    """FSDP's outermost module. Everything that computes with the model's weights runs inside its forward.

    A function may use body and head separately, as token_stats does. FSDP gathers and frees weights only around
    the forward of modules that it knows, so the function itself must be inside one.

    Args:
        model: a transformers causal LM, or a ScoreModel.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return function(model, *args, **kwargs).

        Call `backward` only on tensors that are in the result or in its tuples, lists and dicts.
        """
        result = None
        try:
            # A closure, because FSDP would copy arguments that are dataclasses.
            result = super().__call__(lambda model: function(model, *args, **kwargs))
            return cast(T, result)
        finally:
            tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            if not any(tensor.requires_grad for tensor in tensors):
                reshard(self)  # no backward follows, which would free what was gathered

    def forward(self, function: Callable[[Any], T]) -> T:
        return function(self.model)


def shard(root: Root, ranks: Ranks, config: FsdpConfig, dtype: torch.dtype | None = None) -> None:
    """Shard a model over the ranks, block by block. With one rank nothing changes.

    Its weights are DTensors afterwards, except from the start of a call of `root` to the end of its backward,
    if one follows. Weights on the device `meta` stay there.

    Args:
        root: holds the model.
        ranks: the role's.
        config: how to shard.
        dtype: of the blocks' matrix products, in which their matrices are gathered; None: the weights' own.
            Shards keep their type, and gradients are added in it. So ranks compute what one rank does under
            autocast, which would cast each gathered block and keep the copy until its backward.

    Raises:
        InvalidConfig: fsdp_size does not divide the number of ranks, or the model has no blocks.
    """
    if ranks.mesh is None:
        if config.model_copy(update={"optimizer_offload": False}) != type(config)():
            log.warning("fsdp_config has no effect: the role has one rank")
        return
    mesh = _mesh(ranks, ranks.mesh, config.fsdp_size)
    offload = CPUOffloadPolicy(torch.cuda.is_available()) if config.param_offload else OffloadPolicy()
    products = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
    parts = blocks(root.model)
    for part in parts:
        if dtype and (norms := _without_matrices(part)):
            fully_shard(norms, mesh=mesh, reshard_after_forward=False, offload_policy=offload)
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=products,
            offload_policy=offload,
        )
    # None: the root's own weights stay gathered between forward and backward, which follow each other.
    after = None if config.reshard_after_forward else False
    fully_shard(root, mesh=mesh, reshard_after_forward=after, offload_policy=offload)
    for module in _sharded(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # without it, gloo refuses the factor
        module.set_custom_all_gather(TimedAllGather(ranks.clock))
        module.set_custom_reduce_scatter(TimedReduceScatter(ranks.clock))
    if config.forward_prefetch:
        for part, following in pairwise(parts):
            part.set_modules_to_forward_prefetch([following])


def blocks(model: nn.Module) -> list[Any]:
    """Return a model's transformer blocks, in order.

    Raises:
        InvalidConfig: it has none.
    """
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    found = [part for part in model.modules() if type(part).__name__ in names]
    if not found:
        lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
        found = max(lists, key=len, default=[])
    inner = {part for block in found for part in block.modules() if part is not block}
    if not found:
        raise InvalidConfig(
            f"{type(model).__name__} cannot be sharded over several ranks: it has no list of transformer "
            "blocks (neither _no_split_modules nor a ModuleList); run the role with one rank"
        )
    return [block for block in found if block not in inner]


def _without_matrices(block: nn.Module) -> list[nn.Module]:
    """Return the parts of a block whose own weights are vectors: its norms, which autocast never casts."""
    own = {part: [*part.parameters(recurse=False)] for part in block.modules()}
    return [part for part, weights in own.items() if weights and all(weight.dim() < 2 for weight in weights)]


def _mesh(ranks: Ranks, whole: DeviceMesh, fsdp_size: int) -> DeviceMesh:
    """Return the mesh over which weights are sharded: [ranks], or [copies, ranks of a copy] for HSDP."""
    if fsdp_size == -1 or fsdp_size >= ranks.size:
        return whole
    if ranks.size % fsdp_size:
        raise InvalidConfig(
            f"fsdp_config.fsdp_size is {fsdp_size}, which does not divide the role's {ranks.size} ranks; "
            "set it to a divisor, or to -1 for all ranks"
        )
    table = torch.arange(ranks.size).view(-1, fsdp_size)
    groups = []
    for lines in (table.T, table):  # every rank makes every group, in this order
        made = {tuple(line): dist.new_group(line, timeout=COLLECTIVE_TIMEOUT) for line in lines.tolist()}
        groups.append(next(group for line, group in made.items() if ranks.rank in line))
    return DeviceMesh.from_group(groups, whole.device_type, table, mesh_dim_names=("copy", "shard"))


def _sharded(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def reshard(module: nn.Module) -> None:
    """Free all gathered weights, so that the module's weights are DTensors. Give it the Root."""
    for part in _sharded(module):
        part.reshard()


# ------------------------------------------------------------------------------- rows of a tensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: the tensor itself, or a DTensor's own memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # with gradients it would be a view
        return tensor.to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Every rank calls it, because a DTensor is gathered."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_in_rows(tensor: Tensor) -> bool:
    """Return whether each rank holds a range of the tensor's rows, or the whole tensor."""
    if not isinstance(tensor, DTensor):
        return True
    split = [placement for placement in tensor.placements if not placement.is_replicate()]
    return len(split) <= 1 and all(placement == Shard(0) for placement in split)


def rows_of(tensor: Tensor) -> slice:
    """Return which rows of a tensor `is_in_rows` this rank holds; all of a plain tensor."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return slice(0, num_rows)
    rows = range(num_rows)
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            per_rank = -(-num_rows // tensor.device_mesh.size(axis))
            start = tensor.device_mesh.get_local_rank(axis) * per_rank
            rows = rows[start : start + per_rank]
    held = local(tensor).shape[0]
    assert held == len(rows), f"expected {len(rows)} rows of {num_rows}, found {held}"
    return slice(rows.start, rows.stop)


def own_rows(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor, those that it holds of `like`."""
    return tensor[rows_of(like)] if isinstance(like, DTensor) else tensor


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy; the caller keeps the tensor.

    It avoids numpy: a storage that numpy has accessed can never be resized, and FSDP and the Offloader do that.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def is_first_copy(tensor: Tensor, ranks: Ranks) -> bool:
    """Return whether this rank's part counts: each part of a tensor counts on one of the ranks that hold it."""
    if not isinstance(tensor, DTensor):
        return ranks.rank == 0
    placements = enumerate(tensor.placements)
    return all(not p.is_replicate() or tensor.device_mesh.get_local_rank(axis) == 0 for axis, p in placements)


# -------------------------------------------------------------------------------------- gradients


def gradient_norm(gradients: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Return the norm of a whole gradient, in the gradient's type on the CPU. Every rank calls it.

    Squares are summed in float64, so the norm seldom depends on the number of ranks, even in its last bit.

    Args:
        gradients: of each parameter, plain or sharded.
        ranks: the role's.
    """
    norms = [torch.linalg.vector_norm(local(gradient), dtype=torch.float64) for gradient in gradients]
    counts = torch.tensor([is_first_copy(gradient, ranks) for gradient in gradients])
    squares = torch.stack(norms).cpu().square() * counts
    return ranks.total(squares).sum().sqrt().to(gradients[0].dtype)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale a gradient down to a maximum norm, as torch's clip_grad_norm_ does; each rank scales its part."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(scale)
