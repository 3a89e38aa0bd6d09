"""Connections to MCP servers, which bound what they read: the size of messages, and the fields of tools."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any

import anyio
import httpx2
from mcp.client._transport import ReadStream, TransportStreams
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from rolemesh.process_group import group_that_dies_with_me
from rolemesh.wire.limits import MAX_ANSWER_BYTES

ENDS_S = 2.0  # time limit for a server to end by itself
INHERITED = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR")  # environment variables that servers get from the role

USED = ("name", "description", "inputSchema")  # of a tool
TOO_LONG = f"the answer has more than {MAX_ANSWER_BYTES} bytes"
END_BYTES = 256  # at the beginning, and at the end, of a message that is not read: they name its call
# A response begins with its result or error, or with its id and then these; or its id comes last.
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"\s*'
_ID = rb'"id"\s*:\s*"?(\d+)"?\s*'
RESPONSE = re.compile(rb'\s*\{\s*(?:%b,\s*|%b,\s*)*"(?:result|error)"' % (_VERSION, _ID))
LAST = re.compile(rb"(?<!\\)%b(?:,\s*%b)?\}\s*$" % (_ID, _VERSION))


class ProgramMissing(ValueError):
    """A program is not there, or not executable."""


@asynccontextmanager
async def over_stdio(command: Sequence[str], env: Sequence[str]) -> AsyncGenerator[TransportStreams, None]:
    """Start a server, and connect to its standard input and output.

    The server and its process group end with the block. On Linux they also end with this process, even if it is
    killed.

    Args:
        command: the program and its arguments.
        env: names of further environment variables that it gets, besides INHERITED.

    Raises:
        ProgramMissing: the program is missing or not executable.
        ValueError: a variable is not set.
    """
    if shutil.which(command[0]) is None:
        raise ProgramMissing(command[0])
    if absent := [name for name in env if name not in os.environ]:
        raise ValueError(f"env names {', '.join(absent)}, which is not set")
    process = await asyncio.create_subprocess_exec(
        *group_that_dies_with_me(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={name: os.environ[name] for name in (*INHERITED, *env) if name in os.environ},
        limit=MAX_ANSWER_BYTES,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to_session, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    stdin = process.stdin
    stdout = process.stdout

    async def reading() -> None:
        with suppress(anyio.BrokenResourceError):
            async with to_session:
                while (message := await next_message(stdout)) is not None:
                    await to_session.send(message)

    async def writing() -> None:
        with suppress(OSError):
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(f"{text}\n".encode())
                await stdin.drain()
        await to_session.aclose()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reading)
            tasks.start_soon(writing)
            try:
                yield _UsedFields(read), write
            finally:
                tasks.cancel_scope.cancel()
    finally:
        for stream in (read, write, to_session, from_session):
            stream.close()
        stdin.close()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(ENDS_S):
                await _ended(process, stdout)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            with anyio.move_on_after(ENDS_S):
                await _ended(process, stdout)


async def _ended(process: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
    """Wait for a process to end. asyncio sees that only after the end of its output, so read the output too."""
    while await stdout.read(1 << 16):
        pass
    await process.wait()


async def next_message(stdout: asyncio.StreamReader) -> SessionMessage | Exception | None:
    """Read a line. If it exceeds the reader's limit, at most that much of it is in memory at a time.

    Returns:
        The message. For a response that is too long or that cannot be parsed, an error response to the same
        call. For any other such line, an exception. None at the end of the stream, or if such a response names
        no call.
    """
    head = b""
    tail = b""
    while True:
        try:
            line = await stdout.readuntil()
            break
        except asyncio.LimitOverrunError as too_long:
            part = await stdout.readexactly(too_long.consumed)
            head = head or part[:END_BYTES]
            tail = part[-END_BYTES:]
        except asyncio.IncompleteReadError as end:
            if not end.partial:
                return None
            line = end.partial
            break
    if head:
        return _refused(head, tail + line, INTERNAL_ERROR, TOO_LONG)
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = first["msg"] if first["type"] == "json_invalid" else "it is no message of JSON-RPC"
        return _refused(line[:END_BYTES], line, PARSE_ERROR, f"the answer cannot be read: {why}")


def _refused(head: bytes, tail: bytes, code: int, why: str) -> SessionMessage | Exception | None:
    """Return what `next_message` returns for a line that is not read, with such a beginning and end."""
    if not (response := RESPONSE.match(head)):
        return ValueError(why)
    asked = response[1] or ((last := LAST.search(tail[-END_BYTES:])) and last[1])
    if not asked:
        return None
    error = ErrorData(code=code, message=why)
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(asked), error=error))


class _UsedFields:
    """A stream of messages, in which a list of tools has only the fields of each tool that are used here.

    The library would refuse the whole list for an invalid outputSchema, and an answer in text alone for a valid
    one.
    """

    def __init__(self, stream: ReadStream[SessionMessage | Exception]) -> None:
        self._stream = stream

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return _with_used_fields(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _UsedFields:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return _with_used_fields(await anext(self._stream))

    async def __aenter__(self) -> _UsedFields:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(kind, error, trace)


def _with_used_fields(message: SessionMessage | Exception) -> SessionMessage | Exception:
    if isinstance(message, SessionMessage) and isinstance(message.message, JSONRPCResponse):
        result = message.message.result
        if isinstance(tools := result.get("tools"), list):
            result["tools"] = [
                {key: tool[key] for key in USED if key in tool} if isinstance(tool, dict) else tool
                for tool in tools
            ]
    return message


@asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str]) -> AsyncGenerator[TransportStreams, None]:
    """Connect to a server at a URL, by streamable HTTP.

    Args:
        url: the server's.
        headers: name of each header to the environment variable that has its value.

    Raises:
        ValueError: a variable is not set.
    """
    for name, variable in headers.items():
        if variable not in os.environ:
            raise ValueError(f"header {name} is in the environment variable {variable}, which is not set")
    values = {name: os.environ[variable] for name, variable in headers.items()}
    transport = _Bounded(httpx2.AsyncHTTPTransport())
    timeout = httpx2.Timeout(30.0, read=None)  # the caller has a time limit
    async with (
        # no proxy of the environment, which would get the calls and the headers
        httpx2.AsyncClient(headers=values, transport=transport, timeout=timeout, trust_env=False) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MAX_ANSWER_BYTES) as (read, write),
    ):
        yield _UsedFields(read), write


class _Bounded(httpx2.AsyncBaseTransport):
    """Bounds the size of bodies that are read as a whole. Events of a stream are bounded by the library."""

    def __init__(self, transport: httpx2.AsyncHTTPTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._transport.handle_async_request(request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _BoundedStream(response.stream)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise httpx2.StreamError(TOO_LONG)  # of this request; a ReadError would end the session
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
