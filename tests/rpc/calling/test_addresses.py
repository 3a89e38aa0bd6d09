"""A process speaks to a port of a host, whatever it is told to call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from rolemesh.config.job import make_job
from rolemesh.errors import InvalidBatch, InvalidConfig
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import RewardClient
from rolemesh.rpc.channels import check_address, open_channel
from rolemesh.rpc.contract import ROLLOUT, WEIGHTS
from rolemesh.rpc.serving.server import RoleServer, serve_metrics
from rolemesh.weights.remote import RemoteWeights

GOOD = [
    "127.0.0.1:50051",
    "actor:1",
    "a.b-c.svc.cluster.local.:65535",
    "my_host:80",
    "[::1]:50051",
    "[::ffff:1.2.3.4]:1",
]
BAD = [
    "", ":", "actor", "actor:", ":80", "actor:0", "actor:65536", "actor:-1", "actor:+1", "actor:1_0", "actor:٣",
    "actor:80\n", "actor :80", "a/b:80", "a%2fb:80", "::1:80", "[127.0.0.1]:80", "[::1:80", "::1]:80", "[]:80",
    "[::1%lo]:80", "unix:/tmp/socket", "unix:///tmp/socket", "unix:/tmp/socket:80", "unix-abstract:name",
    "dns:///a:80", "dns:a:80", "ipv4:127.0.0.1:80", "ipv6:[::1]:80", "vsock:1:80", "xds:///a:80",
    "http://a:80", "user@a:80", "a" * 300 + ":80",
]  # fmt: skip


@pytest.mark.parametrize("address", GOOD)
def test_a_host_and_a_port_are_an_address(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize("address", BAD)
async def test_nothing_else_is_dialled(address: str) -> None:
    with pytest.raises(InvalidConfig, match="is not an address; write host:port"):
        open_channel(address, "rollout")
    with pytest.raises(InvalidConfig, match="is not an address"):
        RewardClient([address], methods(make_job({})))
    with pytest.raises(InvalidBatch, match=r"invalid source of weights: .* is not an address"):
        RemoteWeights(["127.0.0.1:1", address], 1, "0" * 64)


@pytest.mark.parametrize(
    ("sources", "version", "digest", "message"),
    [
        ([], 1, "0" * 64, "from 1 to 1024 sources, the actor last; got 0"),
        (["actor:1"] * 1025, 1, "0" * 64, "got 1025"),
        (["actor:1"], 1 << 63, "0" * 64, "at most 9223372036854775807"),
        (["actor:1"], 1, "", "is not a digest"),
        (["actor:1"], 1, "F" * 64, "is not a digest"),
        (["actor:1"], 1, "0" * 63, "is not a digest"),
        (["actor:1"], 1, "0" * 64 + "\n", "is not a digest"),
    ],
)
def test_weights_have_sources_a_version_and_a_digest(
    sources: Sequence[str], version: int, digest: str, message: str
) -> None:
    with pytest.raises(InvalidBatch, match=message):
        RemoteWeights(sources, version, digest)


async def test_a_host_that_is_called_like_a_scheme_of_grpc_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC reads `unix:80` as a socket's file of the name 80, unless it is told that it is a name."""
    dialled: list[str] = []
    plain = grpc.aio.insecure_channel

    def noted(target: str, **options: Any) -> grpc.aio.Channel:
        dialled.append(target)
        return plain(target, **options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", noted)
    async with open_channel("unix:80", "rollout"):
        assert dialled == ["dns:///unix:80"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_every_form_of_an_address_reaches_its_server(host: str) -> None:
    server = RoleServer({"rollout": [ROLLOUT, WEIGHTS]})
    try:
        address = await server.start(f"{host}:0")
    except InvalidConfig as error:
        pytest.skip(str(error))  # a machine without IPv6
    async with asyncio.timeout(60), open_channel(address, "rollout") as channel:
        await channel.channel_ready()
    await server.drain(0)


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "[::]"])
async def test_a_process_on_all_interfaces_is_reached_by_ipv4_and_ipv6(everywhere: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    server = RoleServer({"rollout": [ROLLOUT, WEIGHTS]})
    listening = [
        await server.start(f"{everywhere}:0"),
        await server.start_health(f"{everywhere}:0"),
        serve_metrics(f"{everywhere}:0"),
    ]
    for address in listening:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, int(address.rpartition(":")[2])), timeout=60).close()
    await server.drain(0)
