"""The whole jobs that the docs show are accepted, and each makes a step. Tutorials have tests of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.services.controller.pages.choice import record_step

ROOT = Path(__file__).parents[2]
# Pages whose commands name the algorithm's page, as `rolemesh sft` does.
OVER = {"docs/sft.md": {"algorithm": {"page": "sft"}}}


def whole_jobs() -> Iterator[tuple[str, Any]]:
    """The page, and each of its blocks of YAML that has data to train on and a model."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            if {"data", "actor"} <= set(re.findall(r"^(\w+):", block, re.MULTILINE)):
                yield str(path.relative_to(ROOT)), yaml.safe_load(block)


JOBS = list(whole_jobs())


def test_the_pages_of_given_responses_have_whole_jobs() -> None:
    assert {"docs/sft.md", "docs/preferences.md"} <= {page for page, _ in JOBS}


@pytest.mark.parametrize(("page", "sections"), JOBS, ids=[page for page, _ in JOBS])
def test_a_whole_job_of_the_docs_is_accepted_and_makes_a_step(page: str, sections: Any) -> None:
    record_step(make_job(merge(sections, OVER.get(page, {}))))
