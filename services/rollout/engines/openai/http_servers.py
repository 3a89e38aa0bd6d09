"""The HTTP calls to a server. To add a kind of server, add a class here and its name to rollout.openai.api."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from rolemesh.config import JobConfig
from rolemesh.config.model import chosen_dtype
from rolemesh.config.rollout import SamplingConfig

LEAST_LOG_PROB = -9999.0  # vLLM sends this for minus infinity, and for a token without a log-prob
EXTENSION = "rolemesh.services.rollout.engines.vllm.extension.RolloutExtension"


class ServerLost(Exception):
    """A server that cannot be used. The message names the request and its answer."""


@contextmanager
def understood() -> Iterator[None]:
    """Raise ServerLost if the answer that is read in this context lacks a field, or has one of another type."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerLost(f"an answer is not as documented: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class Request:
    """A request for a completion.

    Args:
        tokens: the prompt and the part of the response that has been generated.
        seed: of this request's random stream, 0 or more.
        num_tokens: maximum number of new tokens.
        ends: tokens that end a response; they are part of it.
        vocabulary: number of token ids.
    """

    tokens: list[int]
    seed: int
    num_tokens: int
    sampling: SamplingConfig
    ends: list[int]
    ignore_eos: bool
    vocabulary: int


@dataclass(frozen=True)
class Completion:
    """The answer: n tokens with their log-probabilities in the distribution from which they were sampled.

    If training's sampling truncates, kept_ids has the tokens that could be sampled, the likeliest first.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    broken_off: bool = False

    def check(self, request: Request) -> Completion:
        """Return itself if it answers the request. A wrong answer is an error, not padded or truncated."""
        wrong = None
        if not (self.tokens or self.broken_off) or len(self.tokens) > request.num_tokens:
            wrong = f"{len(self.tokens)} tokens; the limit is {request.num_tokens}"
        elif len(self.log_probs) != len(self.tokens):
            wrong = f"{len(self.log_probs)} log-probs for {len(self.tokens)} tokens"
        elif any(not 0 <= token < request.vocabulary for token in self.tokens):
            wrong = f"a token outside the vocabulary of {request.vocabulary}"
        elif any(not math.isfinite(x) or x <= LEAST_LOG_PROB for x in self.log_probs):
            wrong = "a log-prob that is not a number"
        elif request.sampling.num_kept and len(self.kept_ids) != len(self.tokens):
            wrong = f"the likeliest tokens for {len(self.kept_ids)} of {len(self.tokens)} tokens"
        elif any(token not in kept for token, kept in zip(self.tokens, self.kept_ids, strict=False)):
            wrong = "a token that is not among the tokens that could be sampled"
        if wrong:
            raise ServerLost(f"it completed a prompt with {wrong}")
        return self


class InferenceServer(ABC):
    """One server: its address and its state as the engine knows it.

    Attributes:
        holds: the version that it is known to compute with; None: unknown, so it is asked before the next row.
        lost: why it is left out; None: it is in use.
        num_rows: rows assigned to it; num_asked: the number of these whose request it has.
        quiet: set while num_asked is 0.
        lock: held to change the weights, and to start a request for a row.
    """

    name: str

    def __init__(self, url: str, job: JobConfig) -> None:
        self.url = url.rstrip("/")
        self._job = job
        self.model = self.root = ""
        self.holds: int | None = None
        self.lost: str | None = None
        self.num_rows = self.num_asked = 0
        self.quiet = asyncio.Event()
        self.lock = asyncio.Lock()
        self.quiet.set()

    async def call(self, client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
        """Return its answer, parsed from JSON. Raises ServerLost."""
        try:
            response = await client.request(method, self.url + path, json=body)
            if response.status_code != httpx.codes.OK:
                raise ServerLost(f"{method} {path}: {response.status_code} {response.text[:300]}")
            return response.json() if response.content else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServerLost(f"{method} {path}: {type(error).__name__} {error}") from error

    async def inspect(self, client: httpx.AsyncClient, tokenizer: Any) -> list[str]:
        """Read the model's name. Returns why the server does not suit the job, and what to change."""
        card = (await self.call(client, "GET", "/v1/models"))["data"][0]
        self.model = card["id"]
        self.root = card["root"]
        wrong = []
        length = self._job.data.max_prompt_length + self._job.data.max_response_length
        if card["max_model_len"] < length:
            wrong.append(
                f"it takes {card['max_model_len']} tokens, but data.max_prompt_length + "
                f"data.max_response_length is {length}"
            )
        text = "Rolemesh: 12 × 34 = 408, ¿verdad?\n"
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        tokens = (await self.call(client, "POST", "/tokenize", body))["tokens"]
        if tokens != tokenizer(text, add_special_tokens=False)["input_ids"]:
            wrong.append(
                f"it serves {self.model!r} with a different tokenizer than actor.model.path "
                f"{self._job.actor.model.path!r}"
            )
        return wrong

    @abstractmethod
    async def complete(self, client: httpx.AsyncClient, request: Request) -> Completion:
        """Ask for a completion. Cancelling the call closes the connection, which ends the generation."""

    @abstractmethod
    async def break_off(self, client: httpx.AsyncClient) -> None:
        """Abort all requests that it has; they answer with the tokens made so far."""

    @abstractmethod
    async def take_weights(self, client: httpx.AsyncClient, path: str, label: str) -> None:
        """Have it load a directory of safetensors, empty its KV cache, and store the weights' label."""

    @abstractmethod
    async def label(self, client: httpx.AsyncClient) -> str:
        """Return the label of its weights; after its start, a label of the server's own."""


class VllmServer(InferenceServer):
    """`vllm serve` with VLLM_SERVER_DEV_MODE=1, 0.32 or newer."""

    name = "vllm"

    async def inspect(self, client: httpx.AsyncClient, tokenizer: Any) -> list[str]:
        wrong = await super().inspect(client, tokenizer)
        try:
            info = await self.call(client, "GET", "/server_info?config_format=json")
        except ServerLost as error:
            return [*wrong, f"{error}; start it with VLLM_SERVER_DEV_MODE=1 in its environment"]
        return wrong + self.unfit(info["vllm_config"])

    def unfit(self, config: dict[str, Any]) -> list[str]:
        """Return what in its configuration does not suit the job, and what to change."""
        rollout = self._job.rollout
        model = config["model_config"]
        wrong = []
        if model["logprobs_mode"] != "processed_logprobs":
            wrong.append(
                f"its log-probs are {model['logprobs_mode']}, not those of the distribution from which it "
                "samples; start it with --logprobs-mode processed_logprobs"
            )
        self._on_cpu = config["device_config"]["device"] == "cpu"
        dtype = chosen_dtype(rollout.dtype, "rollout.dtype", "cpu" if self._on_cpu else "cuda")
        if model["dtype"] != f"torch.{dtype}":
            auto = f", which is {dtype} there; start it with --dtype {dtype}" if rollout.dtype == "auto" else ""
            wrong.append(f"it computes in {model['dtype']}, but rollout.dtype is {rollout.dtype}{auto}")
        if 0 <= model["max_logprobs"] < rollout.num_kept:
            wrong.append(
                f"rollout.top_k is {rollout.top_k}, but it reports at most {model['max_logprobs']} tokens; "
                f"start it with --max-logprobs {rollout.top_k}"
            )
        if self._on_cpu and config["parallel_config"]["worker_extension_cls"] != EXTENSION:
            wrong.append(
                "on a CPU it keeps packed copies of the weights, and an update does not change the copy of a "
                f"tied head; start it with --worker-extension-cls {EXTENSION}"
            )
        if self._on_cpu and config["scheduler_config"]["enable_chunked_prefill"]:
            wrong.append(
                "on a CPU it ends at the first chunk of a prompt, because it cannot rewind the row's random "
                "stream; start it with --no-enable-chunked-prefill, and with --max-num-batched-tokens of at "
                "least --max-model-len"
            )
        return wrong

    async def complete(self, client: httpx.AsyncClient, request: Request) -> Completion:
        sampling = request.sampling
        # Every parameter is set, because a server takes its defaults from generation_config.json.
        body = {
            "model": self.model,
            "prompt": request.tokens,
            "max_tokens": request.num_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_k": -1 if sampling.greedy else sampling.top_k,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request.seed,
            "ignore_eos": request.ignore_eos,
            "stop_token_ids": [] if request.ignore_eos else request.ends,
            "logprobs": sampling.num_kept,  # of the sampled token, and of this many of the likeliest tokens
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # as the names of `top_logprobs`
        }
        choice = (await self.call(client, "POST", "/v1/completions", body))["choices"][0]
        if choice["finish_reason"] not in ("stop", "length", "abort"):
            raise ServerLost(f"it ended a completion with {choice['finish_reason']!r}")
        tokens = choice["token_ids"]
        log_probs = choice["logprobs"] or {}
        kept_ids = []
        if sampling.num_kept:
            for token, likely in zip(tokens, log_probs.get("top_logprobs") or [], strict=False):
                kept_ids.append(_kept(token, likely, sampling.num_kept))
        return Completion(
            tokens, log_probs.get("token_logprobs") or [], kept_ids, choice["finish_reason"] == "abort"
        ).check(request)

    async def break_off(self, client: httpx.AsyncClient) -> None:
        await self.call(client, "POST", "/abort_requests", {})

    async def take_weights(self, client: httpx.AsyncClient, path: str, label: str) -> None:
        await self.call(client, "POST", "/pause")  # also empties the cache
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            await self.call(client, "POST", "/collective_rpc", reload)
            if self._on_cpu:
                await self.call(client, "POST", "/collective_rpc", {"method": "pack_tied"})
            await self.call(client, "POST", "/update_weight_version", {"new_version": label})
        finally:
            await self.call(client, "POST", "/resume")

    async def label(self, client: httpx.AsyncClient) -> str:
        return str((await self.call(client, "GET", "/weight_info"))["weight_version"])


class SglangServer(InferenceServer):
    """`python -m sglang.launch_server`, used as its documentation says.

    Rows are requested from /generate, because /v1/completions does not return token ids and log-probs. The
    log-probs are those of the distribution before top_k and top_p, so neither may be set.
    """

    name = "sglang"

    async def inspect(self, client: httpx.AsyncClient, tokenizer: Any) -> list[str]:
        wrong = await super().inspect(client, tokenizer)
        if self._job.rollout.truncates:
            wrong.append("its log-probs ignore rollout.top_k and rollout.top_p; leave both unset")
        info = await self.call(client, "GET", "/get_server_info")
        if not info.get("enable_deterministic_inference"):
            wrong.append("it ignores seeds; start it with --enable-deterministic-inference")
        cold, warm = [await self._gap(client, temperature) for temperature in (0.5, 1.0)]
        if abs(cold - 2 * warm) > abs(cold - warm):
            wrong.append("its log-probs ignore the temperature; unset SGLANG_RETURN_ORIGINAL_LOGPROB there")
        return wrong

    async def _gap(self, client: httpx.AsyncClient, temperature: float) -> float:
        """Return the difference of the two largest log-probs; a temperature of one half doubles it."""
        sampling = {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True}
        body = {
            "input_ids": [0, 1, 2],
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answer = await self.call(client, "POST", "/generate", body)
        first, second = answer["meta_info"]["output_top_logprobs"][0][:2]
        return float(first[0] - second[0])

    async def complete(self, client: httpx.AsyncClient, request: Request) -> Completion:
        sampling = {
            "temperature": 0.0 if request.sampling.greedy else request.sampling.temperature,
            "top_k": -1 if request.sampling.greedy else request.sampling.top_k,
            "top_p": 1.0 if request.sampling.greedy else request.sampling.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_new_tokens": request.num_tokens,
            "sampling_seed": request.seed,
            "ignore_eos": request.ignore_eos,
            "stop_token_ids": [] if request.ignore_eos else request.ends,
        }
        body = {"input_ids": request.tokens, "sampling_params": sampling, "return_logprob": True}
        info = (await self.call(client, "POST", "/generate", body))["meta_info"]
        reason = info["finish_reason"]["type"]
        if reason not in ("stop", "length", "abort"):
            raise ServerLost(f"it ended a completion with {info['finish_reason']}")
        made = info.get("output_token_logprobs") or []
        return Completion(
            [token for _, token, *_ in made], [log_prob for log_prob, *_ in made], broken_off=reason == "abort"
        ).check(request)

    async def break_off(self, client: httpx.AsyncClient) -> None:
        await self.call(client, "POST", "/abort_request", {"rid": "", "abort_all": True})

    async def take_weights(self, client: httpx.AsyncClient, path: str, label: str) -> None:
        body = {"model_path": path, "weight_version": label, "flush_cache": True}
        answer = await self.call(client, "POST", "/update_weights_from_disk", body)
        if not answer["success"]:
            raise ServerLost(f"POST /update_weights_from_disk: {answer['message']}")

    async def label(self, client: httpx.AsyncClient) -> str:
        return str((await self.call(client, "GET", "/get_model_info"))["weight_version"])


KINDS: dict[str, type[InferenceServer]] = {kind.name: kind for kind in (VllmServer, SglangServer)}


def _kept(token: int, likely: dict[str, float], num_kept: int) -> list[int]:
    """Return the tokens with a probability, the likeliest first, at most num_kept.

    A server may return more tokens that are as likely as the last one. The sampled token then comes before
    them.

    Args:
        likely: log-probs by `token_id:7`.
    """
    ids = ((int(name.removeprefix("token_id:")), log_prob) for name, log_prob in likely.items())
    ranked = sorted((-log_prob, i != token, i) for i, log_prob in ids if log_prob > LEAST_LOG_PROB)
    return [i for *_, i in ranked[:num_kept]]
