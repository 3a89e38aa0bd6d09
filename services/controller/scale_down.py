"""What becomes of the roles' workloads in a cluster when the run has ended: no pod is left, as idle GPUs cost
money."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rolemesh.errors import InvalidConfig
from rolemesh.kubernetes import Cluster, Forbidden, Refused, Unreachable

log = logging.getLogger(__name__)

NO_REPLICAS = {"spec": {"replicas": 0}}
PAUSED = "autoscaling.keda.sh/paused-replicas"
NOT_PAUSED: dict[str, Any] = {"metadata": {"annotations": {PAUSED: None}}}
# Kind to its path, what is laid on it, and the same by hand. A scaler is told first: it would bring back what
# its workload loses.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "scaledobject": (
        "/apis/keda.sh/v1alpha1/namespaces/{namespace}/scaledobjects/{name}",
        {"metadata": {"annotations": {PAUSED: "0"}}},
        f"kubectl -n {{namespace}} annotate scaledobject {{name}} --overwrite {PAUSED}=0",
    ),
    "deployment": (
        "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale",
        NO_REPLICAS,
        "kubectl -n {namespace} scale deployment {name} --replicas=0",
    ),
    "statefulset": (
        "/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}/scale",
        NO_REPLICAS,
        "kubectl -n {namespace} scale statefulset {name} --replicas=0",
    ),
}
ATTEMPTS = 5
RETRY_S = 1.0


@dataclass(frozen=True)
class Workload:
    """What is to be scaled to zero: a kind of KINDS and a name in the pod's own namespace."""

    kind: str
    name: str


def workloads(given: Iterable[str]) -> list[Workload]:
    """KIND/NAME, several separated by commas, in the order in which they are scaled down.

    Raises:
        InvalidConfig: not that, or another kind.
    """
    found = []
    for text in (part for parts in given for part in parts.split(",")):
        kind, _, name = text.partition("/")
        if kind not in KINDS or not name:
            raise InvalidConfig(
                f"cannot scale down {text!r}; write KIND/NAME with a kind of {', '.join(KINDS)}"
            )
        found.append(Workload(kind, name))
    return sorted(found, key=lambda workload: list(KINDS).index(workload.kind))


async def scale_down(to_zero: Sequence[Workload], cluster: Cluster) -> None:
    """Scales each to zero. What cannot be is a warning that says how to do it: the run has ended well."""
    for workload in to_zero:
        path, change, by_hand = KINDS[workload.kind]
        where = {"namespace": cluster.namespace, "name": workload.name}
        try:
            await _patch(cluster, path.format(**where), change)
            log.info("%s %s is scaled down", workload.kind, workload.name)
        except (Forbidden, Refused, Unreachable) as error:
            log.warning(
                "%s %s could not be scaled down: %s; do it by hand: %s",
                workload.kind,
                workload.name,
                error,
                by_hand.format(**where),
            )


async def unpause(scaled_down: Sequence[Workload], cluster: Cluster) -> None:
    """Lets KEDA scale again what the end of an earlier run has paused: this one would have no pods."""
    for workload in scaled_down:
        path, _, _ = KINDS[workload.kind]
        if workload.kind == "scaledobject":
            try:
                await _patch(cluster, path.format(namespace=cluster.namespace, name=workload.name), NOT_PAUSED)
            except (Forbidden, Refused, Unreachable) as error:
                log.warning("scaledobject %s could not be told to go on: %s", workload.name, error)


async def refuse_scaled_down(needed: Sequence[Workload], cluster: Cluster) -> None:
    """Refuses to wait for pods that nobody will start.

    Raises:
        InvalidConfig: some of these have been scaled to zero; how to bring them back.
        Forbidden, Refused, Unreachable: it could not be known.
    """
    gone = []
    for workload in needed:
        path = KINDS[workload.kind][0].format(namespace=cluster.namespace, name=workload.name)
        if not (await cluster.get(path)).get("spec", {}).get("replicas"):
            gone.append(f"{workload.kind}/{workload.name}")
    if gone:
        raise InvalidConfig(
            f"the roles have been scaled down, as at the end of a run: {', '.join(gone)} of namespace "
            f"{cluster.namespace} have no pods; to bring them back: "
            f"kubectl -n {cluster.namespace} scale --replicas=1 {' '.join(gone)}"
        )


async def _patch(cluster: Cluster, path: str, change: dict[str, Any]) -> None:
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            return await cluster.patch(path, change)
        except Unreachable:
            if not attempts_left:
                raise
            await asyncio.sleep(RETRY_S)
