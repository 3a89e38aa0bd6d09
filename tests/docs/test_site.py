"""The documentation site: every page is in its navigation, and generated text is whole."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check
import command_line
import configuration
import pages
import pytest
import repository
import typer
from dialect import adapted

from rolemesh.catalog.plugin_imports import NAMED
from rolemesh.config import JobConfig
from rolemesh.config.base import leaves
from rolemesh.services.command_line.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = tomllib.loads((DOCS / "zensical.toml").read_text(encoding="utf-8"))["project"]


def in_the_navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for inner in entry.values():
            yield from in_the_navigation(inner)
    else:
        for inner in entry:
            yield from in_the_navigation(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    there = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(in_the_navigation(SITE["nav"])) == there


def test_every_configuration_key_has_one_row() -> None:
    row = re.compile(r"^\| `(\w+)`\{ #([\w.]+) \} \| .+ \| `.+` \| .* \|$", re.MULTILINE)
    rows = row.findall(configuration.tables())
    assert sorted(key for _, key in rows) == sorted(leaves(JobConfig))
    assert all(key.rpartition(".")[2] == shown for shown, key in rows)


def test_a_key_with_names_of_a_catalog_shows_them_all() -> None:
    rows = {line.partition("{ #")[2].partition(" }")[0]: line for line in configuration.tables().splitlines()}
    for key, catalog in NAMED.items():
        assert [name for name in catalog if f"`{name}`" not in rows[key]] == [], key


@pytest.mark.parametrize(
    ("key", "row"),
    [
        (
            "algorithm.gamma",
            "number ≥\N{NO-BREAK SPACE}0 and ≤\N{NO-BREAK SPACE}1 | `1.0` | discount factor of rewards; "
            "1: no discount",
        ),
        ("actor.ppo_epochs", "integer >\N{NO-BREAK SPACE}0 | `1` | passes over each batch"),
        (
            "critic.ppo_mini_batch_size",
            "integer >\N{NO-BREAK SPACE}0, or null | `null` | prompts per optimizer step, with rollout.n rows "
            "each; null: the actor's",
        ),
        ("rollout.name", '`hf`, `vllm`, `openai`, or a plug-in\'s | `"hf"` | the engine that generates'),
        ("trainer.val_only", "true or false | `false` | validate once and make no step"),
    ],
)
def test_a_row_has_type_default_and_meaning(key: str, row: str) -> None:
    assert f"{{ #{key} }} | {row} |" in configuration.tables()


def test_every_command_has_a_heading_and_its_options() -> None:
    def walk(command: Any, name: str) -> Iterator[str]:
        for each, below in getattr(command, "commands", {}).items():
            yield f"{name} {each}"
            yield from walk(below, f"{name} {each}")

    text = command_line.sections()
    headings = re.findall(r"^#+ (rolemesh .+)$", text, re.MULTILINE)
    assert headings == list(walk(typer.main.get_command(app), "rolemesh"))
    assert "| `--gpus <int range>` | Number of GPUs; 0: use this machine's CPU." in text


def test_the_pages_are_filled_and_show_the_files_they_link_to(tmp_path: Path) -> None:
    pages.write_pages(tmp_path)
    written = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.md")}
    assert [path for path, text in written.items() if "<!-- generated" in text] == []
    missing = {
        f"{path.relative_to(tmp_path)}: {target}"
        for path, text in written.items()
        for target in repository.LINK.findall(text)
        if not (path.parent / target).exists()
    }
    assert missing == set()
    recipe = (ROOT / "configs/recipes/dapo.yaml").read_text(encoding="utf-8")
    assert recipe in written[tmp_path / "source/configs/recipes/dapo.yaml.md"]
    assert "](source/configs/recipes/dapo.yaml.md)" in written[tmp_path / "algorithms.md"]


def test_a_link_that_leads_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"docs/ links to \.\./configs/none\.yaml, which does not exist"):
        repository.moved("[none](../configs/none.yaml)", DOCS, "page.md")


def test_github_lists_and_tables_are_written_as_python_markdown() -> None:
    github = """\
text
- one
  goes on
  - two
    goes on
- three:

  ```yaml
  a:
    b: 1

  ```
1. four

```
- no list
  here
```
| `\\|d\\|` | a \\| b |
"""
    assert (
        adapted(github)
        == """\
text

- one
    goes on
    - two
        goes on
- three:

    ```yaml
    a:
      b: 1

    ```
1. four

```
- no list
  here
```
| `|d|` | a \\| b |
"""
    )


def test_the_site_check_finds_dead_links_and_external_resources(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="#here"></a><a href="b.html#there"></a><a href="https://example.org"></a>'
        '<a href="c.html"></a><a href="b.html#nowhere"></a><script src="https://example.org/a.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h2 id="there"></h2>')
    assert list(check.faults(tmp_path)) == [
        "a.html links to b.html#nowhere, which has no such anchor",
        "a.html links to c.html, which does not exist",
        "a.html loads https://example.org/a.js",
    ]
