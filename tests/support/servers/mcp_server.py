"""A real MCP server for tests: `mcp_server.py LOG [http | json]`.

Over HTTP it prints its port, and answers with a stream of events, or with json.

It appends a line to LOG when it starts.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test", log_level="ERROR")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a text; answer with all."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def fail(how: str) -> str:
    """Raise an error."""
    raise ToolError(how)


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answer, nor anything else."""
    time.sleep(3600)
    return ""


@server.tool()
async def wait(pipe: str) -> str:
    """Answer with what comes through a named pipe, and answer other calls before."""
    return await anyio.to_thread.run_sync(Path(pipe).read_text)


@server.tool()
def flood(megabytes: int) -> str:
    """Answer with a long text."""
    return "x" * (megabytes << 20)


@server.tool()
def variable(name: str) -> str:
    """Say an environment variable."""
    return os.environ.get(name, "(none)")


if __name__ == "__main__":
    with open(sys.argv[1], "a") as log:
        log.write(f"{os.getpid()}\n")
    if sys.argv[2:]:
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        app = server.streamable_http_app(json_response=sys.argv[2] == "json")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
    else:
        server.run("stdio")
