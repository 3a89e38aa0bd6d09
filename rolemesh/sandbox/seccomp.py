"""seccomp: allows only the system calls that a computation needs.

It needs no privilege: https://docs.kernel.org/userspace-api/seccomp_filter.html.

The list names the allowed calls, not the forbidden ones, so calls that nobody thought of (io_uring, keyrings,
the scheduling of another process, …) are refused. A refused call fails with EPERM, which Python raises as
PermissionError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

# Name: (number on x86_64, number on aarch64); None: the architecture does not have the call.
COMPUTE: dict[str, tuple[int | None, int | None]] = {
    # open files, and the search for files to read
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "getcwd": (79, 17), "readlink": (89, None), "readlinkat": (267, 78),
    "getdents64": (217, 61), "newfstatat": (262, 79), "statx": (332, 291), "faccessat": (269, 48),
    "faccessat2": (439, 439), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233),
    # threads and this process
    "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "membarrier": (324, 283), "gettid": (186, 178),
    "arch_prctl": (158, None), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "exit": (60, 93),
    "exit_group": (231, 94),
    "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "uname": (63, 160), "times": (100, 153),
    # time and random numbers
    "time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "getrandom": (318, 278),
}  # fmt: skip
OPEN = (2, None)
OPENAT = (257, 56)
CLONE = (56, 220)
CLONE3 = (435, 435)
FCNTL = (72, 25)
PRLIMIT64 = (302, 261)

CLONE_THREAD = 0x10000
TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
F_DUPFD = 0
F_GETFD = 1
F_SETFD = 2
F_GETFL = 3
F_DUPFD_CLOEXEC = 1030

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000
LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_ANY_BIT = 0x45
RETURN = 0x06
AT_NUMBER = 0
AT_ARCH = 4
AT_ARGUMENTS = 16
PR_SET_SECCOMP = 22
MODE_FILTER = 2

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

_libc = ctypes.CDLL(None, use_errno=True)


def allow_computing_only() -> None:
    """Allow this process only to compute: to use its open files, to read files, and to start threads.

    It cannot open a file for writing, start a process, create a socket, send a signal or execute a program. It
    cannot change another process, a file's permissions or a file's name. PR_SET_NO_NEW_PRIVS must be set.

    Raises:
        OSError: the kernel refuses, or there is no list for the machine's architecture.
    """
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in _program(platform.machine()))
    text = ctypes.create_string_buffer(program, len(program))
    pointer = ctypes.cast(text, ctypes.c_void_p).value
    header = struct.pack("HL", len(program) // 8, pointer)
    if _libc.prctl(PR_SET_SECCOMP, MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _program(machine: str) -> list[Instruction]:
    if machine not in AUDIT_ARCH:
        raise OSError(f"no list of system calls for {machine}; there are lists for {', '.join(AUDIT_ARCH)}")
    column = list(AUDIT_ARCH).index(machine)
    program = [
        (LOAD, 0, 0, AT_ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),  # another mode of the processor has other call numbers
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, AT_NUMBER),
    ]
    for numbers in COMPUTE.values():
        program += _when(numbers[column], [(RETURN, 0, 0, ALLOW)])
    refused = ERRNO | errno.EPERM
    for numbers, argument in ((OPEN, 1), (OPENAT, 2)):
        program += _when(numbers[column], _by_bits(argument, TO_WRITE, refused, ALLOW))
    program += _when(CLONE[column], _by_bits(0, CLONE_THREAD, ALLOW, refused))
    # A filter cannot read clone3's flags, which are in memory. On ENOSYS the C library uses clone instead.
    program += _when(CLONE3[column], [(RETURN, 0, 0, ERRNO | errno.ENOSYS)])
    # With F_SETOWN and F_SETFL a pipe could send signals to other processes.
    commands = (F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC)
    program += _when(FCNTL[column], _if_one_of(1, commands, refused))
    program += _when(PRLIMIT64[column], _if_one_of(0, (0,), refused))  # only its own limits
    return [*program, (RETURN, 0, 0, refused)]


def _when(number: int | None, block: list[Instruction]) -> list[Instruction]:
    """Run the block for one system call. Every block must end with a return."""
    return [] if number is None else [(JUMP_EQUAL, 0, len(block), number), *block]


def _by_bits(argument: int, bits: int, if_any: int, if_none: int) -> list[Instruction]:
    return [
        (LOAD, 0, 0, AT_ARGUMENTS + 8 * argument),
        (JUMP_ANY_BIT, 0, 1, bits),
        (RETURN, 0, 0, if_any),
        (RETURN, 0, 0, if_none),
    ]


def _if_one_of(argument: int, values: tuple[int, ...], otherwise: int) -> list[Instruction]:
    tests = [(JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    load = (LOAD, 0, 0, AT_ARGUMENTS + 8 * argument)
    return [load, *tests, (RETURN, 0, 0, otherwise), (RETURN, 0, 0, ALLOW)]
