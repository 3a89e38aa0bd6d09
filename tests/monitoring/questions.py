"""What dashboards and alerts ask Prometheus, taken out of the files that people install."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

CHART = Path(__file__).parents[2] / "charts" / "rlhf-job"
ALERTS = CHART / "files" / "alerts.yaml"
BOARDS = sorted((CHART / "dashboards").glob("*.json"))


@dataclass(frozen=True)
class Question:
    """A query, and the labels that its legend shows."""

    where: str
    expr: str
    legend: tuple[str, ...] = ()

    @property
    def selectors(self) -> list[promql.VectorSelector]:
        return selectors(self.expr)

    @property
    def made_labels(self) -> set[str]:
        """Those that the query itself makes."""
        calls = [node for node in _nodes(self.expr) if isinstance(node, promql.Call)]
        return {call.args[1].val for call in calls if call.func.name == "label_replace"}

    @property
    def labels(self) -> set[str]:
        """Those that series are put together by."""
        found: set[str] = set()
        for node in _nodes(self.expr):
            modifier = getattr(node, "modifier", None)
            if isinstance(node, promql.BinaryExpr) and modifier:
                modifier = modifier.matching
            found |= set(modifier.labels if modifier else ())
        return found


def is_of_gpus(selector: promql.VectorSelector) -> bool:
    """Whether it is of DCGM's exporter, which knows pods and no runs: a query joins it with what knows both."""
    return (selector.name or "").startswith("DCGM_")


def boards() -> dict[str, dict[str, Any]]:
    """The dashboards as Grafana reads them."""
    return {path.stem: json.loads(path.read_text()) for path in BOARDS}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Those with data."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def of_panels(variables: dict[str, str]) -> Iterator[Question]:
    """Every panel's queries, with these values for Grafana's variables."""
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                expr = re.sub(r"\$([a-z_]\w*)", lambda found: variables[found[1]], target["expr"])
                legend = tuple(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                yield Question(f"{name} / {panel['title']} / {target['refId']}", expr, legend)


def of_variables(variables: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Where, what selects and which label, of each variable that Prometheus fills."""
    for name, board in boards().items():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                text = re.sub(r"\$([a-z_]\w*)", lambda found: variables[found[1]], variable["query"])
                match = re.fullmatch(r"label_values\((.+), (\w+)\)", text)
                assert match, text
                yield f"{name} / ${variable['name']}", match[1], match[2]


def rules() -> list[dict[str, Any]]:
    """Alerts, and what is recorded for them."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def of_rules() -> Iterator[Question]:
    """Every rule's query; an alert's texts are its legend."""
    for rule in rules():
        texts = " ".join(rule.get("annotations", {}).values())
        legend = tuple(re.findall(r"\$labels\.(\w+)", texts))
        yield Question(rule.get("alert") or rule["record"], rule["expr"], legend)


def selectors(expr: str) -> list[promql.VectorSelector]:
    """What a query takes out of Prometheus."""
    return [node for node in _nodes(expr) if isinstance(node, promql.VectorSelector)]


def _nodes(expr: str) -> list[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(promql.parse(expr), found.append, None)
    return found
