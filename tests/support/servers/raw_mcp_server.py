"""An MCP server for tests that answers as it is told, right or wrong: `raw_mcp_server.py SAYS`, over stdio.

SAYS is a JSON object: `pages` has the result of tools/list by cursor, the first one under "". `answers` has the
result of a call by tool; a text stands for the whole line, written as Latin-1, in which ID is the call's id.
"""

from __future__ import annotations

import json
import sys
from typing import Any

says = json.loads(sys.argv[1])


def line_of(asked: dict[str, Any]) -> bytes:
    params, result = asked.get("params") or {}, None
    if asked["method"] == "initialize":
        result = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "raw", "version": "1"},
        }
    elif asked["method"] == "tools/list":
        result = says["pages"][params.get("cursor") or ""]
    elif asked["method"] == "tools/call":
        result = says["answers"][params["name"]]
    if isinstance(result, str):
        return result.encode("latin-1").replace(b"ID", str(asked["id"]).encode())
    said = {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
    return json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}).encode()


for line in sys.stdin.buffer:
    request = json.loads(line)
    if "id" in request:
        sys.stdout.buffer.write(line_of(request) + b"\n")
        sys.stdout.buffer.flush()
