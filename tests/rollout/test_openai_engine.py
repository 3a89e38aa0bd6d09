"""The engine openai with vLLM's own server, a process of its own: what it generates is the model's of the
version that each token names, rows are neither lost nor doubled, one that does not suit is refused at once."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleUnavailable, WeightsUnavailable
from rolemesh.models.loading import load_causal_lm, named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.rollout.engines.openai.engine import OpenAIEngine
from rolemesh.services.rollout.engines.openai.folder import PREFIX
from rolemesh.services.rollout.engines.openai.servers import Completion, Request, ServerLost, VllmServer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights.held import HeldWeights

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(500)  # the server's start is the first test's; 45 s where nothing else runs

P, T, MAX_LOGPROBS = 12, 96, 24
START_S = 400
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "64"),
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
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *FLAGS]
    with (tmp_path_factory.mktemp("server") / "log").open("w+") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **ENVIRONMENT},
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
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5).is_success
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def job_of(model: Path, urls: list[str], weights_dir: Path, **rollout: Any) -> JobConfig:
    openai = {"urls": urls, "weights_dir": str(weights_dir), **rollout.pop("openai", {})}
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": P, "max_response_length": rollout.pop("tokens", T)},
            "rollout": {"name": "openai", "temperature": 1.0, "openai": openai, **rollout},
        }
    )


@contextmanager
def worker_of(*args: Any, **rollout: Any) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(job_of(*args, **rollout))
    try:
        yield worker
    finally:
        worker.close()


def prompts_of(rows: int, sampling: str = "train") -> DataProto:
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(P) >= P - torch.randint(1, P + 1, (rows,), generator=generator)[:, None]
    ids = torch.randint(0, 256, (rows, P), generator=generator).where(mask, 256)
    return DataProto(
        {"prompts": ids, "prompt_mask": mask, "seeds": torch.arange(rows) * 7919 - 5},
        {},
        {"sampling": sampling},
    )


async def generated(worker: RolloutWorker, prompts: DataProto) -> DataProto:
    """All rows, each once, in the order of the request."""
    answer = DataProto.concat([rows async for rows in worker.generate(prompts)])
    assert sorted(answer["row"].tolist()) == list(range(len(prompts)))
    return answer[answer["row"].argsort()]


def changed(model: Path, scale: float) -> Any:
    """The model with other weights: the law of an update is that answers follow it."""
    other = load_causal_lm(make_job({"actor": {"model": {"path": str(model)}}}).actor.model, "actor")
    generator = torch.Generator().manual_seed(int(1000 * scale))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def weights(model: Any) -> Mapping[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(model).items()}


@torch.no_grad()
def log_probs_of(model: Any, prompts: DataProto, rows: DataProto, temperature: float = 1.0) -> Tensor:
    """[B, T] by transformers, one row after another; renormalised over kept_ids where there are any."""
    result = torch.zeros(rows["responses"].shape)
    for i in range(len(rows)):
        n = int(rows["response_mask"][i].sum())
        prompt = prompts["prompts"][i][prompts["prompt_mask"][i]]
        response = rows["responses"][i, :n]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        log_probs = logits.log_softmax(-1)
        drawn = log_probs.gather(-1, response[:, None])[:, 0]
        if "kept_ids" in rows:
            kept = rows["kept_ids"][i, :n].long()
            drawn -= log_probs.gather(-1, kept.clamp(min=0)).where(kept >= 0, -torch.inf).logsumexp(-1)
        result[i, :n] = drawn
    return result


def assert_are_the_models(model: Any, prompts: DataProto, rows: DataProto, **sampling: float) -> None:
    expected = log_probs_of(model, prompts, rows, **sampling)
    torch.testing.assert_close(rows["rollout_log_probs"], expected, atol=1e-4, rtol=0)


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
            await worker.update_weights(HeldWeights(version, weights(actor)))
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


async def test_rows_come_while_others_wait_and_leaving_ends_those(url: str, model: Path, tmp_path: Path):
    with worker_of(model, [url], tmp_path, ignore_eos=True, max_num_seqs=4) as worker:
        begun = tokens_made(url)
        async with aclosing(worker.generate(prompts_of(64))) as batches:
            first = await anext(batches)
            assert 1 <= len(first) <= 4
        await until(lambda: gauge(url, "num_requests_running") == 0)
        assert tokens_made(url) - begun <= 8 * T, "rows that nobody waits for are not made"
        assert len(await generated(worker, prompts_of(4))) == 4


def gauge(url: str, name: str) -> float:
    found = re.search(rf"^vllm:{name}{{.*}} (.*)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def tokens_made(url: str) -> float:
    return gauge(url, "generation_tokens_total")


async def until(condition: Any) -> None:
    """Asks again and again, for half a minute; each is a request to the server."""
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(condition):
            pass


REQUEST = Request([1], 0, 2, make_job({}).rollout, [258], False, 259)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion([], []), "0 tokens"),
        (Completion([1, 2, 3], [-1.0, -1.0, -1.0]), "3 tokens, of 2"),
        (Completion([1, 2], [-1.0]), "1 log-probs for 2 tokens"),
        (Completion([1, 259], [-1.0, -1.0]), "outside the vocabulary"),
        (Completion([1, 2], [-1.0, float("nan")]), "no number"),
        (Completion([1, 2], [-1.0, -9999.0]), "no number"),
    ],
)
def test_an_answer_that_is_none_is_not_mended(completion: Completion, message: str):
    with pytest.raises(ServerLost, match=message):
        completion.check(REQUEST)


# ---------------------------------------------------------------------------------- weights


async def test_every_token_names_the_weights_that_made_it(url: str, model: Path, tmp_path: Path):
    prompts, actors = prompts_of(32), [changed(model, 0.0), changed(model, 0.04)]
    with worker_of(model, [url], tmp_path, ignore_eos=True, max_num_seqs=4) as worker:
        async with aclosing(worker.generate(prompts)) as stream:
            parts = [await anext(stream)]  # most of the others have not begun
            await worker.update_weights(HeldWeights(1, weights(actors[1])))
            parts += [part async for part in stream]
    rows = DataProto.concat(parts)
    rows = rows[rows["row"].argsort()]
    versions = rows["weight_versions"]
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
            await worker.update_weights(HeldWeights(1, wrong))
        assert worker.version == 0
        assert torch.equal((await generated(worker, prompts))["responses"], before["responses"])


async def test_a_server_that_was_restarted_gets_the_version_before_it_answers(
    url: str, model: Path, tmp_path: Path
):
    prompts, actor = prompts_of(6), changed(model, 0.05)
    with worker_of(model, [url], tmp_path, tokens=16) as worker:
        await worker.update_weights(HeldWeights(1, weights(actor)))
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
            await worker.update_weights(HeldWeights(version, weights(changed(model, 0.01))))
        assert [path.name.split("-")[0] for path in folders(tmp_path, f"{PREFIX}*/*-*")] == ["2"]
        (file,) = folders(tmp_path, f"{PREFIX}*/*/*")  # for servers of another user, too
        assert [path.stat().st_mode & 0o777 for path in (file, *file.parents[:2])] == [0o644, 0o755, 0o755]
    assert folders(tmp_path, "*") == []


def folders(directory: Path, pattern: str) -> list[Path]:
    return list(directory.glob(pattern))


# ------------------------------------------------------------------------- servers that fail


@asynccontextmanager
async def line_to(url: str) -> AsyncIterator[tuple[str, Any]]:
    """An address that leads to the server, and a function that cuts the line: as if that machine were gone."""
    host, port = url.removeprefix("http://").split(":")
    writers: list[asyncio.StreamWriter] = []
    is_cut = False

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writers.extend([writer, far_writer])
        if is_cut:  # while it was being made
            cut()
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)

    def cut() -> None:
        nonlocal is_cut
        is_cut = True
        listener.close()
        for writer in writers:
            writer.transport.abort()

    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", cut
    finally:
        cut()


async def test_rows_of_a_server_that_dies_are_made_by_another(url: str, model: Path, tmp_path: Path):
    prompts = prompts_of(16)
    async with line_to(url) as (line, cut):
        job = job_of(model, [line, url], tmp_path, ignore_eos=True, openai={"timeout_s": 20})
        with closing(await asyncio.to_thread(RolloutWorker, job)) as worker:
            begun = tokens_made(url)
            generation = asyncio.create_task(generated(worker, prompts))
            await until(lambda: tokens_made(url) >= begun + 16)
            cut()
            rows = await generation
            assert rows["response_mask"].all()
            assert_are_the_models(changed(model, 0), prompts, rows)
            actor = changed(model, 0.03)
            await worker.update_weights(HeldWeights(1, weights(actor)))  # the one that is left takes it
            assert_are_the_models(actor, prompts, await generated(worker, prompts))


async def test_the_last_server_that_dies_ends_the_call_in_time(url: str, model: Path, tmp_path: Path):
    async with line_to(url) as (line, cut):
        job = job_of(model, [line], tmp_path, ignore_eos=True, openai={"timeout_s": 20})
        with closing(await asyncio.to_thread(RolloutWorker, job)) as worker:
            begun = tokens_made(url)
            generation = asyncio.create_task(generated(worker, prompts_of(400)))
            await until(lambda: tokens_made(url) >= begun + 8)
            cut()
            with pytest.raises(RoleUnavailable, match=f"no server is left: {line}"):
                await asyncio.wait_for(generation, 60)
            with pytest.raises(RoleUnavailable, match=f"no server took version 1: {line}"):
                await asyncio.wait_for(worker.update_weights(HeldWeights(1, weights(changed(model, 0.1)))), 60)


# ------------------------------------------------------------------------------ at the start


def test_a_server_that_is_not_there(model: Path, tmp_path: Path):
    with pytest.raises(RoleUnavailable, match=r"127\.0\.0\.1:\d+ cannot be used: GET /v1/models: ConnectError"):
        RolloutWorker(job_of(model, [f"http://127.0.0.1:{free_port()}"], tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_something_else_at_the_address(model: Path, tmp_path: Path):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"hello": "world"}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RoleUnavailable, match="an answer is not as documented: KeyError 'data'"):
            RolloutWorker(job_of(model, [f"http://127.0.0.1:{server.server_address[1]}"], tmp_path))
        server.shutdown()


def test_a_server_of_another_tokenizer(url: str, model: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["R"], vocab["o"] = vocab["o"], vocab["R"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidConfig, match="another tokenizer than"):
        RolloutWorker(job_of(other, [url], tmp_path))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"tokens": 501}, "it takes 512 tokens, and .* is 513"),
        ({"dtype": "bfloat16"}, "it computes in torch.float32, and rollout.dtype is bfloat16"),
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
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("parallel_config", "worker_extension_cls", "", "--worker-extension-cls rolemesh.services.rollout"),
    ],
)
def test_a_server_without_a_flag_is_told_which(
    url: str, model: Path, tmp_path: Path, section: str, key: str, value: str, flag: str
):
    """By what the real server says of itself, with one value as it is without the flag: a second server would
    cost a minute."""
    config = httpx.get(f"{url}/server_info?config_format=json", timeout=60).json()["vllm_config"]
    server = VllmServer(url, job_of(model, [url], tmp_path))
    assert server.unfit(config) == []
    config[section][key] = value
    (wrong,) = server.unfit(config)
    assert flag in wrong


def test_settings_that_are_missing_are_named(model: Path, tmp_path: Path):
    with pytest.raises(InvalidConfig, match=r"set rollout\.openai\.urls .* and rollout\.openai\.weights_dir"):
        OpenAIEngine(make_job({"rollout": {"name": "openai"}}))
    with pytest.raises(InvalidConfig, match="no_such_directory"):
        OpenAIEngine(job_of(model, ["http://127.0.0.1:1"], tmp_path / "no_such_directory"))
    with pytest.raises(InvalidConfig, match="NO_SUCH_VARIABLE, which is not set"):
        OpenAIEngine(job_of(model, ["http://x"], tmp_path, openai={"api_key_env": "NO_SUCH_VARIABLE"}))
    with pytest.raises(InvalidConfig, match="enforce_eager is the engine vllm's"):
        job_of(model, ["http://x"], tmp_path, enforce_eager=True)


# ---------------------------------------------------------------------------------- SGLang


class DocumentedSglang(BaseHTTPRequestHandler):
    """What SGLang's documentation says of its endpoints; it writes down what it is asked. Every token is 65 and
    has the log-prob -2 / temperature."""

    asked: list[tuple[str, Any, str]]
    version = "default"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: Any) -> None:
        self.asked.append((self.path, body, self.headers.get("Authorization", "")))
        data = json.dumps(getattr(self, self.path.strip("/").replace("/", "_"))(body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def v1_models(self, _: Any) -> Any:
        return {"data": [{"id": "default", "root": "/models/m", "max_model_len": 512}]}

    def tokenize(self, body: Any) -> Any:
        return {"tokens": self.tokenizer(body["prompt"])["input_ids"]}  # type: ignore[attr-defined]

    def get_server_info(self, _: Any) -> Any:
        return {"enable_deterministic_inference": True}

    def get_model_info(self, _: Any) -> Any:
        return {"model_path": "/models/m", "weight_version": type(self).version}

    def update_weights_from_disk(self, body: Any) -> Any:
        type(self).version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def generate(self, body: Any) -> Any:
        temperature = body["sampling_params"]["temperature"] or 1.0
        made = [[-2.0 / temperature, 65, None]] * body["sampling_params"]["max_new_tokens"]
        info = {"finish_reason": {"type": "length"}, "output_token_logprobs": made}
        if body.get("top_logprobs_num"):
            info["output_top_logprobs"] = [[[-2.0 / temperature, 65, None], [-3.0 / temperature, 66, None]]]
        return {"text": "", "meta_info": info}

    def log_message(self, *_: Any) -> None:
        """Not into the test's output."""


async def test_sglang_is_asked_as_its_documentation_says(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """SGLang itself needs a GPU. The server here stands in for it: it shows what is sent, not that SGLang takes
    it."""
    from transformers import AutoTokenizer

    class Handler(DocumentedSglang):
        asked: list[tuple[str, Any, str]] = []  # noqa: RUF012
        tokenizer = AutoTokenizer.from_pretrained(model)

    monkeypatch.setenv("FLEET_KEY", "secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        keys = {"api": "sglang", "api_key_env": "FLEET_KEY"}
        with worker_of(model, [address], tmp_path, temperature=0.5, tokens=8, openai=keys) as worker:
            rows = await generated(worker, prompts_of(3))
            await worker.update_weights(HeldWeights(4, weights(changed(model, 0.1))))
            again = await generated(worker, prompts_of(3))
        with pytest.raises(InvalidConfig, match=r"do not heed rollout\.top_k and rollout\.top_p"):
            RolloutWorker(job_of(model, [address], tmp_path, top_k=5, openai=keys))
        server.shutdown()

    assert (rows["responses"] == 65).all()
    assert (rows["rollout_log_probs"] == -4.0).all()
    assert (rows["weight_versions"] == 0).all()
    assert (again["weight_versions"] == 4).all()
    assert {key for _, _, key in Handler.asked} == {"Bearer secret"}
    updates = [body for path, body, _ in Handler.asked if path == "/update_weights_from_disk"]
    assert updates[0]["model_path"] == "/models/m", "version 0 is the server's own model"
    assert updates[1]["model_path"].startswith(str(tmp_path))
    assert updates[1]["weight_version"].startswith("4@")
    row = next(
        body for path, body, _ in Handler.asked if path == "/generate" and "top_logprobs_num" not in body
    )
    assert row["return_logprob"]
    assert row["sampling_params"]["stop_token_ids"] == [258]
