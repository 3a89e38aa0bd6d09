"""The process of a program: what it gets, what it returns, and how it ends. The test plays the policy."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from environments import closing, job_with, opening, turn
from serving import serve_process, served
from test_episodes import until

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config import JobConfig
from rolemesh.errors import EnvironmentFailed, InvalidConfig
from rolemesh.methods import methods
from rolemesh.process_group import group_that_dies_with_me
from rolemesh.rpc.calling.episodes import EnvironmentClient
from rolemesh.services.environment import episode
from rolemesh.services.environment.agents import external
from rolemesh.services.environment.timeouts import within
from rolemesh.v1.environment_pb2 import ActRequest

# The endpoint without a library.
PROGRAM = """
import json, os, subprocess, sys, urllib.error, urllib.request

def ask(*messages, **other):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **other}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

user = {"role": "user", "content": "ask"}
"""


def program_job(
    directory: Path, model: Path, code: str, external: dict[str, Any], **multi_turn: Any
) -> JobConfig:
    (directory / "program.py").write_text(PROGRAM + code)
    command = [sys.executable, str(directory / "program.py")]
    agent = {"default_agent_loop": "external", "external": {"command": command} | external}
    return job_with(directory, model, {"rollout": {"agent": agent}}, **multi_turn)


@asynccontextmanager
async def program(
    directory: Path, model: Path, code: str, call_timeout_s: float = 30.0, **external: Any
) -> AsyncIterator[EnvironmentClient]:
    job = program_job(directory, model, code, external, call_timeout_s=call_timeout_s)
    async with (
        served("environment", job) as addresses,
        EnvironmentClient(addresses, methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        yield client


def said(name: str, number: int, text: str = "fine") -> ActRequest:
    request = turn(name, number, text)
    request.text, request.prompt_tokens, request.completion_tokens = text, 5, 2
    return request


async def test_a_program_gets_its_row_and_an_endpoint_and_little_else(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEARCH_KEY", "s")
    monkeypatch.setenv("CLOUD_KEY", "c")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody: the endpoint is reached directly
    code = """
row = json.load(sys.stdin)
said = ask(*row["messages"], max_tokens=9, tools=[{"type": "function", "function": {"name": "f"}}])
ask(*row["messages"], said, user, tools=[{"type": "function", "function": {"name": "f"}}])
open(row["extra_info"]["log"], "w").write(json.dumps([row, sorted(os.environ)]))
print(json.dumps({"reward": 0.5, "steps": 3}))
"""
    log = tmp_path / "log"
    async with program(tmp_path, tiny_model, code, pass_env=["SEARCH_KEY", "http_proxy"]) as client:
        opened = await client.open_episode(opening("a", "external", log=str(log)))
        assert [(m.role, m.content) for m in opened.prompt.messages] == [("user", "begin")]
        assert [json.loads(tool)["function"]["name"] for tool in opened.prompt.tools] == ["f"]
        assert (opened.max_tokens, list(opened.messages)) == (9, [])
        second = await client.act(said("a", 1))
        assert [(m.role, m.content) for m in second.messages] == [("user", "ask")]
        last = await client.act(said("a", 2))
        assert (last.done, last.why) == (True, "ended")
        end = await client.close_episode(closing("a"))
        assert (end.reward, dict(end.metrics)) == (0.5, {"steps": 3.0})
    row, variables = json.loads(log.read_text())
    assert (row["uid"], row["seed"], row["data_source"]) == ("row-a", 7, "test")
    assert {"SEARCH_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"} <= set(variables)
    assert "CLOUD_KEY" not in variables


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("ask(user)\nsys.exit('out of luck')", r"row-a \(agent external\).*status 1: out of luck"),
        ("ask(user)\nprint('nothing')", "last line of the program's output is 'nothing'"),
        ("ask(user)\nprint(json.dumps({'reward': float('nan')}))", "reward is nan; a finite number"),
        ("ask(user)\nprint(json.dumps({'reward': None}))", "the reward, or a dict with it, expected"),
        ("print(json.dumps({'reward': 1}))", "without a call that was answered"),
        ("ask(user, n=2)", r"HTTP Error 400(.|\n)*refused: n should be 1"),
    ],
)
async def test_a_program_that_fails_or_has_no_reward_fails_the_episode(
    tiny_model: Path, tmp_path: Path, code: str, says: str
) -> None:
    async with program(tmp_path, tiny_model, code) as client:

        async def held() -> None:
            await client.open_episode(opening("a", "external"))
            await client.act(said("a", 1))
            await client.close_episode(closing("a"))

        with pytest.raises(EnvironmentFailed, match=says):
            await held()


def is_gone(pid: int) -> Callable[[], bool]:
    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return gone


HANGS = """
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(json.load(sys.stdin)["extra_info"]["log"], "w").write(f"{os.getpid()} {child.pid}")
ask(user)
child.wait()
"""


async def test_a_program_that_hangs_is_ended_with_what_it_started(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    async with program(tmp_path, tiny_model, HANGS) as client:
        await client.open_episode(opening("a", "external", log=str(log)))
        monkeypatch.setattr(episode, "within", lambda _, work: within(3.0, work))  # its start may take longer
        with pytest.raises(EnvironmentFailed, match=r"row-a .*turn 1: it took longer than 3 s"):
            await client.act(said("a", 1))
        for pid in map(int, log.read_text().split()):
            await until(is_gone(pid))


LEAVES_A_CHILD = """
ask(user)
sleeps = [sys.executable, "-c", "import signal; signal.pause()"]
child = subprocess.Popen(sleeps, start_new_session=%s)
open(json.load(sys.stdin)["extra_info"]["log"], "w").write(str(child.pid))
print(json.dumps({"reward": 0.5}))
"""


@pytest.mark.parametrize("in_another_session", [False, True])
async def test_a_child_that_holds_the_output_delays_no_reward(
    tiny_model: Path, tmp_path: Path, in_another_session: bool
) -> None:
    log = tmp_path / "log"
    async with program(tmp_path, tiny_model, LEAVES_A_CHILD % in_another_session) as client:
        await client.open_episode(opening("a", "external", log=str(log)))
        assert (await client.act(said("a", 1))).done
        assert (await client.close_episode(closing("a"))).reward == 0.5
        await until(is_gone(int(log.read_text())))


async def test_a_strange_process_that_holds_the_output_is_an_error(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "PIPES_S", 0.5)
    log = tmp_path / "log"
    code = 'open(json.load(sys.stdin)["extra_info"]["log"], "w").write(str(os.getpid()))\nask(user)'
    async with program(tmp_path, tiny_model, code) as client:
        await client.open_episode(opening("a", "external", log=str(log)))
        output = os.open(f"/proc/{log.read_text()}/fd/1", os.O_WRONLY)
        with pytest.raises(EnvironmentFailed, match="another process holds its output open"):
            await client.act(said("a", 1))
        os.close(output)


EXITS = """
import sys
from rolemesh.plugins import program

@program("exits")
async def exits(episode, endpoint, job):
    sys.exit(3)
"""


async def test_a_function_that_exits_fails_its_episode_alone(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(EXITS)
    sections = {
        "plugins": [str(tmp_path / "exits.py")],
        "rollout": {"agent": {"default_agent_loop": "exits"}},
    }
    try:
        job = job_with(tmp_path, tiny_model, sections)
        async with (
            served("environment", job) as addresses,
            EnvironmentClient(addresses, methods(job)) as client,
        ):
            await client.wait_until_ready(120)
            for name in ("a", "b"):
                with pytest.raises(EnvironmentFailed, match=rf"row-{name} .*it called sys.exit\(3\)"):
                    await client.open_episode(opening(name, "exits"))
    finally:
        forget(str(tmp_path / "exits.py"))


async def test_programs_end_with_their_replica(tiny_model: Path, tmp_path: Path) -> None:
    job, log = program_job(tmp_path, tiny_model, HANGS, {}), tmp_path / "log"
    async with (
        serve_process("environment", job, tmp_path) as replica,
        EnvironmentClient([replica.address], methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        await client.open_episode(opening("a", "external", log=str(log)))
        replica.process.terminate()
        await replica.process.wait()
    for pid in map(int, log.read_text().split()):
        await until(is_gone(pid))


OUTLIVES = """
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(json.load(sys.stdin)["extra_info"]["log"], "w").write(f"{os.getpid()} {child.pid}")
try:
    ask(user)
finally:
    child.wait()
"""


async def test_programs_and_their_children_end_with_a_killed_replica(tiny_model: Path, tmp_path: Path) -> None:
    job, log = program_job(tmp_path, tiny_model, OUTLIVES, {}), tmp_path / "log"
    async with (
        serve_process("environment", job, tmp_path) as replica,
        EnvironmentClient([replica.address], methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        await client.open_episode(opening("a", "external", log=str(log)))
        running = [os.pidfd_open(int(pid)) for pid in log.read_text().split()]
        replica.process.kill()
        for ended in running:
            assert (await asyncio.to_thread(select.select, [ended], [], [], 60))[0]


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (["sh", "-c", "exit 3"], 3, ""),
        (["sh", "-c", "kill -9 $$"], 128 + 9, ""),
        (["no-such-program"], 127, "no-such-program: there is no such program\n"),
        (
            ["node agent.mjs"],
            127,
            "node agent.mjs: there is no such program; if these are several words, write [node, agent.mjs]\n",
        ),
    ],
)
def test_a_command_in_a_group_has_its_own_status(command: list[str], status: int, says: str) -> None:
    assert in_a_group(command) == (status, says)


def test_a_process_group_changes_no_ignored_signals() -> None:
    """A command in a group ignores the signals that it would ignore without one."""
    ignored = ["grep", "SigIgn", "/proc/self/status"]
    assert in_a_group(ignored) == (0, subprocess.check_output(ignored, text=True))


def in_a_group(command: list[str]) -> tuple[int, str]:
    """Its status, and what it says."""
    run = subprocess.run(
        group_that_dies_with_me(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        start_new_session=True,
    )
    return run.returncode, run.stdout


CATCHES = """
said = ask(user)
try:
    ask(user, said, user)
except urllib.error.HTTPError as error:
    print(json.dumps({"reward": 2 if json.load(error)["error"]["code"] == "context_length_exceeded" else 1}))
"""


async def test_a_program_whose_conversation_is_over_returns_its_reward(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with program(tmp_path, tiny_model, CATCHES) as client:
        await client.open_episode(opening("a", "external"))
        await client.act(said("a", 1))
        assert (await client.close_episode(closing("a"))).reward == 2


async def test_a_program_failing_at_a_limit_fails_the_run_by_default(tiny_model: Path, tmp_path: Path) -> None:
    """With reward_at_limit the episode gets that reward."""
    code = "said = ask(user)\nask(user, said, user)"
    async with program(tmp_path, tiny_model, code) as client:
        await client.open_episode(opening("a", "external"))
        await client.act(said("a", 1))
        with pytest.raises(EnvironmentFailed, match=r"status 1(.|\n)*the conversation has no more turns"):
            await client.close_episode(closing("a"))
    async with program(tmp_path, tiny_model, code, reward_at_limit=-1.0) as client:
        await client.open_episode(opening("b", "external"))
        await client.act(said("b", 1))
        assert (await client.close_episode(closing("b"))).reward == -1


async def test_a_command_that_is_not_there_is_an_error_of_the_job(tiny_model: Path, tmp_path: Path) -> None:
    async with program(tmp_path, tiny_model, "", command=["no-such-program"]) as client:
        with pytest.raises(EnvironmentFailed, match="'no-such-program' cannot be started"):
            await client.open_episode(opening("a", "external"))
    with pytest.raises(InvalidConfig, match=r"rollout.agent.external.command is empty"):
        job_with(tmp_path, tiny_model, {"rollout": {"agent": {"default_agent_loop": "external"}}})
