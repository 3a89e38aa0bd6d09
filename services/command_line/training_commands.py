"""The commands that train: `rolemesh run|sft`; and for pods that will, `rolemesh prepare|need`."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

import rolemesh
from rolemesh.services.command_line.arguments import (
    AttemptsOfOption,
    ConfigArgument,
    Overrides,
    ScaleDownOption,
    job_of,
)
from rolemesh.services.processes.role_forks import fork_roles

app = typer.Typer()
FOR_PODS = "For pods of the chart"


@app.command(epilog="Example: rolemesh run configs/tiny.yaml trainer.total_training_steps=5")
def run(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Train on this machine: start a process for each group of roles, run the steps, and stop them all.

    placement.strategy defines the groups; by default each role is in its own group.
    """
    fork_roles()
    job = job_of(config, overrides)
    rolemesh.run(job)


@app.command(epilog="Example: rolemesh sft job.yaml data.messages_key=conversation trainer.total_epochs=2")
def sft(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Train on given responses, with only the actor (docs/sft.md): `run` with algorithm.page=sft."""
    fork_roles()
    job = job_of(config, overrides, "algorithm.page=sft")
    rolemesh.run(job)


@app.command(
    rich_help_panel=FOR_PODS,
    epilog="Example: rolemesh prepare --creates outputs/tiny/model --lock .prepare.lock "
    "-- rolemesh demo outputs/tiny",
)
def prepare(
    command: Annotated[list[str], typer.Argument(help="A program and its arguments.", metavar="COMMAND...")],
    creates: Annotated[
        Path,
        typer.Option(
            help="File or directory that the command creates; if it exists, the command is not run.",
            metavar="PATH",
        ),
    ],
    lock: Annotated[
        Path | None,
        typer.Option(
            help="File whose lock is held meanwhile: of the processes that name it, one at a time prepares.",
            metavar="FILE",
        ),
    ] = None,
    counts_in: Annotated[
        Path | None,
        typer.Option(
            help="File that counts the failures since the last success, for --max-attempts.", metavar="FILE"
        ),
    ] = None,
    max_attempts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Failures of the command, counted by --counts-in, after which the next start ends with status "
            "3 and scales down; 0: no limit.",
        ),
    ] = 0,
    attempts_of: AttemptsOfOption = "",
    final: Annotated[
        int | None,
        typer.Option(help="Exit status of the command with which a retry cannot succeed.", metavar="STATUS"),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            help="Job file that is checked before the lock is awaited: if it is wrong, no retry would help.",
            metavar="FILE",
        ),
    ] = None,
    scale_down: ScaleDownOption = None,
) -> None:
    """Run a command before a pod's process, unless what it creates exists.

    In the pod of `control` it counts failures and, if the command cannot succeed, scales the roles down as
    `control` does. A failure ends with status 75 if it is counted.
    """
    from rolemesh.services.controller.prepare_lock import ended_by_sigterm, locked
    from rolemesh.telemetry.logs import setup_logging

    with ended_by_sigterm():
        setup_logging("text")
        if job and not os.path.exists(creates):
            from rolemesh.services.controller import preparing
            from rolemesh.services.controller.scale_down import workloads

            asyncio.run(preparing.refuse_wrong_job(job, workloads(scale_down or ())))
        with locked(lock) if lock else nullcontext():
            if os.path.exists(creates):  # as at most starts, which need not wait for the imports
                return
            from rolemesh.services.controller import preparing
            from rolemesh.services.controller.run.attempts import Attempts
            from rolemesh.services.controller.scale_down import workloads

            limit = max_attempts if counts_in else 0
            attempts = Attempts(Path.cwd(), limit, attempts_of, counts_in, "could not be prepared")
            to_zero = workloads(scale_down or ())
            asyncio.run(preparing.prepare(command, creates, attempts, final=final, scaled_down=to_zero))


@app.command(
    rich_help_panel=FOR_PODS,
    epilog="Example: rolemesh need deployment/rlhf-job-reward statefulset/rlhf-job-actor",
)
def need(
    given: Annotated[
        list[str],
        typer.Argument(
            help="deployment/NAME or statefulset/NAME in this pod's namespace, as for --need of control.",
            metavar="KIND/NAME",
        ),
    ],
) -> None:
    """Fail if one of these workloads of roles is scaled to zero, and say how to bring it back."""
    from rolemesh.kubernetes import KubernetesApi
    from rolemesh.services.controller.scale_down import refuse_scaled_down, workloads

    asyncio.run(refuse_scaled_down(workloads(given), KubernetesApi.in_pod()))
