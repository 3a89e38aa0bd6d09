"""The command line: `rolemesh run|serve|control|plan|graph|data|demo|model`, and those of steering.py.

Each command imports what it needs when it is called, and the models' libraries after it has read the job file:
`--help` and a misspelt key answer at once.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.services.command_line.run_commands import app as steering

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="RLHF in which every role is a gRPC service, alone on its device or taking turns with others.",
    epilog="Begin with: rolemesh demo outputs/tiny && rolemesh run configs/tiny.yaml",
)
data_app = typer.Typer(no_args_is_help=True, help="Write Parquet in the layout that the data section reads.")
app.add_typer(data_app, name="data")
app.add_typer(steering)


class LogFormat(StrEnum):
    """How logs are written."""

    TEXT = "text"
    JSON = "json"


class GraphFormat(StrEnum):
    """How `graph` prints."""

    TEXT = "text"
    MERMAID = "mermaid"


class Architecture(StrEnum):
    """What `model` makes."""

    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    LLAMA = "llama"


ConfigArgument = Annotated[Path, typer.Argument(help="The job file (YAML).", metavar="CONFIG")]
ConfigOption = Annotated[Path, typer.Option("--config", help="The job file (YAML).", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Laid on the job file: others, such as configs/recipes/dapo.yaml, from left to right, and single "
        "keys, such as trainer.save_freq=5",
        metavar="[FILE|KEY=VALUE]...",
    ),
]
ADDRESSES = (
    "host:port, several separated by commas; or dns:NAME:PORT, all that the name has; or "
    "kubernetes:SERVICE:PORT, the pods behind a Service of the own namespace. The last two follow replicas "
    "that come and go"
)
ADDRESS = "host:port of its one replica; or dns:NAME:PORT or kubernetes:SERVICE:PORT, which follow it"
Address = Annotated[str, typer.Option(help=f"{ADDRESS}.", metavar="ADDRESS")]
OptionalAddress = Annotated[str, typer.Option(help=f"{ADDRESS}; empty: none.", metavar="ADDRESS")]
Addresses = Annotated[str, typer.Option(help=f"{ADDRESSES}.", metavar="ADDRESSES")]
OptionalAddresses = Annotated[str, typer.Option(help=f"{ADDRESSES}; empty: none.", metavar="ADDRESSES")]

LogFormatOption = Annotated[
    LogFormat,
    typer.Option(envvar="ROLEMESH_LOG_FORMAT", help="Lines for people, or one JSON object a line."),
]
HealthListenOption = Annotated[
    str, typer.Option(help="host:port of health alone, for probes; always plain; empty: none.")
]
TlsOption = Annotated[
    Path | None,
    typer.Option(
        help="Keys: a directory with tls.crt, tls.key and ca.crt. Then all gRPC is mutual TLS.", metavar="DIR"
    ),
]


@app.command(epilog="Example: rolemesh run configs/tiny.yaml trainer.total_training_steps=5")
def run(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Train: start a process of this machine for each group of roles (placement.strategy; by default each role
    is its own), make the steps, and stop them all."""
    from rolemesh.config import load_job

    job = load_job(config, overrides or ())
    from rolemesh.services.processes.launch import launch

    asyncio.run(launch(job))


@app.command(epilog="Example: rolemesh serve reward --config job.yaml --listen 127.0.0.1:50051")
def serve(
    roles: Annotated[
        str,
        typer.Argument(
            help="actor, reference, critic, reward or rollout; or several, with commas, which take turns "
            "on this process's device.",
            metavar="ROLES",
        ),
    ],
    config: ConfigOption,
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = "127.0.0.1:0",
    metrics_listen: Annotated[
        str, typer.Option(help="host:port of /metrics; empty: none; port 0 takes a free one.")
    ] = "",
    health_listen: HealthListenOption = "",
    tls_dir: TlsOption = None,
    address_file: Annotated[
        Path | None,
        typer.Option(help="Write the bound addresses here, as JSON."),
    ] = None,
    exit_with_parent: Annotated[
        bool, typer.Option(help="End when standard input closes, so that a killed launcher leaves nothing.")
    ] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
    overrides: Overrides = None,
) -> None:
    """Serve a role, or the roles of a group, over gRPC until SIGTERM."""
    from rolemesh.config import load_job

    job = load_job(config, overrides or ())
    from rolemesh.services.processes.serve import serve as serve_roles

    asyncio.run(
        serve_roles(
            roles.split(","),
            job,
            listen,
            metrics_listen=metrics_listen or None,
            health_listen=health_listen or None,
            tls_dir=tls_dir,
            address_file=address_file,
            exit_with_parent=exit_with_parent,
            log_format=log_format.value,
        )
    )


@app.command(
    epilog="Example: rolemesh control --config job.yaml --actor host1:50051 --rollout host2:50051,host3:50051 "
    "--reward host4:50051 --critic host5:50051"
)
def control(
    config: ConfigOption,
    actor: Address,
    rollout: Addresses,
    reward: Addresses,
    critic: OptionalAddress = "",
    reference: OptionalAddresses = "",
    listen: Annotated[str, typer.Option(help="host:port of the controller's own service.")] = "127.0.0.1:0",
    metrics_listen: Annotated[str, typer.Option(help="host:port of /metrics; empty: none.")] = "",
    health_listen: HealthListenOption = "",
    tls_dir: TlsOption = None,
    scale_down: Annotated[
        list[str] | None,
        typer.Option(
            help="Scale these to zero when the run has ended: deployment/NAME, statefulset/NAME or "
            "scaledobject/NAME of the own namespace; several separated by commas, or the option again.",
            metavar="WORKLOADS",
        ),
    ] = None,
    need: Annotated[
        list[str] | None,
        typer.Option(
            help="Refuse to begin, instead of waiting for the roles, where one of these deployment/NAME or "
            "statefulset/NAME has been scaled to zero.",
            metavar="WORKLOADS",
        ),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    overrides: Overrides = None,
) -> None:
    """Train with roles that are already being served."""
    from rolemesh.config import load_job
    from rolemesh.telemetry.logs import setup_logging

    given = {"actor": actor, "rollout": rollout, "reward": reward, "critic": critic, "reference": reference}
    setup_logging(log_format.value)
    job = load_job(config, overrides or ())
    from rolemesh.rpc import tls
    from rolemesh.rpc.calling.discovery import parse
    from rolemesh.rpc.serving.server import serve_metrics
    from rolemesh.services.controller.scale_down import workloads
    from rolemesh.services.controller.service.server import serving
    from rolemesh.services.controller.service.status import RunStatus
    from rolemesh.telemetry.metrics import CONTROLLER

    addresses = {role: parse(address) for role, address in given.items() if address}
    scaled_down, needed = workloads(scale_down or ()), workloads(need or ())

    async def control_run() -> None:
        tls.use_keys(tls_dir, "controller")
        status = RunStatus(job.trainer.experiment_name)
        async with serving(status, job.roles, listen, health_listen or None) as server:
            scraped = serve_metrics(metrics_listen, CONTROLLER) if metrics_listen else None
            # With the models' libraries, for seconds, in which the server answers.
            services_control = await asyncio.to_thread(import_module, "rolemesh.services.controller.main")
            await services_control.control(
                job,
                addresses,
                server,
                scraped=scraped,
                scaled_down=scaled_down,
                needed=needed,
            )

    asyncio.run(control_run())


@app.command(epilog="Example: rolemesh graph configs/gsm8k-ppo.yaml --format mermaid")
def graph(
    config: ConfigArgument,
    overrides: Overrides = None,
    format: Annotated[GraphFormat, typer.Option(help="How to print it.")] = GraphFormat.TEXT,
) -> None:
    """Print the step: which method runs after which, and the columns that each reads and writes."""
    from rolemesh.config import load_job

    job = load_job(config, overrides or ())
    from rolemesh.services.controller.pages.choice import record_step

    step = record_step(job)
    typer.echo(step.to_mermaid() if format is GraphFormat.MERMAID else step.to_text())


@app.command(epilog="Example: rolemesh plan job.yaml --gpus 8 --gpu-memory 80GiB --search")
def plan(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=0, help="How many there are; 0: this machine's CPU.")] = 0,
    gpu: Annotated[str, typer.Option(help="Their kind: a100, b200, h100, h200, l40s or rtx4090.")] = "h100",
    gpu_memory: Annotated[
        str, typer.Option(help="Of one of them, e.g. 80GiB; empty: what the kind has.", metavar="SIZE")
    ] = "",
    search: Annotated[bool, typer.Option("--search", help="Look through all groupings as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: bytes and seconds.")] = False,
) -> None:
    """Tell what each placement takes in memory and time, the best first; nothing is loaded or started. Exits
    with 1 where the job can be run in none."""
    from rolemesh.config import load_job

    job = load_job(config, overrides or ())
    from rolemesh.services.command_line.plan import cluster_of, make_plans, show, to_json

    plans = make_plans(job, cluster_of(gpus, gpu, gpu_memory), searching=search)
    if as_json:
        typer.echo(json.dumps(to_json(plans), indent=2))
    else:
        show(job, plans, searched=search)
    if not plans[0].fits:
        raise typer.Exit(1)


@data_app.command("gsm8k", epilog="Example: rolemesh data gsm8k path/to/grade-school-math data/gsm8k")
def data_gsm8k(
    src: Annotated[Path, typer.Argument(help="A folder with train.jsonl and test.jsonl, or one JSONL file.")],
    out: Annotated[Path, typer.Argument(help="The folder for the Parquet files.")],
) -> None:
    """GSM8K's own JSONL to Parquet."""
    from rolemesh.data.gsm8k import write_gsm8k

    for path in write_gsm8k(src, out):
        typer.echo(path)


@data_app.command("arithmetic", epilog="Example: rolemesh data arithmetic data/arithmetic")
def data_arithmetic(
    out: Annotated[Path, typer.Argument(help="The folder for train.parquet and val.parquet.")],
    seed: Annotated[int, typer.Option(help="Of the split into training and held-out problems.")] = 0,
) -> None:
    """Two-digit additions, training and held-out ones."""
    from rolemesh.data.arithmetic import write_arithmetic

    for path in write_arithmetic(out, seed=seed):
        typer.echo(path)


@app.command(epilog="Example: rolemesh model outputs/gsm8k/model --hidden-size 64 --num-layers 2")
def model(
    out: Annotated[Path, typer.Argument(help="The folder for the model; a Hugging Face directory.")],
    architecture: Annotated[Architecture, typer.Option(help="Whose shape it has.")] = Architecture.QWEN2,
    hidden_size: Annotated[int, typer.Option(help="Model width.")] = 64,
    num_layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Make a small randomly initialised model with a byte-level tokenizer."""
    from rolemesh.models.tiny import make_tiny_model

    typer.echo(
        make_tiny_model(out, architecture.value, hidden_size=hidden_size, num_layers=num_layers, seed=seed)
    )


@app.command(epilog="Example: rolemesh demo outputs/tiny && rolemesh run configs/tiny.yaml")
def demo(
    out: Annotated[Path, typer.Argument(help="The run directory of configs/tiny.yaml.")] = Path("outputs/tiny"),
    seed: Annotated[int, typer.Option(help="Of the model, the demonstrations and the problems.")] = 1,
) -> None:
    """Make the demo's model, warm-started on flawed additions, and its data. What is there is kept."""
    from rolemesh.services.command_line.demo import prepare_demo

    prepare_demo(out, seed=seed)


def main() -> None:
    """The entry point: an error of ours or of the machine is one line, not a traceback."""
    from rolemesh.errors import WRONG_INPUT, RolemeshError

    atexit.register(gc.freeze)  # the interpreter's last collection would walk all of torch, for seconds
    try:
        app()
    except RolemeshError as error:
        _tell(error)
        sys.exit(2 if isinstance(error, WRONG_INPUT) else 1)
    except OSError as error:  # a full disk, a folder that may not be written: it names the file itself
        _tell(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _tell(error: Exception) -> None:
    """Its lines, as in a log: some of the text may be a stranger's."""
    from rolemesh.telemetry.logs import printable

    typer.secho("\n".join(map(printable, f"error: {error}".split("\n"))), fg="red", err=True)


if __name__ == "__main__":
    main()
