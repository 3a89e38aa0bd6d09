"""Compares columns and meta values bit for bit, to decide whether two batches agree. NaN equals itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """True if shape, dtype and bits are equal; the devices may differ."""
    if left is right:
        return True
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_bits(left), _bits(right.to(left.device)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_array(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """True if shape, dtype and bits are equal; object arrays are compared cell by cell."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return same_value(left.tolist(), right.tolist())
    return left.tobytes() == right.tobytes()


def same_value(left: Any, right: Any) -> bool:
    """True if two values are equal, including tensors and arrays inside dicts, lists and tuples."""
    if left is right:
        return True
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and same_array(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right) or bool(left != left and right != right)
