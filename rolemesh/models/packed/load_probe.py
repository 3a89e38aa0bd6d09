"""Try a model as its role runs it when the role loads it, before anything is generated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rolemesh.config.model import ModelConfig
from rolemesh.dataproto.transfer import on_device
from rolemesh.errors import InvalidConfig
from rolemesh.models.packed.attention import KERNEL_TYPES, PACKED, NoKernel, check_capability
from rolemesh.models.packed.layout import pack
from rolemesh.models.sequence import DTYPES, autocast

# Largest difference of a token's hidden state, relative to the mean norm, by the type of matrix products.
TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}

COMMON = 3  # number of tokens that the probe's two rows have in common

# Errors of the machine, which say nothing about the architecture. Those of CUDA's libraries, of its driver, of
# a CPU's allocator and of a connection between ranks have no class of their own.
OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
WORDS_OF_THE_MACHINE = ("CUDA error", "CUDA driver error", "DefaultCPUAllocator", "gloo/transport")


def prepare_body(body: Any, role: str, config: ModelConfig) -> None:
    """Test that a model is causal. With use_remove_padding also run remove_padding on it.

    Args:
        body: as remove_padding's.
        role: for the message.
        config: its section, with `auto` decided.

    Raises:
        InvalidConfig: it is not causal, or its numbers are not finite; or as remove_padding.
    """
    if config.use_remove_padding:
        remove_padding(body, role, config.dtype)
        return
    for kind in _kinds(body, config.dtype):
        _padded(body, role, config.dtype, kind)


def remove_padding(body: Any, role: str, dtype: str = "float32") -> None:
    """Switch a model to packed attention, and test that it works where and as the role computes.

    The test lays two short rows with a common prefix end to end; they must give the same numbers as separately.
    It detects every architecture in which tokens interact outside of transformers' attention interface, and
    runs the kernel that later passes run. If all weights are float32, and no shards, it compares in float32 as
    well: rounding in a narrower type hides a faint influence, as of positions on nearly uniform attention.
    Every rank of a role calls it, within a call of its Root.

    Args:
        body: a transformers model without its head, on the role's device.
        role: for the message.
        dtype: in which the role computes, a ModelConfig's with `auto` decided.

    Raises:
        InvalidConfig: without padding the model gives other numbers or an error; or the device has no kernel
            for it; or it is not causal, or its numbers are not finite. The message says what to set.
        torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError: the machine failed, not the model.
    """
    attention = body.config._attn_implementation
    for kind in _kinds(body, dtype):
        body.set_attn_implementation(attention)
        _compare(body, role, dtype, kind)


def _kinds(body: Any, dtype: str) -> list[str]:
    """Return the types to try a model in."""
    exact = dtype != "float32" and all(map(_is_whole_float32, body.parameters()))
    return [dtype, "float32"] if exact else [dtype]


def _is_whole_float32(weight: Tensor) -> bool:
    """Return whether only autocast makes it narrow. Shards are gathered in the narrow type."""
    return weight.dtype == torch.float32 and not isinstance(weight, DTensor)


def _compare(body: Any, role: str, dtype: str, kind: str) -> None:
    """Compare passes of a model in `kind`, and switch it to packed attention; `dtype` is for messages."""
    device = _device(body)
    rows = probe_rows()
    expected = _padded(body, role, dtype, kind)
    key = f"{role}.model.use_remove_padding"
    with torch.no_grad(), autocast(device, kind):
        try:
            if device.type == "cuda" and DTYPES[kind] in KERNEL_TYPES:
                check_capability(torch.cuda.get_device_capability(device))
            body.set_attn_implementation(PACKED)
            inputs, places = on_device(pack(*rows, device), device)
            found = body(**inputs, use_cache=False).last_hidden_state[0][places[rows[1].to(device)]]
            if not are_close(found, expected, TOLERANCE[kind]):
                raise InvalidConfig("rows laid end to end change each other's numbers")
        except NoKernel as error:
            raise InvalidConfig(
                f"{key} is true and {role}.model.dtype is {dtype}, but {error}; set {key} to false, or "
                f"{role}.model.dtype to float32"
            ) from error
        except (InvalidConfig, RuntimeError, TypeError, ValueError) as error:
            if is_of_the_machine(error):
                raise
            raise InvalidConfig(
                f"{key} is true, but {type(body).__name__} cannot run without padding ({error}); set it to "
                "false"
            ) from error


def _padded(body: Any, role: str, dtype: str, kind: str) -> Tensor:
    """Compute the hidden states of the probe's tokens with padding, and check them.

    Returns:
        [tokens, H], row after row.
    """
    ids, mask, positions = on_device(probe_rows(), _device(body))
    with torch.no_grad(), autocast(ids.device, kind):
        output = body(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    if not hidden[mask].isfinite().all():
        raise InvalidConfig(
            f"{role}: {type(body).__name__} gives numbers that are not finite, with {role}.model.dtype "
            f"{dtype}: its weights are damaged, or too large for this type"
        )
    if not are_close(hidden[0, :COMMON], hidden[1, :COMMON], TOLERANCE[kind]):
        raise InvalidConfig(
            f"{role}.model.path: {type(body).__name__} is not a causal model: a token's numbers depend on the "
            "tokens after it. Policies, critics and reward models need a causal one"
        )
    return hidden[mask]


def _device(body: Any) -> torch.device:
    """Return the device of a model; with offloaded shards its embedding is the first to be gathered there."""
    device: torch.device = body.get_input_embeddings().weight.device
    return device


def probe_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Make two rows whose first COMMON tokens are equal.

    Returns:
        Tokens, mask (bool) and positions, [2, 7] each.
    """
    columns = torch.arange(7)
    mask = columns < torch.tensor([[7], [4]])
    ids = torch.where(torch.tensor([[False], [True]]) & (columns == COMMON), 5, columns)
    return ids, mask, columns.expand(2, 7)


def are_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether each hidden state [n, H] is as expected, up to this part of their mean norm.

    Of the mean, since the token that a model pads with may have a hidden state of 0. NaN is never close.
    """
    distances = torch.linalg.vector_norm((found - expected).float(), dim=-1)
    return bool((distances <= tolerance * torch.linalg.vector_norm(expected.float(), dim=-1).mean()).all())


def is_of_the_machine(error: Exception) -> bool:
    """Return whether the machine failed: no memory, a broken or missing device, a lost rank."""
    return isinstance(error, OF_THE_MACHINE) or any(words in str(error) for words in WORDS_OF_THE_MACHINE)
