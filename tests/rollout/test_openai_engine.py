"""The engine openai with vLLM's own server, a process of its own: what it generates is the model's of the
version that each token names, rows are neither lost nor doubled, one that does not suit is refused at once."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from generation import generated
from openai_rollouts import (
    MAX_LOGPROBS,
    T,
    assert_are_the_models,
    changed,
    job_of,
    log_probs_of,
    prompts_of,
    weights,
    worker_of,
)
from server_addresses import proxied, reserved_port
from turns import conversation, lengths_of, with_answer
from vllm_rollouts import installed

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleUnavailable, WeightsUnavailable
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.rollout.engines.openai.folder import PREFIX
from rolemesh.services.rollout.engines.openai.http_servers import VllmServer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights.published import PublishedWeights

# The server's start is the first test's; 45 s where nothing else runs.
pytestmark = [installed, pytest.mark.timeout(500)]

START_S, STOP_S = 400, 60
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling C++ would take half a minute
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no other process for the only rank
}
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "64"),
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"),
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_LOGPROBS)),
    *("--worker-extension-cls", "rolemesh.services.rollout.engines.vllm.extension.RolloutExtension"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, and heads of a width that vLLM's kernels for the CPU know."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128, initializer_range=0.1)


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server. Its start takes most of this file's time."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *FLAGS]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    with reserved_port() as port, (tmp_path_factory.mktemp("server") / "log").open("w+") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=inherited | ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it has processes of its own, which end with it
        )
        try:
            deadline = time.monotonic() + START_S
            while not answers(f"http://127.0.0.1:{port}/health"):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    pytest.fail("vLLM's server did not start:\n" + log.read()[-3000:])
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5).is_success
    except httpx.HTTPError:
        return False


# ------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.8}], ids=str)
async def test_log_probs_are_the_models_before_and_after_updates(
    url: str, model: Path, tmp_path: Path, sampling: dict[str, float]
):
    prompts = prompts_of(12)
    with worker_of(model, [url], tmp_path, tokens=24, **sampling) as worker:
        temperature = sampling.get("temperature", 1.0)
        assert_are_the_models(
            changed(model, 0), prompts, await generated(worker, prompts), temperature=temperature
        )
        for version in (1, 2):
            actor = changed(model, 0.03 * version)
            await worker.update_weights(PublishedWeights(version, weights(actor)))
            rows = await generated(worker, prompts)
            assert_are_the_models(actor, prompts, rows, temperature=temperature)
            assert set(rows["weight_versions"][rows["response_mask"]].tolist()) == {version}
            assert (rows["weight_versions"][~rows["response_mask"]] == -1).all()
    if sampling.get("top_k"):
        kept, responses, mask = rows["kept_ids"], rows["responses"], rows["response_mask"]
        assert kept.shape == (12, 24, 20)
        assert (kept == responses[..., None]).any(-1)[mask].all(), "a drawn token could be drawn"
        assert (kept[mask] == -1).any(), "top_p cut something, or the test shows nothing"


async def test_greedy_answers_are_those_of_the_engine_hf(url: str, model: Path, tmp_path: Path):
    prompts = prompts_of(8, "validation")
    with worker_of(model, [url], tmp_path, tokens=24) as worker:
        theirs = await generated(worker, prompts)
    hf = RolloutWorker(job_of(model, [], tmp_path, tokens=24, name="hf"))
    ours = await generated(hf, prompts)
    assert torch.equal(theirs["responses"], ours["responses"])
    torch.testing.assert_close(theirs["rollout_log_probs"], ours["rollout_log_probs"], atol=1e-4, rtol=0)


async def test_a_row_follows_from_its_seed(url: str, model: Path, tmp_path: Path):
    prompts = prompts_of(8)
    with worker_of(model, [url], tmp_path, tokens=24) as worker:
        first, again = await generated(worker, prompts), await generated(worker, prompts[range(4)])
        prompts["seeds"] = prompts["seeds"] + 1
        other = await generated(worker, prompts)
    assert torch.equal(first["responses"][:4], again["responses"])
    assert (first["responses"] != other["responses"]).any(1).all()


async def test_turns_go_on_where_the_row_ends(url: str, model: Path, tmp_path: Path):
    """Log-probs are the model's given all tokens before; a row is its seed's, whoever shares the request."""
    prompts, actor = prompts_of(6), changed(model, 0)
    with worker_of(model, [url], tmp_path, tokens=64) as worker:
        worker._engine._ends = list(range(0, 256, 16))
        exchanged = await conversation(prompts, 64, [[5] * 6], [partial(generated, worker)] * 2)
        request, answer = exchanged[1]
        again = await generated(worker, request[[2]])
        without = await generated(worker, prompts)
    assert torch.equal(exchanged[0][1]["responses"], without["responses"])
    assert torch.equal(again["responses"][0], answer["responses"][2])
    mask, begun = answer["response_mask"], lengths_of(request["turns"])[:, None]
    assert mask.any(1).all()
    assert torch.equal(mask, (torch.arange(64) >= begun) & (torch.arange(64) < begun + mask.sum(1)[:, None]))
    after = with_answer(request, answer, 2)
    after["response_mask"] = after["turns"] != 0
    expected = torch.where(mask, log_probs_of(actor, request, after), 0)
    torch.testing.assert_close(answer["rollout_log_probs"], expected, atol=1e-4, rtol=0)


async def test_rows_come_while_others_wait_and_leaving_ends_those(url: str, model: Path, tmp_path: Path):
    """The server gets the first four rows alone: these come, and the next ones are given up."""
    async with proxied(url) as line:
        job = job_of(model, [line.url], tmp_path, ignore_eos=True, max_num_seqs=4)
        with closing(await asyncio.to_thread(RolloutWorker, job)) as worker:
            begun, line.num_allowed = tokens_made(url), 4
            async with aclosing(worker.generate(prompts_of(64))) as batches:
                first = await anext(batches)
                assert 1 <= len(first) <= 4
                await line.holding.wait()
            await line.quiet.wait()
            await until(lambda: gauge(url, "num_requests_running") == 0)
            assert tokens_made(url) - begun <= 4 * T, "rows that nobody waits for are not made"
            line.num_allowed = math.inf
            assert len(await generated(worker, prompts_of(4))) == 4


def gauge(url: str, name: str) -> float:
    found = re.search(rf"^vllm:{name}{{.*}} (.*)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def tokens_made(url: str) -> float:
    return gauge(url, "generation_tokens_total")


async def until(condition: Any) -> None:
    """Asks again and again; each is a request to the server."""
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(condition):
            pass


# ---------------------------------------------------------------------------------- weights


async def test_every_token_names_the_weights_that_made_it(url: str, model: Path, tmp_path: Path):
    """Leaves when a row of the new weights has come, long before all 400."""
    prompts, actors = prompts_of(400), [changed(model, 0.0), changed(model, 0.04)]
    with worker_of(model, [url], tmp_path, ignore_eos=True, max_num_seqs=4) as worker:
        async with aclosing(worker.generate(prompts)) as stream:
            parts = [await anext(stream)]  # most of the others have not begun
            await worker.update_weights(PublishedWeights(1, weights(actors[1])))
            async for part in stream:
                parts.append(part)
                if (part["weight_versions"] == 1).any():
                    break
    rows = DataProto.concat(parts)
    prompts, versions = prompts[rows["row"]], rows["weight_versions"]
    assert (versions.diff(dim=1) >= 0).all()
    assert set(versions.flatten().tolist()) == {0, 1}, "the swap came while rows were made"
    expected = torch.stack([log_probs_of(actor, prompts, rows) for actor in actors])
    expected = expected.gather(0, versions[None])[0]
    torch.testing.assert_close(rows["rollout_log_probs"], expected, atol=1e-4, rtol=0)


async def test_wrong_tensors_leave_the_old_weights(url: str, model: Path, tmp_path: Path):
    prompts = prompts_of(4, "validation")
    with worker_of(model, [url], tmp_path, tokens=16) as worker:
        before = await generated(worker, prompts)
        wrong = dict(weights(changed(model, 0.1)))
        wrong["model.norm.weight"] = torch.ones(7)
        with pytest.raises(WeightsUnavailable, match=r"model\.norm\.weight is \[7\]"):
            await worker.update_weights(PublishedWeights(1, wrong))
        assert worker.version == 0
        assert torch.equal((await generated(worker, prompts))["responses"], before["responses"])


async def test_a_restarted_server_gets_the_version_before_it_answers(url: str, model: Path, tmp_path: Path):
    prompts, actor = prompts_of(6), changed(model, 0.05)
    with worker_of(model, [url], tmp_path, tokens=16) as worker:
        await worker.update_weights(PublishedWeights(1, weights(actor)))
        # What a restart leaves: the model's own weights under vLLM's own name for them.
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
            (await client.post("/collective_rpc", json=body)).raise_for_status()
            (await client.post("/update_weight_version", json={"new_version": "default"})).raise_for_status()
        rows = await generated(worker, prompts)
    assert set(rows["weight_versions"][rows["response_mask"]].tolist()) == {1}
    assert_are_the_models(actor, prompts, rows)


async def test_a_server_belongs_to_one_rollout(url: str, model: Path, tmp_path: Path):
    with (
        worker_of(model, [url], tmp_path) as worker,
        worker_of(model, [url], tmp_path),
        pytest.raises(RoleUnavailable, match="of another rollout"),
    ):
        await generated(worker, prompts_of(2))


async def test_nothing_is_left_in_the_folder(url: str, model: Path, tmp_path: Path):
    killed = tmp_path / f"{PREFIX}killed"
    (killed / "3-abc").mkdir(parents=True)
    (killed / "lock").touch()  # and nobody holds it
    with worker_of(model, [url], tmp_path) as worker:
        assert not killed.exists()
        for version in (1, 2):
            await worker.update_weights(PublishedWeights(version, weights(changed(model, 0.01))))
        assert [path.name.split("-")[0] for path in folders(tmp_path, f"{PREFIX}*/*-*")] == ["2"]
        (file,) = folders(tmp_path, f"{PREFIX}*/*/*")  # for servers of another user, too
        assert [path.stat().st_mode & 0o777 for path in (file, *file.parents[:2])] == [0o644, 0o755, 0o755]
    assert folders(tmp_path, "*") == []


def folders(directory: Path, pattern: str) -> list[Path]:
    return list(directory.glob(pattern))


# ------------------------------------------------------------------------- servers that fail


async def test_rows_of_a_server_that_dies_are_made_by_another(url: str, model: Path, tmp_path: Path):
    prompts = prompts_of(16)
    async with proxied(url) as line:
        job = job_of(model, [line.url, url], tmp_path, ignore_eos=True)
        with closing(await asyncio.to_thread(RolloutWorker, job)) as worker:
            line.num_allowed = 2
            generation = asyncio.create_task(generated(worker, prompts))
            await line.holding.wait()
            line.cut()
            rows = await generation
            assert rows["response_mask"].all()
            assert_are_the_models(changed(model, 0), prompts, rows)
            actor = changed(model, 0.03)
            await worker.update_weights(PublishedWeights(1, weights(actor)))  # the one that is left takes it
            assert_are_the_models(actor, prompts, await generated(worker, prompts))


async def test_the_last_server_that_dies_ends_the_call_in_time(url: str, model: Path, tmp_path: Path):
    async with proxied(url) as line:
        job = job_of(model, [line.url], tmp_path, ignore_eos=True)
        with closing(await asyncio.to_thread(RolloutWorker, job)) as worker:
            line.num_allowed = 2
            generation = asyncio.create_task(generated(worker, prompts_of(16)))
            await line.holding.wait()
            line.cut()
            with pytest.raises(RoleUnavailable, match=f"no server is left: {line.url}"):
                await asyncio.wait_for(generation, 120)
            new = PublishedWeights(1, weights(changed(model, 0.1)))
            with pytest.raises(RoleUnavailable, match=f"no server took version 1: {line.url}"):
                await asyncio.wait_for(worker.update_weights(new), 120)


# ------------------------------------------------------------------------------ at the start


def test_a_server_with_another_tokenizer_is_refused(url: str, model: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["R"], vocab["o"] = vocab["o"], vocab["R"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidConfig, match="a different tokenizer than"):
        RolloutWorker(job_of(other, [url], tmp_path))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"tokens": 501}, "it takes 512 tokens, but .* is 513"),
        ({"dtype": "bfloat16"}, "it computes in torch.float32, but rollout.dtype is bfloat16"),
        ({"top_k": MAX_LOGPROBS + 1}, "--max-logprobs 25"),
    ],
)
def test_a_server_that_does_not_suit_the_job(
    url: str, model: Path, tmp_path: Path, rollout: dict[str, Any], message: str
):
    with pytest.raises(InvalidConfig, match=message):
        RolloutWorker(job_of(model, [url], tmp_path, **rollout))


@pytest.mark.parametrize(
    ("section", "key", "value", "flag"),
    [
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill, and with --max-num"),
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("parallel_config", "worker_extension_cls", "", "--worker-extension-cls rolemesh.services.rollout"),
    ],
)
def test_the_error_of_a_server_that_lacks_a_flag_names_it(
    url: str, model: Path, tmp_path: Path, section: str, key: str, value: Any, flag: str
):
    """By what the real server says of itself, with one value as it is without the flag: a second server would
    cost a minute."""
    config = httpx.get(f"{url}/server_info?config_format=json", timeout=60).json()["vllm_config"]
    server = VllmServer(url, job_of(model, [url], tmp_path))
    assert server.unfit(config) == []
    config[section][key] = value
    (wrong,) = server.unfit(config)
    assert flag in wrong
