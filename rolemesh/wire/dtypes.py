"""Maps tensor element types between torch, the schema (proto/rolemesh/v1/data.proto, enum Dtype) and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.errors import InvalidBatch
from rolemesh.v1 import data_pb2

Array = NDArray[Any]

TO_WIRE: dict[torch.dtype, data_pb2.Dtype] = {
    torch.float64: data_pb2.DTYPE_FLOAT64,
    torch.float32: data_pb2.DTYPE_FLOAT32,
    torch.float16: data_pb2.DTYPE_FLOAT16,
    torch.bfloat16: data_pb2.DTYPE_BFLOAT16,
    torch.float8_e4m3fn: data_pb2.DTYPE_FLOAT8_E4M3FN,
    torch.float8_e5m2: data_pb2.DTYPE_FLOAT8_E5M2,
    torch.int64: data_pb2.DTYPE_INT64,
    torch.int32: data_pb2.DTYPE_INT32,
    torch.int16: data_pb2.DTYPE_INT16,
    torch.int8: data_pb2.DTYPE_INT8,
    torch.uint8: data_pb2.DTYPE_UINT8,
    torch.uint16: data_pb2.DTYPE_UINT16,
    torch.uint32: data_pb2.DTYPE_UINT32,
    torch.uint64: data_pb2.DTYPE_UINT64,
    torch.bool: data_pb2.DTYPE_BOOL,
}
FROM_WIRE: dict[data_pb2.Dtype, torch.dtype] = {number: dtype for dtype, number in TO_WIRE.items()}

INTEGERS: dict[torch.dtype, np.dtype[Any]] = {
    torch.int64: np.dtype("<i8"),
    torch.int32: np.dtype("<i4"),
    torch.int16: np.dtype("<i2"),
    torch.int8: np.dtype("i1"),
    torch.uint8: np.dtype("u1"),
    torch.uint16: np.dtype("<u2"),
    torch.uint32: np.dtype("<u4"),
    torch.uint64: np.dtype("<u8"),
}


def bits_of(name: str, tensor: Tensor) -> Array:
    """View the elements as unsigned integers of the same size and shape, for comparing and sending.

    Shares memory with a contiguous CPU tensor; copies any other.

    Raises:
        InvalidBatch: the element type cannot be sent, or the tensor has no plain memory (sparse, meta).
    """
    if tensor.dtype not in TO_WIRE or tensor.layout != torch.strided or tensor.is_meta:
        raise InvalidBatch(
            f"column {name!r} cannot be sent: {tensor.dtype}, {tensor.layout}, {tensor.device}; expected a "
            "strided tensor on a real device, of an element type in proto/rolemesh/v1/data.proto"
        )
    plain = tensor.detach().cpu().contiguous()
    octets = plain.reshape(-1).view(torch.uint8).numpy()
    bits: Array = octets.view(f"<u{tensor.dtype.itemsize}").reshape(tuple(plain.shape))
    return bits


def tensor_of(bits: Array, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bits as a tensor of `dtype`; it shares the array's memory."""
    return torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(dtype).reshape(bits.shape)


def element_bits(value: int, dtype: torch.dtype) -> int:
    """Return the bits that represent `value` as an element of `dtype`."""
    octets = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(octets, "little")
