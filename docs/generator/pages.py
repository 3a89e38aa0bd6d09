"""usage: pages.py DIRECTORY. Writes the site's sources there: docs/ with its generated parts filled in.

A page says where generated text goes: `<!-- generated: configuration -->`. A link to a file outside docs/
becomes a link to a page that shows the file. What builds the site afterwards needs no plug-in of ours.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import command_line
import configuration
import repository
from dialect import adapted

GENERATED = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def write_pages(out: Path) -> None:
    """Write every page and picture of the site; what was in the directory is lost."""
    shutil.rmtree(out, ignore_errors=True)
    written: set[Path] = set()
    waiting = {path for path in repository.DOCS.rglob("*") if path.suffix in (".css", ".md", ".png")}
    while waiting - written:
        path = min(waiting - written)
        written.add(path)
        place = repository.place(path)
        target = out / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".css", ".png"):
            shutil.copyfile(path, target)
            continue
        text = filled(path, place) if path.is_relative_to(repository.DOCS) else repository.page_of(path)
        target.write_text(text, encoding="utf-8")
        waiting |= {each for found in _linked_from(path) for each in repository.shown(found)}


def filled(path: Path, place: str) -> str:
    """A page of docs/ with its generated text."""
    text = repository.moved(adapted(path.read_text(encoding="utf-8")), path.parent, place)
    return GENERATED.sub(lambda match: _generated(match[1], path, place), text)


def _generated(name: str, path: Path, place: str) -> str:
    match name:
        case "configuration":
            return configuration.tables()
        case "command-line":
            return command_line.sections()
        case "readme":
            return repository.moved(adapted(repository.opening_of_the_readme()), repository.ROOT, place)
    raise ValueError(f"{path}: generated text is configuration, command-line or readme; got {name!r}")


def _linked_from(path: Path) -> set[Path]:
    if path.suffix != ".md":
        return set()
    text = path.read_text(encoding="utf-8")
    found = repository.linked(text, path.parent)
    if "<!-- generated: readme -->" in text:
        found |= repository.linked(repository.opening_of_the_readme(), repository.ROOT)
    return found


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
