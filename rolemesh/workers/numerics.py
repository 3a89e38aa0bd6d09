"""Settings of a process of roles before CUDA starts: its allocator, and the order and type of its sums."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads either, at CUDA's first use
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it when it starts
_UNORDERED = re.compile(r"(\S+) does not have a deterministic implementation")


def prepare_device(roles: Sequence[str], job: JobConfig) -> None:
    """Set this process up for the roles that it will load. Call it before anything uses CUDA.

    Products of float32 are computed in float32, not in TF32. With trainer.deterministic every kernel adds in a
    fixed order, and a kernel that cannot raises an error (kernel_without_order).
    """
    os.environ.update(allocator_settings(roles, job, os.environ))
    torch.set_float32_matmul_precision("highest")
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = False
    for part in (cudnn.conv, cudnn.rnn):
        part.fp32_precision = "ieee"  # else that of torch.backends.fp32_precision, if the process has set it
    if job.trainer.deterministic:
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        # every element is written before it is read
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def device_prepared(roles: Sequence[str], job: JobConfig) -> Iterator[None]:
    """Set up a process that has other uses, too, as `prepare_device` does; restore its settings afterwards."""
    variables = {name: os.environ.get(name) for name in (ALLOCATOR[0], WORKSPACE)}
    ordered = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    restore_precision = _precision()
    try:
        prepare_device(roles, job)
        yield
    finally:
        torch.use_deterministic_algorithms(ordered, warn_only=only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        restore_precision()
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)


def _precision() -> Callable[[], None]:
    """Return a function that restores the precision of float32 products as it is now.

    torch refuses to read an older setting (allow_tf32) if the newer (fp32_precision) contradict it. Such a
    setting is left as it is. Restoring pins what was inherited: a part that followed
    torch.backends.fp32_precision then has that value as its own.
    """
    backends: Any = torch.backends
    newer = [backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    given = [each.fp32_precision for each in newer]
    older: list[Callable[[], None]] = []
    with suppress(RuntimeError):
        older.append(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    with suppress(RuntimeError):
        older.append(partial(setattr, backends.cudnn, "allow_tf32", backends.cudnn.allow_tf32))

    def restore() -> None:
        for restore_older in older:
            restore_older()
        for each, precision in zip(newer, given, strict=True):
            each.fp32_precision = precision

    return restore


def allocator_settings(roles: Sequence[str], job: JobConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch's allocator for a process of these roles; a setting of the user's stays.

    Micro-batches differ in size. In processes with trained roles segments can grow, so that a micro-batch can
    reuse the memory of the one before. vLLM cannot sleep with such segments, so its processes have none.
    """
    vllm = "rollout" in roles and job.engine.reserves_memory
    if vllm or not any(ROLES[role].trained for role in roles) or any(name in environment for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def kernel_without_order(error: BaseException) -> str:
    """Return the kernel that an error names as not deterministic; empty: it is another error."""
    found = _UNORDERED.search(str(error)) if isinstance(error, RuntimeError) else None
    return found[1] if found else ""


def running_sums(rows: Tensor) -> Tensor:
    """Compute the cumulative sums of each row [B, V], in a fixed order.

    torch has no deterministic cumsum on CUDA, because it adds up a single long row in any order. With several
    rows, one block of threads adds up each row, in a fixed order.
    """
    if not (rows.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return rows.cumsum(-1)
    with _unordered_kernels():
        return torch.cat([rows, rows[:1]]).cumsum(-1)[:-1]


@contextmanager
def _unordered_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)
