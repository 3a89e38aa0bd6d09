"""The agent `external`: runs rollout.agent.external.command as a process for each episode."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from rolemesh.agents.environment import Endpoint, Episode
from rolemesh.config import JobConfig
from rolemesh.errors import EnvironmentFailed
from rolemesh.process_group import group_that_dies_with_me, not_started
from rolemesh.services.environment.timeouts import look_at

GIVEN = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")  # environment variables that every program gets
MAX_LINE_BYTES = 64 << 10  # limit of the last line of output
PIPES_S = 5.0  # time for its output to end after the command itself
MAX_TAIL_BYTES = 4 << 10  # of the end of its standard error
BLOCK_BYTES = 64 << 10
MAX_SEED = 2**53  # whole numbers below this are exact even where all numbers are float64


async def run_command(episode: Episode, endpoint: Endpoint, job: JobConfig) -> Any:
    """Run the job's command for an episode, and return the JSON object in the last line of its output.

    The command's process group ends with the episode, and with this process in any case. On Linux, processes
    that left the group end with the command too, unless it is killed at a time limit.

    The command gets the endpoint in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Its standard input is a
    JSON object with uid, seed, messages (the row's prompt), data_source, reward_model and extra_info.

    Args:
        episode: the row.
        endpoint: the policy's API for this episode.
        job: its section rollout.agent.external names the command.

    Raises:
        EnvironmentFailed: there is no command, it cannot be started, its status is not 0, or its last line is
            not a JSON object with a reward. The message ends with the end of its standard error.
    """
    settings = job.rollout.agent.external
    if not settings.command:
        raise EnvironmentFailed(
            "rollout.agent.external.command is empty; set it to the program, as in [python, agent.py]"
        )
    program = settings.command[0]
    if shutil.which(program) is None:
        raise EnvironmentFailed(
            f"rollout.agent.external.command: {program!r} cannot be started: it is not there, or not executable"
        )
    given = {"uid": episode.uid, "seed": episode.seed % MAX_SEED, "messages": episode.messages, **episode.row}
    variables = _variables(endpoint, settings.pass_env)
    try:
        process = await asyncio.create_subprocess_exec(
            *group_that_dies_with_me(settings.command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=variables,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFailed(
            f"rollout.agent.external.command: {program!r} cannot be started: "
            f"{not_started(settings.command, error)}"
        ) from error
    pipes = asyncio.gather(
        _tail(process.stdout, MAX_LINE_BYTES),
        _tail(process.stderr, MAX_TAIL_BYTES),
        _feed(process.stdin, json.dumps(given).encode()),
    )
    try:
        await _ended(process)
        _kill(process)  # its children may hold its pipes open
        said, complained, _ = await asyncio.wait_for(asyncio.shield(pipes), PIPES_S)
        status = await process.wait()
    except TimeoutError as error:
        raise EnvironmentFailed(
            f"the program has ended, but another process holds its output open after {PIPES_S:g} s"
        ) from error
    finally:
        pipes.cancel()
        pipes.add_done_callback(look_at)
        _kill(process)
    complaint = complained.decode(errors="replace").strip()
    if status:
        raise EnvironmentFailed(f"the program ended with status {status}: {complaint or 'no message'}")
    return _result(said, complaint)


def _variables(endpoint: Endpoint, passed: tuple[str, ...]) -> dict[str, str]:
    if absent := [name for name in passed if name not in os.environ]:
        raise EnvironmentFailed(
            f"rollout.agent.external.pass_env names {', '.join(absent)}, which is not set there"
        )
    given = {name: os.environ[name] for name in (*GIVEN, *passed) if name in os.environ}
    if any(name.lower().endswith("_proxy") for name in given):  # else the endpoint's calls would go there, too
        for name in ("no_proxy", "NO_PROXY"):
            given[name] = ",".join(filter(None, (given.get(name), urlsplit(endpoint.base_url).hostname)))
    return given | {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.key,
        "OPENAI_MODEL": endpoint.model,
    }


async def _ended(process: Process) -> None:
    """Wait until the process itself ends; `Process.wait` would also wait for its pipes."""
    if not hasattr(os, "pidfd_open"):  # not on Linux
        await process.wait()
        return
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the latter: on macOS, of a group of zombies
        os.killpg(process.pid, signal.SIGKILL)


async def _feed(stdin: asyncio.StreamWriter | None, text: bytes) -> None:
    assert stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it may ignore its input
        stdin.write(text)
        await stdin.drain()
    stdin.close()


async def _tail(stream: asyncio.StreamReader | None, most: int) -> bytes:
    """Read a stream to its end, and return the last `most` bytes."""
    assert stream is not None
    tail = b""
    while block := await stream.read(BLOCK_BYTES):
        tail = (tail + block)[-most:]
    return tail


def _result(said: bytes, complaint: str) -> dict[str, Any]:
    lines = said.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        result = json.loads(last)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict) or "reward" not in result:
        heard = f"; its standard error ends with: {complaint}" if complaint else ""
        raise EnvironmentFailed(
            f'the last line of the program\'s output is {last!r:.200}; a JSON object with "reward" '
            f"expected{heard}"
        )
    return result
