"""Starts ranks by Ray (placement.launcher), which places, starts and watches them.

Ray carries neither orders nor tensors: each rank is an actor that runs `rolemesh serve`, as any launcher does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.services.processes.launchers import LOOPBACK, RankSlot
from rolemesh.services.processes.ray_rank import RayRank

log = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"  # of a running cluster; every program of Ray reads this variable
LOCAL = "local"  # no cluster runs: start one
STORE_BYTES = 80 << 20  # Ray's smallest object store; it stays empty
REMIND_S = 5  # seconds between two lines while ranks wait for room
STARTED_S = 30.0  # a Ray that is being started here is awaited this long, to end it
# Settings of a Ray that is started here. Without the first, 127.0.0.1 becomes the machine's address in the
# network, and ports listen on all interfaces. Without the next two, idle workers take 90 MB for each rank.
LOCAL_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class RayProcess:
    """A rank's process (Process), on any machine of a cluster."""

    def __init__(self, actor: Any, pid: int, is_here: bool) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.gone: asyncio.Future[None] = asyncio.ensure_future(self._gone())
        self._actor = actor
        self._is_here = is_here

    def terminate(self) -> None:
        self._actor.signal.remote(signal.SIGTERM)

    def kill(self) -> None:
        self._actor.signal.remote(signal.SIGKILL)

    async def _gone(self) -> None:
        from ray.exceptions import RayActorError

        try:
            self.returncode = await self._actor.wait.remote()
        except RayActorError as error:  # its node or its actor is gone, so the process has ended, or is ending
            log.warning("process %d: %s", self.pid, error)
            if self._is_here:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            self.returncode = -signal.SIGKILL


class RayCluster:
    """Ray on this machine, or the cluster of RAY_ADDRESS.

    Args:
        ray: the module.
        is_here: True if it was started on this machine, for this launcher.
    """

    def __init__(self, ray: ModuleType, is_here: bool) -> None:
        self._ray = ray
        self.is_here = is_here
        self._placed: dict[str, Any] = {}  # by group: its placement group
        self.address: str = ray.util.get_node_ip_address()  # of this machine, for the other nodes

    async def reserve(self, group: str, size: int, num_gpus: int, within_s: float) -> list[RankSlot]:
        """Launcher.reserve, by a placement group."""
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if group in self._placed:  # its ranks have ended
            remove_placement_group(self._placed.pop(group))
        needs = {"CPU": 1.0} | ({"GPU": float(num_gpus)} if num_gpus else {})
        bundles = [needs | {f"node:{self.address}": 0.001}, *[needs] * (size - 1)]
        placed = self._placed[group] = placement_group(bundles, strategy="PACK")
        ends = time.monotonic() + within_s
        while not await asyncio.to_thread(placed.wait, min(REMIND_S, max(0.1, ends - time.monotonic()))):
            lacking = (
                f"room for {size} ranks of {group}, each with {_listed(needs)}, and the first on {self.address}"
            )
            if time.monotonic() >= ends:
                remove_placement_group(self._placed.pop(group))
                raise RoleUnavailable(
                    f"Ray had no {lacking}, within {within_s:.0f} s. The cluster has {self._nodes()}. Lower "
                    "placement.ranks, or add nodes"
                )
            log.info("waiting for %s; the cluster has %s", lacking, self._nodes())
        nodes = placement_group_table(placed)["bundles_to_node_id"]
        order = sorted(range(size), key=lambda bundle: (nodes[bundle] != nodes[0], nodes[bundle], bundle))
        beside = {node: [bundle for bundle in order if nodes[bundle] == node] for node in nodes.values()}
        slots = []
        for bundle in order:
            options = self._ray.remote(RayRank).options(
                num_cpus=1,
                num_gpus=num_gpus,
                max_restarts=0,
                max_concurrency=3,  # `wait` takes one
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placed, placement_group_bundle_index=bundle
                ),
            )
            own = beside[nodes[bundle]]
            slots.append(RankSlot(own.index(bundle), len(own), options.remote()))
        return slots

    async def start(
        self, slot: RankSlot, arguments: Sequence[str], environment: Mapping[str, str], log_file: Path | None
    ) -> RayProcess:
        """Launcher.start."""
        try:
            output = str(log_file) if log_file else None
            pid = await slot.actor.start.remote([*arguments], {**environment}, os.getcwd(), output)
        except self._ray.exceptions.RayError as error:
            raise RoleUnavailable(f"Ray could not start `rolemesh {' '.join(arguments)}`: {error}") from error
        return RayProcess(slot.actor, pid, self.is_here)

    def _nodes(self) -> str:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        total = [f"{node['NodeManagerAddress']} ({_listed(node['Resources'])})" for node in nodes]
        return f"{', '.join(total)}; free: {_listed(self._ray.available_resources())}"


def joins_cluster(job: JobConfig) -> bool:
    """Return whether a job's ranks start in a running Ray cluster, instead of a Ray that is started here."""
    return job.placement.launcher == "ray" and os.environ.get(ADDRESS, LOCAL) != LOCAL


@contextlib.asynccontextmanager
async def ray_cluster(num_ranks: int, within_s: float) -> AsyncIterator[RayCluster]:
    """Start Ray on this machine, or join the cluster that RAY_ADDRESS names. On exit end it, or leave it.

    A Ray that is started here listens only on the loopback interface, and requires its own token. It ends with
    this process, even if the process is killed.

    Args:
        num_ranks: ranks that run at the same time. They share the cores, and Ray counts one core for each.
        within_s: time limit in seconds for the start, or for the cluster's answer.

    Raises:
        InvalidConfig: Ray is not installed, or was imported before, with other settings.
        RoleUnavailable: Ray did not start, or no cluster answered in time.
    """
    address = os.environ.get(ADDRESS, LOCAL)
    is_here = address == LOCAL
    if is_here:  # read when Ray is imported
        os.environ.update(LOCAL_SETTINGS)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
    except ImportError as error:
        raise InvalidConfig(
            f"placement.launcher is ray, but Ray is not installed ({error}): pip install 'rolemesh[ray]', or "
            "set placement.launcher to processes"
        ) from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="rolemesh-ray-", ignore_cleanup_errors=True) as directory:
        here = {
            "num_cpus": num_ranks,
            "num_gpus": 0,  # the launcher assigns this machine's GPUs
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_node_ip_address": LOOPBACK,
            "_temp_dir": directory,
        }

        left = threading.Event()

        def start() -> None:
            ray.init(address, log_to_driver=False, configure_logging=False, **(here if is_here else {}))
            if left.is_set():
                ray.shutdown()

        # In a thread: it takes 10 s. There Ray replaces the handlers of signals only in C, not in Python.
        starting = _in_daemon_thread(start, left)
        try:
            try:
                async with asyncio.timeout(within_s):
                    await asyncio.shield(starting)
            except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
                if not starting.done():
                    raise RoleUnavailable(_no_answer(address, within_s)) from None
                raise RoleUnavailable(f"Ray did not start ({ADDRESS} is {address}): {error}") from error
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.getsignal(number))
            cluster = RayCluster(ray, is_here)
            if is_here and cluster.address != LOOPBACK:
                settings = " ".join(f"{name}={value}" for name, value in LOCAL_SETTINGS.items())
                raise InvalidConfig(
                    f"Ray listens on {cluster.address}, because it was imported before this job was run: start "
                    f"Python with {settings}"
                )
            yield cluster
        finally:
            if is_here:
                await asyncio.wait({starting}, timeout=STARTED_S)
            # A cluster that does not answer is not awaited: Ray asks for minutes, and nothing stops the thread.
            try:
                if not starting.cancel():
                    await asyncio.to_thread(ray.shutdown)
            finally:
                left.set()


def _no_answer(address: str, within_s: float) -> str:
    """Say that no Ray answered in time, and what to do."""
    if address == LOCAL:
        return f"Ray did not start on this machine within trainer.ready_timeout_s, {within_s:.0f} s"
    return (
        f"no Ray cluster at {ADDRESS}={address} answered within trainer.ready_timeout_s, {within_s:.0f} s. "
        f"Start it (`ray start --head`), set {ADDRESS} to one that runs, or unset {ADDRESS} to start a Ray on "
        "this machine"
    )


def _in_daemon_thread(work: Callable[[], None], until: threading.Event) -> asyncio.Future[None]:
    """Run a function as asyncio.to_thread does, but let the event loop and the process end before it.

    The thread stays until the event: Linux ends Ray's processes with the thread that started them
    (PR_SET_PDEATHSIG).
    """
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # so the thread may report, though nobody waits any more

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
            until.wait()

    threading.Thread(target=run, daemon=True, name="start of Ray").start()
    return asyncio.wrap_future(done)


def _listed(resources: Mapping[str, float]) -> str:
    """List the CPUs and GPUs among Ray's resources."""
    return ", ".join(f"{kind} {resources.get(kind, 0):g}" for kind in ("CPU", "GPU"))
