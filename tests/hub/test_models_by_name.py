"""Models by Hub name: the same bits as from the directory, fetched once, by one process, and never a pickle."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_server import CHUNK, Hub, stop_asking
from huggingface_hub import constants
from in_process import recorded, small_job, train
from in_process_commands import rolemesh as command
from launched import rolemesh, written

import rolemesh as library
from rolemesh.config import JobConfig
from rolemesh.config.base import parse_overrides
from rolemesh.config.job import make_job
from rolemesh.errors import HubUnavailable, ModelNotFound, RolemeshError
from rolemesh.models.directory import existing_directory
from rolemesh.models.fetching import fetched, pinned
from rolemesh.models.loading import load_causal_lm, load_tokenizer, model_directory, named_weights

NAME = "Owner/Tiny-0.1B"
PICKLES = {"pytorch_model.bin": b"pickle", "original/consolidated.00.pth": b"pickle"}
OTHERS = {
    "README.md": b"words",
    "onnx/model.onnx": b"graph",
    "original/model.safetensors": b"copy",
    "own.py": b"",
}


def job_of(path: str = NAME, **model: Any) -> JobConfig:
    return make_job(
        {"actor": {"model": {"path": path, **model}}, "data": {"train_files": "none.parquet"}}, "job"
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_name_gives_the_files_of_the_directory_and_no_others(hub: Hub, tiny_model: Path) -> None:
    commit = hub.add(NAME, contents(tiny_model) | PICKLES | OTHERS)
    with pytest.raises(ModelNotFound, match=r"not completely in the Hub's cache .*`rolemesh fetch"):
        existing_directory(job_of().actor.model, "actor")
    assert hub.requests == []  # a role never asks the Hub

    job = fetched(job_of())
    assert job.actor.model.revision == job.model_of("reference").revision == commit
    found = model_directory(job.actor.model, "actor")
    assert contents(found) == {file: b for file, b in contents(tiny_model).items() if file != "README.md"}
    assert not any(hub.asked(file) for file in (PICKLES | OTHERS))
    weights = named_weights(load_causal_lm(job.actor.model, "actor"))
    same = named_weights(load_causal_lm(job_of(str(tiny_model)).actor.model, "actor"))
    assert weights.keys() == same.keys()
    assert all(weights[name].equal(same[name]) for name in same)


async def test_a_run_by_name_has_the_bits_of_a_run_from_the_directory(
    hub: Hub, tiny_model: Path, tmp_path: Path
) -> None:
    commit = hub.add(NAME, tiny_model)
    overrides = ("trainer.total_training_steps=2", "trainer.save_freq=2", "placement.strategy=collocate")
    job = small_job(tmp_path, Path(NAME), "run", *overrides)
    async with rolemesh("run", written(job, tmp_path), executed=True) as launched:  # as a user starts it
        code, output = await launched.end()
    assert code == 0, output
    saved = (job.run_dir / "config.yaml").read_text()
    assert f"revision: {commit}" in saved
    assert hub.asked("model.safetensors").count("GET") == 1

    (tmp_path / "other").mkdir()
    same = small_job(tmp_path / "other", tiny_model, "run", *overrides)
    await train(same)
    assert recorded(job) == recorded(same)
    for role in ("actor", "critic"):
        files = [j.run_dir / "global_step_2" / role / "model.safetensors" for j in (job, same)]
        assert files[0].read_bytes() == files[1].read_bytes()

    moved = hub.add(NAME, contents(tiny_model) | {"merges.txt": b"newer"})
    answer = await asyncio.to_thread(command, "run", written(job, tmp_path), "trainer.total_training_steps=3")
    assert answer.returncode == 2
    for role in ("actor", "reference"):
        assert f"revision of {role}'s model is '{moved}' now and was '{commit}'" in answer.stderr


def test_all_roles_pin_one_revision_that_outlives_its_branch(hub: Hub, tiny_model: Path) -> None:
    old = hub.add(NAME, contents(tiny_model), branch="v1")
    new = hub.add(NAME, contents(tiny_model) | {"config.json": b"{}"})
    assert old != new
    job = fetched(job_of(revision="v1"))
    assert job.actor.model.revision == old
    hub.add(NAME, contents(tiny_model) | {"merges.txt": b"newer"}, branch="v1")
    num_requests = len(hub.requests)
    assert fetched(job).actor.model.revision == old
    assert len(hub.requests) == num_requests  # a commit that is in the cache needs no question
    assert pinned(job_of(revision="v1")).actor.model.revision == old  # nobody has fetched the newer one
    assert existing_directory(job.actor.model, "actor").name == old


def test_a_fetched_model_is_used_offline(hub: Hub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(NAME, tiny_model)
    fetched(job_of())
    stop_asking(monkeypatch)
    num_requests = len(hub.requests)
    job = fetched(job_of())
    assert job.actor.model.revision == commit
    assert load_tokenizer(job.actor.model)("1+1=")
    assert len(hub.requests) == num_requests
    with pytest.raises(ModelNotFound, match="and HF_HUB_OFFLINE is set"):
        fetched(job_of("Owner/Never-Fetched"))


def test_a_plan_downloads_the_configuration_alone(hub: Hub, tiny_model: Path) -> None:
    hub.add(NAME, tiny_model)
    plans = library.plan(job_of(), gpus=1)
    assert plans[0].fits
    assert hub.sent.keys() - {""} == {"config.json"}
    with pytest.raises(ModelNotFound, match="not completely in the Hub's cache"):
        model_directory(job_of().actor.model, "actor")


def test_the_token_is_sent_and_nowhere_kept(
    hub: Hub,
    tiny_model: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.add(NAME, tiny_model)
    hub.repositories[NAME].token = "hf_secret"
    with pytest.raises(ModelNotFound, match=r"status 401\): check the name, or set HF_TOKEN"):
        fetched(job_of())
    token = tmp_path_factory.mktemp("secret") / "token"  # as in the chart
    token.write_text("hf_secret\n")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(token))
    job = tmp_path / "job.yaml"
    job.write_text(job_of().to_yaml())
    answer = command("fetch", job, "--done", tmp_path / "done.json")
    assert answer.returncode == 0, answer.stderr
    assert hub.tokens == {"Bearer hf_secret"}
    assert json.loads((tmp_path / "done.json").read_text()) == {NAME: hub.repositories[NAME].revisions["main"]}
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
    assert kept == []
    assert "hf_secret" not in answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("status", "revision", "kind", "words"),
    [
        (200, "", ModelNotFound, "Absent is not a directory, and not a model at http"),
        (200, "v9", ModelNotFound, "has no revision 'v9' at http"),
        (401, "", ModelNotFound, "that the token may read (status 401): check the name, or set HF_TOKEN"),
        (403, "", ModelNotFound, "is gated at http"),
        (500, "", HubUnavailable, "status 500. Run the command again: finished files are kept"),
        (0, "", HubUnavailable, "could not be downloaded from http"),
        (-1, "", HubUnavailable, "ConnectError"),
    ],
)
def test_each_failure_names_model_endpoint_and_remedy(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    revision: str,
    kind: type[RolemeshError],
    words: str,
) -> None:
    hub.add(NAME, {"config.json": b"{}"})
    hub.repositories[NAME].status = status
    hub.silent = status == 0
    if hub.silent:
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    if status == -1:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    name = "Owner/Absent" if "Absent" in words else NAME
    with pytest.raises(kind) as failed:
        fetched(job_of(name, revision=revision))
    message = str(failed.value)
    assert words in message
    assert f"actor.model.path: {name}" in message
    assert "(HF_ENDPOINT)" in message


def test_a_path_neither_directory_nor_hub_name_is_refused(hub: Hub, tiny_model: Path) -> None:
    for path in ("outputs/tiny/model", "absent", "/absent/model", "../a", "Owner/Name/"):
        with pytest.raises(ModelNotFound, match=r"no such model directory.*not a name of the Hugging Face"):
            existing_directory(job_of(path).actor.model, "actor")
    with pytest.raises(ModelNotFound, match="is a directory; only a Hub name has revisions"):
        existing_directory(job_of(str(tiny_model), revision="main").actor.model, "actor")
    assert hub.requests == []


def test_a_directory_of_the_same_name_has_precedence(
    hub: Hub, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Owner").mkdir()
    Path(NAME).symlink_to(tiny_model)
    assert fetched(job_of()).actor.model.revision == ""
    assert model_directory(job_of().actor.model, "actor") == Path(NAME)
    assert hub.requests == []


async def fetching(job: Path) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "rolemesh", "fetch", str(job))
    return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)


async def test_two_processes_at_once_fetch_once(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, {"config.json": b"{}", "model.safetensors": os.urandom(10 * CHUNK)})
    job = tmp_path / "job.yaml"
    job.write_text(job_of().to_yaml())
    hub.holds_after = CHUNK
    first = await fetching(job)
    assert await asyncio.to_thread(hub.held.wait, 60)  # in the middle of the weights
    second = await fetching(job)
    await asyncio.to_thread(hub.until, lambda: len(hub.asked("main")) == 2)
    hub.go_on.set()
    assert await first.wait() == 0
    assert await second.wait() == 0
    assert hub.sent["model.safetensors"] == 10 * CHUNK


def contents_by_name(cache: Path) -> dict[str, bytes]:
    """The shards of all snapshots."""
    return {path.name: path.read_bytes() for path in cache.rglob("model-*.safetensors")}


async def test_a_repeated_download_keeps_files_of_a_killed_one(hub: Hub, tmp_path: Path) -> None:
    shards = {f"model-{i}.safetensors": os.urandom(size * CHUNK) for i, size in enumerate((1, 4))}
    hub.add(NAME, shards)
    job = tmp_path / "job.yaml"
    job.write_text(job_of().to_yaml())
    hub.holds_after = 2 * CHUNK  # the second file is never whole
    first, cache = await fetching(job), Path(constants.HF_HUB_CACHE)
    assert await asyncio.to_thread(hub.held.wait, 60)
    async with asyncio.timeout(60):
        while "model-0.safetensors" not in contents_by_name(cache):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.02)
    first.kill()
    await first.wait()
    hub.holds_after = None
    hub.go_on.set()
    second = await fetching(job)
    assert await second.wait() == 0
    assert contents_by_name(cache) == shards
    assert hub.sent["model-0.safetensors"] == CHUNK


def test_a_broken_connection_is_resumed(hub: Hub) -> None:
    weights = os.urandom(12 << 20)  # the library writes parts of 10 MB
    hub.add(NAME, {"config.json": b"{}", "model.safetensors": weights})
    hub.cuts_after = 11 << 20
    found = existing_directory(fetched(job_of()).actor.model, "actor")
    assert (found / "model.safetensors").read_bytes() == weights
    assert hub.sent["model.safetensors"] == (11 << 20) + (2 << 20)


def test_an_adapter_needs_one_base_at_one_revision() -> None:
    words = "reference.model.path is Owner/Tiny-0.1B at v2, but with actor.model.lora_rank 4"
    overrides = ["actor.model.lora_rank=4", f"reference.model.path={NAME}", "reference.model.revision=v2"]
    with pytest.raises(RolemeshError, match=words):
        make_job(
            {"data": {"train_files": "none.parquet"}}
            | parse_overrides([f"actor.model.path={NAME}", "actor.use_kl_loss=true", *overrides]),
            "job",
        )
