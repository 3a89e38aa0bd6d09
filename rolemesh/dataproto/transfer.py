"""Copies the tensors of a batch to a device together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

V = TypeVar("V")

ALIGNED = 16  # bytes; a multiple of every element's size


def on_device(value: V, device: torch.device) -> V:
    """Return a value with its tensors on a device, without waiting for the device's running work.

    Tensors on the CPU go to a GPU in one copy from pinned memory. Separate copies would each wait: a copy from
    memory that is not pinned returns only after the work queued on the GPU before it.

    Args:
        value: a tensor; or mappings, tuples and dataclasses of tensors, where anything else stays as it is.
        device: tensors that are already there stay as they are.
    """
    tensors = list(_tensors(value))
    moved = _together(tensors, device) if device.type == "cuda" else [tensor.to(device) for tensor in tensors]
    made: V = _with_tensors(value, iter(moved))
    return made


def _together(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED if tensor.device.type == "cpu" else 0 for tensor in tensors]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    parts = host.split(sizes)  # type: ignore[no-untyped-call]
    for part, tensor in zip(parts, tensors, strict=True):
        if len(part):
            _seen_as(part, tensor).copy_(tensor)
    there = host.to(device, non_blocking=True).split(sizes)  # type: ignore[no-untyped-call]
    return [
        _seen_as(part, tensor) if len(part) else tensor.to(device)
        for part, tensor in zip(there, tensors, strict=True)
    ]


def _seen_as(part: Tensor, like: Tensor) -> Tensor:
    """Return the first bytes of `part` as a tensor of the shape and type of `like`.

    It has a version counter of its own. Views share one, so if a model changed its positions in place, autograd
    would refuse every other tensor that came with them.
    """
    return part[: like.nbytes].view(like.dtype).view(like.shape).data


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for each in _children(value):
            yield from _tensors(each)


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if not any(True for _ in _tensors(value)):
        return value
    children = [_with_tensors(each, tensors) for each in _children(value)]
    if isinstance(value, Mapping):
        return dict(zip(value, children, strict=True))
    if isinstance(value, tuple):
        return tuple(children)
    return replace(value, **dict(zip((field.name for field in fields(value)), children, strict=True)))
