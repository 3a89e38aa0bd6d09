"""`rolemesh status|watch|pause|resume|stop` beside a real controller."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from in_process import small_job
from server_addresses import reserved_port
from serving import reward_job, served

from rolemesh.errors import RolemeshError, RoleTimeout, RoleUnavailable
from rolemesh.methods import methods
from rolemesh.models.loading import load_tokenizer
from rolemesh.rpc.calling.clients import RewardClient
from rolemesh.rpc.calling.replica import MAX_WHY
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.command_line.controller_client import (
    FAILED,
    code_of,
    follow,
    steer,
    to_json,
    watch,
)
from rolemesh.services.command_line.controller_client import status as show_status
from rolemesh.services.controller.display.progress import line_of
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import address_shown
from rolemesh.services.controller.service.controller_server import ControllerServer
from rolemesh.services.controller.service.servicer import SERVICE, ControllerServicer
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.v1 import controller_pb2 as pb


async def rolemesh(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolemesh", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_commands_show_pause_resume_follow_and_stop_a_run(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.total_training_steps=500")
    where = str(job.run_dir)
    async with AsyncExitStack() as stack:
        addresses = {
            role: await stack.enter_async_context(served(role, *[job] * (1 + (role == "reward"))))
            for role in job.roles
        }
        run = Run(job, load_tokenizer(job.actor.model))
        run.status.pause()
        training = asyncio.create_task(drive(run, addresses, "127.0.0.1:0", None))
        async with aclosing(run.status.watch()) as records:
            await anext(records)  # the validation before step 1
            code, output = await rolemesh("status", where, "--json")
            status = json.loads(output)
            assert (code, status["job"], status["state"]) == (0, "run", "paused")
            assert (status["step"], status["total_steps"]) == (0, 500)
            assert "val-core/digits/reward/mean@1" in status["metrics"] or status["metrics"]
            replicas = {
                role: [r["address"] for r in status["roles"][role] if r["live"]] for role in status["roles"]
            }
            assert replicas == addresses

            watching = asyncio.create_task(rolemesh("watch", where))
            code, output = await rolemesh("resume", where)
            assert code == 0, output
            await anext(records)
            code, output = await rolemesh("status", where)
            assert code == 0
            for words in ("run  step ", " of 500", "reward 0.", "s a step", addresses["reward"][1]):
                assert words in output
            assert re.search(r"KL -?\d\.\d{4}", output)
            assert (await rolemesh("pause", where))[0] == 0
            assert run.status.state is State.PAUSED
            code, output = await rolemesh("stop", where)
            assert code == 0
        await training
        code, output = await watching
    assert code == 0
    assert f"run  step {run.status.step} of 500  ·  has ended" in output
    code, output = await rolemesh("status", where)
    assert code == 1
    assert output.startswith(f"error: no run is in progress in {where}")


async def test_a_watcher_survives_a_restarted_controller_to_the_end() -> None:
    async def serve(status: RunStatus, address: str) -> RoleServer:
        server = RoleServer({"controller": [SERVICE]})
        await server.start(address)
        await server.ready({SERVICE: ControllerServicer(status)})
        return server

    status = RunStatus("run")
    status.set(state=State.RUNNING, step=3)
    async with AsyncExitStack() as stack:
        address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        first = await serve(status, address)
        answers = await stack.enter_async_context(aclosing(follow(address)))
        seen = await anext(answers)
        assert isinstance(seen, pb.GetStatusResponse)
        assert (seen.state, seen.step) == (pb.RUN_STATE_RUNNING, 3)
        status.set(phase="gen", found="3 of 8 groups")
        while seen.phase != "gen":
            seen = await anext(answers)
            assert isinstance(seen, pb.GetStatusResponse)
        assert to_json(seen)["found"] == "3 of 8 groups"
        assert "generating  ·  3 of 8 groups" in line_of(status).plain
        await first.drain(0)
        while not isinstance(await anext(answers), RoleUnavailable):
            pass  # its state, which it tells every two seconds

        status = RunStatus("run")
        second = await serve(status, address)
        stack.push_async_callback(second.drain, 1)
        status.set(state=State.RUNNING, step=2)
        async for answer in answers:
            if not isinstance(answer, RolemeshError):
                break
        assert (answer.state, answer.step) == (pb.RUN_STATE_RUNNING, 2)
        status.set(state=State.FAILED)
        *_, last = [answer async for answer in answers]
    assert isinstance(last, pb.GetStatusResponse)
    assert to_json(last)["state"] == "failed"
    assert code_of(last) == FAILED


@asynccontextmanager
async def controller(status: RunStatus) -> AsyncIterator[ControllerServer]:
    server = ControllerServer(status, ())
    await server.start("127.0.0.1:0")
    yield server
    await server.stop()


async def test_a_run_that_goes_on_after_losing_a_role_is_followed(tmp_path: Path) -> None:
    """It is followed to its end."""
    seen = []
    first, second = RunStatus("run"), RunStatus("run")
    first.may_go_on = lambda: True
    async with aclosing(follow(str(tmp_path))) as answers:
        async with controller(first) as server:
            first.set(state=State.RUNNING)
            with address_shown(tmp_path, server.address, server.life):
                seen.append(await anext(answers))
                first.fail(asyncio.CancelledError())
        async with controller(second) as server:
            second.set(state=State.FINISHED)
            with address_shown(tmp_path, server.address, server.life):
                seen += [answer async for answer in answers]
    states = [answer.state for answer in seen if isinstance(answer, pb.GetStatusResponse)]
    assert states[0] == pb.RUN_STATE_RUNNING
    assert states[-1] == pb.RUN_STATE_FINISHED
    assert pb.RUN_STATE_FAILED not in states


@pytest.mark.parametrize(
    ("error", "may_go_on", "stop_requested", "state"),
    [
        (RoleUnavailable("lost"), True, False, State.STARTING),
        (RoleUnavailable("lost"), False, False, State.FAILED),
        (asyncio.CancelledError(), True, True, State.FAILED),  # by a second signal
        (KeyError("page"), True, False, State.FAILED),
    ],
)
def test_a_run_has_failed_unless_it_lost_a_role_and_goes_on(
    error: BaseException, may_go_on: bool, stop_requested: bool, state: State
) -> None:
    status = RunStatus("run")
    status.may_go_on = lambda: may_go_on
    status.set(state=State.RUNNING)
    if stop_requested:
        status.request_stop()
    status.fail(error)
    assert status.state is state


async def test_no_command_reaches_another_run_on_a_reused_port(
    tmp_path: Path,
) -> None:
    """The file of a killed controller stays, and another one may get its port, always so with a fixed one."""
    killed, own, status = tmp_path / "killed", tmp_path / "own", RunStatus("another")
    status.set(state=State.RUNNING)
    async with controller(status) as server:
        with address_shown(killed, server.address, "of old"), address_shown(own, server.address, server.life):
            words = (
                "no run is in progress in .*killed: its controller was killed, and another one, of 'another'"
            )
            for command in ("Stop", "Pause"):
                with pytest.raises(RoleUnavailable, match=words):
                    await steer(str(killed), command)
            with pytest.raises(RoleUnavailable, match=words):
                await show_status(str(killed), as_json=False)
            async with aclosing(follow(str(killed))) as answers:
                assert isinstance(await anext(answers), RoleUnavailable)
            assert status.state is State.RUNNING
            assert await steer(str(own), "Stop") == 0
            assert status.state is State.STOPPING


async def test_a_run_that_ends_as_soon_as_it_is_stopped_was_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    status = RunStatus("run")
    status.set(state=State.RUNNING)
    status.pause()
    server = ControllerServer(status, ())
    await server.start("127.0.0.1:0")

    async def end() -> None:
        assert not await status.may_begin()
        status.set(state=State.FINISHED)
        await server.stop()

    ending = asyncio.create_task(end())
    assert await steer(server.address, "Stop") == 0
    assert capsys.readouterr().out == "the controller got Stop, and has ended\n"
    await ending


async def test_a_controller_slow_to_show_its_state_has_not_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Slow(ControllerServicer):
        async def GetStatus(self, request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")

    status, server = RunStatus("run"), RoleServer({"controller": [SERVICE]})
    status.set(state=State.RUNNING)
    address = await server.start("127.0.0.1:0")
    await server.ready({SERVICE: Slow(status)})
    with pytest.raises(RoleTimeout):
        await steer(address, "Pause")
    assert status.state is State.PAUSED
    assert "has ended" not in capsys.readouterr().out
    await server.drain(0)


async def test_a_watcher_that_is_interrupted_gives_the_terminal_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    status, before = RunStatus("run"), sys.stdout
    status.set(state=State.RUNNING)
    async with controller(status) as server:
        watching = asyncio.create_task(watch(server.address, as_json=False))
        async with asyncio.timeout(60):
            while sys.stdout is before:  # noqa: ASYNC110  # the live display takes its place
                await asyncio.sleep(0.01)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    assert sys.stdout is before
    output = capsys.readouterr().out
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1


async def test_where_nobody_answers_a_command_says_so_at_once() -> None:
    code, output = await rolemesh("status", "127.0.0.1:1")
    assert code == 1
    assert output.splitlines()[-1].startswith("error: controller 127.0.0.1:1: ")
    assert "Connection refused" in output


@pytest.mark.parametrize("command", ["status", "stop"])
async def test_a_name_is_looked_for_on_kubernetes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, output = await rolemesh(command, "my-job")
    assert code == 2
    assert "'my-job' is taken for a job on Kubernetes, but there is no kubectl" in output


HOSTILE = "\x1b[2J\x1b]52;c;cm0gLXJm\a\u202e\nerror: forged"


async def test_text_of_a_role_reaches_no_terminal_as_it_came(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A role that runs users' code answers health checks with an error text of its own."""

    class Lying(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNKNOWN, HOSTILE * 100)

    lying = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Lying(), lying)
    address = f"127.0.0.1:{lying.add_insecure_port('127.0.0.1:0')}"
    await lying.start()
    job = reward_job(tiny_model, tmp_path)
    status = RunStatus("run")
    status.set(phase=HOSTILE)
    async with RewardClient([address], methods(job)) as client:
        with pytest.raises(RoleUnavailable, match=r"\\u001b\[2J") as late:
            await client.wait_until_ready(0.2)
        [replica] = client.pool.replicas
        assert replica.problem.isprintable()
        assert len(replica.problem) <= MAX_WHY
        assert len(str(late.value)) < 2 * MAX_WHY
        replica.problem = HOSTILE  # as an older controller shows it
        server = RoleServer({"controller": [SERVICE]})
        where = await server.start("127.0.0.1:0")
        await server.ready({SERVICE: ControllerServicer(status, {"reward": client})})
        assert await show_status(where, as_json=False) == 0
        await server.drain(0)
    await lying.stop(None)
    output = capsys.readouterr().out
    assert r"\u001b[2J" in output
    assert not [char for char in output if not char.isprintable() and char != "\n"]
    assert not [line for line in output.splitlines() if line.startswith("error")]
