"""What a release tells Prometheus and Grafana."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from questions import boards, is_of_gpus, rules, selectors
from real_prometheus import promtool
from rendering import EXAMPLES, helm, objects, of_kind

RELEASE = [("namespace", "jobs"), ("rolemesh_job", "demo")]


@pytest.fixture(scope="module")
def release() -> list[dict[str, Any]]:
    if not helm():
        pytest.skip("WHAT A RELEASE TELLS PROMETHEUS IS NOT TESTED: there is no helm; `make helm` builds one")
    return objects({}, files=EXAMPLES[-1:])


def test_a_releases_alerts_select_its_own_runs(release: list[dict[str, Any]], tmp_path: Path) -> None:
    """And their annotations are those of the file."""
    (made,) = of_kind(release, "PrometheusRule")
    (group,) = made["spec"]["groups"]
    for rule, plain in zip(group["rules"], rules(), strict=True):
        own = [selector for selector in selectors(rule["expr"]) if not is_of_gpus(selector)]
        assert own
        for selector in own:
            labels = [(m.name, m.value) for m in selector.matchers.matchers if m.op == promql.MatchOp.Equal]
            assert set(RELEASE) <= set(labels), rule["expr"]
        assert rule.get("annotations") == plain.get("annotations")  # with {{ $labels }}, which are Prometheus'
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(made["spec"]))
    promtool("check", "rules", str(tmp_path / "rules.yaml"))


@pytest.mark.usefixtures("release")  # skips where there is no helm
@pytest.mark.parametrize(
    ("runbooks", "folder"),
    [
        ("https://wiki/rlhf/", "https://wiki/rlhf/"),
        ("https://wiki/rlhf", "https://wiki/rlhf/"),
        ("/", "/"),
        ("", ""),
    ],
)
def test_a_releases_alerts_link_runbooks_where_the_values_say(runbooks: str, folder: str) -> None:
    (made,) = of_kind(objects({"monitoring": {"runbooks": runbooks}}), "PrometheusRule")
    alerts = [rule for rule in made["spec"]["groups"][0]["rules"] if "alert" in rule]
    pages = [rule["annotations"]["runbook_url"] for rule in alerts]
    assert pages == [f"{folder}{rule['alert']}.md" for rule in alerts]


def test_a_releases_pods_have_the_label_that_queries_select(
    release: list[dict[str, Any]],
) -> None:
    """The queries of dashboards and alerts."""
    (monitor,) = of_kind(release, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    of_instance = "__meta_kubernetes_pod_label_app_kubernetes_io_instance"
    assert {"sourceLabels": [of_instance], "targetLabel": "rolemesh_job"} in endpoint["relabelings"]


def test_a_releases_config_maps_hold_the_dashboards(release: list[dict[str, Any]]) -> None:
    held = {
        name.removesuffix(".json"): json.loads(text)
        for thing in of_kind(release, "ConfigMap")
        for name, text in thing["data"].items()
        if name.endswith(".json")
    }
    assert held == boards()
