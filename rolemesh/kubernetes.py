"""A small client of the Kubernetes API for a pod's own service account: list, watch, get, patch and delete.

It uses httpx, which is a dependency anyway, instead of a client library. There are only five kinds of requests,
and a library leaves the hard parts of a watch (an expired version, a cut stream, a rotated token) to its user.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from rolemesh.errors import InvalidConfig, RolemeshError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
LATE_S = 15.0  # a watch that the server ends later than this is broken off


class ApiRefused(RolemeshError):
    """The API server refused the request; the message is its own."""


class Absent(ApiRefused):
    """There is no such object."""


class Forbidden(RolemeshError):
    """The service account is not permitted to do this."""


class Expired(RolemeshError):
    """The watch's start version is too old: the API server no longer has it."""


class Unreachable(RolemeshError):
    """The API server does not answer, or is temporarily unable to; or the pod's account cannot be read."""


class KubernetesApi:
    """The API server, as seen from a pod.

    Args:
        url: e.g. https://10.96.0.1:443.
        account: directory with token, ca.crt and namespace, as Kubernetes mounts it. The token is read for each
            request, because Kubernetes renews it in place well before it expires.
    """

    def __init__(self, url: str, account: Path) -> None:
        self._url = url
        self._account = account
        self.namespace = (account / "namespace").read_text().strip()

    @classmethod
    def in_pod(cls) -> KubernetesApi:
        """Return the API of the cluster that this process's pod runs in.

        Raises:
            InvalidConfig: the process is not in a pod, or its pod has no service account token.
        """
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        if not host:
            raise InvalidConfig("the job needs the Kubernetes API, but this process is not in a pod")
        if not (ACCOUNT / "token").exists():
            raise InvalidConfig(
                f"the job needs the Kubernetes API, but the pod has no service account token in {ACCOUNT}"
            )
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", ACCOUNT)

    async def list(self, path: str, selector: str) -> dict[str, Any]:
        """List the objects with these labels.

        Raises:
            Forbidden, ApiRefused, Unreachable.
        """
        async with self._client() as client:
            answer: dict[str, Any] = (await client.get(path, params={"labelSelector": selector})).json()
            return answer

    async def watch(
        self, path: str, selector: str, version: str, seconds: float
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield changes of these objects since a version, for `seconds` or until the API server ends the watch.

        Events are {"type", "object"}.

        Raises:
            Expired: the API server no longer has this version.
            Forbidden, ApiRefused, Unreachable.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(int(seconds)),
        }
        async with (
            self._client(read_s=seconds + LATE_S) as client,
            client.stream("GET", path, params=params) as answer,
        ):
            async for line in answer.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    _raise_for(event["object"].get("code", 500), event["object"].get("message", line))
                yield event

    async def get(self, path: str) -> dict[str, Any]:
        """Return one object.

        Raises:
            Forbidden, ApiRefused, Unreachable; Absent: it does not exist.
        """
        async with self._client() as client:
            answer: dict[str, Any] = (await client.get(path)).json()
            return answer

    async def patch(self, path: str, change: Mapping[str, Any]) -> None:
        """Apply `change` to an object, as a merge patch.

        Raises:
            Forbidden, ApiRefused, Unreachable; Absent: it does not exist.
        """
        async with self._client() as client:
            headers = {"content-type": "application/merge-patch+json"}
            await client.patch(path, content=json.dumps(change), headers=headers)

    async def delete(self, path: str) -> None:
        """Delete an object.

        Raises:
            Forbidden, ApiRefused, Unreachable; Absent: it does not exist.
        """
        async with self._client() as client:
            await client.delete(path)

    @asynccontextmanager
    async def _client(self, read_s: float = TIMEOUT_S) -> AsyncIterator[httpx.AsyncClient]:
        try:
            async with httpx.AsyncClient(
                base_url=self._url,
                verify=ssl.create_default_context(cafile=str(self._account / "ca.crt")),
                auth=_Token(self._account / "token"),
                timeout=httpx.Timeout(TIMEOUT_S, read=read_s),
                trust_env=False,  # reach the API server directly, even if the shell sets a proxy
                event_hooks={"response": [_check]},
            ) as client:
                yield client
        # OSError: token or ca.crt cannot be read. ValueError: a cut line of JSON.
        except (httpx.RequestError, OSError, ValueError) as error:
            raise Unreachable(f"{self._url}: {error or type(error).__name__}") from error


class _Token(httpx.Auth):
    def __init__(self, path: Path) -> None:
        self._path = path

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._path.read_text().strip()}"
        yield request


async def _check(answer: httpx.Response) -> None:
    if answer.is_error:
        text = (await answer.aread()).decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):  # e.g. a proxy's HTML page
            text = json.loads(text)["message"]
        _raise_for(answer.status_code, text or answer.reason_phrase)


def _raise_for(code: int, message: str) -> None:
    if code == httpx.codes.GONE:
        raise Expired(message)
    if code == httpx.codes.FORBIDDEN:
        raise Forbidden(message)
    if code == httpx.codes.NOT_FOUND:
        raise Absent(message)
    # 401: the token was just renewed; 429 and 5xx: the server is overloaded or restarting
    if code in (httpx.codes.UNAUTHORIZED, httpx.codes.TOO_MANY_REQUESTS) or code >= 500:
        raise Unreachable(f"{code}: {message}")
    raise ApiRefused(message)
