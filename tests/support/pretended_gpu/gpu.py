"""The GPU itself: the modes under which threads compute on it, and what torch says of it meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretended_gpu import attention
from pretended_gpu.backward import run_backward
from pretended_gpu.operations import Operation, check_devices, count
from pretended_gpu.record import Backward, Record, where
from pretended_gpu.tensors import CUDA, GpuTensor, held, on_gpu
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

W = TypeVar("W", bound=LocalWorker)


class _Stream:
    """The only stream, or a mark in it. Whatever was begun has ended, but who waits for it is counted."""

    def __init__(self, work: Record) -> None:
        self._work = work

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self._work.add("wait", "synchronize")


# What torch.cuda answers: one Hopper.
ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "is_bf16_supported": lambda *_, **__: True,
    "get_device_capability": lambda *_: (9, 0),
    "get_device_properties": lambda *_: SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30),
    "max_memory_allocated": lambda *_: 3 << 30,
    "max_memory_reserved": lambda *_: 4 << 30,
    "empty_cache": lambda: None,
    "is_current_stream_capturing": lambda: False,
    "_lazy_init": lambda: None,
}


class PretendedGpu(TorchDispatchMode):
    """Runs the operations of a thread on the CPU, keeps CUDA's rules, and records what a GPU would have done.

    Attributes:
        record: of all threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._calls = _Calls(self)

    # ------------------------------------------------------------------------------- who computes on it

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let this thread compute on the GPU within the context."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def worker(self, make: Callable[..., W], *args: Any) -> Iterator[W]:
        """Make a worker on a thread of its own that computes on the GPU, as make(*args, worker_context)."""
        thread = ComputingThread("pretended")
        thread.submit(self._begin).result()
        made: W | None = None
        try:
            made = thread.submit(make, *args, WorkerContext(thread)).result()
            yield made
        finally:
            thread.submit(self._end).result()
            thread.shutdown() if made is None else made.close()

    def _begin(self) -> None:
        # torch.tensor(…, device="cuda") makes a tensor on the CPU, and copies it.
        torch._C._set_only_lift_cpu_tensors(True)
        self.__enter__()
        self._calls.__enter__()

    def _end(self) -> None:
        self._calls.__exit__(None, None, None)
        self.__exit__(None, None, None)
        torch._C._set_only_lift_cpu_tensors(False)

    # ------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation, kwargs = _operation(func), kwargs or {}
        if operation.is_composite:  # in inference mode it comes here whole
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
        device = kwargs.get("device")
        makes_here = bool(here) if device is None else torch.device(device).type == "cuda"
        if not here and not makes_here:
            kwargs.pop("pin_memory", None)  # only a driver can pin
            return func(*args, **kwargs)
        check_devices(operation, args, tensors)
        Backward.note_forward()
        count(self.record, operation, args, kwargs, makes_here)
        given = held(kwargs)
        given.pop("pin_memory", None)
        if device is not None and makes_here:
            given["device"] = torch.device("cpu")
        run = attention.KERNELS.get(operation.name, func)
        result = run(*held(args), **given)
        if operation.writes:
            return operation.written(args, kwargs)
        if operation.is_view and not here[0].is_inference():
            with torch.inference_mode(False):  # a view is of the kind of its base
                return on_gpu(result)
        return on_gpu(result) if makes_here else result

    def launch(self, kernel: str, way: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Run a function of tensors on the CPU as one kernel.

        Args:
            kernel: of attention.
            way: forward or backward.
        """
        self.record.add("attention", f"{kernel} {way}")
        self.record.add("kernel", f"attention {kernel}")
        return on_gpu(function(*held(tensors)))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute F.scaled_dot_product_attention by the kernel that CUDA would take."""
        assert not dropout_p, "Rolemesh has no dropout"
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (x.to(dtype) for x in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        shares = enable_gqa and query.shape[-3] != key.shape[-3]
        assert shares or query.shape[-3] == key.shape[-3], "heads that share keys need enable_gqa"
        kernel = attention.kernel_for(query, key, value, attn_mask, shares)
        if kernel == "math":
            self.record.add("attention", "math forward")
            op = torch.ops.aten._scaled_dot_product_attention_math
            output: Tensor = op(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=shares)[0]
            return output
        bias = attention.bias_of(query, key, held(attn_mask), is_causal)
        launch = functools.partial(self.launch, kernel)
        fused: Tensor = attention.Fused.apply(query, key, value, launch, bias, attention.scale_of(query, scale))
        return fused


@functools.cache
def _operation(func: Any) -> Operation:
    return Operation.of(func)


class _Calls(TorchFunctionMode):
    """Python's calls of torch that a dispatch mode does not see, or sees too late."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], GpuTensor):
            if func is F.scaled_dot_product_attention:
                return self._gpu.attend(*args, **kwargs)
            if func is Tensor.tolist:
                return args[0].detach().cpu().tolist()
            if func in (Tensor.numpy, Tensor.__array__):
                raise TypeError(f"can't convert cuda:0 device type tensor to numpy, at {where()}")
        if "autocast" in getattr(func, "__name__", ""):
            return func(*args, **kwargs)
        # Without a number a device is the current one, for which C++ would ask the driver.
        return func(*map(_numbered, args), **{key: _numbered(value) for key, value in kwargs.items()})


def _numbered(value: Any) -> Any:
    is_cuda = (
        value == "cuda" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cuda"
    )
    return CUDA if is_cuda else value


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """Have a GPU in this process within the context.

    Only the threads of its workers, and those in `here`, compute on it.
    """
    torch._C._ensureCUDADeviceGuardSet()
    gpu = PretendedGpu()
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in ANSWERS.items():
            patch.setattr(torch.cuda, name, answer)
        for name in ("current_stream", "Event"):
            patch.setattr(torch.cuda, name, lambda *_, **__: _Stream(gpu.record))
        plain = torch.autograd.backward
        patch.setattr(torch.autograd, "backward", functools.partial(run_backward, plain))
        # clip_grad_norm_ and AdamW have kernels for lists of tensors, but only of these types.
        patch.setattr(
            _foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, GpuTensor]
        )
        yield gpu
