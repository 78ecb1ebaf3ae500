"""The parts around the panels of every dashboard: variables, links, annotations, rows."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as d

from grafana.panels import SOURCE, Row
from grafana.promql import CLUSTER, FLEET, select

TITLES = {
    "lockd-fleet": "lockd: fleet",
    "lockd-service": "lockd: service",
    "lockd-host": "lockd: host",
    "lockd-lock": "lockd: lock",
}
"""The titles of all dashboards, by uid."""
KEPT = ("datasource", "cluster", "job")
"""The variables whose chosen values a link passes on, as it does with the time range, unless the link
sets them itself."""
HOST_COLUMNS = {"instance": "Host", "cluster": "Cluster", "job": "Job"}
"""The columns of a table with one line per host. There is no column for a label that no target has."""

# Every lockd has one series of this metric, so queries of variables stay cheap on a large fleet.
HOSTS_OF = "lockd_start_time_seconds"

ANY = ".*"
"""The pattern that All, the choice of all values of a variable, stands for. Without it Grafana would put all
values into a query, such as the names of a thousand hosts. It also matches what a variable does not list:
series without the label, and a job of which no host answers."""

Variable = Builder[d.VariableModel]


def source() -> Variable:
    return (
        dashboard.DatasourceVariable("datasource")
        .label("Data source")
        .description("A Prometheus that scrapes lockd.")
        .type("prometheus")
    )


def choice(
    name: str,
    label: str,
    description: str,
    query: str,
    *,
    is_multiple: bool = True,
    has_all: bool = True,
    all_value: str = "",
) -> Variable:
    """Return a variable whose values `query` finds.

    Its choice All stands for any of these values or, if `all_value` is given, for what this pattern matches.
    """
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(SOURCE)
        .query({"query": query, "refId": f"variable-{name}"})
        .refresh(d.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(d.VariableSort.ALPHABETICAL_ASC)
        .multi(is_multiple)
        .include_all(has_all)
    )
    if has_all:
        variable.current(d.VariableOption(selected=True, text=["All"], value=["$__all"]))
    if all_value:
        variable.all_value(all_value)
    return variable


def fleet() -> list[Variable]:
    return [
        source(),
        choice(
            "cluster",
            "Cluster",
            "The label cluster of the targets. All has targets without this label too.",
            f"label_values({HOSTS_OF}, cluster)",
            all_value=ANY,
        ),
        choice(
            "job",
            "Job",
            "The scrape jobs of lockd.",
            f"label_values({select(HOSTS_OF, CLUSTER)}, job)",
            all_value=ANY,
        ),
    ]


def hosts(*, is_multiple: bool = True) -> Variable:
    return choice(
        "instance",
        "Host",
        "Hosts whose lockd to ask." if is_multiple else "The lockd to look at.",
        f"label_values({select(HOSTS_OF, FLEET)}, instance)",
        is_multiple=is_multiple,
        has_all=is_multiple,
        all_value=ANY if is_multiple else "",
    )


def link(uid: str, title: str, *kept: str, **variables: str) -> d.DashboardLink:
    """Return a link from a cell of a table to another dashboard.

    The values of `variables` come from the row of the cell. The variables named by `kept` have the values
    that were chosen on this dashboard. A variable may have several values.
    """
    parts = [f"${{{name}:queryparam}}" for name in (*KEPT, *kept) if name not in variables]
    parts += ["${__url_time_range}", *(f"var-{name}={value}" for name, value in variables.items())]
    return dashboard.DashboardLink(title).url(f"/d/{uid}?{'&'.join(parts)}").build()


def host_link(title: str, *kept: str, **variables: str) -> d.DashboardLink:
    """Return a link from a row about a host, with HOST_COLUMNS, to the dashboard of that host.

    Where targets have no label cluster, its value is empty, which matches series without that label.
    """
    host = {label: cell(label) for label in ("cluster", "job", "instance")}
    return link("lockd-host", title, *kept, **host, **variables)


def cell(label: str) -> str:
    """Return what Grafana replaces by the value of this label in the row that was clicked on."""
    return f"${{__data.fields.{label}:percentencode}}"


def board(
    uid: str, description: str, variables: Sequence[Variable], rows: Sequence[Row], *, where: str
) -> d.Dashboard:
    """Return the dashboard. `where` has the label matchers of its annotations."""
    made = (
        dashboard.Dashboard(TITLES[uid])
        .uid(uid)
        .description(description)
        .tags(["lockd"])
        .timezone("browser")
        .tooltip(d.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .editable()
        .variables(list(variables))
        .links([_way_to(other) for other in TITLES if other != uid])
        .annotations(
            [
                _Annotation(
                    "Deadlocks", "red", f"{select('lockd_deadlocks', where)} > 0", "{{instance}} {{comm}}"
                ),
                _Annotation(
                    "Alerts",
                    "orange",
                    select("ALERTS", where, 'alertname=~"Lockd.+"', 'alertstate="firing"'),
                    "{{alertname}} {{instance}} {{unit}} {{comm}}",
                ),
            ]
        )
    )
    for number, row in enumerate(rows, start=1):
        heading = dashboard.Row(row.title).id(100 * number).collapsed(row.is_collapsed)
        panels = [panel.id(100 * number + place) for place, panel in enumerate(row.panels, start=1)]
        # In Grafana's JSON the panels of an open row follow it; those of a collapsed row are inside of it.
        for panel in panels if row.is_collapsed else ():
            heading.with_panel(panel)
        made.with_row(heading)
        for panel in () if row.is_collapsed else panels:
            made.with_panel(panel)
    return made.build()


def _way_to(uid: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(TITLES[uid].removeprefix("lockd: ").capitalize())
        .type(d.DashboardLinkType.LINK)
        .url(f"/d/{uid}")
        .icon("dashboard")
        .tooltip(TITLES[uid])
        .include_vars(True)
        .keep_time(True)
    )


class _Annotation(Builder[d.AnnotationQuery], d.AnnotationQuery):
    """An annotation of Prometheus with a title; the model of the SDK has none."""

    def __init__(self, name: str, colour: str, expr: str, text: str) -> None:
        super().__init__(name=name, datasource=SOURCE, icon_color=colour, expr=expr)
        self.text = text

    def build(self) -> d.AnnotationQuery:
        return self

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "step": "30s", "titleFormat": self.name, "textFormat": self.text}
