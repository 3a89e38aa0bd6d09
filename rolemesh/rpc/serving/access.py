"""Access control under TLS: a caller's certificate names its roles, and the .proto lists each method's callers.

Every method that a server offers is checked, health and reflection too. A method without declared callers is
denied.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from rolemesh.errors import NotPermitted
from rolemesh.rpc import tls
from rolemesh.rpc.contract import CALLERS, Rpc
from rolemesh.rpc.serving.handlers import Around, Context, Method
from rolemesh.rpc.status_codes import to_status
from rolemesh.telemetry import metrics

log = logging.getLogger(__name__)


class Permissions(Around):
    """Ends calls that are not permitted with PERMISSION_DENIED, in every state of the server.

    Every process of the job may call health. Every role that may call any method of this server may call
    reflection.

    Args:
        rpcs: path to rpc, for the server's services.
        role_of: full name of a service to its role.
    """

    def __init__(self, rpcs: Mapping[str, Rpc], role_of: Mapping[str, str]) -> None:
        self._rpcs = rpcs
        self._role_of = role_of
        self._callers = frozenset[str]().union(*(rpc.callers for rpc in rpcs.values()))

    def around(self, path: str, handler: grpc.RpcMethodHandler[Any, Any], method: Method) -> Method:
        async def checked(request: Any, context: Context) -> Any:
            try:
                self._check(path, context)
            except NotPermitted as error:
                self._report(path, error)
                await context.abort(*to_status(error))
            return await method(request, context)

        return checked

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
                f"{service.rpartition('.')[2]}.{name} may be called by {_listed(permitted) or 'nobody'}; "
                f"the caller's certificate names {_listed(roles) or 'no role'} of {keys.job}"
            )

    def _permitted(self, path: str, service: str) -> frozenset[str]:
        if service == reflection.SERVICE_NAME:
            return self._callers
        return self._rpcs[path].callers if path in self._rpcs else frozenset()

    def _report(self, path: str, error: NotPermitted) -> None:
        log.warning("refused: %s", error)
        if (rpc := self._rpcs.get(path)) is not None:
            role = self._role_of[rpc.service]
            metrics.SERVER_REQUESTS.labels(role, rpc.name, grpc.StatusCode.PERMISSION_DENIED.name).inc()


def _listed(roles: Collection[str]) -> str:
    return ", ".join(sorted(roles))
