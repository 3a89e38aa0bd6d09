"""Landlock: a process names the files that it needs, and permanently loses access to all others.

It needs Linux 5.13 and no privilege: https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

# the same on x86_64 and aarch64
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
RULESET_VERSION = 1
PATH_BENEATH = 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
PR_SET_NO_NEW_PRIVS = 38

# All rights that can be forbidden, by the version of the ABI that introduced them. All rights that the kernel
# knows are forbidden: files (execute, write, read, remove, make …; link and rename to another directory;
# truncate; ioctl of a device), TCP (bind, connect), and other processes (abstract Unix sockets, signals).
FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
TCP = {4: 0b11}
SCOPES = {6: 0b11}

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Return the kernel's version of the ABI; 0: no Landlock, or it is disabled."""
    return max(0, int(_libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), RULESET_VERSION)))


def restrict_to_reading(paths: Iterable[str], *, listed: Iterable[str]) -> None:
    """Restrict this process and its children to reading from now on.

    They can read files, and list directories, at or beneath `paths`. At or beneath `listed` they can only list
    directories. They cannot write, create, remove or execute any file. Open files stay open.

    Raises:
        OSError: there is no Landlock, or it refuses. Then no access is restricted.
    """
    version = abi()
    if not version:
        raise OSError("the kernel has no Landlock (Linux 5.13 or newer, with landlock among its LSMs)")
    fields = [_latest(FILES, version)]
    fields += [_latest(TCP, version)] * (version >= 4) + [_latest(SCOPES, version)] * (version >= 6)
    attribute = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = _call(CREATE_RULESET, attribute, ctypes.c_size_t(len(attribute)), 0)
    rules = [(path, READ_FILE | (READ_DIR if os.path.isdir(path) else 0)) for path in paths]
    for path, allowed in (*rules, *((path, READ_DIR) for path in listed)):
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
        os.close(beneath)
    no_new_privileges()
    _call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def no_new_privileges() -> None:
    """Prevent executed programs from gaining rights; the kernel requires this before other restrictions."""
    if _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")


def _latest(by_abi: dict[int, int], version: int) -> int:
    return max(mask for since, mask in by_abi.items() if since <= version)


def _call(number: int, *args: object) -> int:
    result = int(_libc.syscall(number, *args))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock (system call {number}): {os.strerror(error)}")
    return result
