"""The chart's tests need Helm."""

import pytest
from rendering import helm


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.parent.name == "charts" and not helm():
        pytest.skip("THE CHART IS NOT TESTED: helm was not found; `make .venv/bin/helm` builds it")
