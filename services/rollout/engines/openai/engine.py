"""The engine: spreads rows over servers, and updates the weights of all servers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
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
from rolemesh.models.loading import load_tokenizer, named_weights, vocabulary_of
from rolemesh.services.rollout.engines.eos import end_tokens
from rolemesh.services.rollout.engines.fitting import check_fit, check_kept, load_served_outline
from rolemesh.services.rollout.engines.openai.folder import WeightsFolder
from rolemesh.services.rollout.engines.openai.http_servers import (
    KINDS,
    Completion,
    InferenceServer,
    Request,
    ServerLost,
    understood,
)
from rolemesh.services.rollout.engines.token_rows import (
    RowToGenerate,
    blank_answer,
    rows_to_generate,
    seed_from,
)
from rolemesh.tasks import as_they_end
from rolemesh.workers.local import LocalWorker

log = logging.getLogger(__name__)

CONNECT_S = 10.0
KEEPALIVE_S = 1.0  # shorter than a server's: a connection closed while we write looks like a dead server
BREAK_OFF_AGAIN_S = 0.1  # interval of aborts: a request may reach the server after the previous abort


@dataclass
class _Row:
    """The part of a row that has been generated. Each list has one entry per token."""

    asked: RowToGenerate
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
    """Implements rolemesh.services.rollout.engines.Engine on external servers."""

    def __init__(self, job: JobConfig) -> None:
        settings = job.rollout.openai
        key = _key_in(settings.api_key_env) if settings.api_key_env else ""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._job = job
        self._ssl = ssl.create_default_context()
        self._num_tokens = job.data.max_response_length
        outline = load_served_outline(job.actor.model)
        self.weights = named_weights(outline)
        self.vocabulary: int = vocabulary_of(outline)
        check_kept(job.rollout, self.vocabulary)
        self._ends, self._pad = end_tokens(job)
        self._servers = [KINDS[settings.api](url, job) for url in settings.urls]
        self._room = asyncio.Condition()  # notified when a server has fewer rows
        self._run = secrets.token_hex(4)  # part of labels, because another run may have the same version number
        self._version = 0
        self._directory: Path | None = None  # with the version's weights; None: the servers' own model
        self._loading = asyncio.Lock()
        self._folder = WeightsFolder(Path(settings.weights_dir))
        try:
            with ThreadPoolExecutor(1) as thread:  # this thread may already run an event loop
                thread.submit(asyncio.run, self._start()).result()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        return self._version

    def _client(self) -> httpx.AsyncClient:
        """Make a client for one call. Closing it closes its connections, which ends their requests."""
        return httpx.AsyncClient(
            headers=self._headers,
            verify=self._ssl,
            trust_env=self._job.rollout.openai.trust_env,  # else prompts and the key would go to any proxy
            timeout=httpx.Timeout(self._job.rollout.openai.timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
        )

    async def _start(self) -> None:
        tokenizer = load_tokenizer(self._job.actor.model, "rollout")
        async with self._client() as client:
            await asyncio.gather(*(self._admit(client, server, tokenizer) for server in self._servers))

    async def _admit(self, client: httpx.AsyncClient, server: InferenceServer, tokenizer: Any) -> None:
        """Check a server against the job, load version 0 to test weight updates, and ask for one token."""
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
        for server in self._servers:
            server.lost = None  # it may be back; its weights are checked before it gets a row
        await self._look_again()
        async with self._client() as client:
            rows = [
                asyncio.create_task(self._respond(client, _Row(row), sampling))
                for row in rows_to_generate(prompts)
            ]
            async with aclosing(as_they_end(rows)) as finished:
                async for done in finished:
                    yield self._columns([task.result() for task in done], sampling.num_kept)

    async def _respond(self, client: httpx.AsyncClient, made: _Row, sampling: SamplingConfig) -> _Row:
        """Ask for the row until it is complete.

        A failed request is repeated, on any server. A server that fails the row twice is left out, because a
        connection may break once.
        """
        doubted = set[InferenceServer]()
        while True:
            async with self._server_with_room() as server:
                try:
                    return await self._complete(client, server, made, sampling)
                except ServerLost as error:
                    server.holds = None
                    if server in doubted:
                        self._leave_out(server, error)
                    doubted.add(server)

    async def _complete(
        self, client: httpx.AsyncClient, server: InferenceServer, made: _Row, sampling: SamplingConfig
    ) -> _Row:
        """Ask a server for the rest of a row. A row that it aborts continues there."""
        asked = made.asked
        wanted = self._num_tokens - asked.begun
        while True:
            n = len(made.tokens)
            tokens = asked.tokens + made.tokens
            seed = seed_from(asked.seed, n)
            request = self._request(tokens, seed, wanted - n, sampling)
            part, version = await self._ask(client, server, request)
            made.add(part, version)
            if not part.broken_off or len(made.tokens) == wanted:
                return made

    def _request(self, tokens: list[int], seed: int, num_tokens: int, sampling: SamplingConfig) -> Request:
        ignore_eos = self._job.rollout.ignore_eos
        return Request(tokens, seed, num_tokens, sampling, self._ends, ignore_eos, self.vocabulary)

    @asynccontextmanager
    async def _server_with_room(self) -> AsyncIterator[InferenceServer]:
        """Assign a row within the context to the usable server with the fewest rows, once that has room."""
        async with self._room:
            try:
                while (server := self._emptiest()).num_rows >= self._job.rollout.rows:
                    await self._room.wait()
            except BaseException:  # cancelled, or no server is left: the next row looks in place of this one
                self._room.notify()
                raise
            server.num_rows += 1
        try:
            yield server
        finally:
            async with self._room:
                server.num_rows -= 1
                self._room.notify()

    async def _look_again(self) -> None:
        """Let the rows that wait for room look for it: a server may be back."""
        async with self._room:
            self._room.notify_all()

    def _emptiest(self) -> InferenceServer:
        usable = [server for server in self._servers if server.lost is None]
        if not usable:
            raise RoleUnavailable("rollout: no server is left: " + self._reasons())
        return min(usable, key=lambda server: server.num_rows)

    async def _ask(
        self, client: httpx.AsyncClient, server: InferenceServer, request: Request
    ) -> tuple[Completion, int]:
        """Return a completion, and the one version of the weights that made all of it."""
        async with server.lock:
            if server.lost is not None:
                raise ServerLost(server.lost)
            if not server.num_asked:
                server.holds = None  # without an open connection, a restart would not be noticed
            while server.holds != self._version:  # the version may change meanwhile
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
            return Completion(broken_off=True), version  # SGLang answers 503 for a row that it had not started
        finally:
            server.num_asked -= 1
            if not server.num_asked:
                server.quiet.set()
        if part.broken_off and not server.lock.locked():
            server.holds = None  # this engine did not abort it
        return part, version

    def _leave_out(self, server: InferenceServer, error: ServerLost) -> None:
        server.holds = None
        if server.lost is None:
            server.lost = str(error)
            log.error("rollout: server %s is left out: %s", server.url, error)

    def _reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.lost}" for server in self._servers)

    def _columns(self, done: list[_Row], num_kept: int) -> DataProto:
        rows = [made.asked.row for made in done]
        columns = blank_answer(rows, self._num_tokens, pad=self._pad, num_kept=num_kept)
        for i, made in enumerate(done):
            first = made.asked.begun
            here = slice(first, first + len(made.tokens))
            columns["responses"][i, here] = torch.tensor(made.tokens)
            columns["response_mask"][i, here] = True
            columns["rollout_log_probs"][i, here] = torch.tensor(made.log_probs)
            columns["weight_versions"][i, here] = torch.tensor(made.versions)
            if num_kept and made.kept_ids:
                kept = [ids + [-1] * (num_kept - len(ids)) for ids in made.kept_ids]
                columns["kept_ids"][i, first : first + len(kept)] = torch.tensor(kept, dtype=torch.int32)
        return DataProto(columns)

    # --------------------------------------------------------------------------- weights

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        check_fit(version, tensors, self.weights)
        async with self._loading, self._client() as client:
            directory = await asyncio.to_thread(self._folder.write, version, tensors)
            before = self._directory
            self._version = version
            self._directory = directory
            # From here on a server gets no row before it has the version.
            await asyncio.gather(*(self._give(client, server) for server in self._servers))
            await self._look_again()
            if before is not None:
                await asyncio.to_thread(self._folder.remove, before)
        if all(server.lost is not None for server in self._servers):
            raise RoleUnavailable(f"rollout: no server took version {version}: " + self._reasons())

    async def _give(self, client: httpx.AsyncClient, server: InferenceServer) -> None:
        async with server.lock:
            server.lost = None
            try:
                await self._install(client, server)
            except ServerLost as error:
                self._leave_out(server, error)

    async def _make_sure(self, client: httpx.AsyncClient, server: InferenceServer) -> None:
        """Check a server's weights; install the version in use if it was restarted. Its lock is held."""
        label = await server.label(client)
        if label == self._label:
            server.holds = self._version
            return
        if "@" in label and not label.endswith(self._run):
            raise ServerLost(f"it has the weights {label} of another rollout; a server serves only one")
        await self._install(client, server)

    async def _install(self, client: httpx.AsyncClient, server: InferenceServer) -> None:
        """Load the version in use on a server. Its lock is held."""
        server.holds = None
        while server.num_asked:
            await server.break_off(client)
            with suppress(TimeoutError):
                await asyncio.wait_for(server.quiet.wait(), BREAK_OFF_AGAIN_S)
        version = self._version
        label = self._label
        await server.take_weights(client, str(self._directory or server.root), label)
        if (found := await server.label(client)) != label:
            raise ServerLost(f"it was given the weights {label}, but reports {found}")
        server.holds = version

    @property
    def _label(self) -> str:
        return f"{self._version}@{self._run}"

    # ----------------------------------------------------------------------------- sleep

    async def sleep(self) -> int:
        return 0  # the servers have their own devices, so there is no memory to release here

    async def wake(self) -> int:
        return 0

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()  # never ends: a lost server may come back

    def close(self) -> None:
        self._folder.close()


def _key_in(variable: str) -> str:
    """Return the key in an environment variable, without the newline that a key from a file often ends in.

    Raises:
        InvalidConfig: there is none, or no HTTP header can hold it. The message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InvalidConfig(f"rollout.openai.api_key_env names {variable}, which is not set or is empty")
    if not (key.isascii() and key.isprintable()):
        raise InvalidConfig(
            f"rollout.openai.api_key_env names {variable}, whose value an HTTP header cannot hold: expected "
            "printable ASCII characters in one line"
        )
    return key


def load_openai(job: JobConfig, worker: LocalWorker) -> OpenAIEngine:
    """Make the engine. It computes nothing on the worker's thread."""
    return OpenAIEngine(job)
