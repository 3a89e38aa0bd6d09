"""The commands that start one role and train nothing: `rolemesh generate|evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolemesh.services.command_line.arguments import ConfigArgument, Overrides, job_of
from rolemesh.services.processes.role_forks import fork_roles

app = typer.Typer()


@app.command(
    epilog="Example: rolemesh generate job.yaml --output out.parquet data.val_files=test.parquet "
    "rollout.val_kwargs.n=4 rollout.val_kwargs.do_sample=true"
)
def generate(
    config: ConfigArgument,
    output: Annotated[
        Path, typer.Option(help="The Parquet file to write: the given rows, and responses.", metavar="FILE")
    ],
    overrides: Overrides = None,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Also write the log-probability of each token.")
    ] = False,
) -> None:
    """Respond to the prompts of data.val_files, with only the rollout (docs/generate-and-evaluate.md).

    As in a validation, rollout.val_kwargs sets how responses are sampled, and rollout.val_kwargs.n how many for
    each prompt. If the command is interrupted, repeat it: it continues.
    """
    fork_roles()
    job = job_of(config, overrides)
    from rolemesh.services.processes.generate import generate_file

    generate_file(job, output, log_probs=log_probs)


@app.command(
    epilog="Example: rolemesh evaluate job.yaml --output scores.json data.val_files=out.parquet "
    "reward.custom_reward_function.path=reward.py"
)
def evaluate(
    config: ConfigArgument,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Also write the metrics to this JSON file.", metavar="FILE")
    ] = None,
    response_key: Annotated[
        str, typer.Option(help="The column with a list of responses in each row.", metavar="COLUMN")
    ] = "responses",
) -> None:
    """Score the responses in data.val_files, with only the reward, and print metrics by data source.

    The numbers are the same as in a validation, with standard errors (docs/generate-and-evaluate.md). Rows need
    the columns data.reward_fn_key and data.reward_model_key. The section reward scores them as in a run.
    """
    fork_roles()
    job = job_of(config, overrides)
    from rolemesh.services.processes.evaluate import evaluate_file

    evaluate_file(job, output, response_key)
