"""Recognises errors after which a process can no longer use its device.

After an illegal address, a failed assert in a kernel or an Xid, the CUDA context of the process is broken.
Every later call of the device fails, whatever it computes. Only a new process gets a new context. Other errors
of CUDA leave it intact: no memory, an input that is too large for a kernel, no kernel for this GPU.

A kernel runs after the call that launched it has returned. So any later call may report its failure, and often
that is a matrix product.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.distributed as dist

from rolemesh.errors import chain

EXIT_CODE = 74  # of a process whose device is broken; EX_IOERR of sysexits.h

# The errors after which "the process must be terminated and relaunched" (NVIDIA, CUDA runtime API, cudaError_t:
# 700, 702, 710, 714 to 719), in CUDA's words.
BREAKING = (
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
)
# How errors of CUDA's libraries, of its driver and of Triton's kernels begin. They have no class of their own.
# The first is of cuBLAS and cuSPARSE, and of extensions; cuDNN's frontend computes attention.
OF_LIBRARIES = (
    "CUDA error: ",
    "CUDA driver error",
    "cuDNN error",
    "cuDNN Frontend error",
    "cusolver error",
    "cuFFT error",
    "Triton Error [CUDA]",
)
# How NCCL names an error of CUDA. Only then may the device be asked: if another rank is gone, to wait for the
# device could wait for ever for a collective. The word alone also stands in paths and in C++ stack traces.
OF_NCCL = re.compile(r"\bcuda (?:error|failure|function)", re.IGNORECASE)

_tell: Callable[[str], None] | None = None  # one for the process, since the process has one context


def when_broken(tell: Callable[[str], None] | None) -> None:
    """Set what to call, on the thread of the failed call, once the device is broken; None: nothing.

    Args:
        tell: takes the description of the error. It should end the process soon.
    """
    global _tell
    _tell = tell


def device_answers() -> bool:
    """Wait for the device to finish. Return True if that succeeds, i.e. its context is not broken."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def error_of_device(error: BaseException, answers: Callable[[], bool] = device_answers) -> RuntimeError | None:
    """Return the error that broke the device, if it is this one or one that led to it; else None.

    Args:
        error: any error of a call.
        answers: returns whether the device still works, for errors that are not in BREAKING. ECC and NVLink
            errors, for example, may or may not break the context. cuBLAS reports a broken context and a lack of
            memory by the same exception.
    """
    for each in chain(error):
        if _is_of_device(each) and (any(words in str(each) for words in BREAKING) or not answers()):
            return each
    return None


def _is_of_device(error: BaseException) -> TypeGuard[RuntimeError]:
    if dist.is_available() and isinstance(error, dist.DistBackendError):  # NCCL, another rank, or the network
        return OF_NCCL.search(str(error)) is not None
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith(OF_LIBRARIES)
    )


def report(error: BaseException, who: str) -> None:
    """Report an error if it broke the device.

    Args:
        error: any error of a call.
        who: whose call it was.
    """
    if _tell is not None and (broken := error_of_device(error)) is not None:
        text = str(broken).partition("\n")[0]  # then advice on debugging, the same for every error
        _tell(f"the device of {who} is broken, and only a new process can use it again: {text}")
