"""What an operation of torch costs on a GPU, and which tensors it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pretended_gpu.record import Record, where
from pretended_gpu.tensors import GpuTensor, MixedDevices

# The CPU waits until the GPU has computed the size of the result, or the number.
WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique_dim",
    "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
    "aten::repeat_interleave.Tensor",
}  # fmt: skip
# They launch nothing, though their declarations do not say that they are views.
FREE = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
    "aten::new_empty_strided", "aten::_unsafe_view", "aten::lift_fresh", "aten::_local_scalar_dense",
    "aten::is_pinned",
}  # fmt: skip
COPIES = {"aten::_to_copy", "aten::copy_"}
INDEXED = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
# Not pointwise by their tags, but they take numbers of the CPU.
TAKE_NUMBERS = {"aten::masked_fill.Tensor", "aten::masked_fill_.Tensor", "aten::fill_.Tensor"}


@dataclass(frozen=True)
class Operation:
    """Facts about an overload of an operation.

    Args:
        name: with its overload.
        is_composite: made of other operations.
        is_view: its result shares the memory of an argument.
        takes_numbers: a tensor of the CPU without dimensions may stand for a number.
        writes: number and name of the arguments that it writes to.
        returns: number of results.
    """

    name: str
    is_composite: bool
    is_view: bool
    takes_numbers: bool
    writes: tuple[tuple[int, str], ...]
    returns: int

    @classmethod
    def of(cls, func: Any) -> Operation:
        name, schema = func.name(), func._schema
        arguments = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
        return cls(
            name=name,
            is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"),
            is_view=bool(arguments) and not any(a.alias_info.is_write for _, a in arguments),
            takes_numbers=torch.Tag.pointwise in func.tags or name in TAKE_NUMBERS,
            writes=tuple((i, a.name) for i, a in arguments if a.alias_info.is_write),
            returns=len(schema.returns),
        )

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what the operation returns after it wrote to its arguments: one of them, or nothing."""
        found = [args[i] if i < len(args) else kwargs[name] for i, name in self.writes]
        for tensor in (x for x in found if isinstance(x, GpuTensor)):
            assert tensor.shape == tensor.held.shape, f"{self.name} changed a shape, which is not pretended"
        if not self.returns:
            return None
        assert self.returns == len(found) == 1, f"{self.name} returns several of its arguments"
        return found[0]


def check_devices(operation: Operation, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Check the devices of an operation's tensors, one of which at least is on the GPU.

    Raises:
        MixedDevices: some are not, and it is not a copy, an index or a number.
    """
    others = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor)]
    if not others or operation.name in COPIES:
        return
    if operation.name in INDEXED and isinstance(args[0], GpuTensor):
        others = [tensor for tensor in others if not any(tensor is index for index in args[1])]
    if operation.takes_numbers or operation.name in INDEXED:
        others = [tensor for tensor in others if tensor.dim()]
    if others:
        shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise MixedDevices(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"{operation.name} of {shapes}, at {where()}"
        )


def count(
    record: Record, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any], makes_here: bool
) -> None:
    """Record what an operation does. One operation counts as one kernel; a few launch several."""
    name = operation.name
    if name in COPIES:
        _count_copy(record, name, args, kwargs, makes_here)
        return
    if name in WAITS and kwargs.get("output_size") is None:
        record.add("wait", name)
    if name in INDEXED:
        _count_indexes(record, name, args)
    if name == "torch_attn::_varlen_attn":
        record.add("attention", "varlen forward")
    if name == "torch_attn::_varlen_attn_backward":
        record.add("attention", "varlen backward")
    if not operation.is_view and name not in FREE:
        record.add("kernel", name)


def _count_copy(
    record: Record, name: str, args: Sequence[Any], kwargs: dict[str, Any], makes_here: bool
) -> None:
    source = args[1] if name == "aten::copy_" else args[0]
    from_here = isinstance(source, GpuTensor)
    to_here = isinstance(args[0], GpuTensor) if name == "aten::copy_" else makes_here
    target = args[0].dtype if name == "aten::copy_" else kwargs.get("dtype") or source.dtype
    if from_here and to_here:
        if target != source.dtype:
            kind = "cast of a weight" if isinstance(source, nn.Parameter) else "cast"
            record.add(kind, f"{_short(source.dtype)} -> {_short(target)}")
        record.add("kernel", name)
    elif not source.numel():
        return
    elif to_here:
        record.add("to device", name, source.nbytes)
    elif not _is_meta(kwargs.get("device")):
        record.add("to host", name, source.nbytes)


def _count_indexes(record: Record, name: str, args: Sequence[Any]) -> None:
    indexes = [index for index in args[1] if isinstance(index, Tensor)]
    for index in indexes:
        if not isinstance(index, GpuTensor) and isinstance(args[0], GpuTensor):
            record.add("to device", f"{name}, index", index.nbytes)
    masks = [index for index in indexes if index.dtype in (torch.bool, torch.uint8)]
    fills = name != "aten::index.Tensor" and len(indexes) == 1 and args[2].numel() == 1  # becomes masked_fill
    if masks and not fills:
        record.add("wait", f"{name}, mask")


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
