"""The files that people install: fresh, whole, and of Grafana's and Prometheus' own kinds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from questions import boards, is_of_gpus, of_panels, of_rules, panels, rules
from real_prometheus import ROOT, promtool

from monitoring.dashboards import DIRECTORY, generated

RUNBOOKS = ROOT / "docs" / "runbooks"
CASES = Path(__file__).with_name("alerts.yaml")
BOARDS = ["agents", "job", "roles", "transport"]
ALERT_NAMES = [rule["alert"] for rule in rules() if "alert" in rule]


def test_dashboards_are_fresh() -> None:
    assert {path: path.read_text() for path in DIRECTORY.iterdir()} == generated(), "run make dashboards"


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_one_of_grafanas_schema(name: str) -> None:
    """Read with Grafana's own types nothing is lost: every key is one that they know."""
    register_default_plugins()
    board = boards()[name]
    assert json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder)) == board


@pytest.mark.parametrize("name", BOARDS)
def test_panels_say_what_they_show_and_fill_their_rows(name: str) -> None:
    board = boards()[name]
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, f"{panel['title']} lies on another panel"
        cells |= own
    assert {x for x, _ in cells} == set(range(24)), "a line is wider than Grafana's 24 columns"
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)
    assert all(panel["description"].endswith(".") for panel in panels(board))


def test_rules_are_of_the_run_that_a_release_makes() -> None:
    """Each selector has what the chart puts a release's name into, and nothing else selects a run."""
    for question in of_rules():
        own = [selector for selector in question.selectors if not is_of_gpus(selector)]
        for selector in own:
            of_run = [m for m in selector.matchers.matchers if m.name in ("namespace", "rolemesh_job")]
            assert [m.name for m in of_run] == ["rolemesh_job"], f"{question.where}: {selector.prettify()}"
        assert question.expr.count('rolemesh_job!=""') == len(own) > 0, question.where
        assert len(own) == len(question.selectors) or {"namespace", "pod"} <= question.labels, question.where


@pytest.mark.parametrize("alert", ALERT_NAMES)
def test_an_alert_says_how_bad_it_is_and_has_its_page(alert: str) -> None:
    (rule,) = [rule for rule in rules() if rule.get("alert") == alert]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    page = ROOT / rule["annotations"]["runbook_url"]
    assert page == RUNBOOKS / f"{alert}.md"
    text = page.read_text()
    assert text.startswith(f"# {alert}\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## What it means",
        "## What to look at",
        "## What to do",
    ]
    titles = tuple(
        f"*{name}* / {panel['title']}" for name, board in boards().items() for panel in panels(board)
    )
    named = re.findall(r"\*(?:agents|job|roles|transport)\* / .{60}", " ".join(text.split()))
    assert named
    assert not [name for name in named if not name.startswith(titles)], "there is no such panel"


def test_runbooks_are_of_alerts() -> None:
    assert sorted(path.stem for path in RUNBOOKS.glob("Rolemesh*.md")) == sorted(ALERT_NAMES)


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(CASES))


def test_panels_know_the_pace_of_steps_that_are_longer_than_they_look_back(tmp_path: Path) -> None:
    """The third step of forty minutes runs, of ten."""
    asked = {
        question.where: question.expr
        for question in of_panels({"namespace": "n", "job": "j", "role": ".+", "__rate_interval": "1m"})
    }
    shown = {
        'rolemesh_step_metric{namespace="n",rolemesh_job="j",name="timing_s/step"}': "_x40 2400x80",
        'rolemesh_training_step{namespace="n",rolemesh_job="j"}': "0x39 1x39 2x39",
        'rolemesh_training_steps_planned{namespace="n",rolemesh_job="j"}': "10x120",
    }
    expected = {"job / Steps per hour / A": 1.5, "job / Left / A": 8 * 2400}
    case = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in shown.items()],
        "promql_expr_test": [
            {"expr": asked[where], "eval_time": "115m", "exp_samples": [{"labels": "{}", "value": value}]}
            for where, value in expected.items()
        ],
    }
    (tmp_path / "paces.yaml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", str(tmp_path / "paces.yaml"))


def test_prometheus_takes_the_configurations(tmp_path: Path) -> None:
    promtool("check", "config", "monitoring/prometheus.yml")
    text = (ROOT / "monitoring" / "kubernetes.yml").read_text()  # Debian's knows no Kubernetes
    (tmp_path / "same.yml").write_text(
        text.replace("kubernetes_sd_configs: [{role: pod}]", "static_configs: []")
    )
    promtool("check", "config", str(tmp_path / "same.yml"))


def test_every_alert_fires_in_some_case_and_is_quiet_before() -> None:
    expected = [
        [sample["labels"] for sample in at.get("exp_samples", ())]
        for case in yaml.safe_load(CASES.read_text())["tests"]
        for at in case["promql_expr_test"]
    ]
    assert {f'{{alertname="{name}"}}' for name in ALERT_NAMES} == {label for at in expected for label in at}
    assert [] in expected
