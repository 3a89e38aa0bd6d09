"""A role's gRPC server. It answers health probes once it is bound, and calls once it is ready."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from rolemesh.errors import InvalidConfig, RoleFailed
from rolemesh.rpc import tls
from rolemesh.rpc.channels import CHANNEL_OPTIONS
from rolemesh.rpc.contract import FRAME, Rpc, rpcs, serializer
from rolemesh.rpc.metadata import FINGERPRINT_KEY, LIFE_KEY, WHY_KEY
from rolemesh.rpc.serving.access import Permissions
from rolemesh.rpc.serving.bounded import Bounded
from rolemesh.rpc.serving.guard import Behaviour, Guard
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.memory_budget import MemoryBudget
from rolemesh.telemetry import metrics
from rolemesh.wire.limits import MAX_STREAMS

if TYPE_CHECKING:
    from rolemesh.batch_validation import BatchValidator

log = logging.getLogger(__name__)

SERVER_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # two servers on one port are a mistake, not a way to balance
    # Clients ping during long computations without data; by default gRPC permits one ping in five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),  # of each connection
]

# Options that are raised for a server that allows more than MAX_STREAMS calls on a connection.
STREAMS_OPTIONS = (
    "grpc.max_concurrent_streams",
    "grpc.server.max_pending_requests",
    "grpc.server.max_pending_requests_hard_limit",
)

# Health name for liveness probes: SERVING whenever the event loop answers, in every state of the roles, unless
# one of them hangs on its device.
LIVE = "live"

HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class _Health(health.aio.HealthServicer):  # type: ignore[name-defined,misc]  # absent from the stubs
    """Health whose trailing metadata has the server's life, the role's fingerprint and why it is NOT_SERVING.

    Args:
        life: the server's, the same as in its other answers.
        why: returns the reason; empty: none is known.
        hung: returns which role hangs on its device, so that LIVE is NOT_SERVING; empty: none.
        fingerprints: role to its fingerprint's metadata.
    """

    def __init__(
        self, life: str, why: Callable[[], str], hung: Callable[[], str], fingerprints: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._life = life
        self._why = why
        self._hung = hung
        self._fingerprints = fingerprints

    async def status_of(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        """Return the answer to a check, without metadata."""
        if request.service == LIVE and (hung := self._hung()):
            log.error("not live: %s", hung)
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return await super().Check(request, context)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        answer = await self.status_of(request, context)
        trailing = [(LIFE_KEY, self._life)]
        why = self._hung() if request.service == LIVE else self._why()
        if answer.status != health_pb2.HealthCheckResponse.SERVING and why:
            trailing.append((WHY_KEY, why))
        if fingerprint := self._fingerprints.get(request.service):
            trailing.append((FINGERPRINT_KEY, fingerprint))
        context.set_trailing_metadata(tuple(trailing))
        return answer


class _PlainHealth(HealthServicer):  # type: ignore[misc]  # absent from the stubs
    """The same health without metadata, for a port that anybody may ask."""

    def __init__(self, of: _Health) -> None:
        self._health = of

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        return await self._health.status_of(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        await self._health.Watch(request, context)


class RoleServer(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Serves one role, or the roles of a group, on one port, with health and reflection.

    While loading, health is NOT_SERVING and calls get UNAVAILABLE. After ready(), health is SERVING. During
    drain(), health is NOT_SERVING, running calls may finish, and new calls get UNAVAILABLE.

    Args:
        roles: role to its services. A service shared by two roles counts as the first role's.
        budget: memory for the batches that callers send; None: a share of this machine's memory.
        max_streams: calls at once on each connection; gRPC queues further ones at the caller.
        job: name of the roles' job; calls that name another job are refused. Empty: none is refused.
        fingerprints: role to its fingerprint's metadata, which health checks report. A call that names another
            fingerprint is refused.

    Raises:
        RoleFailed: an rpc's request is neither one message nor one batch.
    """

    def __init__(
        self,
        roles: Mapping[str, Sequence[ServiceDescriptor]],
        budget: MemoryBudget | None = None,
        *,
        max_streams: int = MAX_STREAMS,
        job: str = "",
        fingerprints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._role_of: dict[str, str] = {}  # full name of a service to its role
        for role, its_services in roles.items():
            for service in its_services:
                self._role_of.setdefault(service.full_name, role)
        services = [service for its_services in roles.values() for service in its_services]
        self._roles = ", ".join(roles)
        self._rpcs = {rpc.path: rpc for service in services for rpc in rpcs(service)}
        for rpc in self._rpcs.values():
            if rpc.streams[0] != (rpc.request is FRAME):
                wrong = "a single Frame" if rpc.request is FRAME else "a stream of another message than Frame"
                raise RoleFailed(
                    f"{rpc.path} takes {wrong}; a request must be one message, or `stream Frame` for a batch"
                )
        # Calls that wait for the event loop are pending, and gRPC cancels some beyond 1,000 by chance.
        own = {name: max_streams for name in STREAMS_OPTIONS if max_streams > MAX_STREAMS}
        self._options = [*(dict(SERVER_OPTIONS) | own).items()]
        self._behaviours: dict[str, Behaviour] = {}  # path to the guarded method
        self._refusal = "is still loading"
        self.why: Callable[[], str] = lambda: ""  # returns why it is not ready; empty: not known
        self.hung: Callable[[], str] = lambda: ""  # returns which role hangs on its device; empty: none
        self._guard = Guard(budget or MemoryBudget(), job, fingerprints)
        waits_for = lambda: self.why() if self._refusal else ""  # noqa: E731
        self._health: Any = _Health(self._guard.life, waits_for, lambda: self.hung(), fingerprints)
        self._servers: list[grpc.aio.Server] = []

    @property
    def life(self) -> str:
        """Tells this server from all others, in the trailing metadata of its answers."""
        return self._guard.life

    async def start(self, listen: str) -> str:
        """Bind and answer health probes, with TLS if this process has keys (tls.use_keys), else without.

        Args:
            listen: host:port; port 0 picks a free one.

        Returns:
            host:port as bound.

        Raises:
            InvalidConfig: not an address, or one that cannot be bound.
        """
        permissions = [Permissions(self._rpcs, self._role_of)] if tls.current_keys() else []
        server = self._new_server(self._health, permissions)
        server.add_generic_rpc_handlers((self,))
        reflection.enable_server_reflection(
            [*self._role_of, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        return await self._serve_on(server, listen, partial(tls.add_port, server))

    async def start_health(self, listen: str) -> str:
        """Serve only health, on a port without TLS, because probes have no keys. It names no job and no reason.

        Arguments, result and errors are as in `start`.
        """
        server = self._new_server(_PlainHealth(self._health))
        return await self._serve_on(server, listen, server.add_insecure_port)

    def _new_server(self, its_health: Any, permissions: Sequence[Permissions] = ()) -> grpc.aio.Server:
        server = grpc.aio.server(options=self._options, interceptors=[Bounded(), *permissions])
        add_HealthServicer_to_server(its_health, server)
        return server

    async def _serve_on(self, server: grpc.aio.Server, listen: str, add_port: Callable[[str], int]) -> str:
        host, port = split_address(listen)
        try:
            bound = add_port(f"{host}:{port}")
        except RuntimeError as error:
            for begun in (server, *self._servers):  # a server dropped without a stop keeps its thread forever
                await begun.stop(None)
            raise InvalidConfig(f"{self._roles} cannot listen on {listen}: {_problem(host, port)}") from error
        if not self._servers:
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        self._servers.append(server)
        return f"{host}:{bound}"

    async def ready(self, servicers: Mapping[ServiceDescriptor, Any]) -> None:
        """Start to answer calls.

        Args:
            servicers: service to its servicer. A servicer whose rpcs take batches needs a `validator`
                (rolemesh/batch_validation.py).

        Raises:
            RoleFailed: an rpc takes a batch that no Method declares.
        """
        for service, servicer in servicers.items():
            for rpc in rpcs(service):
                self._behaviours[rpc.path] = self._guarded(rpc, servicer)
        self._refusal = ""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        for service, servicer in servicers.items():
            if hasattr(servicer, "watch_serving"):  # this servicer reports itself whether its service is usable
                await servicer.watch_serving(partial(self._set_serving, service))

    def _guarded(self, rpc: Rpc, servicer: Any) -> Behaviour:
        validator: BatchValidator | None = getattr(servicer, "validator", None) if rpc.takes_batch else None
        if rpc.takes_batch and (validator is None or rpc.name not in validator.methods):
            raise RoleFailed(
                f"{rpc.path} takes a batch that no Method of rolemesh/methods.py declares; declare it there"
            )
        behaviour = getattr(servicer, rpc.name)
        terms = getattr(servicer, "terms", None)
        if terms is not None:  # of a trained role
            behaviour = terms.wrap(rpc, behaviour)
        return self._guard.wrap(self._role_of[rpc.service], rpc, behaviour, validator)

    async def _set_serving(self, service: ServiceDescriptor, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        serving = serving and not self._refusal  # weights may still arrive during drain
        await self._health.set(service.full_name, status.SERVING if serving else status.NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish, and stop.

        Args:
            grace_s: seconds after which running calls are cancelled.
        """
        self._refusal = "is draining"
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            # Server.stop(grace) would also wait for clients that watch our health, whose calls never end.
            async with asyncio.timeout(grace_s):
                await self._guard.idle.wait()
        except TimeoutError:
            log.warning("cancelling calls that still run after a grace period of %.0f s", grace_s)
        for server in self._servers:
            await server.stop(0.2)

    async def _set_health(self, status: Any) -> None:
        self._show_ready(status == health_pb2.HealthCheckResponse.SERVING)
        for name in ("", *self._role_of.values(), *self._role_of):
            await self._health.set(name, status)

    def _show_ready(self, ready: bool) -> None:
        for role in self._role_of.values():
            metrics.ROLE_READY.labels(role, "0").set(ready)

    # ------------------------------------------------------------ grpc.GenericRpcHandler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler for a call; gRPC calls this."""
        rpc = self._rpcs.get(handler_call_details.method)
        if rpc is None:
            return None
        behaviour = self._refuse if self._refusal else self._behaviours[rpc.path]
        make: Any = HANDLERS[rpc.streams]  # no deserializer: the guard reads the request
        handler: grpc.RpcMethodHandler[Any, Any] = make(behaviour, response_serializer=serializer(rpc.response))
        return handler

    async def _refuse(self, request: Any, context: Context) -> None:
        why = f": {text}" if (text := self.why()) else ""
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._roles} {self._refusal}{why}")


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`.

    Raises:
        InvalidConfig: another form. The host is required, so that no server listens on all interfaces by
            mistake.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536) or (":" in host and host[:1] != "["):
        raise InvalidConfig(f"{address!r} is not an address; write host:port, e.g. 127.0.0.1:50051")
    return host, int(port)


def serve_metrics(listen: str, *more: CollectorRegistry) -> str:
    """Serve /metrics over HTTP, on threads of its own.

    Args:
        listen: host:port; port 0 picks a free one. As for gRPC, 0.0.0.0 and [::] both mean all interfaces, for
            IPv4 and IPv6.
        more: registries to serve in addition to the process's own.

    Returns:
        host:port as bound.

    Raises:
        InvalidConfig: not an address, or one that cannot be bound.
    """
    host, port = split_address(listen)
    shown = CollectorRegistry()
    for registry in (REGISTRY, *more):
        shown.register(registry)
    interface = host.strip("[]")
    if interface in {"0.0.0.0", "::"}:
        interface = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    try:
        server, _ = start_http_server(port, interface, shown)
    except OSError as error:
        raise InvalidConfig(f"/metrics cannot listen on {listen}: {error.strerror or error}") from error
    return f"{host}:{server.server_port}"


def _problem(host: str, port: int) -> str:
    """Find out why binding failed, by trying it with a plain socket. gRPC does not report the cause."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError as error:
        return error.strerror or str(error)
    return "it cannot be bound"
