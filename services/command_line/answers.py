"""`rolemesh answers`: prints rows of a run's dumps, conversations turn by turn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from rolemesh.config.yaml_file import read_texts, read_yaml
from rolemesh.errors import InvalidData
from rolemesh.telemetry.logs import printable, printable_lines

MAX_LINE_BYTES = 64 << 20  # of one row in a dump
FOLDERS = ("rollout_data_dir", "validation_data_dir")  # keys of the section trainer, the first that is set
# What the policy sampled is trained on; all else is masked out of the loss.
SAMPLED = "green"
MASKED = "dim cyan"


def show_answers(where: Path, step: int | None, uid: str | None, num_rows: int) -> None:
    """Print rows of a dump.

    Args:
        where: a dump; a folder of dumps; or a run directory, whose job names the folder; that of
            validation if it names no other.
        step: whose dump; None: the newest.
        uid: the rows' uid; None: any.
        num_rows: how many rows at most.

    Raises:
        InvalidData: there is no such dump, it has no such row, or it is not a dump.
    """
    dump = _dump(where, step)
    found = list(itertools.islice((row for row in _rows(dump) if uid in (None, row["uid"])), num_rows))
    if not found:
        raise InvalidData(f"{dump} has no row" + (f" of uid {uid}" if uid else ""))
    console = Console()
    for row in found:
        console.print(picture(row))
    console.print(Text.assemble(("sampled", SAMPLED), "  ", ("given, without loss", MASKED), f"  {dump}"))


def picture(row: dict[str, Any]) -> RenderableType:
    """Draw a row: its prompt, what each side said, and its score."""
    conversation = row.get("conversation", {"said": [{"who": "policy", "text": row["output"]}]})
    parts = [Text(printable_lines(row["input"]), style=MASKED)]
    for said in conversation["said"]:
        policy = said["who"] == "policy"
        parts.append(Text(_side(said), style="bold" if policy else "bold dim"))
        parts.append(Text(printable_lines(said["text"]), style=SAMPLED if policy else MASKED))
    numbers = {name: value for name, value in conversation.items() if name not in ("said", "why")}
    ended = [f"ended: {conversation['why']}"] if "why" in conversation else []
    facts = [
        f"score {row['score']:g}",
        f"truth {row['gts']}",
        *ended,
        *(f"{k} {v:g}" for k, v in numbers.items()),
    ]
    title = f"step {row['step']}  {row['data_source']}  {row['uid']}"
    parts.append(Text("── " + printable("   ".join(facts)), style="bold dim"))
    return Panel(Group(*parts), title=Text(printable(title)), title_align="left")


def _side(said: dict[str, Any]) -> str:
    tokens = f", {said['tokens']} tokens" if "tokens" in said else ""
    reward = f", reward {said['reward']:g}" if said.get("reward") else ""
    return f"── {said['who']}{tokens}{reward}"


def _dump(where: Path, step: int | None) -> Path:
    if where.is_file():
        return where
    folder = where
    if (config := where / "config.yaml").is_file():
        trainer = read_texts(read_yaml(config), [f"trainer.{key}" for key in FOLDERS])["trainer"]
        named = [trainer[key] for key in FOLDERS if trainer.get(key)]
        if not named:
            raise InvalidData(f"{where}: the run writes no answers; set trainer.{' or trainer.'.join(FOLDERS)}")
        folder = Path(named[0])
    steps = {int(file.stem): file for file in folder.glob("*.jsonl") if file.stem.isdigit()}
    if not steps or (step is not None and step not in steps):
        known = f"; there are steps {min(steps)} to {max(steps)}" if steps else ""
        wanted = "no dump of answers" if step is None else f"no dump of step {step}"
        raise InvalidData(f"{folder} has {wanted} (<step>.jsonl){known}")
    return steps[max(steps) if step is None else step]


def _rows(dump: Path) -> Iterator[dict[str, Any]]:
    with dump.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                return
            try:
                row = json.loads(line)
                picture(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidData(f"{dump}, line {number}: not a row of trainer.rollout_data_dir") from error
            yield row
