"""The commands that show and control a running job: `rolemesh status|watch|answers|pause|resume|stop`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rolemesh.services.command_line import kubectl

app = typer.Typer()

Where = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run directory of a run on this machine; or host:port of a controller; or the name of a job "
        "on Kubernetes (its Helm release), which needs kubectl.",
    ),
]
TlsOption = Annotated[
    Path | None,
    typer.Option(help="Directory of TLS keys, if the controller at host:port uses TLS.", metavar="DIR"),
]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the job on Kubernetes.")]
Context = Annotated[str, typer.Option(help="Context of the kubeconfig, for a job on Kubernetes.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="Example: rolemesh status outputs/tiny")
def status(
    where: Where,
    tls_dir: TlsOption = None,
    namespace: Namespace = "",
    context: Context = "",
    as_json: Json = False,
) -> None:
    """Show a run's step, phase, reward, and its roles with their replicas.

    Exits with status 1 if no controller answers, as after the end of a run on this machine, and with 3 if the
    run has failed and its controller still answers, or its job on Kubernetes has failed.
    """
    _exit_with(
        lambda controller: controller.status(where, as_json=as_json),
        lambda job: job.once("status", as_json=as_json),
        (where, tls_dir, namespace, context),
    )


@app.command("watch", epilog="Example: rolemesh watch my-job --namespace research")
def watch_run(
    where: Where,
    tls_dir: TlsOption = None,
    namespace: Namespace = "",
    context: Context = "",
    as_json: Json = False,
) -> None:
    """Show a run live until it ends, also across restarts of its controller. Exits like `status`.

    A controller that ends with an error ends this command with 3, also if something will start it again. Only
    `rolemesh run` after the loss of a role, and a job on Kubernetes, are followed further.
    """
    _exit_with(
        lambda controller: controller.watch(where, as_json=as_json),
        lambda job: job.watch(as_json=as_json),
        (where, tls_dir, namespace, context),
    )


@app.command("answers", epilog="Example: rolemesh answers outputs/tiny-tools --rows 3")
def answers_of_run(
    where: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, a folder of dumps, or one dump (JSONL).")
    ],
    step: Annotated[
        int | None, typer.Option(help="Step whose answers are shown; by default the newest step.")
    ] = None,
    uid: Annotated[
        str | None, typer.Option(help="Show only rows with this uid, i.e. answers to one prompt.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Maximum number of rows.", min=1)] = 1,
) -> None:
    """Show the policy's answers, conversations turn by turn, and the tokens that it is trained on.

    Reads the dumps in the job's trainer.rollout_data_dir, or else in its trainer.validation_data_dir.
    """
    from rolemesh.services.command_line.answers import show_answers

    show_answers(where, step, uid, rows)


@app.command(epilog="Example: rolemesh pause outputs/tiny")
def pause(where: Where, tls_dir: TlsOption = None, namespace: Namespace = "", context: Context = "") -> None:
    """Pause after the current step."""
    _steer("pause", where, tls_dir, namespace, context)


@app.command(epilog="Example: rolemesh resume outputs/tiny")
def resume(where: Where, tls_dir: TlsOption = None, namespace: Namespace = "", context: Context = "") -> None:
    """Continue a paused run. To resume a run that has ended, repeat its `rolemesh run` command."""
    _steer("resume", where, tls_dir, namespace, context)


@app.command(epilog="Example: rolemesh stop outputs/tiny")
def stop(where: Where, tls_dir: TlsOption = None, namespace: Namespace = "", context: Context = "") -> None:
    """End the run after the current step, with a checkpoint if trainer.save_freq is above 0."""
    _steer("stop", where, tls_dir, namespace, context)


def _steer(command: str, where: str, tls_dir: Path | None, namespace: str, context: str) -> None:
    _exit_with(
        lambda controller: controller.steer(where, command.capitalize()),
        lambda job: job.once(command),
        (where, tls_dir, namespace, context),
    )


def _exit_with(
    here: Callable[[Any], Coroutine[Any, Any, int]],
    there: Callable[[kubectl.Job], int],
    run: tuple[str, Path | None, str, str],
) -> NoReturn:
    """Do a command and exit with its code.

    Args:
        here: does it where the controller can be reached, given the module controller_client.
        there: does it for a job on Kubernetes.
        run: where, tls_dir, namespace and context, as the command takes them.
    """
    from rolemesh.rpc import tls
    from rolemesh.services.command_line import controller_client, kubectl

    where, tls_dir, namespace, context = run
    if controller_client.is_here(where):
        tls.use_keys(tls_dir, "operator")
        raise typer.Exit(asyncio.run(here(controller_client)))
    raise typer.Exit(there(kubectl.Job(where, namespace, context)))
