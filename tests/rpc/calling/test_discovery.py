"""Who is there, as DNS and the Kubernetes API tell it; the API's edge cases by a server that speaks its
protocol (a real API server: tests/cluster/test_endpoints.py)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from api_server import ApiServer, api_server, endpoint, slice_of
from membership import until

from rolemesh.errors import InvalidConfig
from rolemesh.kubernetes import KubernetesApi
from rolemesh.rpc.calling import discovery, pool
from rolemesh.rpc.calling.discovery import Endpoints, parse


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    monkeypatch.setattr(discovery, "RETRY_S", 0.01)
    async with api_server(tmp_path) as server:
        yield server


class Seen:
    """The addresses that a watch has reported, each once."""

    def __init__(self, cluster: KubernetesApi) -> None:
        self._watch = Endpoints("reward", 50051, cluster).watch()

    async def next(self) -> list[str]:
        async with asyncio.timeout(120):
            return sorted(await anext(self._watch))


A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def at(*ips: str) -> list[str]:
    return [f"{ip}:50051" for ip in ips]


async def test_a_watch_goes_on_from_what_was_listed(api: ApiServer) -> None:
    """Pods that are not ready are there, those that are being terminated are not; a slice may go, too."""
    seen = Seen(api.cluster)
    reported = asyncio.create_task(seen.next())
    asked = await api.next()
    assert asked.query == {"labelSelector": "kubernetes.io/service-name=reward"}
    await asked.items("7", slice_of(endpoint(A, ready=True), endpoint(B, ready=False)))
    assert await reported == at(A, B)

    reported = asyncio.create_task(seen.next())
    watch = await api.next()
    assert watch.is_watch
    assert watch.query["resourceVersion"] == "7"
    assert watch.query["allowWatchBookmarks"] == "true"
    watch.begin()
    watch.event("MODIFIED", slice_of(endpoint(A, terminating=True, ready=True), endpoint(B), version="8"))
    assert await reported == at(B)
    watch.event("ADDED", slice_of(endpoint(C), name="reward-b", version="9"))
    assert await seen.next() == at(B, C)
    watch.event("DELETED", slice_of(endpoint(B), version="10"))
    assert await seen.next() == at(C)


async def test_a_watch_resumes_from_the_last_version_received(api: ApiServer) -> None:
    """A bookmark counts. Nothing is reported twice, and the token is the one of that time."""
    seen = Seen(api.cluster)
    reported = asyncio.create_task(seen.next())
    await (await api.next()).items("7", slice_of(endpoint(A)))
    assert await reported == at(A)
    reported = asyncio.create_task(seen.next())
    versions = []
    for kind in ("ended", "cut in an event", "cut before the answer"):
        watch = await api.next()
        versions.append((watch.query["resourceVersion"], watch.token))
        (api.account / "token").write_text("second\n")
        if kind != "cut before the answer":
            watch.begin()
            version = str(20 + len(versions))
            watch.event("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": version}})
        if kind == "cut in an event":
            watch.half_an_event()
        await (watch.end() if kind == "ended" else watch.cut())
    watch = await api.next()
    versions.append((watch.query["resourceVersion"], watch.token))
    assert versions == [("7", "bearer first"), *[(str(v), "bearer second") for v in (21, 22, 22)]]
    watch.begin()
    watch.event("MODIFIED", slice_of(endpoint(A), endpoint(B), version="30"))
    assert await reported == at(A, B)


@pytest.mark.parametrize("way", ["answer", "event"])
async def test_a_version_that_is_forgotten_is_listed_anew(api: ApiServer, way: str) -> None:
    """What was deleted meanwhile is gone, though no event said so."""
    seen = Seen(api.cluster)
    reported = asyncio.create_task(seen.next())
    await (await api.next()).items("7", slice_of(endpoint(A)), slice_of(endpoint(B), name="reward-b"))
    assert await reported == at(A, B)
    reported = asyncio.create_task(seen.next())
    watch = await api.next()
    gone = {"kind": "Status", "code": 410, "message": "too old resource version: 7 (99)"}
    if way == "answer":
        await watch.answer(gone, 410)
    else:
        watch.begin()
        watch.event("ERROR", gone)
    again = await api.next()
    assert not again.is_watch
    await again.items("99", slice_of(endpoint(B), name="reward-b"))
    assert await reported == at(B)


@pytest.mark.parametrize("code", [401, 429, 500, 503])
async def test_an_api_server_that_is_not_well_is_asked_again(api: ApiServer, code: int) -> None:
    seen = Seen(api.cluster)
    reported = asyncio.create_task(seen.next())
    await (await api.next()).answer({"message": "not now"}, code)
    await (await api.next()).items("7", slice_of(endpoint(A)))
    assert await reported == at(A)


async def test_a_pod_in_two_slices_or_of_two_families_is_one(api: ApiServer) -> None:
    seen = Seen(api.cluster)
    reported = asyncio.create_task(seen.next())
    six = slice_of(endpoint("fd00::1", pod="a"), endpoint("fd00::9", pod="z"), name="six") | {
        "addressType": "IPv6"
    }
    four = [slice_of(endpoint(A, pod="a"), name="four"), slice_of(endpoint(A, pod="a"), name="again")]
    await (await api.next()).items("7", six, *four, slice_of(name="empty") | {"endpoints": None})
    assert await reported == [*at(A), "[fd00::9]:50051"]


async def test_after_an_object_that_makes_no_sense_all_are_listed_anew(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "FOLLOW_S", 0.01)
    followed = pool.ReplicaPool("reward", [], patience_s=60)
    followed.follow(Endpoints("reward", 50051, api.cluster))
    await (await api.next()).items("7", slice_of(endpoint(A) | {"addresses": []}))
    await (await api.next()).items("8", slice_of(endpoint(A)))
    await until(followed, lambda: [replica.address for replica in followed.replicas] == at(A))
    await followed.close()
    assert "IndexError" in caplog.text


# ------------------------------------------------------------------------------------------------- by name

# Tells what it sees, line by line.
WATCHER = """
import asyncio, json, logging, sys
from pathlib import Path
from rolemesh.kubernetes import KubernetesApi
from rolemesh.rpc.calling import discovery, pool

logging.basicConfig(format="%(message)s", stream=sys.stdout)
discovery.DNS_EVERY_S = 0.05

async def main():
    members = discovery.Dns("reward.here.svc", 50051)
    if len(sys.argv) > 1:
        members = discovery.Endpoints("reward", 50051, KubernetesApi(sys.argv[1], Path(sys.argv[2])))
    async for found in members.watch():
        print(json.dumps(sorted(found)), flush=True)

asyncio.run(main())
"""
OWN_HOSTS = ["unshare", "--mount", "--map-root-user", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']


@dataclass
class Hosts:
    """/etc/hosts of the process that `watcher` starts."""

    path: Path

    def name(self, *addresses: str) -> None:
        """What reward.here.svc is from now on. One write in place, of always the same length: a reader never
        sees the file empty, and it stays the file that is mounted."""
        text = "".join(f"{address} reward.here.svc\n" for address in addresses).encode()
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, text.ljust(1024, b"\n"), 0)
        finally:
            os.close(file)

    @asynccontextmanager
    async def watcher(self, *args: str) -> AsyncIterator[Callable[[], Awaitable[str]]]:
        """Gives the next line that WATCHER prints."""
        process = await asyncio.create_subprocess_exec(
            *OWN_HOSTS, str(self.path), sys.executable, "-c", WATCHER, *args, stdout=asyncio.subprocess.PIPE
        )

        async def line() -> str:
            assert process.stdout
            async with asyncio.timeout(120):
                return (await process.stdout.readline()).decode().strip()

        try:
            yield line
        finally:
            process.kill()
            await process.communicate()


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    own = Hosts(tmp_path / "hosts")
    own.name()
    if subprocess.run([*OWN_HOSTS, str(own.path), "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no mount namespace")
    return own


async def test_a_name_is_all_its_addresses_as_they_change(hosts: Hosts) -> None:
    hosts.name("127.0.0.2")
    async with hosts.watcher() as line:
        assert json.loads(await line()) == ["127.0.0.2:50051"]
        hosts.name("127.0.0.2", "127.0.0.3")
        assert json.loads(await line()) == ["127.0.0.2:50051", "127.0.0.3:50051"]
        hosts.name("127.0.0.3")
        assert json.loads(await line()) == ["127.0.0.3:50051"]


@pytest.mark.parametrize("forbidden", ["list", "watch"])
async def test_where_the_watch_is_forbidden_the_name_is_asked(
    api: ApiServer, hosts: Hosts, forbidden: str
) -> None:
    hosts.name("127.0.0.4")
    async with hosts.watcher(api.url, str(api.account)) as line:
        if forbidden == "watch":
            await (await api.next()).items("7", slice_of(endpoint(A)))
            assert json.loads(await line()) == at(A)
        await (await api.next()).answer({"message": "endpointslices is forbidden: User"}, 403)
        assert (
            "cannot watch endpoints of reward, using DNS name reward.here.svc: endpointslices is forbidden"
            in await line()
        )
        assert json.loads(await line()) == ["127.0.0.4:50051"]


# ------------------------------------------------------------------------------------------- what is written


def test_a_list_of_addresses_is_fixed() -> None:
    assert parse("h1:50051,h2:50051") == ["h1:50051", "h2:50051"]


@pytest.mark.parametrize(
    "address",
    ["dns:reward", "dns::50051", "dns:reward:http", "dns:reward:0", "dns:reward:65536", "kubernetes:reward"],
)
def test_an_address_that_means_nothing_is_refused(address: str) -> None:
    with pytest.raises(InvalidConfig, match="write host:port,host:port or dns:NAME:PORT or kubernetes:"):
        parse(address)


@pytest.mark.skipif("KUBERNETES_SERVICE_HOST" in os.environ, reason="this is a pod")
def test_the_kubernetes_api_is_for_pods() -> None:
    with pytest.raises(InvalidConfig, match="not in a pod"):
        parse("kubernetes:reward:50051")
