"""Arguments that several commands take, and the job that they name."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rolemesh

if TYPE_CHECKING:
    from rolemesh.config import JobConfig


class LogFormat(StrEnum):
    """Format of logs."""

    TEXT = "text"
    JSON = "json"


ConfigArgument = Annotated[Path, typer.Argument(help="The job file (YAML).", metavar="CONFIG")]
ConfigOption = Annotated[Path, typer.Option("--config", help="The job file (YAML).", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Overrides of the job file: further files, such as configs/recipes/dapo.yaml, from left to right, "
        "and then single keys, such as trainer.save_freq=5",
        metavar="FILE|KEY=VALUE",
    ),
]
DrainOption = Annotated[
    float,
    typer.Option(
        min=0,
        help="Seconds for running calls after SIGTERM; the process ends at most 5 s later. A rollout needs as "
        "long as its longest row.",
    ),
]
ScaleDownOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Scale these to zero after the run: deployment/NAME, statefulset/NAME, raycluster/NAME or "
        "scaledobject/NAME in this pod's namespace; delete poddisruptionbudget/NAME. Separate several by "
        "commas, or repeat the option.",
        metavar="WORKLOADS",
    ),
]
ScaleUpOption = Annotated[
    bool,
    typer.Option(
        "--scale-up",
        help="Before the run, scale each deployment/NAME and statefulset/NAME of --scale-down that has fewer "
        "pods than its annotation rolemesh.dev/replicas up to that number.",
    ),
]
NeedOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Fail at the start, instead of waiting for the roles, if one of these deployment/NAME or "
        "statefulset/NAME is scaled to zero.",
        metavar="WORKLOADS",
    ),
]
MaxAttemptsOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Starts of the run without a new checkpoint or, with --counts-in, that did not begin, after which "
        "it ends with status 3 and scales down. Waiting for roles that have no pod is no start; 0: no limit.",
    ),
]
AttemptsOfOption = Annotated[
    str,
    typer.Option(
        help="Name of the run as it was started; only starts with this name count. If they have ended it "
        "(status 3), start it again under another name.",
        metavar="TEXT",
    ),
]

ADDRESSES = (
    "host:port, several separated by commas; or dns:NAME:PORT, all addresses of the name; or "
    "kubernetes:SERVICE:PORT, the pods behind a Service in this pod's namespace. The last two follow replicas "
    "that come and go"
)
ADDRESS = "host:port of its only replica; or dns:NAME:PORT or kubernetes:SERVICE:PORT, which follow it"
Address = Annotated[str, typer.Option(help=f"{ADDRESS}.", metavar="ADDRESS")]
OptionalAddress = Annotated[str, typer.Option(help=f"{ADDRESS}; empty: none.", metavar="ADDRESS")]
Addresses = Annotated[str, typer.Option(help=f"{ADDRESSES}.", metavar="ADDRESSES")]
OptionalAddresses = Annotated[str, typer.Option(help=f"{ADDRESSES}; empty: none.", metavar="ADDRESSES")]


LogFormatOption = Annotated[
    LogFormat,
    typer.Option(envvar="ROLEMESH_LOG_FORMAT", help="Text for people, or one JSON object per line."),
]
HealthListenOption = Annotated[
    str, typer.Option(help="host:port that serves only health, for probes, without TLS; empty: none.")
]
TlsOption = Annotated[
    Path | None,
    typer.Option(
        help="Use mutual TLS for all gRPC, with tls.crt, tls.key and ca.crt in this directory.", metavar="DIR"
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rolemesh {rolemesh.__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]


def job_of(config: Path, overrides: list[str] | None, *own: str) -> JobConfig:
    """Return the job of a file with overrides, of which a command's own come last.

    Raises:
        InvalidConfig: as load_job.
    """
    from rolemesh.config import load_job

    return load_job(config, [*(overrides or ()), *own])
