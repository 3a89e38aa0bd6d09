"""Where the replicas of a role are: fixed addresses, the records of a name, or the endpoints of a Kubernetes
Service."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from rolemesh.errors import InvalidConfig
from rolemesh.kubernetes import Cluster, Expired, Forbidden, Refused, Unreachable

log = logging.getLogger(__name__)

DNS_EVERY_S = 3.0
WATCH_S = 60.0  # after which a watch is begun anew: a connection that died in silence is noticed so late
RETRY_S, MAX_RETRY_S = 0.5, 15.0
GRAMMAR = "write host:port,host:port or dns:NAME:PORT or kubernetes:SERVICE:PORT"


class Members(Protocol):
    """Replicas that come and go."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """host:port of each replica that may be given work, now and after every change."""


def parse(address: str) -> list[str] | Members:
    """What a role's address on the command line means: a list is fixed.

    Raises:
        InvalidConfig: it means nothing, or kubernetes: is asked for outside of a pod.
    """
    kind, _, rest = address.partition(":")
    if kind not in ("dns", "kubernetes"):
        return address.split(",")
    name, colon, port = rest.rpartition(":")
    if not (name and colon and port.isdecimal()):
        raise InvalidConfig(f"{address!r} is not an address; {GRAMMAR}")
    return Dns(name, int(port)) if kind == "dns" else Endpoints(name, int(port), Cluster.in_pod())


class Dns:
    """Every address that a name has, e.g. a headless Service's; asked again every few seconds."""

    def __init__(self, name: str, port: int) -> None:
        self._name, self._port = name, port

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        before: frozenset[str] | None = None
        while True:
            found = await self._ask()
            if found is not None and found != before:
                yield found
                before = found
            await asyncio.sleep(DNS_EVERY_S)

    async def _ask(self) -> frozenset[str] | None:
        """None while nobody knows."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            log.debug("%s: %s", self._name, error)
            return frozenset() if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) else None
        return frozenset(_joined(where[0], self._port) for *_, where in found)


class Endpoints:
    """The pods behind a Service, as its EndpointSlices have them: without those that are being terminated, and
    with those that are not ready, if the Service publishes them. Health says which can be used.

    Where the pod's account may not watch EndpointSlices, there is a warning, and DNS from then on.

    Args:
        service: of the pod's own namespace; headless, so that DNS has its pods, too.
        port: of each pod.
        cluster: to ask.
    """

    def __init__(self, service: str, port: int, cluster: Cluster) -> None:
        self._service, self._port, self._cluster = service, port, cluster
        self._slices: dict[str, Mapping[str, Any]] = {}

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        try:
            async for addresses in self._watch():
                yield addresses
        except Forbidden as error:
            name = f"{self._service}.{self._cluster.namespace}.svc"
            log.warning("replicas of %s are looked for by DNS, as %s: %s", self._service, name, error)
            async for addresses in Dns(name, self._port).watch():
                yield addresses

    async def _watch(self) -> AsyncIterator[frozenset[str]]:
        version, backoff_s = "", RETRY_S
        before: frozenset[str] | None = None
        while True:
            try:
                if not version:
                    version = await self._list()
                    if (found := self._addresses()) != before:
                        yield (before := found)
                async for event in self._cluster.watch(self._path, self._selector, version, WATCH_S):
                    version, backoff_s = self._take(event), RETRY_S
                    if (found := self._addresses()) != before:
                        yield (before := found)
                # Every watch ends some time; a server that ends them at once is spared.
                await asyncio.sleep(RETRY_S)
            except Expired:  # what happened meanwhile is forgotten there; what is there now is not
                version = ""
            except (Unreachable, Refused) as error:
                log.warning("%s: %s; asked again in %.1f s", self._service, error, backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_RETRY_S)

    @property
    def _path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._cluster.namespace}/endpointslices"

    @property
    def _selector(self) -> str:
        return f"kubernetes.io/service-name={self._service}"

    async def _list(self) -> str:
        """Reads all that is there; returns the version to watch from."""
        answer = await self._cluster.list(self._path, self._selector)
        self._slices = {item["metadata"]["name"]: item for item in answer["items"]}
        version: str = answer["metadata"]["resourceVersion"]
        return version

    def _take(self, event: Mapping[str, Any]) -> str:
        """Notes an event; returns the version to go on from."""
        changed = event["object"]
        if event["type"] in ("ADDED", "MODIFIED"):
            self._slices[changed["metadata"]["name"]] = changed
        elif event["type"] == "DELETED":
            self._slices.pop(changed["metadata"]["name"], None)
        version: str = changed["metadata"]["resourceVersion"]  # a BOOKMARK has nothing else
        return version

    def _addresses(self) -> frozenset[str]:
        """An endpoint may be in two slices for a while, and in two families for ever."""
        by_pod: dict[str, str] = {}
        for part in sorted(self._slices.values(), key=lambda part: str(part["addressType"])):
            for endpoint in part.get("endpoints") or ():
                if not (endpoint.get("conditions") or {}).get("terminating"):
                    address = _joined(endpoint["addresses"][0], self._port)
                    by_pod.setdefault((endpoint.get("targetRef") or {}).get("uid", address), address)
        return frozenset(by_pod.values())


def _joined(host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
