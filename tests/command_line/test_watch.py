"""`rolemesh status|watch|pause|resume|stop` beside a real controller."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
from in_process import small_job
from server_addresses import reserved_port
from serving import served

from rolemesh.errors import RolemeshError, RoleUnavailable
from rolemesh.models.loading import load_tokenizer
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.command_line.controller_client import FAILED, code_of, follow, to_json
from rolemesh.services.controller.display.progress import line_of
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
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


async def test_a_run_is_shown_paused_resumed_followed_and_stopped_by_commands(
    tiny_model: Path, tmp_path: Path
) -> None:
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
            for words in ("run  step ", " of 500", "reward 0.", "s a step", "KL 0.0", addresses["reward"][1]):
                assert words in output
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


async def test_a_watcher_survives_a_controller_that_is_restarted_and_sees_the_end() -> None:
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
        assert isinstance(await anext(answers), RoleUnavailable)

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
