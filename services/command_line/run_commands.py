"""The commands that show and steer a run that goes on: `rolemesh status|watch|pause|resume|stop`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Where = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run directory of a run of this machine; or host:port of a controller; or the name of a job "
        "on Kubernetes (its Helm release), which takes kubectl.",
    ),
]
TlsOption = Annotated[
    Path | None,
    typer.Option(help="Keys, where the controller at host:port has some.", metavar="DIR"),
]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Of the job on Kubernetes.")]
Context = Annotated[str, typer.Option(help="Of the kubeconfig, for the job on Kubernetes.")]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.command(epilog="Example: rolemesh status outputs/tiny")
def status(
    where: Where,
    tls_dir: TlsOption = None,
    namespace: Namespace = "",
    context: Context = "",
    as_json: Json = False,
) -> None:
    """Show what a run is doing: step, phase, reward, and its roles with their replicas. Exits with 1 where no
    controller answers, with 3 where the run has failed."""
    from rolemesh.services.command_line import controller_client as watch
    from rolemesh.services.command_line import kubectl

    if watch.is_here(where):
        _use(tls_dir)
        raise typer.Exit(asyncio.run(watch.status(where, as_json=as_json)))
    raise typer.Exit(kubectl.Job(where, namespace, context).once("status", as_json=as_json))


@app.command("watch", epilog="Example: rolemesh watch my-job --namespace research")
def watch_run(
    where: Where,
    tls_dir: TlsOption = None,
    namespace: Namespace = "",
    context: Context = "",
    as_json: Json = False,
) -> None:
    """Show a run live, to its end, also when its controller is restarted. Exits as `status` does."""
    from rolemesh.services.command_line import controller_client as watch
    from rolemesh.services.command_line import kubectl

    if watch.is_here(where):
        _use(tls_dir)
        raise typer.Exit(asyncio.run(watch.watch(where, as_json=as_json)))
    raise typer.Exit(kubectl.Job(where, namespace, context).watch(as_json=as_json))


@app.command(epilog="Example: rolemesh pause outputs/tiny")
def pause(where: Where, tls_dir: TlsOption = None, namespace: Namespace = "", context: Context = "") -> None:
    """Pause after the current step."""
    _steer("pause", where, tls_dir, namespace, context)


@app.command(epilog="Example: rolemesh resume outputs/tiny")
def resume(where: Where, tls_dir: TlsOption = None, namespace: Namespace = "", context: Context = "") -> None:
    """Go on after `pause`."""
    _steer("resume", where, tls_dir, namespace, context)


@app.command(epilog="Example: rolemesh stop outputs/tiny")
def stop(where: Where, tls_dir: TlsOption = None, namespace: Namespace = "", context: Context = "") -> None:
    """Let the running step end, write a checkpoint if trainer.save_freq is above 0, and end the run."""
    _steer("stop", where, tls_dir, namespace, context)


def _steer(command: str, where: str, tls_dir: Path | None, namespace: str, context: str) -> None:
    from rolemesh.services.command_line import controller_client as watch
    from rolemesh.services.command_line import kubectl

    if watch.is_here(where):
        _use(tls_dir)
        raise typer.Exit(asyncio.run(watch.steer(where, command.capitalize())))
    raise typer.Exit(kubectl.Job(where, namespace, context).once(command))


def _use(tls_dir: Path | None) -> None:
    from rolemesh.rpc import tls

    tls.use_keys(tls_dir, "operator")
