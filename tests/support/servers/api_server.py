"""A small HTTPS server with the part of the Kubernetes API that a watch needs. Tests let it fail in the ways
that the protocol allows."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rolemesh.kubernetes import KubernetesApi

Slice = dict[str, Any]


def endpoint(ip: str, *, pod: str = "", **conditions: bool) -> dict[str, Any]:
    return {"addresses": [ip], "conditions": conditions, "targetRef": {"kind": "Pod", "uid": pod or ip}}


def slice_of(*endpoints: dict[str, Any], name: str = "reward-a", version: str = "2") -> Slice:
    metadata = {"name": name, "resourceVersion": version}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": list(endpoints)}


@dataclass
class Request:
    """A request that waits for its answer."""

    method: str
    path: str
    query: dict[str, str]
    token: str
    body: bytes
    _writer: asyncio.StreamWriter

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"

    async def answer(self, content: Any, code: int = 200) -> None:
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {code} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self._write(head.encode() + body)
        await self.cut()

    async def items(self, version: str, *slices: Slice) -> None:
        """Answer a list request."""
        await self.answer({"metadata": {"resourceVersion": version}, "items": list(slices)})

    def begin(self) -> None:
        self._write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def event(self, kind: str, thing: Any) -> None:
        line = json.dumps({"type": kind, "object": thing}).encode() + b"\n"
        self._write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    def half_an_event(self) -> None:
        self._write(b'9\r\n{"type": \r\n')

    async def end(self) -> None:
        """End a watch as a server does after timeoutSeconds."""
        self._write(b"0\r\n\r\n")
        await self.cut()

    async def cut(self) -> None:
        await self._writer.drain()
        self._writer.close()

    def _write(self, data: bytes) -> None:
        self._writer.write(data)


@dataclass
class ApiServer:
    account: Path
    url: str = ""
    requests: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)

    @property
    def cluster(self) -> KubernetesApi:
        return KubernetesApi(self.url, self.account)

    async def next(self) -> Request:
        async with asyncio.timeout(120):
            return await self.requests.get()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, target, _ = head[0].split()
        asked = urlsplit(target)
        token = headers["authorization"]
        query = dict(parse_qsl(asked.query))
        self.requests.put_nowait(Request(method, asked.path, query, token, body, writer))


@asynccontextmanager
async def api_server(directory: Path) -> AsyncIterator[ApiServer]:
    """Start a server; `directory` gets a pod's service account in the namespace `here`."""
    certificate, key = _certificate()
    (directory / "ca.crt").write_bytes(certificate)
    (directory / "own.pem").write_bytes(certificate + key)
    (directory / "namespace").write_text("here")
    (directory / "token").write_text("first\n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "own.pem")
    api = ApiServer(directory)
    server = await asyncio.start_server(api._serve, "127.0.0.1", 0, ssl=context)
    api.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield api
    finally:
        server.close()


def _certificate() -> tuple[bytes, bytes]:
    """Make a self-signed certificate of an API server, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return signed.public_bytes(serialization.Encoding.PEM), private
