"""Addresses of servers: one reserved before its server listens, and a proxy of one."""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

COMPLETION = b"POST /v1/completions "


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of 127.0.0.1. Connections to it are refused, and no other socket gets it by chance.

    A server that sets SO_REUSEADDR can still bind the port and listen, because this socket does not.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


class HttpProxy:
    """Forwards HTTP/1.1 to a server. It can hold requests for completions, and it can be cut.

    Attributes:
        url: its own address.
        num_allowed: how many more requests for completions it forwards. Those after them never reach the
            server; each is held until its client closes the connection.
        holding: set while it holds a request.
        quiet: set while it holds none.
    """

    def __init__(self, server: str) -> None:
        self._host, self._port = server.removeprefix("http://").split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._listener: asyncio.Server | None = None  # None: not begun, or cut
        self._num_held = 0
        self.url = ""
        self.num_allowed: float = math.inf
        self.holding, self.quiet = asyncio.Event(), asyncio.Event()
        self.quiet.set()

    async def begin(self) -> None:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break all connections and refuse new ones, as if the server's machine were gone."""
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, far_writer]
        if self._listener is None:  # cut while the connection was being made
            self.cut()
        await asyncio.gather(
            self._requests(reader, far_writer), _copy(far_reader, writer), return_exceptions=True
        )

    async def _requests(self, reader: asyncio.StreamReader, far: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith(COMPLETION):
                    if self.num_allowed <= 0:
                        await self._hold(reader)
                        break
                    self.num_allowed -= 1
                far.write(head + body)
        finally:
            far.close()

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        self._num_held += 1
        self.holding.set()
        self.quiet.clear()
        try:
            await reader.read(1)  # until the connection ends: no client sends more before it has an answer
        finally:
            self._num_held -= 1
            if not self._num_held:
                self.holding.clear()
                self.quiet.set()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def proxied(server: str) -> AsyncIterator[HttpProxy]:
    """Start a proxy of the server at an address like http://127.0.0.1:8000; it is cut on exit."""
    proxy = HttpProxy(server)
    await proxy.begin()
    try:
        yield proxy
    finally:
        proxy.cut()
