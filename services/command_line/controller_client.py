"""Implements `rolemesh status|watch|pause|resume|stop` for a controller that is reachable from this machine."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rolemesh.errors import InvalidConfig, RolemeshError, RoleUnavailable
from rolemesh.rpc.channels import open_channel
from rolemesh.rpc.metadata import LIFE_KEY
from rolemesh.rpc.status_codes import from_status
from rolemesh.services.controller.display.progress import Display, line_of
from rolemesh.services.controller.display.table import log_console, number
from rolemesh.services.controller.record import ADDRESS_FILE, STEP
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.telemetry.logs import printable
from rolemesh.v1 import controller_pb2 as pb
from rolemesh.v1.controller_pb2_grpc import ControllerServiceStub

FAILED = 3  # exit code if the run has failed
ANSWER_S = 10.0  # deadline for one answer
PATIENCE_S = 120.0  # how long to wait for a controller to start or to come back
RETRY_S = 1.0

KL = ("actor/reward_kl_penalty", "actor/kl_per_token", "actor/ppo_kl")


def is_here(where: str) -> bool:
    """True for host:port or a run directory; False for the name of a job on Kubernetes."""
    return ":" in where or "/" in where or Path(where).is_dir()


async def status(where: str, *, as_json: bool) -> int:
    """Print the run's state. Returns the exit code."""
    async with _controller(where) as controller:
        answer = await controller.GetStatus(pb.GetStatusRequest(), timeout=ANSWER_S)
    if as_json:
        typer.echo(json.dumps(to_json(answer)))
    else:
        log_console().print(picture(answer))
    return code_of(answer)


async def steer(where: str, command: str) -> int:
    """Pause, resume or stop the run, and print its new state. Returns the exit code."""
    requests = {"Pause": pb.PauseRequest(), "Resume": pb.ResumeRequest(), "Stop": pb.StopRequest()}
    async with _controller(where) as controller:
        await getattr(controller, command)(requests[command], timeout=ANSWER_S)
        try:
            answer = await controller.GetStatus(pb.GetStatusRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if type(from_status(error, where)) is not RoleUnavailable:  # a RoleTimeout: it may live but be slow
                raise
            log_console().print(f"the controller got {command}, and has ended", soft_wrap=True)
            return 0
    log_console().print(_headline(answer))
    return code_of(answer)


async def watch(where: str, *, as_json: bool) -> int:
    """Show the run until it ends, also across restarts of its controller. Returns the exit code."""
    console = log_console()
    last = pb.GetStatusResponse()
    printed = ""
    async with aclosing(follow(where)) as answers:
        with closing(Display(console)) as display:  # left open, it would hide the cursor
            async for answer in answers:
                silence: list[RenderableType] = []
                if isinstance(answer, RolemeshError):
                    problem = printable(str(answer))
                    silence = [Text(f"since {datetime.now():%H:%M:%S}: {problem}", style="yellow")]
                else:
                    last = answer
                if as_json:
                    typer.echo(json.dumps(to_json(last) | ({"problem": str(answer)} if silence else {})))
                elif console.is_terminal:
                    display.show(_as_run(last), _roles(last), *silence)
                elif printed != (now := str(answer) if silence else f"{last.state} {last.step}"):
                    printed = now
                    console.print(*(silence or [_headline(last)]), soft_wrap=True)  # one line per change
    if not as_json and console.is_terminal:
        console.print(picture(last))
    return code_of(last)


async def follow(where: str) -> AsyncGenerator[pb.GetStatusResponse | RolemeshError]:
    """Yield the run's state at each change until it ends, or the error while no controller answers.

    Raises:
        RolemeshError: no controller has answered for PATIENCE_S, or one answered with another error.
    """
    status: pb.GetStatusResponse | None = None
    heard = time.monotonic()
    while status is None or not _has_ended(status):
        try:
            async with _controller(where) as controller:
                async for answer in controller.WatchStatus(pb.WatchStatusRequest()):
                    status = answer.status
                    heard = time.monotonic()
                    yield status
        except RoleUnavailable as problem:
            if time.monotonic() - heard > PATIENCE_S:
                raise
            yield problem
            await asyncio.sleep(RETRY_S)


@asynccontextmanager
async def _controller(where: str) -> AsyncIterator[Any]:
    """Open a channel to the controller, and return the stub of its service.

    A controller that was killed leaves its address in the run directory, where another run's controller may
    listen by now. Its life tells them apart.

    Raises:
        RoleUnavailable: no controller answers, or another run's.
        RolemeshError: a call within the block failed.
    """
    address, life = address_of(where)
    async with open_channel(address, "controller") as channel:
        controller: Any = ControllerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        try:
            if life:
                call = controller.GetStatus(pb.GetStatusRequest(), timeout=ANSWER_S)
                other = (await call).job
                if dict(await call.trailing_metadata() or ()).get(LIFE_KEY) != life:
                    raise RoleUnavailable(
                        f"no run is in progress in {where}: its controller was killed, and another one, of "
                        f"{other!r}, answers at {address}"
                    )
            yield controller
        except grpc.aio.AioRpcError as error:
            raise from_status(error, f"controller {where}") from None


def address_of(where: str) -> tuple[str, str]:
    """Return host:port of the controller, and its server's life; "" if `where` does not tell it.

    Raises:
        InvalidConfig: no such run directory.
        RoleUnavailable: no run is in progress in that directory.
    """
    directory = Path(where)
    if ":" in where and not directory.exists():
        return where, ""
    if not directory.is_dir():
        raise InvalidConfig(
            f"{where!r} should be a run directory, the host:port of a controller, or a job's name; no such "
            "directory exists"
        )
    try:
        shown = json.loads((directory / ADDRESS_FILE).read_text())
    except FileNotFoundError:
        raise RoleUnavailable(f"no run is in progress in {where}: it has no {ADDRESS_FILE}") from None
    return shown["address"], shown.get("life", "")


# ------------------------------------------------------------------------------------- for machines


def code_of(status: pb.GetStatusResponse) -> int:
    """Return the exit code for a run in this state."""
    return FAILED if status.state == pb.RUN_STATE_FAILED else 0


def to_json(status: pb.GetStatusResponse) -> dict[str, Any]:
    """Convert the state to JSON-like data; a metric that is not finite becomes None."""
    return {
        "job": status.job,
        "state": State(status.state).name.lower() if status.state else "unknown",
        "step": status.step,
        "total_steps": status.total_steps,
        "phase": status.phase,
        "found": status.found,
        "metrics": {name: v if math.isfinite(v) else None for name, v in sorted(status.latest.items())},
        "roles": {
            role.name: [
                {
                    "address": replica.address,
                    "live": replica.live,
                    "problem": replica.problem,
                    "outstanding_rows": replica.outstanding_rows,
                }
                for replica in role.replicas
            ]
            for role in status.roles
        },
    }


# --------------------------------------------------------------------------------------- for people


def picture(status: pb.GetStatusResponse) -> RenderableType:
    """Render the state, numbers and roles of a run."""
    return Group(_headline(status), _numbers(status.latest), _roles(status))


def _headline(status: pb.GetStatusResponse) -> Text:
    where = f"  step {status.step} of {status.total_steps}  ·  "
    return Text.assemble((printable(status.job), "bold"), where, line_of(_as_run(status)))


def _numbers(latest: Mapping[str, float]) -> Text:
    parts = []
    if "timing_s/step" in latest:
        parts.append(f"{latest['timing_s/step']:.1f} s a step")
    parts += [f"KL {number(latest[name], '.4f')}" for name in KL if name in latest][:1]
    return Text("  ·  ".join(parts))


def _roles(status: pb.GetStatusResponse) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("role", "replica", "state"):
        table.add_column(name, header_style="dim")
    table.add_column("rows", header_style="dim", justify="right")
    for role in status.roles:
        for index, replica in enumerate(role.replicas):
            state = "ready" if replica.live else replica.problem or "not ready yet"
            name = "" if index else role.name
            cells = (name, replica.address, state, str(replica.outstanding_rows))
            table.add_row(*(escape(printable(cell)) for cell in cells))
        if not role.replicas:
            table.add_row(escape(printable(role.name)), "none", "", "")
    return table


def _as_run(status: pb.GetStatusResponse) -> RunStatus:
    run = RunStatus(status.job)
    if status.latest:
        run.add({STEP: status.step, **status.latest})
    run.set(
        state=State(status.state or State.STARTING.value),
        step=status.step,
        phase=status.phase,
        total_steps=status.total_steps,
        found=status.found,
    )
    return run


def _has_ended(status: pb.GetStatusResponse) -> bool:
    return status.state in (pb.RUN_STATE_FINISHED, pb.RUN_STATE_FAILED)
