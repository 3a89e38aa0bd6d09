"""The tool python: it keeps its variables within an episode, and harms no other."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from environments import calling, closing, job_with, opening, turn
from serving import serve_process
from tool_plugins import agent, opened

from rolemesh.methods import methods
from rolemesh.rpc.calling.episodes import EnvironmentClient

LIMITS = {"reward": {"sandbox": {"timeout_s": 2, "memory_limit_mb": 256}}}
FRESH = "(A fresh interpreter: the variables of earlier calls are lost.)\n"


class Talk:
    """An episode whose turns are one call of python each."""

    def __init__(self, client: EnvironmentClient, name: str = "a") -> None:
        self.client, self.name, self.turns = client, name, 0

    async def __call__(self, code: str) -> str:
        self.turns += 1
        answer = await self.client.act(turn(self.name, self.turns, "", calling("python", {"code": code})))
        assert [use.error for use in answer.tools] == [""]
        return answer.messages[0].content


@asynccontextmanager
async def talking(tmp_path: Path, model: Path, **multi_turn: Any) -> AsyncIterator[Talk]:
    settings = {"tools": ["python"], "max_tool_response_length": 100_000, "max_parallel_calls": 4} | multi_turn
    async with agent(tmp_path, model, sections=LIMITS, **settings) as client:
        await opened(client)
        yield Talk(client)


async def test_variables_stay_within_an_episode_and_not_beyond(tiny_model: Path, tmp_path: Path) -> None:
    async with talking(tmp_path, tiny_model) as run:
        assert await run("x = 20\ndef f(n):\n    return n + 1") == "(no output)"
        assert await run("print('is')\nf(x) * 2") == "is\n42\n"
        assert await run("x / 0") == (
            'Traceback (most recent call last):\n  File "<call 3>", line 1, in <module>\n    x / 0\n    ~~^~~\n'
            "ZeroDivisionError: division by zero\n"
        )
        assert (await run("if x")).endswith("    if x\n        ^\nSyntaxError: expected ':'\n")
        assert await run("import math; math.isqrt(x), _") == "(4, 42)\n"
        await opened(run.client, "b")
        other = Talk(run.client, "b")
        assert "NameError: name 'x' is not defined" in await other("x")
        assert await run("x") == "20\n"


async def test_what_is_written_to_standard_error_is_in_the_answer(tiny_model: Path, tmp_path: Path) -> None:
    async with talking(tmp_path, tiny_model) as run:
        assert await run("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)") == "1\n2\n3\n"
        caught = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()"
        assert (await run(caught)).endswith("ZeroDivisionError: division by zero\n")
        assert await run("import logging; logging.warning('hot')") == "WARNING:root:hot\n"
        assert "UserWarning: old" in await run("import warnings; warnings.warn('old')")


async def test_calls_of_one_turn_run_in_their_order(tiny_model: Path, tmp_path: Path) -> None:
    async with talking(tmp_path, tiny_model) as run:
        codes = ("import time; time.sleep(0.2); x = 1", "x = x + 1", "x * 10")
        calls = (calling("python", {"code": code}, id=code) for code in codes)
        answer = await run.client.act(turn("a", 1, "", *calls, calling("python", {"program": "1"})))
    assert [message.content for message in answer.messages] == [
        "(no output)",
        "(no output)",
        "20\n",
        "Error: python takes one argument, code, a text; it got ['program']",
    ]


ATTEMPTS = (
    "os.fork()", "subprocess.run(['/bin/true'])", "os.execv('/bin/true', ['true'])", "os.setsid()",
    "open('/etc/passwd')", "open('/tmp/made-by-a-call', 'w')", "os.listdir('/')", "open('/proc/self/environ')",
    "socket.create_connection(('127.0.0.1', 1))", "socket.socketpair()", "os.kill(os.getppid(), 9)",
    "os.memfd_create('x')", "open(f'/proc/{os.getppid()}/mem', 'rb')", "os.ftruncate(1, 1 << 40)",
)  # fmt: skip


async def test_there_is_no_network_no_file_no_process(tiny_model: Path, tmp_path: Path) -> None:
    async with talking(tmp_path, tiny_model) as run:
        await run("import os, signal, socket, subprocess")
        for attempt in ATTEMPTS:
            said = await run(f"try: {attempt}\nexcept PermissionError: print('refused')")
            assert said == "refused\n", attempt
        bomb = "while True:\n    try: os.fork()\n    except OSError: pass"
        assert "the interpreter has ended: it took " in await run(bomb)


CLOSE = "for i in range(3, 64):\n    try: os.close(i)\n    except OSError: pass\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("while True: pass", "Error: the interpreter has ended: it took "),
        ("exit()", "Error: the interpreter has ended: it ended with status 0. Its variables are lost.\n"),
        (
            "import os; print('so', flush=True); os._exit(3)",
            "so\nError: the interpreter has ended: it ended with",
        ),
        (
            f"import os\nprint('so')\n{CLOSE}",
            "so\nError: the interpreter has ended: it ended with status 1.",
        ),
        (  # it goes on after that
            f"import os\n{CLOSE}for _ in range(10**6): pass\nprint('so')",
            "so\nError: the interpreter has ended: it ended with status 1.",
        ),
    ],
    ids=["loop", "exit", "_exit", "close", "close-and-go-on"],
)
async def test_an_interpreter_that_ends_is_said_and_the_next_is_fresh(
    tiny_model: Path, tmp_path: Path, code: str, words: str
) -> None:
    async with talking(tmp_path, tiny_model) as run:
        await opened(run.client, "b")
        other = Talk(run.client, "b")
        await run("x = 1")
        await other("x = 2")
        assert (await run(code)).startswith(words)
        assert (await run("x")).startswith(FRESH + "Traceback")
        assert await run("3") == "3\n"
        assert await other("x") == "2\n"


async def test_a_call_is_shorter_than_a_turn_may_be(tiny_model: Path, tmp_path: Path) -> None:
    async with talking(tmp_path, tiny_model, call_timeout_s=4.0) as run:
        assert await run("1") == "1\n"  # it has begun
        said = await run("import time; time.sleep(60)")
        assert said.startswith("Error: the interpreter has ended: it took longer than 3.2 s")


async def test_output_and_memory_are_bounded_and_the_variables_stay(tiny_model: Path, tmp_path: Path) -> None:
    async with talking(tmp_path, tiny_model) as run:
        await run("x = 1")
        said = await run("while True: print('y' * 10_000)")
        assert len(said) == 100_000
        assert said.endswith("\n(Output beyond 465536 bytes is lost.)\n")
        assert await run("x") == "1\n"
        assert (await run("z = bytearray(1 << 30)")).endswith("\nMemoryError\n")
        assert (await run("def f(): f()\nf()")).endswith("RecursionError: maximum recursion depth exceeded\n")
        assert await run("x") == "1\n"


async def test_nothing_runs_between_calls(tiny_model: Path, tmp_path: Path) -> None:
    async with talking(tmp_path, tiny_model) as run:
        counting = "import threading, time\nn = [0]\ndef count():\n    while True: n[0] += 1; time.sleep(0)\n"
        await run(
            f"{counting}threading.Thread(target=count, daemon=True).start()\nimport time; time.sleep(0.1)"
        )
        await run("began = time.process_time()")
        await asyncio.sleep(1.0)  # in which it would take most of a second
        assert float(await run("time.process_time() - began")) < 0.5


async def test_answers_are_the_same_in_another_replica(tiny_model: Path, tmp_path: Path) -> None:
    codes = (
        "import random; {str(i) for i in range(20)}, hash('x'), random.random()",
        "class A: pass\nA(), A, lambda: 1",
        "import json\njson.loads('{')",
    )
    seen = []
    for _ in range(2):
        async with talking(tmp_path, tiny_model) as run:
            seen.append([await run(code) for code in codes])
    assert seen[0] == seen[1]
    assert seen[0][1].startswith(
        "(<__main__.A object at 0x0>, <class '__main__.A'>, <function <lambda> at 0x0>)"
    )


# -------------------------------------------------------------------------------------- its end


def below(pid: int) -> list[int]:
    """All processes that a process and its children have started, and that live."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *below(child)]
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def have_ended(pidfds: list[int]) -> bool:
    return all(select.select([pidfd], [], [], 60)[0] for pidfd in pidfds)


async def test_nothing_is_left_of_an_episode_or_of_a_killed_role(tiny_model: Path, tmp_path: Path) -> None:
    sections = LIMITS | {"rollout": {"agent": {"default_agent_loop": "tool_agent"}}}
    job = job_with(tmp_path, tiny_model, sections, tools=["python"])
    async with (
        serve_process("environment", job, tmp_path) as role,
        EnvironmentClient([role.address], methods(job)) as client,
    ):
        await client.wait_until_ready(60)
        before = below(role.process.pid)  # the sandbox alone
        await client.open_episode(opening("a", "tool_agent"))
        await Talk(client, "a")("x = 1")
        ended = [os.pidfd_open(pid) for pid in set(below(role.process.pid)) - set(before)]
        assert len(ended) == 2
        await client.close_episode(closing("a"))
        assert have_ended(ended)
        await client.open_episode(opening("b", "tool_agent"))
        await Talk(client, "b")("x = 1")
        endless = asyncio.create_task(Talk(client, "b")("while True: pass"))
        running = [os.pidfd_open(pid) for pid in below(role.process.pid)]
        assert len(running) >= 3
        role.process.kill()
        assert await asyncio.to_thread(have_ended, running)
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)


async def test_a_killed_sandbox_is_a_tool_error_and_is_started_anew(tiny_model: Path, tmp_path: Path) -> None:
    async with talking(tmp_path, tiny_model) as run:
        before = set(below(os.getpid()))
        await run("x = 1")
        supervisor = next(pid for pid in set(below(os.getpid())) - before if below(pid))
        ended = os.pidfd_open(supervisor)
        os.kill(parent_of(supervisor), 9)
        assert have_ended([ended])
        answer = await run.client.act(turn("a", 2, "", calling("python", {"code": "x"})))
        assert answer.tools[0].error.startswith("SandboxUnavailable: the sandbox's own process ended")
        run.turns = 2
        assert (await run("x")).startswith(FRESH + "Traceback")
        assert await run("1") == "1\n"


def test_without_landlock_the_role_does_not_start(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "import ctypes, struct\nfrom rolemesh.sandbox import landlock\nlandlock.no_new_privileges()\n"
        "program = [(32, 0, 0, 0), (21, 0, 1, 444), (6, 0, 0, 0x50000 | 38), (6, 0, 0, 0x7FFF0000)]\n"
        "code = ctypes.create_string_buffer(b''.join(struct.pack('=HBBI', *i) for i in program))\n"
        "assert ctypes.CDLL(None).prctl(22, 2, struct.pack('HL', 4, ctypes.addressof(code)), 0, 0) == 0\n"
        "from rolemesh.config.job import make_job\n"
        "from rolemesh.services.environment.agents.tool_agent import ToolAgent\n"
        "ToolAgent(make_job({'rollout': {'multi_turn': {'enable': True, 'tools': ['python']}}}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert ran.stderr.splitlines()[-1].endswith(
        "InvalidConfig: rollout.multi_turn.tools names python, but programs cannot be sandboxed here: the "
        "kernel has no Landlock (Linux 5.13 or newer, with landlock among its LSMs)"
    )
