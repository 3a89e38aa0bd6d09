"""Connections to the job's MCP servers, on an event loop and a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import shlex
import threading
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp.client._transport import TransportStreams
from mcp_types import CONNECTION_CLOSED, CallToolResult, Tool
from pydantic import ValidationError

from rolemesh.config.rollout import McpServerConfig
from rolemesh.config.yaml_file import one_line
from rolemesh.errors import InvalidConfig
from rolemesh.services.environment.mcp_tools.transports import ProgramMissing, over_http, over_stdio
from rolemesh.tasks import gather
from rolemesh.wire.limits import MAX_TOOLS

log = logging.getLogger(__name__)

R = TypeVar("R")

CLOSES_S = 10.0  # time limit for connections to end


class Servers:
    """The servers of a job.

    Args:
        configs: by name.
        timeout_s: time limit in seconds for a server to start and to list its tools.
    """

    def __init__(self, configs: Mapping[str, McpServerConfig], timeout_s: float) -> None:
        self._servers = {name: _Server(name, config, timeout_s) for name, config in configs.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="MCP")
        self._thread.start()

    def start(self) -> dict[str, list[Tool]]:
        """Connect to all servers, and return the tools of each by its name.

        Raises:
            InvalidConfig: one cannot be reached, or offers no valid list; the message names it.
        """

        async def listed() -> list[list[Tool]]:
            return await gather(*(server.tools() for server in self._servers.values()))

        try:
            return dict(zip(self._servers, self._submit(listed()).result(), strict=True))
        except BaseException:
            self.close()
            raise

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. If the call is cancelled, the server is notified.

        Raises:
            Exception: the connection was lost, or the server refuses the call.
        """
        return await asyncio.wrap_future(self._submit(self._servers[server].call(tool, arguments)))

    def close(self) -> None:
        """End all connections, and the servers that were started here. May be called again."""
        if self._loop.is_closed():
            return

        async def ended() -> None:
            await gather(*(server.close() for server in self._servers.values()))

        self._submit(ended()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, R]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class _Connection:
    """An open connection, with the task that holds it: the library requires one task to open and close it.

    Attributes:
        calls: number of calls that run on it.
        answered: number of calls that it has answered.
    """

    def __init__(self, transport: AbstractAsyncContextManager[TransportStreams]) -> None:
        self.calls = 0
        self.answered = 0
        self._transport = transport
        self._ending = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        try:
            async with Client(self._transport, cache=None) as client:
                if not self._opened.done():
                    self._opened.set_result(client)
                await self._ending.wait()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            elif not isinstance(error, asyncio.CancelledError):
                log.warning("a connection to an MCP server ended: %s", said(error))

    async def client(self) -> Client:
        return await asyncio.shield(self._opened)

    def end(self) -> None:
        self._ending.set()
        if not self._opened.done():
            self.task.cancel()


class _Server:
    def __init__(self, name: str, config: McpServerConfig, timeout_s: float) -> None:
        self._name = name
        self._config = config
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._open: set[_Connection] = set()

    def _connected(self) -> _Connection:
        """Return the connection, or a new one if it was lost."""
        if self._connection is None or self._connection.task.done():
            config = self._config
            over = (
                over_stdio(config.command, config.env)
                if config.command
                else over_http(config.url, config.headers)
            )
            self._connection = connection = _Connection(over)
            self._open.add(connection)
            connection.task.add_done_callback(lambda _: self._open.discard(connection))
        return self._connection

    def _lose(self, connection: _Connection) -> None:
        """Let the next call open another connection. This one ends after the last call on it."""
        if self._connection is connection:
            self._connection = None
        if not connection.calls:
            connection.end()

    async def tools(self) -> list[Tool]:
        config = self._config
        where = f"rollout.multi_turn.mcp_servers.{self._name}.{'command' if config.command else 'url'}"
        command = shlex.join(config.command)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._listed(await self._connected().client())
        except TimeoutError as error:
            raise InvalidConfig(
                f"{where}: {command or config.url} did not answer in {self._timeout_s:g} s "
                "(rollout.multi_turn.call_timeout_s)"
            ) from error
        except ProgramMissing as error:
            raise InvalidConfig(
                f"{where}: {config.command[0]!r} is not there, or not executable; correct the path, or install "
                "the program where the environment runs"
            ) from error
        except Exception as error:
            cause = _cause(error)
            if command and isinstance(cause, MCPError) and cause.code == CONNECTION_CLOSED:
                raise InvalidConfig(
                    f"{where}: `{command}` ended before it listed its tools; see its standard error in the log "
                    "of the environment, or run it by hand there"
                ) from error
            raise InvalidConfig(
                f"{where}: the tools of {command or config.url} cannot be listed: {said(error)}"
            ) from error

    async def _listed(self, client: Client) -> list[Tool]:
        """Return all pages of the list of tools, each tool once. A cursor that came before ends the list."""
        tools: list[Tool] = []
        cursor: str | None = None
        seen: set[str] = set()
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [tool for tool in page.tools if tool not in tools]
            if len(tools) > MAX_TOOLS:
                raise ValueError(f"there are more than {MAX_TOOLS}")
            cursor = page.next_cursor
            if not cursor or cursor in seen:
                return tools
            seen.add(cursor)

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        connection = self._connected()
        answered = connection.answered
        connection.calls += 1
        is_lost = True
        try:
            client = await connection.client()
            result: CallToolResult = await client.call_tool(tool, arguments)
            connection.answered += 1
            is_lost = False
            return result
        except MCPError as error:
            # A live server refused the call. Over HTTP it may also mean that no server answered.
            is_lost = not self._config.command or error.code == CONNECTION_CLOSED
            raise
        except ValidationError:  # of an answer
            is_lost = False
            raise
        except asyncio.CancelledError:
            is_lost = connection.answered == answered  # it answered no other call meanwhile, so it hangs
            raise
        finally:
            connection.calls -= 1
            if is_lost or (connection is not self._connection):
                self._lose(connection)

    async def close(self) -> None:
        for connection in list(self._open):
            connection.end()
        if self._open:
            await asyncio.wait({connection.task for connection in self._open}, timeout=CLOSES_S)


def said(error: BaseException) -> str:
    """Return an error as one line; of a group of errors, the first."""
    cause = _cause(error)
    return one_line(f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__)


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
