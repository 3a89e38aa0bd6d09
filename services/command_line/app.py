"""The command line: `rolemesh serve|control|plan|graph|data|configs|demo|model`, and the others' commands.

Each command imports what it needs when it is called, and the models' libraries only after reading the job file.
So `--help` and a misspelt key answer at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

import rolemesh
from rolemesh.errors import InvalidConfig
from rolemesh.importing import imported
from rolemesh.services.command_line.arguments import (
    Address,
    AttemptsOfOption,
    ConfigArgument,
    ConfigOption,
    DrainOption,
    HealthListenOption,
    LogFormat,
    LogFormatOption,
    MaxAttemptsOption,
    NeedOption,
    OptionalAddress,
    OptionalAddresses,
    Overrides,
    ScaleDownOption,
    ScaleUpOption,
    TlsOption,
    VersionOption,
    job_of,
)
from rolemesh.services.command_line.data_commands import data_app
from rolemesh.services.command_line.offline_commands import app as offline
from rolemesh.services.command_line.run_commands import app as steering
from rolemesh.services.command_line.training_commands import app as training

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="RLHF with every role as a gRPC service, alone on its device or taking turns with others.",
    epilog="Begin with: rolemesh configs && rolemesh demo outputs/tiny && rolemesh run configs/tiny.yaml",
)
app.add_typer(data_app, name="data")
app.add_typer(training)
app.add_typer(offline)
app.add_typer(steering)


@app.callback()
def options(version: VersionOption = False) -> None:
    """Take what comes before a command."""


class GraphFormat(StrEnum):
    """Output format of `graph`."""

    TEXT = "text"
    MERMAID = "mermaid"


class Task(StrEnum):
    """The task that a demo's model learns."""

    SUMS = "sums"
    TOOLS = "tools"


class Architecture(StrEnum):
    """Architectures that `model` makes."""

    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    LLAMA = "llama"


@app.command(epilog="Example: rolemesh serve reward --config job.yaml --listen 127.0.0.1:50051")
def serve(
    roles: Annotated[
        str,
        typer.Argument(
            help="actor, reference, critic, reward, environment or rollout. Several, separated by commas, take "
            "turns on this process's device.",
            metavar="ROLES",
        ),
    ],
    config: ConfigOption,
    listen: Annotated[
        str, typer.Option(help="host:port of the roles' gRPC server; port 0 picks a free one.")
    ] = "127.0.0.1:0",
    metrics_listen: Annotated[
        str, typer.Option(help="host:port of /metrics; empty: none; port 0 picks a free one.")
    ] = "",
    health_listen: HealthListenOption = "",
    tls_dir: TlsOption = None,
    address_file: Annotated[
        Path | None,
        typer.Option(help="Write the bound addresses to this file, as JSON."),
    ] = None,
    exit_with_parent: Annotated[
        bool, typer.Option(help="Exit when standard input closes, so that no process outlives its launcher.")
    ] = False,
    drain: DrainOption = 25.0,
    log_format: LogFormatOption = LogFormat.TEXT,
    overrides: Overrides = None,
) -> None:
    """Serve a role, or the roles of a group, over gRPC until SIGTERM.

    If placement.ranks gives the group several ranks, this starts them all, unless WORLD_SIZE says that it is
    one of them.
    """
    job = job_of(config, overrides)
    from rolemesh.services.processes.serve_ranks import serve_ranks, spread_group

    ports = {"metrics_listen": metrics_listen or None, "health_listen": health_listen or None}
    if group := spread_group(roles.split(","), job, os.environ):
        arguments = ["serve", roles, "--config", str(config), "--log-format", log_format.value]
        arguments += ["--drain", str(drain)]
        arguments += ["--tls-dir", str(tls_dir)] if tls_dir else []
        serving = serve_ranks(
            group,
            job,
            [*arguments, *(overrides or [])],
            listen,
            **ports,
            address_file=address_file,
            exit_with_parent=exit_with_parent,
            drain_s=drain,
            log_format=log_format.value,
        )
    else:
        serving = imported("rolemesh.services.processes.serve").serve(
            roles.split(","),
            job,
            listen,
            **ports,
            tls_dir=tls_dir,
            address_file=address_file,
            exit_with_parent=exit_with_parent,
            drain_s=drain,
            log_format=log_format.value,
        )
    asyncio.run(serving)


@app.command(
    epilog="Example: rolemesh control --config job.yaml --actor host1:50051 --rollout host2:50051,host3:50051 "
    "--reward host4:50051 --critic host5:50051"
)
def control(
    config: ConfigOption,
    actor: Address,
    rollout: OptionalAddresses = "",
    reward: OptionalAddresses = "",
    critic: OptionalAddress = "",
    reference: OptionalAddresses = "",
    environment: OptionalAddresses = "",
    listen: Annotated[str, typer.Option(help="host:port of the controller's own service.")] = "127.0.0.1:0",
    metrics_listen: Annotated[str, typer.Option(help="host:port of /metrics; empty: none.")] = "",
    health_listen: HealthListenOption = "",
    tls_dir: TlsOption = None,
    scale_down: ScaleDownOption = None,
    scale_up: ScaleUpOption = False,
    need: NeedOption = None,
    max_attempts: MaxAttemptsOption = 0,
    attempts_of: AttemptsOfOption = "",
    counts_in: Annotated[
        Path | None,
        typer.Option(
            help="File that counts starts that end before the run directory is locked, for --max-attempts.",
            metavar="FILE",
        ),
    ] = None,
    roles_of: Annotated[
        Path | None,
        typer.Option(
            help="Run directory of the job with which the roles were started, if this run writes to another: a "
            "trial before the run. Refused while the roles have a controller.",
            metavar="DIRECTORY",
        ),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    overrides: Overrides = None,
) -> None:
    """Train with roles that are already being served."""
    from rolemesh.telemetry.logs import setup_logging

    given = {
        "actor": actor,
        "rollout": rollout,
        "reward": reward,
        "critic": critic,
        "reference": reference,
        "environment": environment,
    }
    setup_logging(log_format.value)
    from rolemesh.services.controller.scale_down import workloads
    from rolemesh.services.controller.start_guard import start_guard

    scaled_down = workloads(scale_down or ())
    needed = workloads(need or ())
    with start_guard(counts_in, max_attempts, attempts_of, scaled_down) as begun:
        job = job_of(config, overrides)
        from rolemesh.rpc import tls
        from rolemesh.rpc.calling.discovery import parse
        from rolemesh.rpc.serving.server import serve_metrics
        from rolemesh.services.controller.service.controller_server import serving
        from rolemesh.services.controller.service.status import RunStatus
        from rolemesh.telemetry.metrics import CONTROLLER

        addresses = {role: parse(address) for role, address in given.items() if address}

        async def control_run() -> None:
            tls.use_keys(tls_dir, "controller")
            status = RunStatus(job.trainer.experiment_name)
            async with serving(status, job.roles, listen, health_listen or None) as server:
                scraped = serve_metrics(metrics_listen, CONTROLLER) if metrics_listen else None
                # In a thread: to import the models' libraries takes seconds, and the server must answer.
                services_control = await asyncio.to_thread(imported, "rolemesh.services.controller.main")
                await services_control.control(
                    job,
                    addresses,
                    server,
                    scraped=scraped,
                    scaled_down=scaled_down,
                    scales_up=scale_up,
                    needed=needed,
                    max_attempts=max_attempts,
                    attempts_of=attempts_of,
                    begun=begun,
                    roles_of=roles_of,
                )

        asyncio.run(control_run())


@app.command(epilog="Example: rolemesh graph configs/gsm8k-ppo.yaml --format mermaid")
def graph(
    config: ConfigArgument,
    overrides: Overrides = None,
    format: Annotated[GraphFormat, typer.Option(help="Output format.")] = GraphFormat.TEXT,
) -> None:
    """Print the calls of a step in their order, with the columns that each reads and writes."""
    job = job_of(config, overrides)
    step = rolemesh.step_graph(job)
    typer.echo(step.to_mermaid() if format is GraphFormat.MERMAID else step.to_text())


@app.command(epilog="Example: rolemesh check configs/gsm8k-grpo.yaml configs/recipes/dapo.yaml")
def check(
    config: Annotated[
        Path, typer.Argument(help="A job file, or values of the chart rlhf-job (YAML).", metavar="FILE")
    ],
    overrides: Overrides = None,
) -> None:
    """Say what is wrong with a job, in one sentence each, and exit with status 2; or that nothing is, and 0.

    It needs no models, no data and no cluster, and starts nothing. Of values of the chart, it finds what the
    chart's schema refuses, what the first pod of a release would, and unknown names in groups and tls.secrets.
    `helm template` and `helm install` find the rest, such as GPUs of pods, claims, and what the cluster lacks.

    If the job has plug-ins that are not on this machine, stderr names them, and only the chart's schema checks
    the job. If Helm gets --set-file plugins.code=my_parts.py, add job.plugins=my_parts.py here.
    """
    from rolemesh.services.command_line.check_command import wrong

    if found := wrong(config, overrides or []):
        typer.echo("\n".join(found))
        raise typer.Exit(2)
    typer.echo(f"{config}: nothing is wrong")


@app.command(epilog="Example: rolemesh plan job.yaml --gpus 8 --gpu-memory 80GiB --search")
def plan(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=0, help="Number of GPUs; 0: use this machine's CPU.")] = 0,
    gpu: Annotated[str, typer.Option(help="Kind of GPU: a100, b200, h100, h200, l40s or rtx4090.")] = "h100",
    gpu_memory: Annotated[
        str, typer.Option(help="Memory of one GPU, e.g. 80GiB; empty: the kind's usual size.", metavar="SIZE")
    ] = "",
    search: Annotated[bool, typer.Option("--search", help="Also search all groupings of roles.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> None:
    """Estimate memory and time of each placement, the best first. Nothing is loaded or started.

    Exits with status 1 if the job can run in none of them.
    """
    job = job_of(config, overrides)
    from rolemesh.services.command_line.plan_command import show, to_json

    plans = rolemesh.plan(job, gpus=gpus, gpu=gpu, gpu_memory=gpu_memory, search=search)
    if as_json:
        typer.echo(json.dumps(to_json(job, plans), indent=2))
    else:
        show(job, plans, searched=search)
    if not plans[0].fits:
        raise typer.Exit(1)


@app.command(epilog="Example: rolemesh fetch job.yaml")
def fetch(
    config: ConfigArgument,
    overrides: Overrides = None,
    done: Annotated[
        Path | None,
        typer.Option(help="Write this file at the end, with what was fetched, as JSON.", metavar="FILE"),
    ] = None,
) -> None:
    """Download the models and data files of the Hugging Face Hub that a job names, to the Hub's cache.

    `run` does this itself. Roles and controllers that are started one by one read only the cache.
    """
    from rolemesh.services.command_line.fetch import fetch_and_show

    fetch_and_show(job_of(config, overrides), done)


@app.command(
    epilog="Examples: rolemesh model outputs/gsm8k/model --hidden-size 64 --num-layers 2 && "
    "rolemesh model models/smollm2 --from-gguf SmolLM2-135M-Instruct.Q4_1.gguf"
)
def model(
    out: Annotated[Path, typer.Argument(help="The folder for the model; a Hugging Face directory.")],
    architecture: Annotated[Architecture, typer.Option(help="Architecture of the model.")] = Architecture.QWEN2,
    hidden_size: Annotated[int, typer.Option(help="Model width.")] = 64,
    num_layers: Annotated[int, typer.Option(help="Number of transformer blocks.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    from_gguf: Annotated[
        Path | None,
        typer.Option(
            help="Convert this GGUF file instead, of any architecture that transformers reads. Needs "
            "rolemesh[gguf].",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Make a small randomly initialised model with a byte-level tokenizer, or convert a GGUF file.

    A random model has up to four attention heads, at least 32 wide where the width allows. vLLM on a CPU loads
    no narrower ones.
    """
    if from_gguf is not None:
        from rolemesh.services.command_line.convert import convert_and_show

        if (architecture, hidden_size, num_layers, seed) != (Architecture.QWEN2, 64, 2, 0):
            raise InvalidConfig("--from-gguf has a model of its own; leave out the options of a random one")
        convert_and_show(from_gguf, out)
        return
    from rolemesh.models.tiny import make_tiny_model

    made = make_tiny_model(
        out,
        architecture.value,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=_num_heads(hidden_size),
        seed=seed,
    )
    typer.echo(made)


def _num_heads(hidden_size: int) -> int:
    """Return how many heads a width has: of an even width, since rotary embeddings turn pairs of numbers."""
    even = [number for number in (4, 3, 2, 1) if hidden_size % (2 * number) == 0]
    wide = [number for number in even if hidden_size // number >= 32]
    return next(iter(wide or even), 4)


@app.command(epilog="Example: rolemesh export outputs/run models/policy --checkpoint best --dtype bfloat16")
def export(
    source: Annotated[
        Path,
        typer.Argument(help="A run, a checkpoint, or a directory with a model or an adapter.", metavar="FROM"),
    ],
    out: Annotated[Path, typer.Argument(help="The new directory.", metavar="TO")],
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint of a run: latest, best or the number of a step.")
    ] = "latest",
    role: Annotated[str, typer.Option(help="Role whose model is exported: actor or critic.")] = "actor",
    dtype: Annotated[
        str, typer.Option(help="Type of the exported weights: float32, bfloat16 or float16.")
    ] = "float32",
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a file, such as 500MB.")] = "5GB",
    base: Annotated[
        str, typer.Option(help="An adapter's base model: a directory or a Hub name; empty: the one it names.")
    ] = "",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code from the model directory.")] = False,
) -> None:
    """Write a checkpoint as one Hugging Face directory: adapter merged, rounded, in shards, with its tokenizer.

    The directory is read again, and must give the same logits. To go on training from it, set
    actor.model.path to it.
    """
    from rolemesh.services.command_line.export import export_and_show

    export_and_show(
        source,
        out,
        checkpoint=checkpoint,
        role=role,
        dtype=dtype,
        max_shard_size=max_shard_size,
        base=base,
        trust_remote_code=trust_remote_code,
    )


@app.command(epilog="Example: rolemesh configs && rolemesh graph configs/gsm8k-ppo.yaml")
def configs(
    out: Annotated[
        Path, typer.Argument(help="The folder to write; documentation and recipes name it configs.")
    ] = Path("configs"),
) -> None:
    """Write the job files and recipes that the documentation names. Existing files are kept.

    A checkout has them already.
    """
    from rolemesh.services.command_line.job_files import write_job_files

    num_written, kept = write_job_files(out)
    typer.echo(f"{out}: {num_written} files written")
    for path in kept:
        typer.echo(f"{path} differs from the package's, and is kept")


@app.command(epilog="Example: rolemesh demo outputs/tiny && rolemesh run configs/tiny.yaml")
def demo(
    out: Annotated[Path, typer.Argument(help="The run directory of the job file.")] = Path("outputs/tiny"),
    seed: Annotated[int, typer.Option(help="Seed of the model, the demonstrations and the problems.")] = 1,
    task: Annotated[
        Task,
        typer.Option(
            help="sums: additions, for configs/tiny.yaml; tools: a calculator, for configs/tiny-tools.yaml."
        ),
    ] = Task.SUMS,
) -> None:
    """Make a demo's model, warm-started on flawed demonstrations, and its data. Existing files are kept."""
    if task is Task.TOOLS:
        from rolemesh.services.command_line.tools_demo import prepare_tools_demo

        prepare_tools_demo(out, seed=seed)
        return
    from rolemesh.services.command_line.demo import prepare_demo

    prepare_demo(out, seed=seed)


def main() -> None:
    """Run the command line. Expected errors print as one line instead of a traceback."""
    from rolemesh.errors import WRONG_INPUT, RolemeshError

    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a policy may write any character
    try:
        app()
    except RolemeshError as error:
        _print_error(error)
        sys.exit(2 if isinstance(error, WRONG_INPUT) else error.exit_code)
    except OSError as error:  # e.g. a full disk or a read-only folder; the error names the file itself
        _print_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_error(error: Exception) -> None:
    """Print an error, with unprintable characters escaped as in logs: its text may be untrusted."""
    from rolemesh.telemetry.logs import printable

    typer.secho("\n".join(map(printable, f"error: {error}".split("\n"))), fg="red", err=True)


if __name__ == "__main__":
    main()
