"""What dashboards are made of: selectors, panels, variables. Grafana's own types, in few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model

# Which run is looked at. Every target has these labels: from the PodMonitor, or from a local run's file.
# (`job` is Prometheus' own word for what it scrapes.)
RUN = 'namespace="$namespace",rolemesh_job="$job"'
ROLES = f'{RUN},role=~"$role"'
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
WINDOW = "[$__rate_interval]"

Panel = timeseries.Panel | stat.Panel | statetimeline.Panel
P = TypeVar("P", timeseries.Panel, stat.Panel, statetimeline.Panel)


@dataclass(frozen=True)
class Query:
    """PromQL, and what its series are called: text with {{label}}."""

    expr: str
    legend: str = ""

    def build(self, ref_id: str, *, instant: bool) -> prometheus.Dataquery:
        query = prometheus.Dataquery().expr(self.expr).ref_id(ref_id).datasource(SOURCE)
        query = query.legend_format(self.legend or "__auto")
        return query.instant() if instant else query.range()


def run(metric: str, more: str = "") -> str:
    """A selector of the run's."""
    return f"{metric}{{{','.join(filter(None, (RUN, more)))}}}"


def role(metric: str, more: str = "") -> str:
    """The same, of the roles that are looked at."""
    return f"{metric}{{{','.join(filter(None, (ROLES, more)))}}}"


def process(metric: str) -> str:
    """A metric of processes, of those that have a role that is looked at, which is no label of theirs."""
    return f"{run(metric)} and on (namespace, pod) {role('rolemesh_role_ready')}"


def step(name: str, legend: str) -> Query:
    """What the last step says of itself under this name. A controller that was restarted has another pod."""
    return Query("max({})".format(run("rolemesh_step_metric", f'name="{name}"')), legend)


def rate(selector: str, *by: str) -> str:
    """A counter's increase in a second."""
    return f"sum by ({', '.join(by)}) (rate({selector}{WINDOW}))"


def quantile(q: float, bucket: str, *by: str) -> str:
    """Of a histogram."""
    return f"histogram_quantile({q:g}, {rate(bucket, 'le', *by)})"


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    least: float | None = None,
) -> timeseries.Panel:
    """Values over time, `width` of 24 columns wide.

    Args:
        least: where the axis begins; None: at the least value.
    """
    panel = _described(timeseries.Panel(), title, description, queries).unit(unit).height(8).span(width)
    panel = panel.fill_opacity(5).show_points(common.VisibilityMode.AUTO).span_nulls(False)
    legend = parts.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    panel = panel.legend(legend.placement(common.LegendPlacement.BOTTOM))
    hover = parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    panel = panel.tooltip(hover)
    return panel if least is None else panel.min(least)


def stacked(title: str, description: str, *queries: Query, unit: str, width: int = 8) -> timeseries.Panel:
    """Shares of a whole over time."""
    panel = lines(title, description, *queries, unit=unit, width=width, least=0)
    whole = parts.StackingConfig().mode(common.StackingMode.NORMAL)
    return panel.fill_opacity(60).line_width(0).stacking(whole)


def number(
    title: str, description: str, query: Query, unit: str = "short", *, names: bool = False
) -> stat.Panel:
    """The value of now; with `names` what the series are called instead."""
    panel = _described(stat.Panel(), title, description, (query,), instant=True).unit(unit).height(4).span(3)
    mode = common.BigValueTextMode.NAME if names else common.BigValueTextMode.VALUE
    panel = panel.text_mode(mode).graph_mode(common.BigValueGraphMode.NONE)
    return panel.color_mode(common.BigValueColorMode.NONE)


def timeline(title: str, description: str, query: Query, width: int = 12) -> statetimeline.Panel:
    """A row for each series, filled while its value is 1."""
    panel = _described(statetimeline.Panel(), title, description, (query,)).height(8).span(width)
    colours = {"0": "transparent", "1": "green"}
    results = {value: model.ValueMappingResult(text=value, color=colour) for value, colour in colours.items()}
    panel = panel.mappings([model.ValueMap(options=results)])
    return panel.show_value(common.VisibilityMode.NEVER).line_width(0).fill_opacity(70)


def _described(panel: P, title: str, description: str, queries: Sequence[Query], *, instant: bool = False) -> P:
    panel.title(title).description(description).datasource(SOURCE)
    for index, query in enumerate(queries):
        panel.with_target(query.build(chr(ord("A") + index), instant=instant))
    return panel


def variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A choice out of what Prometheus knows."""
    made = dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE)
    return made.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)


def board(
    name: str, description: str, rows: Mapping[str, Sequence[Panel]], *, roles: bool
) -> dashboard.Dashboard:
    """A dashboard with variables and links to its sisters.

    Args:
        name: job, roles or transport.
        rows: title to panels, from left to right.
        roles: also choose roles.
    """
    made = dashboard.Dashboard(f"Rolemesh / {name}").uid(f"rolemesh-{name}").description(description)
    made = made.tags(["rolemesh"]).readonly().refresh("10s").time("now-1h", "now").timezone("browser")
    made = made.tooltip(model.DashboardCursorSync.CROSSHAIR)
    link = dashboard.DashboardLink("Rolemesh").type(model.DashboardLinkType.DASHBOARDS).tags(["rolemesh"])
    made = made.link(link.include_vars(True).keep_time(True))
    made = made.with_variable(dashboard.DatasourceVariable("datasource").label("Source").type("prometheus"))
    steps = "rolemesh_training_step"
    made = made.with_variable(variable("namespace", "Namespace", f"label_values({steps}, namespace)"))
    of_namespace = f'label_values({steps}{{namespace="$namespace"}}, rolemesh_job)'
    made = made.with_variable(variable("job", "Job", of_namespace))
    if roles:
        choice = variable("role", "Role", f"label_values({run('rolemesh_role_ready')}, role)")
        made = made.with_variable(choice.multi(True).include_all(True).all_value(".+"))
    number_of = 0
    for title, panels in rows.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            number_of += 1
            made = made.with_panel(panel.id(number_of))
    return made
