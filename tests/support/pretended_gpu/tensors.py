"""The tensors of a pretended GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda", 0)


class MixedDevices(RuntimeError):
    """An operation got tensors of the CPU and of the GPU."""


class GpuTensor(Tensor):
    """A tensor whose device is cuda:0.

    Args:
        held: a tensor on the CPU with the numbers. Views hold views, so a write to one is seen in the other.
        requires_grad: as of every tensor.
    """

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> GpuTensor:
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=CUDA,
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    # nn.Module.to swaps the contents of such a parameter, so tied weights stay tied as on a GPU.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> GpuTensor:
        return GpuTensor(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: this thread has tensors of a GPU that it does not compute on")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"


def held(tree: Any) -> Any:
    """Replace tensors of the GPU in a nest of tuples, lists and dicts by those that they hold."""
    return tree_map(lambda leaf: leaf.held if isinstance(leaf, GpuTensor) else leaf, tree)


def on_gpu(tree: Any) -> Any:
    """Replace the tensors in a nest by tensors of the GPU which hold them."""
    return tree_map(
        lambda x: GpuTensor(x) if isinstance(x, Tensor) and not isinstance(x, GpuTensor) else x, tree
    )
