"""The engine: rows spread over servers, weights given to all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.models.loading import load_outline, load_tokenizer, named_weights, vocabulary_of
from rolemesh.services.rollout.engines.fitting import check_fit
from rolemesh.services.rollout.engines.openai.folder import WeightsFolder
from rolemesh.services.rollout.engines.openai.servers import (
    KINDS,
    Completion,
    Request,
    Server,
    ServerLost,
    understood,
)
from rolemesh.services.rollout.engines.vllm.arguments import end_tokens

log = logging.getLogger(__name__)

CONNECT_S = 10.0
KEEPALIVE_S = 1.0  # shorter than a server's: a connection that it closes while we write looks like its end
BREAK_OFF_AGAIN_S = 0.1  # a request that was on its way when the others were broken off needs another word
SEED_BITS = 2**63 - 1
STRIDE = 0x9E3779B97F4A7C15  # the golden ratio's: seeds of a row's later parts lie far from other rows'


@dataclass
class _Row:
    """What has been made of a row: each list has one entry for each token."""

    row: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)

    def add(self, part: Completion, version: int) -> None:
        self.tokens += part.tokens
        self.log_probs += part.log_probs
        self.kept_ids += part.kept_ids
        self.versions += [version] * len(part.tokens)


class OpenAIEngine:
    """Implements rolemesh.services.rollout.engines.Engine on servers of somebody else."""

    def __init__(self, job: JobConfig) -> None:
        settings = job.rollout.openai
        self._headers = {}
        if settings.api_key_env:
            if settings.api_key_env not in os.environ:
                raise InvalidConfig(
                    f"rollout.openai.api_key_env names {settings.api_key_env}, which is not set"
                )
            self._headers["Authorization"] = f"Bearer {os.environ[settings.api_key_env]}"
        self._job, self._ssl = job, ssl.create_default_context()
        self._num_tokens = job.data.max_response_length
        outline = load_outline(job.actor.model, "rollout")
        self.weights = named_weights(outline)
        self.vocabulary: int = vocabulary_of(outline)
        self._ends, self._pad = end_tokens(job, outline)
        self._servers = [KINDS[settings.api](url, job) for url in settings.urls]
        self._seats = asyncio.Semaphore(job.rollout.max_num_seqs * len(self._servers))
        self._run = secrets.token_hex(4)  # of labels: another run's version 3 is not ours
        self._version = 0
        self._directory: Path | None = None  # of the version; None: the servers' own model
        self._loading = asyncio.Lock()
        self._folder = WeightsFolder(Path(settings.weights_dir))
        try:
            with ThreadPoolExecutor(1) as thread:  # here may be an event loop already
                thread.submit(asyncio.run, self._start()).result()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        return self._version

    def _client(self) -> httpx.AsyncClient:
        """Lives as long as one call: with it go its connections, and with those what they wait for."""
        return httpx.AsyncClient(
            headers=self._headers,
            verify=self._ssl,
            timeout=httpx.Timeout(self._job.rollout.openai.timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
        )

    async def _start(self) -> None:
        tokenizer = load_tokenizer(self._job.actor.model, "rollout")
        async with self._client() as client:
            await asyncio.gather(*(self._admit(client, server, tokenizer) for server in self._servers))

    async def _admit(self, client: httpx.AsyncClient, server: Server, tokenizer: Any) -> None:
        """Holds a server against the job, puts it on version 0, which shows that it takes weights, and asks it
        for a token."""
        try:
            with understood():
                wrong = await server.inspect(client, tokenizer)
                if not wrong:
                    await self._install(client, server)
                    await server.complete(client, self._request([0], 0, 1, self._job.rollout))
        except ServerLost as error:
            raise RoleUnavailable(f"rollout: server {server.url} cannot be used: {error}") from error
        if wrong:
            raise InvalidConfig(f"rollout: server {server.url}: " + "; ".join(wrong))

    # ------------------------------------------------------------------------------ rows

    async def generate(self, prompts: DataProto, sampling: SamplingConfig) -> AsyncGenerator[DataProto, None]:
        ids, mask = prompts["prompts"], prompts["prompt_mask"].bool()
        for server in self._servers:
            server.lost = None  # it may be back; nothing is asked of it before its weights are known
        finished: asyncio.Queue[asyncio.Task[_Row]] = asyncio.Queue()
        async with self._client() as client:
            rows = []
            for row, seed in enumerate(prompts["seeds"].tolist()):
                tokens = ids[row][mask[row]].tolist()
                rows.append(asyncio.create_task(self._respond(client, _Row(row), tokens, seed, sampling)))
                rows[-1].add_done_callback(finished.put_nowait)
            try:
                left = len(rows)
                while left:
                    done = [await finished.get()]
                    while not finished.empty():
                        done.append(finished.get_nowait())
                    left -= len(done)
                    yield self._columns([task.result() for task in done], sampling.num_kept)
            finally:
                for task in rows:
                    task.cancel()
                await asyncio.gather(*rows, return_exceptions=True)

    async def _respond(
        self, client: httpx.AsyncClient, made: _Row, prompt: list[int], seed: int, sampling: SamplingConfig
    ) -> _Row:
        """Asks for the row until it is whole: what a server broke off goes on at any, what one lost is asked
        again. A server that fails the row twice is left out; a connection may break once."""
        doubted: set[Server] = set()
        async with self._seats:
            while True:
                n = len(made.tokens)
                request = self._request(prompt + made.tokens, seed + STRIDE * n, self._num_tokens - n, sampling)
                server = self._choose()
                server.num_rows += 1
                try:
                    part, version = await self._ask(client, server, request)
                except ServerLost as error:
                    server.holds = None
                    if server in doubted:
                        self._leave_out(server, error)
                    doubted.add(server)
                    continue
                finally:
                    server.num_rows -= 1
                made.add(part, version)
                if not part.broken_off or len(made.tokens) == self._num_tokens:
                    return made

    def _request(self, tokens: list[int], seed: int, num_tokens: int, sampling: SamplingConfig) -> Request:
        ignore_eos = self._job.rollout.ignore_eos
        return Request(tokens, seed & SEED_BITS, num_tokens, sampling, self._ends, ignore_eos, self.vocabulary)

    def _choose(self) -> Server:
        """The server with the fewest rows."""
        usable = [server for server in self._servers if server.lost is None]
        if not usable:
            raise RoleUnavailable("rollout: no server is left: " + self._reasons())
        return min(usable, key=lambda server: server.num_rows)

    async def _ask(self, client: httpx.AsyncClient, server: Server, request: Request) -> tuple[Completion, int]:
        """A completion and the version of the weights that made it, all of it."""
        async with server.lock:
            if server.lost is not None:
                raise ServerLost(server.lost)
            if not server.num_asked:
                server.holds = None  # a restart breaks connections: here is none that would have told
            while server.holds != self._version:  # another may come up meanwhile
                await self._make_sure(client, server)
            version = self._version
            server.num_asked += 1
            server.quiet.clear()
        try:
            with understood():
                part = await server.complete(client, request)
        except ServerLost:
            if not server.lock.locked():
                raise
            return Completion(broken_off=True), version  # SGLang says 503 of a row that it had not begun
        finally:
            server.num_asked -= 1
            if not server.num_asked:
                server.quiet.set()
        if part.broken_off and not server.lock.locked():
            server.holds = None  # not by us
        return part, version

    def _leave_out(self, server: Server, error: ServerLost) -> None:
        server.holds = None
        if server.lost is None:
            server.lost = str(error)
            log.error("rollout: server %s is left out: %s", server.url, error)

    def _reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.lost}" for server in self._servers)

    def _columns(self, done: list[_Row], num_kept: int) -> DataProto:
        shape = (len(done), self._num_tokens)
        columns = {
            "row": torch.tensor([made.row for made in done]),
            "responses": torch.full(shape, self._pad),
            "response_mask": torch.zeros(shape, dtype=torch.bool),
            "rollout_log_probs": torch.zeros(shape),
            "weight_versions": torch.full(shape, -1),
        }
        if num_kept:
            columns["kept_ids"] = torch.full((*shape, num_kept), -1, dtype=torch.int32)
        for i, made in enumerate(done):
            n = len(made.tokens)
            columns["responses"][i, :n] = torch.tensor(made.tokens)
            columns["response_mask"][i, :n] = True
            columns["rollout_log_probs"][i, :n] = torch.tensor(made.log_probs)
            columns["weight_versions"][i, :n] = torch.tensor(made.versions)
            if num_kept:
                for t, kept in enumerate(made.kept_ids):
                    columns["kept_ids"][i, t, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        return DataProto(columns)

    # --------------------------------------------------------------------------- weights

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        check_fit(version, tensors, self.weights)
        async with self._loading, self._client() as client:
            directory = await asyncio.to_thread(self._folder.write, version, tensors)
            before, self._version, self._directory = self._directory, version, directory
            # From here on no server is asked for a row before it has the version.
            await asyncio.gather(*(self._give(client, server) for server in self._servers))
            if before is not None:
                await asyncio.to_thread(self._folder.remove, before)
        if all(server.lost is not None for server in self._servers):
            raise RoleUnavailable(f"rollout: no server took version {version}: " + self._reasons())

    async def _give(self, client: httpx.AsyncClient, server: Server) -> None:
        async with server.lock:
            server.lost = None
            try:
                await self._install(client, server)
            except ServerLost as error:
                self._leave_out(server, error)

    async def _make_sure(self, client: httpx.AsyncClient, server: Server) -> None:
        """Asks a server, whose lock is held, for its weights, and gives it those in use if it was restarted."""
        label = await server.label(client)
        if label == self._label:
            server.holds = self._version
            return
        if "@" in label and not label.endswith(self._run):
            raise ServerLost(f"it has the weights {label} of another rollout; a server belongs to one")
        await self._install(client, server)

    async def _install(self, client: httpx.AsyncClient, server: Server) -> None:
        """Puts a server, whose lock is held, on the version in use."""
        server.holds = None
        while server.num_asked:
            await server.break_off(client)
            with suppress(TimeoutError):
                await asyncio.wait_for(server.quiet.wait(), BREAK_OFF_AGAIN_S)
        version, label = self._version, self._label
        await server.take_weights(client, str(self._directory or server.root), label)
        if (found := await server.label(client)) != label:
            raise ServerLost(f"it was given the weights {label} and says that it has {found}")
        server.holds = version

    @property
    def _label(self) -> str:
        return f"{self._version}@{self._run}"

    # ----------------------------------------------------------------------------- sleep

    async def sleep(self) -> int:
        return 0  # the servers' devices are their own: nothing here could be given to others

    async def wake(self) -> int:
        return 0

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()  # a server that is gone may come back

    def close(self) -> None:
        self._folder.close()
