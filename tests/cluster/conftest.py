"""Cluster tests run on the cluster of KUBECONFIG, and need kubectl and helm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import cluster
import pytest

NO_CLUSTER = cache(cluster.absence)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.parent.name == "cluster" and (why := NO_CLUSTER()):
        pytest.skip(f"NO CLUSTER IS TESTED: {why}")


@pytest.fixture
def namespace() -> Iterator[cluster.Namespace]:
    with cluster.new_namespace() as new:
        yield new
