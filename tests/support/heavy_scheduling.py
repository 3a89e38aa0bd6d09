"""Distribute tests over the test processes of xdist so that two heavy tests never run at once.

One test process gets every test with the mark `processes` (`heavy_tests.py`): file by file, the longest first.
The others go through the light tests, and it helps them once the heavy tests are done. Each takes a file that
no other has begun: one process the first of them, the others the last. Only when all files have begun do they
share one, so the fixtures of hardly any file are made twice. Once the light tests are done, the others end, and
heavy tests still run one at a time.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

# Seconds of the heavy files that take 15 and more, on two cores. A file that is not here comes after these.
LONGEST = {
    "tests/e2e/test_vllm_run.py": 153,
    "tests/rollout/test_vllm_engine.py": 110,
    "tests/rollout/test_vllm_processes.py": 80,
    "tests/e2e/test_run.py": 80,
    "tests/rollout/test_openai_engine.py": 60,
    "tests/ranks/test_trained_roles.py": 57,
    "tests/ranks/test_spread_rollouts.py": 52,
    "tests/processes/test_phases.py": 38,
    "tests/agents/test_agents_over_grpc.py": 35,
    "tests/ranks/test_machines.py": 30,
    "tests/hub/test_models_by_name.py": 22,
    "tests/processes/test_ranks.py": 20,
    "tests/processes/test_server.py": 20,
    "tests/ranks/test_sharded_files.py": 20,
    "tests/ranks/test_sharding.py": 19,
    "tests/processes/test_fork_server.py": 19,
    "tests/e2e/test_generate_and_evaluate.py": 18,
    "tests/workers/test_failed_updates.py": 18,
    "tests/benchmarks/test_gpu.py": 17,
    "tests/monitoring/test_real_run.py": 15,
}
# Light files whose tests share a fixture that takes a minute to make, so they stay in one test process.
TOGETHER = {"tests/e2e/test_learning.py"}
# Files whose tests wait for pods of a cluster. They run beside those that ask its API server through Helm.
OF_PODS = {
    "tests/cluster/test_endpoints.py",
    "tests/cluster/test_keda.py",
    "tests/cluster/test_kuberay.py",
    "tests/cluster/test_training.py",
    "tests/cluster/test_utilization.py",
}

FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Name a folder in which each test process tells which tests are heavy: only it has collected them."""
    if FOLDER not in node.config.stash:
        node.config.stash[FOLDER] = tempfile.TemporaryDirectory()
        node.config.add_cleanup(node.config.stash[FOLDER].cleanup)
    node.workerinput["heavy_tests"] = node.config.stash[FOLDER].name


@pytest.hookimpl(tryfirst=True)  # before xdist tells that this process has collected
def pytest_collection_finish(session: pytest.Session) -> None:
    worker_input = getattr(session.config, "workerinput", None)
    if worker_input is not None:
        heavy = [item.nodeid for item in session.items if item.get_closest_marker("processes")]
        Path(worker_input["heavy_tests"], worker_input["workerid"]).write_text(json.dumps(heavy))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class HeavyApart(LoadScopeScheduling):  # type: ignore[misc]
        """A unit of work is a heavy file, a file of TOGETHER or OF_PODS, or a light test."""

        def __init__(self) -> None:
            super().__init__(config, log)
            self._heavy: set[str] = set()  # node ids of tests
            self._heavy_node: Any = None
            self._light: dict[str, dict[str, None]] | None = None  # units by file; None: count them anew
            self._files: dict[Any, str] = {}  # of the last light unit of each test process
            if in_random_order(config):
                config.option.loadscopereorder = False  # units with many tests would come first

        def schedule(self) -> None:
            for file in Path(config.stash[FOLDER].name).iterdir():
                self._heavy |= set(json.loads(file.read_text()))
            super().schedule()

        def remove_node(self, node: Any) -> str | None:
            self._light = None  # what it has not done comes back
            self._files.pop(node, None)
            return cast("str | None", super().remove_node(node))

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file in TOGETHER | OF_PODS:
                return file
            return f"heavy {file}" if nodeid in self._heavy else nodeid

        def _next_unit(self, node: Any) -> str | None:
            """Choose the next unit of work for a test process; None: there is no more for it."""
            if self._heavy_node not in self.assigned_work:  # at the start, or it has crashed
                self._heavy_node = node
            if node is self._heavy_node:
                heavy = [unit for unit in self.workqueue if unit.startswith("heavy ")]
                if heavy and not in_random_order(config):
                    heavy.sort(key=lambda unit: -LONGEST.get(unit.removeprefix("heavy "), 0))
                if heavy:
                    return heavy[0]
            return self._next_light_unit(node)

        def _next_light_unit(self, node: Any) -> str | None:
            if self._light is None:
                self._light = {}
                for unit in self.workqueue:
                    if not unit.startswith("heavy "):
                        self._light.setdefault(unit.partition("::")[0], {})[unit] = None
            if not self._light:
                return None
            file = self._files[node] = self._next_file(node, self._light)
            unit = next(iter(self._light[file]))
            del self._light[file][unit]
            if not self._light[file]:
                del self._light[file]
            return unit

        def _next_file(self, node: Any, light: dict[str, dict[str, None]]) -> str:
            """Choose the next light unit's file: its own, one of nobody, or the one with the most tests."""
            if self._files.get(node) in light:
                return self._files[node]
            if of_nobody := [file for file in light if file not in self._files.values()]:
                first = next((each for each in self.assigned_work if each is not self._heavy_node), None)
                return of_nobody[0 if node is first else -1]
            return max(light, key=lambda file: len(light[file]))

        def _assign_work_unit(self, node: Any) -> None:
            unit = self._next_unit(node)
            if unit is None:
                node.shutdown()
            else:
                self.workqueue.move_to_end(unit, last=False)
                super()._assign_work_unit(node)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            """Forget units that are complete: xdist counts through all that it knows after each test."""
            super().mark_test_complete(node, item_index, duration)
            unit = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][unit].values()):
                del self.assigned_work[node][unit]

        def _reschedule(self, node: Any) -> None:
            """Keep three tests at a process: it begins a test only when it knows the next one."""
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
                self._assign_work_unit(node)

    return HeavyApart()


def in_random_order(config: pytest.Config) -> bool:
    """Whether pytest-random-order was asked for an order."""
    options = ("random_order_bucket", "random_order_seed")
    return not all(str(config.getoption(name, "default:")).startswith("default:") for name in options)
