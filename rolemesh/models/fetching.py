"""Downloads what a job names at the Hugging Face Hub, before its roles start. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from rolemesh import hub
from rolemesh.config import JobConfig
from rolemesh.config.base import Config
from rolemesh.config.model import ModelConfig
from rolemesh.models.directory import hub_directory

MODELS = ("actor.model", "critic.model", "reference.model", "reward.reward_model.model")


def models_of(job: JobConfig) -> dict[str, ModelConfig]:
    """Return the model of each role that loads one; the actor's also gives every job its tokenizer."""
    return {role: job.model_of(role) for role in job.roles if role == "actor" or job.on_device(role)}


def fetched(job: JobConfig) -> JobConfig:
    """Download the models and the data files that a job names by Hub names.

    Returns:
        The job with commits for revisions. So all its roles read the same files, even if a branch moves on.

    Raises:
        ModelNotFound, InvalidData, HubUnavailable: as hub.snapshot; before any download of a later one.
    """
    return _pinned(job, _commits(models_of(job), fetch=True), fetch=True)


def pinned(job: JobConfig) -> JobConfig:
    """Return the job as `fetched` returned it where it ran, from the Hub's cache alone.

    Raises:
        ModelNotFound, InvalidData: the cache lacks files.
    """
    return _pinned(job, _commits(models_of(job), fetch=False), fetch=False)


def fetch_shapes(job: JobConfig) -> None:
    """Download the configurations of a job's models, a few kilobytes, from which a plan is made.

    Raises:
        ModelNotFound, HubUnavailable: as hub.snapshot.
    """
    for role, model in models_of(job).items():
        if hub.is_name(model.path):
            hub_directory(model, role, hub.configuration_files(model.trust_remote_code), fetch=True)


Commits = Mapping[tuple[str, str], str]


def _commits(models: Mapping[str, ModelConfig], *, fetch: bool) -> Commits:
    """Return the commit of each Hub name and revision."""
    named = {role: model for role, model in models.items() if hub.is_name(model.path)}
    return {
        (model.path, model.revision): hub_directory(model, role, fetch=fetch).name
        for role, model in named.items()
    }


def _pinned(job: JobConfig, commits: Commits, *, fetch: bool) -> JobConfig:
    for key in MODELS:
        model: ModelConfig = _value(job, key)
        if commit := commits.get((model.path, model.revision)):
            job = _with(job, f"{key}.revision", commit)
    for key in ("data.train_files", "data.val_files"):
        files = [hub.pinned_file(file, fetch=fetch) for file in _value(job, key)]
        job = _with(job, key, files) if files != _value(job, key) else job
    return job


def _value(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def _with(config: Config, key: str, value: object) -> Any:
    """Return a section with another value of a key in it, which may have dots."""
    name, _, rest = key.partition(".")
    return config.model_copy(update={name: _with(getattr(config, name), rest, value) if rest else value})
