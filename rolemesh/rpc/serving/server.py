"""A role's gRPC server: it answers probes from the moment it is bound, calls from the moment it is ready."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from rolemesh.errors import InvalidConfig, RoleFailed
from rolemesh.rpc import tls
from rolemesh.rpc.channels import CHANNEL_OPTIONS
from rolemesh.rpc.contract import FRAME, Rpc, rpcs, serializer
from rolemesh.rpc.serving.access import Permissions
from rolemesh.rpc.serving.bounded import Bounded
from rolemesh.rpc.serving.guard import Behaviour, Context, Guard
from rolemesh.telemetry import metrics
from rolemesh.wire.limits import MAX_STREAMS
from rolemesh.wire.room import Room

if TYPE_CHECKING:
    from rolemesh.door import Door

log = logging.getLogger(__name__)

SERVER_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # two servers on one port are a mistake, not a way to balance
    # Clients ping while a model computes and no data flows; the default allows one ping in five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),  # of each connection
]

# The name whose health says that the event loop answers, whatever the roles do: what a liveness probe asks for.
LIVE = "live"

HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class RoleServer(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Services of one role, or of the roles of a group, on one port, with health and reflection.

    loading: health NOT_SERVING, calls get UNAVAILABLE. ready(): SERVING. drain(): NOT_SERVING, what runs may
    end, new calls get UNAVAILABLE.

    Args:
        roles: each role's services. One that two roles have is the first one's.
        room: for the batches that callers send; None: a share of this machine's memory.

    Raises:
        RoleFailed: an rpc's request is neither one message nor one batch.
    """

    def __init__(self, roles: Mapping[str, Sequence[ServiceDescriptor]], room: Room | None = None) -> None:
        self._role_of: dict[str, str] = {}  # by service
        for role, its_services in roles.items():
            for service in its_services:
                self._role_of.setdefault(service.full_name, role)
        services = [service for its_services in roles.values() for service in its_services]
        self._roles = ", ".join(roles)
        self._rpcs = {rpc.path: rpc for service in services for rpc in rpcs(service)}
        for rpc in self._rpcs.values():
            if rpc.streams[0] != (rpc.request is FRAME):
                wrong = "a Frame that is no stream" if rpc.request is FRAME else "a stream of no Frames"
                raise RoleFailed(f"{rpc.path} takes {wrong}; a request is one message or one batch's Frames")
        self._behaviours: dict[str, Behaviour] = {}  # by path; guarded
        self._refusal = "is still loading"
        self._guard = Guard(room or Room())
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # absent from the stubs
        self._servers: list[grpc.aio.Server] = []

    async def start(self, listen: str) -> str:
        """Binds and answers probes: with TLS where this process has keys (tls.use_keys), else plain.

        Args:
            listen: host:port; port 0 takes a free one.

        Returns:
            host:port as bound.

        Raises:
            InvalidConfig: not an address, or one that cannot be had.
        """
        permissions = [Permissions(self._rpcs, self._role_of)] if tls.current_keys() else []
        server = self._new_server(permissions)
        server.add_generic_rpc_handlers((self,))
        reflection.enable_server_reflection(
            [*self._role_of, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        return await self._begin(server, listen, partial(tls.add_port, server))

    async def start_health(self, listen: str) -> str:
        """Health alone, on a port that is always plain: probes have no keys. Arguments, result and errors are
        those of `start`."""
        server = self._new_server()
        return await self._begin(server, listen, server.add_insecure_port)

    def _new_server(self, permissions: Sequence[Permissions] = ()) -> grpc.aio.Server:
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[Bounded(), *permissions])
        add_HealthServicer_to_server(self._health, server)
        return server

    async def _begin(self, server: grpc.aio.Server, listen: str, add_port: Callable[[str], int]) -> str:
        host, port = split_address(listen)
        try:
            bound = add_port(f"{host}:{port}")
        except RuntimeError as error:
            for begun in (server, *self._servers):  # one that is dropped without keeps a thread for ever
                await begun.stop(None)
            raise InvalidConfig(f"{self._roles} cannot listen on {listen}: {_why(host, port)}") from error
        if not self._servers:
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        self._servers.append(server)
        return f"{host}:{bound}"

    async def ready(self, servicers: Mapping[ServiceDescriptor, Any]) -> None:
        """Begins to answer calls.

        Args:
            servicers: of each service. One whose rpcs take batches has a `door` (rolemesh/door.py).

        Raises:
            RoleFailed: an rpc takes a batch of which no Method says what it is.
        """
        for service, servicer in servicers.items():
            for rpc in rpcs(service):
                self._behaviours[rpc.path] = self._guarded(rpc, servicer)
        self._refusal = ""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        for service, servicer in servicers.items():
            if hasattr(servicer, "watch_serving"):  # it knows better whether its service can be used
                await servicer.watch_serving(partial(self._set_serving, service))

    def _guarded(self, rpc: Rpc, servicer: Any) -> Behaviour:
        door: Door | None = getattr(servicer, "door", None) if rpc.takes_batch else None
        if rpc.takes_batch and (door is None or rpc.name not in door.methods):
            raise RoleFailed(
                f"{rpc.path} takes a batch, which no Method of rolemesh/roles.py declares; declare it there"
            )
        return self._guard.wrap(self._role_of[rpc.service], rpc, getattr(servicer, rpc.name), door)

    async def _set_serving(self, service: ServiceDescriptor, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        serving = serving and not self._refusal  # weights may still come while it drains
        await self._health.set(service.full_name, status.SERVING if serving else status.NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones end, and stops.

        Args:
            grace_s: seconds after which running calls are cancelled.
        """
        self._refusal = "is draining"
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            # Not left to Server.stop(grace), which would also wait for those who watch our health for ever.
            async with asyncio.timeout(grace_s):
                await self._guard.idle.wait()
        except TimeoutError:
            log.warning("calls still run after a grace of %.0f s and are cancelled", grace_s)
        for server in self._servers:
            await server.stop(0.2)

    async def _set_health(self, status: Any) -> None:
        self._show_ready(status == health_pb2.HealthCheckResponse.SERVING)
        for name in ("", *self._role_of.values(), *self._role_of):
            await self._health.set(name, status)

    def _show_ready(self, ready: bool) -> None:
        for role in self._role_of.values():
            metrics.ROLE_READY.labels(role).set(ready)

    # ------------------------------------------------------------ grpc.GenericRpcHandler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call, as gRPC asks for it."""
        rpc = self._rpcs.get(handler_call_details.method)
        if rpc is None:
            return None
        behaviour = self._refuse if self._refusal else self._behaviours[rpc.path]
        make: Any = HANDLERS[rpc.streams]  # without a deserializer: the guard reads the request
        handler: grpc.RpcMethodHandler[Any, Any] = make(behaviour, response_serializer=serializer(rpc.response))
        return handler

    async def _refuse(self, request: Any, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._roles} {self._refusal}")


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`.

    Raises:
        InvalidConfig: it is not; a host is demanded, so that nothing listens to the world by an oversight.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536) or (":" in host and host[:1] != "["):
        raise InvalidConfig(f"{address!r} is not an address; write host:port, e.g. 127.0.0.1:50051")
    return host, int(port)


def serve_metrics(listen: str, *more: CollectorRegistry) -> str:
    """Serves /metrics over HTTP, on threads of its own.

    Args:
        listen: host:port; port 0 takes a free one.
        more: registries beside the process's own.

    Returns:
        host:port as bound.

    Raises:
        InvalidConfig: not an address, or one that cannot be had.
    """
    host, port = split_address(listen)
    shown = CollectorRegistry()
    for registry in (REGISTRY, *more):
        shown.register(registry)
    try:
        server, _ = start_http_server(port, host.strip("[]"), shown)
    except OSError as error:
        raise InvalidConfig(f"/metrics cannot listen on {listen}: {error.strerror or error}") from error
    return f"{host}:{server.server_port}"


def _why(host: str, port: int) -> str:
    """gRPC does not say why it could not bind; the same attempt with a bare socket does."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError as error:
        return error.strerror or str(error)
    return "it cannot be bound"
