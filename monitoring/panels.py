"""Building blocks of dashboards: selectors, panels and variables. Thin wrappers around Grafana's own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model

# Selects the chosen run. Every target has these labels, from the PodMonitor or from a local run's file.
# (`job` is not free: Prometheus uses it for its scrape jobs.)
RUN = 'namespace="$namespace",rolemesh_job="$job"'
ROLES = f'{RUN},role=~"$role"'
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
WINDOW = "[$__rate_interval]"

Panel = timeseries.Panel | stat.Panel | statetimeline.Panel
P = TypeVar("P", timeseries.Panel, stat.Panel, statetimeline.Panel)


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the legend of its series: text with {{label}}."""

    expr: str
    legend: str = ""

    def build(self, ref_id: str, *, instant: bool) -> prometheus.Dataquery:
        query = prometheus.Dataquery().expr(self.expr).ref_id(ref_id).datasource(SOURCE)
        query = query.legend_format(self.legend or "__auto")
        return query.instant() if instant else query.range()


def run(metric: str, more: str = "") -> str:
    """Return a selector of the metric in the chosen run."""
    return f"{metric}{{{','.join(filter(None, (RUN, more)))}}}"


def role(metric: str, more: str = "") -> str:
    """Return a selector of the metric in the chosen run and roles."""
    return f"{metric}{{{','.join(filter(None, (ROLES, more)))}}}"


def process(metric: str) -> str:
    """Select a process metric, which has no role label, for the processes of the chosen roles."""
    return f"{run(metric)} and on (namespace, pod) {role('rolemesh_role_ready')}"


def gpu(metric: str) -> str:
    """Select a metric of NVIDIA's DCGM exporter for the GPUs of the chosen roles' pods.

    The exporter puts a GPU's pod into the labels `pod` and `namespace`. Unless its scrape honours them, these
    are the exporter's own, and those of the GPU's pod begin with `exported_`.
    """
    for label in ("pod", "namespace"):
        metric = f'label_replace({metric}, "{label}", "$1", "exported_{label}", "(.+)")'
    return f"{metric} and on (namespace, pod) {role('rolemesh_role_ready')}"


def step(name: str, legend: str) -> Query:
    """Query a metric of the last step. max() merges the pods of a controller that was restarted."""
    return Query("max({})".format(run("rolemesh_step_metric", f'name="{name}"')), legend)


def rate(selector: str, *by: str) -> str:
    """Return the per-second rate of a counter, summed by labels."""
    return f"sum by ({', '.join(by)}) (rate({selector}{WINDOW}))"


def quantile(q: float, bucket: str, *by: str) -> str:
    """Return the q-quantile of a histogram, by labels."""
    return f"histogram_quantile({q:g}, {rate(bucket, 'le', *by)})"


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    least: float | None = None,
) -> timeseries.Panel:
    """Make a panel of values over time.

    Args:
        title: title of the panel.
        description: its tooltip.
        queries: what to show.
        unit: Grafana's name of the unit.
        width: width in Grafana's 24 columns.
        least: start of the value axis; None: automatic.
    """
    panel = _described(timeseries.Panel(), title, description, queries).unit(unit).height(8).span(width)
    panel = panel.fill_opacity(5).show_points(common.VisibilityMode.AUTO).span_nulls(False)
    legend = parts.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    panel = panel.legend(legend.placement(common.LegendPlacement.BOTTOM))
    hover = parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    panel = panel.tooltip(hover)
    return panel if least is None else panel.min(least)


def stacked(title: str, description: str, *queries: Query, unit: str, width: int = 8) -> timeseries.Panel:
    """Make a panel of values over time, stacked on each other."""
    panel = lines(title, description, *queries, unit=unit, width=width, least=0)
    whole = parts.StackingConfig().mode(common.StackingMode.NORMAL)
    return panel.fill_opacity(60).line_width(0).stacking(whole)


def number(
    title: str, description: str, query: Query, unit: str = "short", *, names: bool = False
) -> stat.Panel:
    """Make a panel that shows the current value, or with `names` the legend of the series."""
    panel = _described(stat.Panel(), title, description, (query,), instant=True).unit(unit).height(4).span(3)
    mode = common.BigValueTextMode.NAME if names else common.BigValueTextMode.VALUE
    panel = panel.text_mode(mode).graph_mode(common.BigValueGraphMode.NONE)
    return panel.color_mode(common.BigValueColorMode.NONE)


def timeline(title: str, description: str, query: Query, width: int = 12) -> statetimeline.Panel:
    """Make a panel with a row for each series, filled while its value is 1."""
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
    """Make a dashboard variable whose choices come from a Prometheus query."""
    made = dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE)
    return made.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)


def board(
    name: str, description: str, rows: Mapping[str, Sequence[Panel]], *, roles: bool
) -> dashboard.Dashboard:
    """Make a dashboard with variables, and with links to the other dashboards.

    Args:
        name: agents, job, roles or transport.
        description: its description.
        rows: title of a row to its panels, from left to right.
        roles: whether to add a variable that selects roles.
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
