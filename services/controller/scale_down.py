"""Scales the roles' workloads in a cluster to zero after a run, as idle GPUs cost money, and up before one.

It also deletes disruption budgets that ask for a number of pods. After the run there are no pods, so Prometheus
would report such a budget for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rolemesh.errors import InvalidConfig, RolemeshError
from rolemesh.kubernetes import Absent, KubernetesApi, Unreachable

log = logging.getLogger(__name__)

NO_REPLICAS = {"spec": {"replicas": 0}}
REPLICAS = "rolemesh.dev/replicas"  # on a workload: how many pods its values ask for
PAUSED = "autoscaling.keda.sh/paused-replicas"
# What undoes the end of an earlier run, of the kinds for which Helm does not.
UNPAUSED = {"metadata": {"annotations": {PAUSED: None}}}
RESUMED = {"spec": {"suspend": False}}
# Kind to its API path, the patch that scales it to zero (None: it is deleted), and the equivalent command.
# Scalers come first: a running scaler would restore the replicas of its workload.
KINDS: dict[str, tuple[str, dict[str, Any] | None, str]] = {
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
    "raycluster": (
        "/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{name}",
        {"spec": {"suspend": True}},
        """kubectl -n {namespace} patch raycluster {name} --type=merge -p '{{"spec": {{"suspend": true}}}}'""",
    ),
    "poddisruptionbudget": (
        "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/{name}",
        None,
        "kubectl -n {namespace} delete poddisruptionbudget {name}",
    ),
}
_SCALE = "kubectl -n {} scale --replicas=1 {}"
_BRINGS_BACK = {
    "deployment": _SCALE,
    "statefulset": _SCALE,
    "raycluster": """kubectl -n {} patch {} --type=merge -p '{{"spec": {{"suspend": false}}}}'""",
}
PATIENCE_S = 600.0  # managed control planes are away for minutes during an upgrade
START_PATIENCE_S = 10.0  # of a start, which is repeated if roles lack pods
RETRY_S = 1.0  # doubled after each round, up to LONGEST_RETRY_S
LONGEST_RETRY_S = 30.0


@dataclass(frozen=True)
class Workload:
    """A workload to scale to zero, or a budget: a kind of KINDS, and a name in the pod's own namespace."""

    kind: str
    name: str


def workloads(given: Iterable[str]) -> list[Workload]:
    """Parse texts of KIND/NAME, separated by commas, and return them in the order of scaling down.

    Raises:
        InvalidConfig: a text has another form or an unknown kind.
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


async def scale_down(to_zero: Sequence[Workload], cluster: KubernetesApi) -> None:
    """Scale each workload to zero. A failure is only logged, with the command to run: the run has succeeded.

    While the API server does not answer, this tries for PATIENCE_S, as nobody else would release the GPUs.
    """

    async def scale(workload: Workload, path: str) -> None:
        change = KINDS[workload.kind][1]
        if change is None:
            with suppress(Absent):  # disruptionBudgets is false, or an earlier attempt deleted it
                await cluster.delete(path)
            return
        await cluster.patch(path, change)
        log.info("scaled down %s %s", workload.kind, workload.name)

    def give_up(workload: Workload, error: Exception) -> None:
        by_hand = KINDS[workload.kind][2].format(namespace=cluster.namespace, name=workload.name)
        log.warning(
            "could not scale down %s %s: %s; scale it by hand: %s", workload.kind, workload.name, error, by_hand
        )

    await _in_rounds(to_zero, cluster, scale, give_up, PATIENCE_S)


async def scale_down_in_pod(to_zero: Sequence[Workload]) -> None:
    """Do as `scale_down` in the namespace of this process's pod. If this is no pod, that is logged, too."""
    if not to_zero:
        return
    try:
        cluster = KubernetesApi.in_pod()
    except (RolemeshError, OSError) as error:
        names = ", ".join(f"{workload.kind}/{workload.name}" for workload in to_zero)
        log.warning("could not scale down %s: %s", names, error)
        return
    await scale_down(to_zero, cluster)


async def scale_up(workloads: Sequence[Workload], cluster: KubernetesApi, *, sets_replicas: bool) -> None:
    """Scale up the workloads that the end of an earlier run scaled down. A failure is only logged.

    Args:
        workloads: of these, KEDA's ScaledObjects and RayClusters are resumed.
        cluster: of their namespace.
        sets_replicas: scale Deployments and StatefulSets with fewer pods than their annotation REPLICAS up to
            it. False: Helm does it. Those that have more, because somebody scaled them, keep them.
    """

    async def scale(workload: Workload, path: str) -> None:
        if workload.kind == "scaledobject":
            await cluster.patch(path, UNPAUSED)
        elif workload.kind == "raycluster":
            # Only if it is suspended: KubeRay replaces all pods when a field that was absent becomes false.
            found = await cluster.get(path)
            if found["spec"].get("suspend"):
                await cluster.patch(path, RESUMED)
        elif sets_replicas and path.endswith("/scale"):
            found = await cluster.get(path.removesuffix("/scale"))
            wanted = int(found["metadata"].get("annotations", {}).get(REPLICAS, "1"))
            if found["spec"].get("replicas", 1) < wanted:
                await cluster.patch(path, {"spec": {"replicas": wanted}})
                log.info("scaled %s %s up to %d", workload.kind, workload.name, wanted)

    def give_up(workload: Workload, error: Exception) -> None:
        log.warning("could not scale up %s %s: %s", workload.kind, workload.name, error)

    await _in_rounds(workloads, cluster, scale, give_up, START_PATIENCE_S)


async def refuse_scaled_down(needed: Sequence[Workload], cluster: KubernetesApi) -> None:
    """Fail early if needed workloads are scaled to zero, instead of waiting for pods that nobody will start.

    Raises:
        InvalidConfig: some workloads are scaled to zero. The message says how to bring them back.
        Forbidden, Refused, Unreachable: the check itself failed.
    """
    gone = []
    for workload in needed:
        path = KINDS[workload.kind][0].format(namespace=cluster.namespace, name=workload.name)
        spec = (await cluster.get(path)).get("spec", {})
        if spec.get("suspend", not spec.get("replicas", workload.kind == "raycluster")):
            gone.append(f"{workload.kind}/{workload.name}")
    if gone:
        raise InvalidConfig(
            f"the roles are scaled to zero, as after a run: {', '.join(gone)} in namespace "
            f"{cluster.namespace} have no pods; to bring them back, run: "
            + "; ".join(_BRINGS_BACK[text.partition("/")[0]].format(cluster.namespace, text) for text in gone)
        )


async def _in_rounds(
    workloads: Iterable[Workload],
    cluster: KubernetesApi,
    act: Callable[[Workload, str], Awaitable[None]],
    give_up: Callable[[Workload, Exception], None],
    patience_s: float,
) -> None:
    """Act on each workload, and in further rounds on those for which the API server did not answer.

    One kind may get no answer while others do: its admission webhook is down.

    Args:
        workloads: the workloads.
        cluster: of their namespace.
        act: gets a workload and its API path.
        give_up: gets a workload for which `act` failed, or still got no answer after `patience_s`.
        patience_s: no round begins later.
    """
    deadline = time.monotonic() + patience_s
    wait_s = RETRY_S
    left = list(workloads)
    while left:
        silent: list[tuple[Workload, Unreachable]] = []
        for workload in left:
            path = KINDS[workload.kind][0].format(namespace=cluster.namespace, name=workload.name)
            try:
                await act(workload, path)
            except Unreachable as error:
                silent.append((workload, error))
            except (RolemeshError, ValueError) as error:  # ValueError: REPLICAS is no number
                give_up(workload, error)
        left = [workload for workload, _ in silent]
        left_s = deadline - time.monotonic()
        if left_s < wait_s:
            for workload, why in silent:
                give_up(workload, why)
            return
        if silent:
            log.info("trying for another %.0f s: %s", left_s, silent[0][1])
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)
