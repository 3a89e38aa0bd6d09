"""The HTTP server that programs call: an OpenAI-compatible API on loopback, with a key for each episode."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rolemesh.agents.environment import Endpoint
from rolemesh.config.yaml_file import one_line
from rolemesh.services.environment.external.calls import RequestRefused, chunks, completion, read
from rolemesh.services.environment.external.program_session import ProgramSession

log = logging.getLogger(__name__)
log_of_http = logging.getLogger(f"{__name__}.http")  # aiohttp's own errors

HOST = "127.0.0.1"
MODEL = "policy"
# A call carries the whole conversation, which is larger than any of its messages.
MAX_BODY_BYTES = 4 << 20
BODY_S = 30.0  # time limit for a body to arrive
SHUTDOWN_S = 1.0  # time limit for running calls when the server stops
RETRIES = "x-stainless-retry-count"  # header of OpenAI's clients: how often they already sent the call

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EpisodeEndpoint:
    """Listens while any episode is open, on a port that the system chooses."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[str, ProgramSession]] = {}  # by the public part of the key
        self._changing = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._number = 0

    @asynccontextmanager
    async def serving(self, session: ProgramSession) -> AsyncIterator[Endpoint]:
        """Serve an episode's calls within the block, at an address with a key that is valid only there."""
        self._number += 1
        name = f"rolemesh-{self._number}"
        secret = secrets.token_urlsafe(32)
        async with self._changing:
            self._sessions[name] = (secret, session)
            runner = self._runner = self._runner or await _started(self._application())
        try:
            host, port = runner.addresses[0][:2]
            yield Endpoint(f"http://{host}:{port}/v1", f"{name}.{secret}", MODEL)
        finally:
            del self._sessions[name]
            async with self._changing:
                if not self._sessions and self._runner is not None:
                    runner = self._runner
                    self._runner = None
                    await runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_with_errors])
        application.router.add_post("/v1/chat/completions", self._complete)
        application.router.add_get("/v1/models", self._models)
        return application

    def _session_of(self, request: web.Request) -> ProgramSession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        name, _, given = key.strip().partition(".")
        secret, session = self._sessions.get(name, ("", None))
        if scheme.lower() != "bearer" or session is None or not _is_equal(given, secret):
            raise RequestRefused(401, "the key is unknown, or its episode has ended", code="invalid_api_key")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rolemesh"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise RequestRefused(408, f"the body did not arrive within {BODY_S:g} s") from None
        try:
            call = read(body, MODEL)
        except RequestRefused as refused:
            session.refused = str(refused)
            raise
        utterance = await session.call(call, is_retry=request.headers.get(RETRIES, "0") != "0")
        if not call.streams:
            return web.json_response(completion(utterance, MODEL))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        for chunk in chunks(utterance, MODEL, includes_usage=call.includes_usage):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@web.middleware
async def _with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into answers in the form of OpenAI's API."""
    try:
        return await handler(request)
    except RequestRefused as error:
        refused = error
    except web.HTTPRequestEntityTooLarge:
        refused = RequestRefused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    except web.HTTPException as error:
        refused = RequestRefused(error.status, f"{request.method} {request.path:.100}: {error.reason}")
    return web.json_response(refused.body(), status=refused.status)


def _is_of_this_process(record: logging.LogRecord) -> bool:
    """Log one quiet line, and return False, for an error of a client: it left, or it does not speak HTTP.

    aiohttp logs it with a traceback, as an error of the server.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ConnectionError | HttpProcessingError):
        log.info("a client left, or sent no HTTP: %s", one_line(str(error)))
        return False
    return True


log_of_http.addFilter(_is_of_this_process)


async def _started(application: web.Application) -> web.AppRunner:
    runner = web.AppRunner(application, access_log=None, logger=log_of_http, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    return runner


def _is_equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), secret.encode())
