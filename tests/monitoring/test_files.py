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


@pytest.mark.parametrize(
    ("ends", "minutes", "at", "per_hour"),
    [
        ([40, 80], [40, 40], 100, 1.5),
        ([40, 80], [40, 40], 115, 1.5),  # none has ended in the last half hour
        ([10, 20, 30, 40], [5, 5, 5, 5], 45, 6),  # each is followed by a validation of five minutes
        ([10, 20, 30, 40], [5, 5, 5, 5], 160, 0.5),  # it hangs
        ([1, 30, 31, 60, 61, 90, 91], [1, 29, 1, 29, 1, 29, 1], 95, 4),
    ],
)
def test_panels_know_the_pace_of_steps_by_the_clock(
    ends: list[int], minutes: list[int], at: int, per_hour: float, tmp_path: Path
) -> None:
    """The run's process is seen from minute 0 on, and its steps begin at minute 1."""
    asked = {
        question.where: question.expr
        for question in of_panels({"namespace": "n", "job": "j", "role": ".+", "__rate_interval": "1m"})
    }
    made = [sum(end <= minute for end in ends) for minute in range(at + 1)]
    labels = 'namespace="n",rolemesh_job="j"'
    shown: dict[str, list[object]] = {
        f'rolemesh_step_metric{{{labels},name="timing_s/step"}}': [
            60 * minutes[n - 1] if n else "_" for n in made
        ],
        f"rolemesh_training_step{{{labels}}}": list(made),
        f"rolemesh_training_steps_planned{{{labels}}}": [10] * (at + 1),
        f"rolemesh_step_seconds_count{{{labels}}}": list(made),
        f"rolemesh_step_ended_timestamp_seconds{{{labels}}}": [0] + [60 * [1, *ends][n] for n in made[1:]],
    }
    expected = {"job / Steps per hour / A": per_hour, "job / Left / A": (10 - len(ends)) * 3600 / per_hour}
    case = {
        "interval": "1m",
        "input_series": [
            {"series": series, "values": " ".join(map(str, values))} for series, values in shown.items()
        ],
        "promql_expr_test": [
            {"expr": asked[where], "eval_time": f"{at}m", "exp_samples": [{"labels": "{}", "value": value}]}
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
