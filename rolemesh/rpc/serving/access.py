"""Who may call what, under TLS: a caller's certificate names its roles, the .proto says which of them may.

All that a server offers passes here, health and reflection too. What is said nowhere may be called by nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from rolemesh.errors import NotPermitted
from rolemesh.rpc import tls
from rolemesh.rpc.contract import CALLERS, Rpc
from rolemesh.rpc.errors import to_status
from rolemesh.rpc.serving.handlers import Context, Method, surrounded
from rolemesh.telemetry import metrics

log = logging.getLogger(__name__)


class Permissions(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Ends the calls of those who may not make them with PERMISSION_DENIED, whatever the server's state.

    Health is for every process of the job. Reflection is for those who may call anything at this server.

    Args:
        rpcs: of the server's services, by path.
        role_of: each service's role, by full name.
    """

    def __init__(self, rpcs: Mapping[str, Rpc], role_of: Mapping[str, str]) -> None:
        self._rpcs, self._role_of = rpcs, role_of
        self._callers = frozenset[str]().union(*(rpc.callers for rpc in rpcs.values()))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler behind the check of its caller; None: there is no such method."""
        found = await continuation(handler_call_details)
        if found is None:
            return None
        path = str(handler_call_details.method)

        def around(method: Method) -> Method:
            async def checked(request: Any, context: Context) -> Any:
                try:
                    self._check(path, context)
                except NotPermitted as error:
                    self._tell(path, error)
                    await context.abort(*to_status(error))
                return await method(request, context)

            return checked

        return surrounded(found, around)

    def _check(self, path: str, context: Context) -> None:
        keys = tls.current_keys()
        assert keys is not None, "a server with permissions has keys"
        names = tls.names_of_caller(context)
        if names[:1] != [keys.job]:
            raise NotPermitted(f"this process is of job {keys.job}; the caller's certificate is for {names}")
        service, _, name = path.lstrip("/").partition("/")
        if service == health.SERVICE_NAME:
            return
        permitted = self._permitted(path, service)
        roles = tls.roles_in(names, keys.job) & set(CALLERS.values())
        if not permitted & roles:
            raise NotPermitted(
                f"{service.rpartition('.')[2]}.{name} may be called by {_told(permitted) or 'nobody'}; "
                f"the caller's certificate names {_told(roles) or 'no role'} of {keys.job}"
            )

    def _permitted(self, path: str, service: str) -> frozenset[str]:
        if service == reflection.SERVICE_NAME:
            return self._callers
        return self._rpcs[path].callers if path in self._rpcs else frozenset()

    def _tell(self, path: str, error: NotPermitted) -> None:
        log.warning("refused: %s", error)
        if (rpc := self._rpcs.get(path)) is not None:
            role = self._role_of[rpc.service]
            metrics.SERVER_REQUESTS.labels(role, rpc.name, grpc.StatusCode.PERMISSION_DENIED.name).inc()


def _told(roles: Collection[str]) -> str:
    return ", ".join(sorted(roles))
