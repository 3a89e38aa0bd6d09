"""Cluster tests run on the cluster of KUBECONFIG, and need kubectl and helm."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import cluster
import pytest
from training import Outcome, train_here

NO_CLUSTER = cache(cluster.absence)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.parent.name == "cluster" and (why := NO_CLUSTER()):
        pytest.skip(f"NO CLUSTER IS TESTED: {why}")


@pytest.fixture(autouse=True, scope="session")
def _control_plane() -> None:
    cluster.await_control_plane()


@pytest.fixture
def namespace() -> Iterator[cluster.Namespace]:
    with cluster.new_namespace() as new:
        yield new


@pytest.fixture(scope="session")
def refusing() -> Iterator[cluster.Namespace]:
    """A namespace in which every installation is refused: nothing is ever made in it."""
    with cluster.new_namespace() as new:
        yield new


@pytest.fixture(scope="session")
def workspace() -> Iterator[tuple[cluster.Namespace, str]]:
    """A namespace, and a claim in it that the jobs share: the first one makes the model."""
    with cluster.new_namespace() as made:
        cluster.make_claim(made, "workspace", "ReadWriteOnce")
        yield made, "workspace"


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Outcome]]:
    """What the jobs are to come to, step by step: the demo on this machine, beside the first job."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(train_here, tmp_path_factory.mktemp("here"))
