"""Discovers a role's replicas: fixed addresses, a name's DNS records, or a Kubernetes Service's endpoints."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from rolemesh.errors import InvalidConfig
from rolemesh.kubernetes import ApiRefused, Expired, Forbidden, KubernetesApi, Unreachable
from rolemesh.rpc.channels import PORT

log = logging.getLogger(__name__)

DNS_EVERY_S = 3.0
WATCH_S = 60.0  # a watch is restarted after this time, so that a silently dead connection is noticed
RETRY_S = 0.5
MAX_RETRY_S = 15.0
# Backoff before members are followed again after an error: doubled each time, up to the maximum.
FOLLOW_S = 0.5
MAX_FOLLOW_S = 15.0
GRAMMAR = "write host:port,host:port or dns:NAME:PORT or kubernetes:SERVICE:PORT"


class Members(Protocol):
    """Reports the addresses of replicas that join and leave."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """Yield host:port of each replica that may get work, now and after every change."""


async def follow(members: Members, role: str, use: Callable[[frozenset[str]], Awaitable[None]]) -> None:
    """Call `use` with a role's addresses, now and after every change. Log errors other than InvalidConfig.

    Raises:
        InvalidConfig: raised by `members`, which are then no longer followed.
    """
    backoff_s = FOLLOW_S
    while True:
        try:
            async for addresses in members.watch():
                await use(addresses)
                backoff_s = FOLLOW_S
            log.warning("%s: the watch of its addresses ended; watching again", role)
        except InvalidConfig:
            raise
        except Exception:  # e.g. no file descriptor is left; replicas that join later must still be seen
            log.exception("%s: the watch of its addresses failed; watching again", role)
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, MAX_FOLLOW_S)


def parse(address: str) -> list[str] | Members:
    """Parse a role's address from the command line, by GRAMMAR. A list of host:port is fixed.

    Raises:
        InvalidConfig: the address is invalid, or kubernetes: is used outside of a pod.
    """
    kind, _, rest = address.partition(":")
    if kind not in ("dns", "kubernetes"):
        return address.split(",")
    name, colon, port = rest.rpartition(":")
    if not (name and colon and PORT.fullmatch(port) and 0 < int(port) < 65536):
        raise InvalidConfig(f"{address!r} is not an address; {GRAMMAR}")
    return Dns(name, int(port)) if kind == "dns" else Endpoints(name, int(port), KubernetesApi.in_pod())


class Dns:
    """Resolves every address of a name, e.g. a headless Service's, every DNS_EVERY_S seconds."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._problem = ""

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        before: frozenset[str] | None = None
        while True:
            found = await self._ask()
            if found is not None and found != before:
                yield found
                before = found
            await asyncio.sleep(DNS_EVERY_S)

    async def _ask(self) -> frozenset[str] | None:
        """Resolve the name. None if the lookup failed, i.e. the addresses are unknown."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if str(error) != self._problem:  # once for each outage
                log.warning("%s: %s; asking again every %.0f s", self._name, error, DNS_EVERY_S)
            self._problem = str(error)
            return frozenset() if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) else None
        self._problem = ""
        return frozenset(_joined(where[0], self._port) for *_, where in found)


class Endpoints:
    """Watches the pods behind a Service in its EndpointSlices.

    Terminating pods are left out. Pods that are not ready are included if the Service publishes them; their
    health decides whether they get work. If the pod's account may not watch EndpointSlices, a warning is logged
    and DNS is used instead.

    Args:
        service: a Service in the pod's own namespace; headless, so that DNS resolves to its pods too.
        port: of each pod.
        api: the API server.
    """

    def __init__(self, service: str, port: int, api: KubernetesApi) -> None:
        self._service = service
        self._port = port
        self._api = api
        self._slices: dict[str, Mapping[str, Any]] = {}

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        try:
            async for addresses in self._watch():
                yield addresses
        except Forbidden as error:
            name = f"{self._service}.{self._api.namespace}.svc"
            log.warning("cannot watch endpoints of %s, using DNS name %s: %s", self._service, name, error)
            async for addresses in Dns(name, self._port).watch():
                yield addresses

    async def _watch(self) -> AsyncIterator[frozenset[str]]:
        version = ""
        backoff_s = RETRY_S
        before: frozenset[str] | None = None
        while True:
            try:
                if not version:
                    version = await self._list()
                    if (found := self._addresses()) != before:
                        yield (before := found)
                async for event in self._api.watch(self._path, self._selector, version, WATCH_S):
                    version = self._take(event)
                    backoff_s = RETRY_S
                    if (found := self._addresses()) != before:
                        yield (before := found)
                # Every watch ends at some time. The pause protects a server that ends watches at once.
                await asyncio.sleep(RETRY_S)
            except Expired:  # the server has dropped the events since this version, so list anew
                version = ""
            except (Unreachable, ApiRefused) as error:
                log.warning("%s: %s; retrying in %.1f s", self._service, error, backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_RETRY_S)

    @property
    def _path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._api.namespace}/endpointslices"

    @property
    def _selector(self) -> str:
        return f"kubernetes.io/service-name={self._service}"

    async def _list(self) -> str:
        """List all EndpointSlices; return the version to watch from."""
        answer = await self._api.list(self._path, self._selector)
        self._slices = {item["metadata"]["name"]: item for item in answer["items"]}
        version: str = answer["metadata"]["resourceVersion"]
        return version

    def _take(self, event: Mapping[str, Any]) -> str:
        """Apply an event; return the version to continue from."""
        changed = event["object"]
        if event["type"] in ("ADDED", "MODIFIED"):
            self._slices[changed["metadata"]["name"]] = changed
        elif event["type"] == "DELETED":
            self._slices.pop(changed["metadata"]["name"], None)
        version: str = changed["metadata"]["resourceVersion"]  # all that a BOOKMARK has
        return version

    def _addresses(self) -> frozenset[str]:
        """Return one address per pod. A pod may be in two slices for a while, or have one in each IP family."""
        by_pod: dict[str, str] = {}
        for part in sorted(self._slices.values(), key=lambda part: str(part["addressType"])):
            for endpoint in part.get("endpoints") or ():
                if not (endpoint.get("conditions") or {}).get("terminating"):
                    address = _joined(endpoint["addresses"][0], self._port)
                    by_pod.setdefault((endpoint.get("targetRef") or {}).get("uid", address), address)
        return frozenset(by_pod.values())


def _joined(host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
