"""The commands `rolemesh data …`, which convert publishers' files to Parquet in verl's layout."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(no_args_is_help=True, help="Write Parquet files that the job file's data section reads.")

Out = Annotated[Path, typer.Argument(help="The folder for the Parquet files.")]


class Answering(StrEnum):
    """Who answers the policy's turns in the rows that `data gsm8k` writes."""

    TOOL = "tool"
    INTERACTION = "interaction"


@data_app.command("gsm8k", epilog="Example: rolemesh data gsm8k path/to/grade-school-math data/gsm8k")
def data_gsm8k(
    src: Annotated[
        Path,
        typer.Argument(
            help="A clone of openai/grade-school-math, a folder with train.jsonl and test.jsonl, "
            "or one JSONL file."
        ),
    ],
    out: Out,
    answered_by: Annotated[
        Answering | None,
        typer.Option(help="Write rows of conversations, in which a tool or an interaction checks answers."),
    ] = None,
) -> None:
    """Convert GSM8K's JSONL files to Parquet."""
    from rolemesh.data.converters.gsm8k_dataset import write_gsm8k

    for path in write_gsm8k(src, out, answered_by.value if answered_by else None):
        typer.echo(path)


@data_app.command("math", epilog="Example: rolemesh data math path/to/MATH data/math")
def data_math(
    src: Annotated[
        Path, typer.Argument(help="The folder MATH of the publishers' archive, with train and test.")
    ],
    out: Out,
) -> None:
    """Convert MATH's JSON files to Parquet."""
    from rolemesh.data.converters.competitions import write_math

    for path in write_math(src, out):
        typer.echo(path)


@data_app.command("aime", epilog="Example: rolemesh data aime path/to/aime_2024.parquet data/aime")
def data_aime(
    src: Annotated[Path, typer.Argument(help="A Parquet or JSONL file with the columns problem and answer.")],
    out: Out,
) -> None:
    """Convert the problems of AIME 2024 to test.parquet, with the prompts of DAPO."""
    from rolemesh.data.converters.competitions import write_aime

    typer.echo(write_aime(src, out))


@data_app.command("hh-rlhf", epilog="Example: rolemesh data hh-rlhf path/to/helpful-base data/helpful")
def data_hh_rlhf(
    src: Annotated[
        Path, typer.Argument(help="A folder with train.jsonl.gz and test.jsonl.gz, or one such file.")
    ],
    out: Out,
) -> None:
    """Convert the pairs of hh-rlhf to Parquet, with the columns prompt, chosen and rejected."""
    from rolemesh.data.converters.hh_rlhf import write_hh_rlhf

    for path in write_hh_rlhf(src, out):
        typer.echo(path)


@data_app.command("apps", epilog="Example: rolemesh data apps path/to/APPS data/apps")
def data_apps(
    src: Annotated[
        Path,
        typer.Argument(
            help="The folder APPS of the publishers' archive, with train and test; or a folder with "
            "train.jsonl and test.jsonl, or one JSONL file."
        ),
    ],
    out: Out,
) -> None:
    """Convert the programming problems of APPS to Parquet, with their tests.

    Problems without tests are left out.
    """
    from rolemesh.data.converters.apps import write_apps

    for path in write_apps(src, out):
        typer.echo(path)


@data_app.command("arithmetic", epilog="Example: rolemesh data arithmetic data/arithmetic")
def data_arithmetic(
    out: Annotated[Path, typer.Argument(help="The folder for train.parquet and val.parquet.")],
    seed: Annotated[int, typer.Option(help="Seed of the split into training and held-out problems.")] = 0,
) -> None:
    """Write additions of two-digit numbers, for training and validation."""
    from rolemesh.services.command_line.arithmetic import write_arithmetic

    for path in write_arithmetic(out, seed=seed):
        typer.echo(path)
