"""A process whose certificate does not name it does not start, and takes no such keys later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from certificates import Authority, swap
from in_process import small_job
from serving import serve_process
from typer.testing import CliRunner

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.rpc import tls
from rolemesh.services.command_line.app import app

JOB = "my-job"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def test_a_process_not_named_by_its_certificate_does_not_start(
    tiny_model: Path, tmp_path: Path, authority: Authority
) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    keys = swap(tmp_path / "keys", authority.keys(JOB, "reward"))
    addresses = [f"--{role}=127.0.0.1:1" for role in job.roles]
    for role, arguments in {
        "operator": ["status", "127.0.0.1:1"],
        "controller": ["control", "--config", str(written(job, tmp_path)), *addresses],
    }.items():
        ended = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--tls-dir", str(keys)])
        assert isinstance(ended.exception, InvalidConfig), ended.output
        assert f"does not name {role}, which this process is" in str(ended.exception)
    async with serve_process("actor,reward", job, tmp_path, f"--tls-dir={keys}") as role:
        _, errors = await role.process.communicate()
    assert role.process.returncode == 2
    assert "does not name actor, which this process is" in errors.decode().splitlines()[-1]


def test_new_keys_that_do_not_name_the_process_are_not_taken(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    keys = swap(tmp_path / "keys", authority.keys(JOB, "actor", "rollout"))
    folder = tls.KeyFolder(keys, ("actor", "rollout"))
    before = folder.current()
    swap(keys, authority.keys(JOB, "actor"))
    assert folder.current() is before
    assert "does not name rollout, which this process is" in caplog.text
    swap(keys, authority.keys(JOB, "rollout", "actor"))
    assert folder.current() is not before


def written(job: JobConfig, directory: Path) -> Path:
    (directory / "job.yaml").write_text(job.to_yaml())
    return directory / "job.yaml"
