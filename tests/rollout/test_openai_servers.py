"""The engine openai without vLLM's server: SGLang as its documentation says, addresses without a server, and
answers that are none."""

import asyncio
import json
import shutil
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from generation import generated
from launched import rolemesh, written
from openai_rollouts import changed, job_of, prompts_of, weights, worker_of
from server_addresses import reserved_port

from rolemesh.config.job import make_job
from rolemesh.data.parquet import write_rows
from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.rollout.engines.openai.engine import OpenAIEngine
from rolemesh.services.rollout.engines.openai.http_servers import Completion, Request, ServerLost
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights.published import PublishedWeights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128, initializer_range=0.1)


REQUEST = Request([1], 0, 2, make_job({}).rollout, [258], False, 259)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion([], []), "0 tokens"),
        (Completion([1, 2, 3], [-1.0, -1.0, -1.0]), "3 tokens; the limit is 2"),
        (Completion([1, 2], [-1.0]), "1 log-probs for 2 tokens"),
        (Completion([1, 259], [-1.0, -1.0]), "outside the vocabulary"),
        (Completion([1, 2], [-1.0, float("nan")]), "not a number"),
        (Completion([1, 2], [-1.0, -9999.0]), "not a number"),
    ],
)
def test_an_answer_that_is_none_is_not_mended(completion: Completion, message: str):
    with pytest.raises(ServerLost, match=message):
        completion.check(REQUEST)


def test_a_server_that_does_not_answer_is_named(model: Path, tmp_path: Path):
    named = r"127\.0\.0\.1:\d+ cannot be used: GET /v1/models: ConnectError"
    with reserved_port() as port, pytest.raises(RoleUnavailable, match=named):
        RolloutWorker(job_of(model, [f"http://127.0.0.1:{port}"], tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trust_env", [False, True])
def test_a_server_of_another_protocol_is_named_or_proxied(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust_env: bool
):
    """A proxy reaches it if the job says so."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"hello": "world"}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, reserved_port() as nobody:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_address[1]}"
        url, proxy = ("http://fleet.invalid", here) if trust_env else (here, f"http://127.0.0.1:{nobody}")
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with pytest.raises(RoleUnavailable, match="an answer is not as documented: KeyError 'data'"):
            RolloutWorker(job_of(model, [url], tmp_path, openai={"trust_env": trust_env}))
        server.shutdown()
    assert asked == [f"{url}/v1/models" if trust_env else "/v1/models"]


def test_settings_that_are_missing_are_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidConfig, match=r"set rollout\.openai\.urls .* and rollout\.openai\.weights_dir"):
        OpenAIEngine(make_job({"rollout": {"name": "openai"}}))
    with pytest.raises(InvalidConfig, match="no_such_directory"):
        OpenAIEngine(job_of(model, ["http://127.0.0.1:1"], tmp_path / "no_such_directory"))
    with pytest.raises(InvalidConfig, match="NO_SUCH_VARIABLE, which is not set"):
        OpenAIEngine(job_of(model, ["http://x"], tmp_path, openai={"api_key_env": "NO_SUCH_VARIABLE"}))
    for key, why in {"SECRET\nKEY": "cannot hold", "SÉCRET": "cannot hold", " \n": "is empty"}.items():
        monkeypatch.setenv("FLEET_KEY", key)
        with pytest.raises(InvalidConfig, match=why) as refused:
            OpenAIEngine(job_of(model, ["http://x"], tmp_path, openai={"api_key_env": "FLEET_KEY"}))
        assert "CRET" not in str(refused.value)
    with pytest.raises(InvalidConfig, match="enforce_eager is a key of engine vllm"):
        job_of(model, ["http://x"], tmp_path, enforce_eager=True)


def test_settings_that_servers_would_not_follow_are_refused(model: Path, tmp_path: Path):
    with pytest.raises(
        InvalidConfig, match=r"rollout.temperature is 0.005, but engine openai raises it to 0.01"
    ):
        job_of(model, ["http://x"], tmp_path, temperature=0.005)
    assert job_of(model, ["http://x"], tmp_path, temperature=0.005, openai={"api": "sglang"})
    with pytest.raises(InvalidConfig, match=r"rollout.top_k is 260, but the model has 259 tokens"):
        OpenAIEngine(job_of(model, ["http://x"], tmp_path, top_k=260))


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

    monkeypatch.setenv("FLEET_KEY", "secret\n")  # as from a file
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        keys = {"api": "sglang", "api_key_env": "FLEET_KEY"}
        with worker_of(model, [address], tmp_path, temperature=0.5, tokens=8, openai=keys) as worker:
            rows = await generated(worker, prompts_of(3))
            await worker.update_weights(PublishedWeights(4, weights(changed(model, 0.1))))
            again = await generated(worker, prompts_of(3))
        with pytest.raises(InvalidConfig, match=r"ignore rollout\.top_k and rollout\.top_p"):
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


async def test_a_server_never_exceeds_its_rows_even_after_a_loss(model: Path, tmp_path: Path):
    """The lost one breaks off each row; the other holds its first four until the lost one is left out."""
    from transformers import AutoTokenizer

    lost = threading.Event()
    rows_there: list[int] = []

    class Handler(DocumentedSglang):
        asked: list[tuple[str, Any, str]] = []  # noqa: RUF012
        tokenizer = AutoTokenizer.from_pretrained(model)

    class Failing(Handler):
        def answer(self, body: Any) -> None:
            if body and body.get("sampling_params", {}).get("max_new_tokens", 1) > 1:  # not when it is admitted
                self.close_connection = True
            else:
                super().answer(body)

    class Slow(Handler):
        def generate(self, body: Any) -> Any:
            if body["sampling_params"]["max_new_tokens"] > 1:
                assert lost.wait(60)
                rows_there.append(engine._servers[1].num_rows)
            return super().generate(body)

    with ExitStack() as opened:
        addresses = []
        for handler in (Failing, Slow):
            server = opened.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            opened.callback(server.shutdown)
            addresses.append(f"http://127.0.0.1:{server.server_address[1]}")
        settings = {"tokens": 8, "max_num_seqs": 4, "openai": {"api": "sglang"}}
        worker = opened.enter_context(worker_of(model, addresses, tmp_path, **settings))
        engine: Any = worker._engine
        generation = asyncio.create_task(generated(worker, prompts_of(12)))
        while engine._servers[0].lost is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lost.set()
        rows = await generation
    assert (rows["responses"] == 65).all()
    assert len(rows_there) == 12
    assert max(rows_there) == 4


async def test_one_free_place_is_news_for_every_row_that_waits(model: Path, tmp_path: Path):
    """Also if the row that hears of it is cancelled, or finds that no server is left."""

    from transformers import AutoTokenizer

    class Handler(DocumentedSglang):
        asked: list[tuple[str, Any, str]] = []  # noqa: RUF012
        tokenizer = AutoTokenizer.from_pretrained(model)

    with ExitStack() as opened:
        server = opened.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened.callback(server.shutdown)
        addresses = [f"http://127.0.0.1:{server.server_address[1]}"]
        settings = {"tokens": 8, "max_num_seqs": 4, "openai": {"api": "sglang"}}
        engine: Any = opened.enter_context(worker_of(model, addresses, tmp_path, **settings))._engine
        (full,) = engine._servers
        full.num_rows = 4

        async def take() -> None:
            async with engine._server_with_room():
                pass

        async def one_less() -> None:
            async with engine._room:
                full.num_rows -= 1
                engine._room.notify()

        async with asyncio.timeout(60):
            cancelled, waiting = asyncio.create_task(take()), asyncio.create_task(take())
            await asyncio.sleep(0)  # both wait
            await one_less()
            cancelled.cancel()
            await waiting
            full.num_rows = 4
            rows = [asyncio.create_task(take()) for _ in range(3)]
            await asyncio.sleep(0)
            full.lost = "it died"
            await one_less()
            for row in rows:
                with pytest.raises(RoleUnavailable, match=r"no server is left: .*it died"):
                    await row


async def test_generate_asks_servers_where_no_local_weights_exist(model: Path, tmp_path: Path):
    """The model directory has tokenizer and configuration alone. The server stands in for SGLang again."""
    from transformers import AutoTokenizer

    class Handler(DocumentedSglang):
        asked: list[tuple[str, Any, str]] = []  # noqa: RUF012
        tokenizer = AutoTokenizer.from_pretrained(model)

    outline = tmp_path / "outline"
    shutil.copytree(model, outline, ignore=shutil.ignore_patterns("*.safetensors"))
    prompts = write_rows(tmp_path / "in.parquet", [{"prompt": [{"role": "user", "content": "1+1="}]}] * 3)
    output = tmp_path / "out.parquet"
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        job = job_of(outline, [address], tmp_path, tokens=8, openai={"api": "sglang"})
        keys = (
            f"data.val_files={prompts}",
            "data.max_prompt_length=64",
            "rollout.val_kwargs={n: 2, do_sample: true}",
        )
        async with rolemesh("generate", written(job, tmp_path), "--output", str(output), *keys) as launched:
            code, said = await launched.end()
        server.shutdown()
    assert code == 0, said
    assert [row["responses"] for row in pq.read_table(output).to_pylist()] == [
        [Handler.tokenizer.decode([65] * 8)] * 2
    ] * 3
