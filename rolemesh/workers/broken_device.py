"""Tells errors after which a process cannot use its device any more from all others.

After an illegal address, a failed assert in a kernel or an Xid, the CUDA context of the process is broken.
Every later call of the device fails, whatever it computes. Only a new process gets a new context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rolemesh.errors import chain

EXIT_CODE = 74  # of a process whose device is broken; EX_IOERR of sysexits.h

_tell: Callable[[str], None] | None = None  # of the process, since the context is the process's


def when_broken(tell: Callable[[str], None] | None) -> None:
    """Set what to call, on the thread of the failed call, once the device is broken; None: nothing.

    Args:
        tell: takes the description of the error. It should end the process soon.
    """
    global _tell
    _tell = tell


def error_of_device(error: BaseException) -> torch.AcceleratorError | None:
    """Return the error that broke the device, if it is this one or one that led to it; else None.

    Memory that is full breaks nothing: neither torch.OutOfMemoryError nor CUDA's own error "out of memory".
    """
    for each in chain(error):
        if isinstance(each, torch.AcceleratorError) and "out of memory" not in str(each):
            return each
    return None


def report(error: BaseException, who: str) -> None:
    """Report an error, if it broke the device.

    Args:
        error: any error of a call.
        who: whose call it was.
    """
    if _tell is not None and (broken := error_of_device(error)) is not None:
        text = str(broken).partition("\n")[0]  # then advice on debugging, the same for every error
        _tell(f"the device of {who} is broken, and only a new process can use it again: {text}")
