"""The reference of the command line: usage, arguments and options of each command, from their help texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from rolemesh.services.command_line.app import app


def sections() -> str:
    """One heading for each command, in the order of `rolemesh --help`."""
    return "\n".join(_command(typer.main.get_command(app), None, "rolemesh"))


def _command(command: Any, parent: Any, name: str) -> Iterator[str]:
    context = typer.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    inner = getattr(command, "commands", {})
    if parent:
        yield f"{'#' * (name.count(' ') + 1)} {name}\n"
        yield " ".join(command.help.split()) + "\n"
    if not inner:
        yield f"```\n{name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        yield from _parameters(command, context)
        example = (command.epilog or "").partition("Example: ")[2]
        if example:
            yield f"Example:\n\n```\n{example}\n```\n"
    for each, below in inner.items():
        yield from _command(below, context, f"{name} {each}")


def _parameters(command: Any, context: typer.Context) -> Iterator[str]:
    rows = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    rows = [(written, meaning) for written, meaning in rows if "--help" not in written]
    if rows:
        yield "| argument or option | meaning |\n|-|-|"
        for written, meaning in rows:
            yield f"| `{written}` | {_cell(meaning)} |"
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "&#124;").replace("<", "&lt;")
