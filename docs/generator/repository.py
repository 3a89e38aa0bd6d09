"""Links from a page to the rest of the repository.

A link to `../configs/recipes/dapo.yaml` works where a page is read in the repository. On the site the same link
leads to a page under `source/` that shows the file. So no page names the repository's public address.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from dialect import adapted

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=(?:#[^)\s]*)?\))")
LANGUAGES = {".json": "json", ".proto": "protobuf", ".py": "python", ".yaml": "yaml", ".yml": "yaml"}


def linked(text: str, base: Path) -> set[Path]:
    """The files and directories of the repository that a page links to.

    Args:
        text: Markdown.
        base: the directory that its links start from.
    """
    found = {(base / target).resolve() for target in LINK.findall(text)}
    return {path for path in found if path.exists() and path.is_relative_to(ROOT)}


def shown(path: Path) -> list[Path]:
    """What the site shows of a path outside docs/: the file, or the directory and each file in it."""
    if not path.is_dir():
        return [path]
    return [path, *sorted(file for file in path.iterdir() if file.is_file())]


def place(path: Path) -> str:
    """Where a file of the repository is on the site; a page ends in `.md`, as in docs/."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}" if path.suffix in (".md", ".png") else f"source/{name}.md"


def moved(text: str, base: Path, page: str) -> str:
    """Markdown whose links start from `base`, with links that start from a page of the site.

    Raises:
        ValueError: a link leads nowhere, or out of the repository.
    """

    def move(match: re.Match[str]) -> str:
        if not linked(f"]({match[0]})", base):
            raise ValueError(f"a page in {base.relative_to(ROOT)}/ links to {match[0]}, which does not exist")
        return posixpath.relpath(place((base / match[0]).resolve()), posixpath.dirname(page))

    return LINK.sub(move, text)


def page_of(path: Path) -> str:
    """Markdown of the page that shows a file or a directory. The site's search leaves these pages out."""
    name = path.relative_to(ROOT).as_posix()
    front = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n\n"
    if path.suffix == ".md":
        return front + moved(adapted(path.read_text(encoding="utf-8")), path.parent, place(path))
    if path.is_dir():
        entries = (f"- [{file.name}]({path.name}/{Path(place(file)).name})" for file in shown(path)[1:])
        return f"{front}# {name}/\n\n" + "\n".join(entries) + "\n"
    language = LANGUAGES.get(path.suffix, "text")
    return f"{front}# {name}\n\n`````` {language}\n{path.read_text(encoding='utf-8')}``````\n"


def opening_of_the_readme() -> str:
    """README.md from its title to its second heading: what the project is, and what runs today."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.partition("\n")[2].partition("\n## ")[0].strip()
