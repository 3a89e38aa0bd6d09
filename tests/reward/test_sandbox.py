"""The sandbox: whatever a program does, it fails, nothing is left of it, and the next one is answered."""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rolemesh.sandbox.box import ProgramLimits, ProgramResult, Sandbox, SandboxUnavailable

LIMITS = ProgramLimits(cpu_s=2, wall_s=3.0, memory_bytes=512 << 20, output_bytes=1 << 20)
ADDS = "a, b = map(int, input().split())\nprint(a + b)\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox()
    yield box
    box.close()


def session_of(box: Sandbox) -> list[int]:
    """Processes of the sandbox's session. No program can leave it: there is no setsid for one."""
    assert box._process is not None
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.getsid(pid) == box._process.pid:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def attempt(box: Sandbox, program: str, stdin: str = "", limits: ProgramLimits = LIMITS) -> ProgramResult:
    """What a program comes to; then nothing of it runs, and a right program passes in the same sandbox."""
    assert box.run(ADDS, "1 2\n", LIMITS) == ProgramResult(0, "3\n")
    assert box._process is not None
    pid = box._process.pid
    outcome = box.run(program, stdin, limits)
    assert box._process.pid == pid, "the sandbox's own process was lost"
    assert session_of(box) == [pid]
    assert box.run(ADDS, "20 22\n", LIMITS) == ProgramResult(0, "42\n")
    return outcome


def refused(box: Sandbox, *statements: str) -> None:
    """None of the statements is permitted: the program itself says so, and no other mistake passes for it."""
    tries = "".join(f"try:\n    {each}\nexcept PermissionError:\n    print('refused')\n" for each in statements)
    program = f"import ctypes, mmap, os, resource, signal, socket, subprocess, threading\n{tries}"
    assert attempt(box, program) == ProgramResult(0, "refused\n" * len(statements))


# ------------------------------------------------------------------------- time, memory, processes


def test_an_endless_loop_ends_with_its_cpu_seconds(sandbox: Sandbox) -> None:
    outcome = attempt(sandbox, "while True: pass", limits=replace(LIMITS, cpu_s=1, wall_s=60.0))
    assert outcome == ProgramResult(-signal.SIGKILL, "")


def test_sleep_past_the_wall_time_ends_despite_ignored_signals(sandbox: Sandbox) -> None:
    program = (
        "import signal, time\n"
        "for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except OSError: pass\n"
        "print('asleep', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    outcome = attempt(sandbox, program, limits=replace(LIMITS, wall_s=2.5))  # enough to begin on a busy machine
    assert outcome == ProgramResult(-signal.SIGKILL, "asleep\n")


def test_a_program_that_oversleeps_ends_before_the_wall_time(
    sandbox: Sandbox,
) -> None:
    outcome = attempt(sandbox, "import time; time.sleep(600)", limits=replace(LIMITS, wall_s=600.0, idle_s=0.5))
    assert outcome.status == -signal.SIGKILL
    assert outcome.idle_s >= 0.5


def test_ten_gigabytes_are_not_to_be_had(sandbox: Sandbox) -> None:
    assert attempt(sandbox, "x = bytearray(10 << 30)") == ProgramResult(1, "")
    assert attempt(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 20))").status != 0


def test_a_fork_bomb_makes_no_process(sandbox: Sandbox) -> None:
    refused(sandbox, "os.fork()", "subprocess.run(['/bin/true'])", "os.execv('/bin/true', ['true'])")
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    assert attempt(sandbox, bomb, limits=replace(LIMITS, cpu_s=1)).status == -signal.SIGKILL


def test_a_daemon_is_not_made(sandbox: Sandbox) -> None:
    refused(sandbox, "os.setsid()")
    daemon = (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass\n"
    )
    assert attempt(sandbox, daemon) == ProgramResult(1, "")


def test_threads_are_to_be_had_but_not_without_end(sandbox: Sandbox) -> None:
    deep = (
        "import threading\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "threading.stack_size(128 << 20)\n"
        "t = threading.Thread(target=lambda: print(f(50_000)))\nt.start()\nt.join()\n"
    )
    assert attempt(sandbox, deep) == ProgramResult(0, "50000\n")
    bomb = (
        "import os, threading\nthreading.stack_size(32 << 10)\nn = 0\nlock = threading.Lock()\nlock.acquire()\n"
        "try:\n    while True:\n        threading.Thread(target=lock.acquire, daemon=True).start()\n"
        "        n += 1\n"
        "except RuntimeError: print(n, flush=True)\nos._exit(0)\n"
    )
    outcome = attempt(sandbox, bomb, limits=replace(LIMITS, cpu_s=10, wall_s=20.0, memory_bytes=4 << 30))
    assert outcome.status == 0
    assert int(outcome.output) < 600  # 512, and as many as the user's other programs have ended meanwhile


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    program = (
        "import resource\n"
        "for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):\n"
        "    try: resource.setrlimit(limit, (1 << 40, 1 << 40))\n"
        "    except (ValueError, OSError): print('refused')\n"
    )
    assert attempt(sandbox, program) == ProgramResult(0, "refused\n" * 3)


# ------------------------------------------------------------------------------------- files


def test_no_file_but_the_interpreters_is_read(sandbox: Sandbox, tmp_path: Path) -> None:
    open_to_all = tmp_path / "secret"
    open_to_all.write_text("secret")
    folders = (Path.home(), Path("/"), Path("/proc"), Path("/etc"), tmp_path, Path(__file__).parent)
    files = (open_to_all, Path("/etc/passwd"), Path("/proc/self/environ"), Path(__file__))
    refused(sandbox, *(f"os.listdir({str(path)!r})" for path in folders))
    refused(sandbox, *(f"open({str(path)!r}).read()" for path in files))


def test_a_link_shows_its_target_and_nothing_inside_it(sandbox: Sandbox) -> None:
    """Python needs that: without readlink, inspect.stack and os.path.realpath raise PermissionError."""
    refused(sandbox, "os.listdir('/proc/self/cwd')", "open('/proc/self/cwd/etc/passwd').read()")
    program = (
        "import inspect, os\nprint(os.readlink('/proc/self/cwd'), os.path.realpath('/proc/self/cwd'))\n"
        "print([frame.function for frame in inspect.stack()][0])\n"
    )
    assert attempt(sandbox, program) == ProgramResult(0, "/ /\n<module>\n")


def test_installed_packages_are_not_readable(sandbox: Sandbox) -> None:
    packages = Path(sys.base_prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}")
    installed = next((packages / "site-packages").rglob("*.py"), None)
    if installed is None:
        pytest.skip("the interpreter has nothing installed")
    there = str(installed.relative_to(packages))
    refused(sandbox, f"open(os.path.join(os.path.dirname(os.__file__), {there!r})).read()")


def test_the_environment_is_empty_and_no_file_is_inherited(sandbox: Sandbox) -> None:
    program = (
        "import os\nprint(dict(os.environ))\n"
        "for number in range(3, 200):\n"
        "    try: os.read(number, 1) if not os.path.isdir(f'/proc/self/fd/{number}') else None\n"
        "    except OSError: continue\n"
        "    else: print('open' if not os.path.isdir(f'/proc/self/fd/{number}') else 'directory')\n"
    )
    outcome = attempt(sandbox, program)
    assert (outcome.status, outcome.output.splitlines()[0]) == (0, "{}")
    assert "open" not in outcome.output.splitlines()


def test_nothing_is_written_made_or_changed_anywhere(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    mine.chmod(0o666)
    there, new = repr(str(mine)), repr(str(tmp_path / "new"))
    statements = (
        f"open({there}, 'w')", f"open({there}, 'a')", f"open({new}, 'w')", "open('here', 'w')",
        "open('/tmp/made-by-a-program', 'w')", "open('/dev/shm/made-by-a-program', 'w')",
        f"os.truncate({there}, 0)", f"os.unlink({there})", f"os.rename({there}, {new})", f"os.mkdir({new})",
        f"os.symlink('/', {new})", f"os.link({there}, {new})", f"os.chmod({there}, 0)",
        f"os.utime({there})", f"os.setxattr({there}, 'user.x', b'1')", f"os.mkfifo({new})",
        "os.memfd_create('x')", "os.chdir('/')",
    )  # fmt: skip
    refused(sandbox, *statements)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert mine.read_text() == "mine"


def test_the_disk_is_not_filled_and_a_flood_of_output_is_cut(sandbox: Sandbox) -> None:
    attempt(sandbox, "import os\ni = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').write('x' * 10**6); i += 1\n")
    flood = "while True: print('x' * 10_000)\n"
    outcome = attempt(sandbox, flood, limits=replace(LIMITS, output_bytes=100_000))
    assert outcome.status != 0
    assert len(outcome.output) <= 100_000
    stubborn = (
        "import os\nwhile True:\n    try: os.write(1, b'x' * 10_000)\n"
        "    except OSError: os.lseek(1, 10**9, 0)\n"
    )
    outcome = attempt(sandbox, stubborn, limits=replace(LIMITS, output_bytes=100_000, cpu_s=1))
    assert outcome.status == -signal.SIGKILL
    assert len(outcome.output) <= 100_000


# ------------------------------------------------------------------------- the network, and others


def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        refused(sandbox, f"socket.create_connection(('127.0.0.1', {port}))")
        listening.settimeout(0)
        with pytest.raises(BlockingIOError):
            listening.accept()
    kinds = ("AF_INET, socket.SOCK_DGRAM", "AF_INET6", "AF_UNIX", "AF_NETLINK, socket.SOCK_RAW")
    refused(sandbox, *(f"socket.socket(socket.{kind})" for kind in kinds), "socket.socketpair()")


def test_no_other_process_is_reached(sandbox: Sandbox) -> None:
    attempt(sandbox, "print('begun')")
    assert sandbox._process is not None
    pids = ("os.getppid()", str(sandbox._process.pid), str(os.getpid()), "-1", "0")
    refused(
        sandbox,
        *(f"os.kill({pid}, signal.SIGKILL)" for pid in pids),
        "os.pidfd_open(os.getppid())",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "open(f'/proc/{os.getppid()}/mem', 'rb')",
    )
    calls = (  # what Python has no name for: PTRACE_ATTACH, io_uring_setup, process_vm_readv, pidfd_getfd, bpf
        "ptrace(16, os.getppid(), 0, 0)", "mount(b'x', b'/tmp', b'tmpfs', 0, 0)", "unshare(0x10000000)",
        "syscall(425, 1, 0)", "syscall(310, os.getppid(), 0, 0, 0, 0, 0)", "syscall(438, 3, 0, 0)",
        "syscall(321, 0, 0, 0)",
    )  # fmt: skip
    failing = "libc = ctypes.CDLL(None, use_errno=True)\n    if libc.{} == -1 and ctypes.get_errno() == 1: "
    refused(sandbox, *(f"{failing.format(call)}raise PermissionError" for call in calls))


def test_standard_input_may_be_closed_or_left_unread(sandbox: Sandbox) -> None:
    assert (
        attempt(sandbox, "import sys, os\nsys.stdin.close()\nos.close(0)\nprint(1)", "x" * 10**6).output
        == "1\n"
    )
    assert attempt(sandbox, "print(2)", "x" * 10**7) == ProgramResult(0, "2\n")
    assert attempt(sandbox, "import os\nos.close(1)\nos.close(2)\n") == ProgramResult(0, "")


def test_a_program_finds_nothing_of_the_one_before_it(sandbox: Sandbox) -> None:
    sandbox.run(
        "import builtins, math\nbuiltins.left = 1\nmath.left = 1\nsecret = 'of-the-first-' + 'program'",
        "",
        LIMITS,
    )
    program = (
        "import builtins, gc, math\nprint(hasattr(builtins, 'left'), hasattr(math, 'left'))\n"
        "print(any('of-the-first-' in o for o in gc.get_objects() if isinstance(o, dict) for o in o.values() "
        "if isinstance(o, str) and o != 'of-the-first-'))\n"
    )
    assert attempt(sandbox, program) == ProgramResult(0, "False False\nFalse\n")


# --------------------------------------------------------------------------- what a program has


def test_a_program_has_the_standard_library_and_is_deterministic(sandbox: Sandbox) -> None:
    program = (
        "import hashlib, decimal, fractions, asyncio.queues, xml.dom.minidom, zoneinfo, random, unicodedata\n"
        "print(hashlib.sha256(b'').hexdigest()[:8], zoneinfo.ZoneInfo('UTC'), random.random())\n"
        "print({'a', 'b', 'c'}, hash('x'))\n"
        "import atexit\natexit.register(lambda: print('last'))\nexit()\n"
    )
    first = attempt(sandbox, program)
    assert first.status == 0
    assert first.output.startswith("e3b0c442 UTC 0.8444218515250481\n")  # random.seed(0)
    assert first.output.endswith("\nlast\n")
    other = Sandbox()
    assert other.run(program, "", LIMITS) == first
    other.close()


def test_a_non_text_program_fails_and_least_memory_is_enough(sandbox: Sandbox) -> None:
    assert attempt(sandbox, "print('\ud800')\n", limits=replace(LIMITS, memory_bytes=64 << 20)).output == "?\n"
    assert attempt(sandbox, "\x00").status == 1
    assert attempt(sandbox, "print(input())", "\ud800").output == "?\n"


def test_a_function_gets_its_arguments_and_prints_are_no_result(sandbox: Sandbox) -> None:
    program = (
        "class Solution:\n    def f(self, xs: List[int], k):\n        print('x')\n        return xs[k], k\n"
    )
    assert sandbox.run(program, "[[4, 5], 1]", LIMITS, function="f") == ProgramResult(0, "[5, 1]")
    assert sandbox.run("def f(): return {1}", "[]", LIMITS, function="f").status == 1
    assert sandbox.run("g = 1", "[]", LIMITS, function="f").status == 1


def test_the_prelude_has_the_streams_of_the_program(sandbox: Sandbox) -> None:
    program = "stdout.write('1\\n')\nprint(2)\nstdout.write(stdin.readline())\nprint(stdin is sys.stdin)"
    assert attempt(sandbox, program, "3\n").output == "1\n2\n3\nTrue\n"
    prints = "def f(x):\n    stdout.write('debug')\n    stderr.write('debug')\n    return x"
    assert sandbox.run(prints, "[5]", LIMITS, function="f") == ProgramResult(0, "5")


# ------------------------------------------------------------------------------ its own end


def test_the_sandbox_and_its_program_end_with_their_parent() -> None:
    """Killed without a chance to clean up, as by the kernel when memory is short."""
    source = (
        "import threading\nfrom rolemesh.sandbox.box import ProgramLimits, Sandbox\n"
        "box = Sandbox()\nbox.run('', '', ProgramLimits())\nprint(box._process.pid, flush=True)\n"
        "box.run('import time; time.sleep(600)', '', ProgramLimits(wall_s=600.0))\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    inside = int(starter.stdout.readline())
    ended = os.pidfd_open(inside)
    children = Path(f"/proc/{inside}/task/{inside}/children")
    while not children.read_text().split():
        os.sched_yield()
    program = os.pidfd_open(int(children.read_text().split()[0]))
    starter.kill()
    starter.wait()
    for process in (ended, program):
        assert wait_for(process), "a process outlived the one that started it"


def wait_for(pidfd: int, timeout_s: float = 100.0) -> bool:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1000))


def test_a_killed_sandbox_says_so_and_is_replaced(sandbox: Sandbox) -> None:
    box = Sandbox()
    assert box.run(ADDS, "1 1", LIMITS).output == "2\n"
    assert box._process is not None
    killing = threading.Timer(0.2, box._process.kill)
    killing.start()
    with pytest.raises(SandboxUnavailable, match="ended with -9"):
        box.run("import time; time.sleep(60)", "", replace(LIMITS, wall_s=60.0))
    assert box.run(ADDS, "1 1", LIMITS).output == "2\n"
    box.close()


def test_without_landlock_no_program_is_run() -> None:
    """Landlock's system calls are taken away by a filter, as a kernel or a runtime without it does."""
    source = (
        "import ctypes, struct\nfrom rolemesh.sandbox import landlock, seccomp\n"
        "landlock.no_new_privileges()\n"
        "program = [(32, 0, 0, 0), (21, 0, 1, 444), (6, 0, 0, 0x50000 | 38), (6, 0, 0, 0x7FFF0000)]\n"
        "code = ctypes.create_string_buffer(b''.join(struct.pack('=HBBI', *i) for i in program))\n"
        "head = struct.pack('HL', 4, ctypes.cast(code, ctypes.c_void_p).value)\n"
        "assert ctypes.CDLL(None).prctl(22, 2, head, 0, 0) == 0\n"
        "from rolemesh.sandbox.box import ProgramLimits, Sandbox, SandboxUnavailable\n"
        "try: print(Sandbox().run('print(1)', '', ProgramLimits()))\n"
        "except SandboxUnavailable as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert ran.stdout == (
        "programs cannot be sandboxed here: the kernel has no Landlock "
        "(Linux 5.13 or newer, with landlock among its LSMs)\n"
    ), ran.stderr


ONE_USER = ("unshare", "--user", "--map-root-user")


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*ONE_USER, "true"], check=False, capture_output=True).returncode != 0,
    reason="ROOT OF ONE USER IS NOT TESTED: no user namespace can be made",
)
def test_root_that_cannot_become_nobody_is_told_so() -> None:
    source = "from rolemesh.sandbox.box import Sandbox\nSandbox().start()"
    command = [*ONE_USER, sys.executable, "-c", source]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "programs cannot be sandboxed here: root cannot become nobody ([Errno 1] Operation" in ran.stderr
    assert ran.stderr.endswith("Run as another user\n")


def test_the_limits_of_the_service_itself_are_untouched(sandbox: Sandbox) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    attempt(sandbox, "print(1)")
    assert resource.getrlimit(resource.RLIMIT_AS) == before
