"""Implements `rolemesh fetch`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from rolemesh import hub
from rolemesh.config import JobConfig
from rolemesh.models.fetching import fetched, models_of


def fetch_and_show(job: JobConfig, done: Path | None) -> None:
    """Download what a job names by Hub names, and print each name and its commit.

    Args:
        job: the job.
        done: written at the end, as JSON, name to commit; None: no file.

    Raises:
        RolemeshError: as rolemesh.models.fetching.fetched.
    """
    job = fetched(job)
    found = {model.path: model.revision for model in models_of(job).values() if hub.is_name(model.path)}
    for file in (*job.data.train_files, *job.data.val_files):
        if file.startswith("hf://"):
            repository, name = hub.split_uri(file)
            found[f"{hub.URI}{repository.name}/{name}"] = repository.revision
    for name, commit in found.items():
        typer.echo(f"{name} {commit}")
    if done is not None:
        done.parent.mkdir(parents=True, exist_ok=True)
        unfinished = done.with_name(f"{done.name}.unfinished")
        unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(done)
