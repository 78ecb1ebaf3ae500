"""The house style: how a number, a graph, a table and a heatmap look on every dashboard.

A panel answers one question. Its description says how to read the answer, and which answer is worth a closer
look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as c
from grafana_foundation_sdk.models import dashboard as d
from grafana_foundation_sdk.models import heatmap as h
from grafana_foundation_sdk.models import prometheus as p

Panel: TypeAlias = stat.Panel | timeseries.Panel | table.Panel | heatmap.Panel
Limits: TypeAlias = Mapping[str, float]
"""For each colour the least value that is shown in it."""

Item = TypeVar("Item")

SOURCE = d.DataSourceRef(type_val="prometheus", uid="${datasource}")

SECONDS = "s"
MICROSECONDS = "µs"
PER_SECOND = "suffix: /s"
SECONDS_PER_SECOND = "suffix: s/s"
SHARE = "percentunit"
COUNT = "short"
BYTES = "bytes"
LEVEL = "none"
TIMES = "suffix: times"
UNITS = (SECONDS, MICROSECONDS, PER_SECOND, SECONDS_PER_SECOND, SHARE, COUNT, BYTES, LEVEL, TIMES)
"""The units of panels and columns. The unit µs is for metrics whose names end in _us, and for no others."""

UNASKED = ("Time", "__name__", "cluster", "job", "instance")
"""Columns that Grafana adds to a table by itself, or that every series has."""

OR_ZERO = " or vector(0)"
"""The end of the query of number(): 0 if there is no result."""

WAIT_LIMITS = {"orange": 1e6, "red": 1e7}
"""The limits of the alerts on long waits, in microseconds."""

KINDS = " Only kinds lock and pi are counted: a worker parked on a condition variable is idle, not contended."
PER_THREAD = (
    " 1 s/s means that, on average, one thread is blocked all the time; 4 s/s means four threads are, or"
    " eight for half of the time."
)
LIMITS_SHOWN = " The dashed lines are the alert limits, 1 s and 10 s."
CELLS = (
    "Each column is an interval of time, each row a range of durations (the label is the upper end of the"
    " range). The more a cell stands out from the background, the more {what} of that duration ended in that"
    " interval."
)


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]
    is_collapsed: bool = False


@dataclass(frozen=True)
class Value:
    """A column of numbers. `limits` colours the cell."""

    title: str
    expr: str
    unit: str
    limits: Limits = field(default_factory=dict)


def number(
    title: str,
    description: str,
    expr: str,
    unit: str = COUNT,
    *,
    limits: Limits | None = None,
    width: int = 4,
) -> stat.Panel:
    """Return a panel with one number, and behind it the graph of its values over time.

    Without a result now the number is 0. Otherwise Grafana would show the last result in the time range, such
    as a deadlock that has ended.
    """
    calm = "green" if limits else "blue"
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(width)
        .height(4)
        .targets([_query("A", expr + OR_ZERO, "")])
        .unit(unit)
        .thresholds(_thresholds(limits or {}, calm))
        .color_scheme(dashboard.FieldColor().mode(d.FieldColorModeId.THRESHOLDS))
        .color_mode(c.BigValueColorMode.VALUE)
        .graph_mode(c.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )


def graph(
    title: str,
    description: str,
    queries: Mapping[str, str],
    unit: str,
    *,
    width: int = 12,
    limits: Limits | None = None,
    is_stacked: bool = False,
    is_logarithmic: bool = False,
    maximum: float | None = None,
    reference: str = "",
) -> timeseries.Panel:
    """Return a panel with lines over time, one for each query of `queries`, by legend.

    Lines whose legend ends with `reference` are dashed and never stacked: the others are compared with them.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .targets([_query(ref, expr, legend) for ref, (legend, expr) in _numbered(queries.items())])
        .unit(unit)
        .color_scheme(dashboard.FieldColor().mode(d.FieldColorModeId.PALETTE_CLASSIC))
        .draw_style(c.GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(40 if is_stacked else 8)
        .show_points(c.VisibilityMode.NEVER)
        .stacking(
            common.StackingConfig()
            .group("A")
            .mode(c.StackingMode.NORMAL if is_stacked else c.StackingMode.NONE)
        )
        .legend(
            common.VizLegendOptions()
            .display_mode(c.LegendDisplayMode.TABLE)
            .placement(c.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["max", "lastNotNull"])
            .sort_by("Max")
            .sort_desc(True)
        )
        .tooltip(common.VizTooltipOptions().mode(c.TooltipDisplayMode.MULTI).sort(c.SortOrder.DESCENDING))
    )
    if is_logarithmic:
        panel.scale_distribution(common.ScaleDistributionConfig().type(c.ScaleDistribution.LOG).log(10))
    else:
        panel.min(0)
    if maximum is not None:
        panel.max(maximum)
    if limits:
        panel.thresholds(_thresholds(limits))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(c.GraphTresholdsStyleMode.DASHED))
    if reference:
        panel.override_by_regexp(
            f"/{reference}$/",
            [
                d.DynamicConfigValue("custom.stacking", {"group": "A", "mode": "none"}),
                d.DynamicConfigValue("custom.fillOpacity", 0),
                d.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
                d.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": "red"}),
            ],
        )
    return panel


def waits(title: str, description: str, queries: Mapping[str, str]) -> timeseries.Panel:
    """Return a graph of the longest waits, with the limits of the alerts."""
    return graph(
        title,
        description + LIMITS_SHOWN,
        queries,
        MICROSECONDS,
        limits=WAIT_LIMITS,
        is_logarithmic=True,
    )


def listing(
    title: str,
    description: str,
    names: Mapping[str, str],
    values: Sequence[Value],
    *,
    width: int = 24,
    height: int = 10,
    links: Mapping[str, d.DashboardLink] | None = None,
    states: Mapping[int, tuple[str, str]] | None = None,
) -> table.Panel:
    """Return a table that is sorted by the first column of values, the largest on top.

    `names` has the title of each label's column. `links` has, by label, the link that a click on a value
    follows. `states` has, by number, a text and a colour that the first column of values shows instead.
    """
    fields = [f"Value #{ref}" for ref, _ in _numbered(values)] if len(values) > 1 else ["Value"]
    titles = {**names, **dict(zip(fields, (value.title for value in values), strict=True))}
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(width)
        .height(height)
        .targets([_instant(ref, value.expr) for ref, value in _numbered(values)])
        .cell_height(c.TableCellHeight.SM)
        .sort_by([common.TableSortByFieldState().display_name(values[0].title).desc(True)])
        .transformations(
            [
                d.DataTransformerConfig(id_val="merge", options={}),
                d.DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": {name: True for name in UNASKED if name not in names},
                        "indexByName": {name: place for place, name in enumerate(titles)},
                        "renameByName": titles,
                    },
                ),
            ]
        )
    )
    for value in values:
        properties = [d.DynamicConfigValue("unit", value.unit)]
        if value.limits:
            properties += [
                d.DynamicConfigValue("thresholds", _thresholds(value.limits, "text").build()),
                d.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
            ]
        panel.override_by_name(value.title, properties)
    if states:
        mapping = d.ValueMap(
            {str(n): d.ValueMappingResult(text, colour) for n, (text, colour) in states.items()}
        )
        panel.override_by_name(
            values[0].title,
            [
                d.DynamicConfigValue("mappings", [mapping]),
                d.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
            ],
        )
    for label, link in (links or {}).items():
        panel.override_by_name(names[label], [d.DynamicConfigValue("links", [link])])
    return panel


def durations(
    title: str, description: str, expr: str, *, what: str = "waits", width: int = 12, repeat: str = ""
) -> heatmap.Panel:
    """Return a heatmap of how long waits take. `expr` gives the buckets of a histogram, summed by le. `what`
    is what the numbers are: "waits", which are whole numbers, or "waits per second"."""
    cells = heatmap.CellValues().unit(COUNT)
    if what == "waits":
        cells.decimals(0)
    panel = (
        heatmap.Panel()
        .title(title)
        .description(f"{CELLS.format(what=what)} {description}")
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .targets([_query("A", expr, "{{le}}").format(p.PromQueryFormat.HEATMAP)])
        .max_data_points(120)
        .unit(COUNT)
        .calculate(False)
        .cell_gap(1)
        .cell_values(cells)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(h.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .fill("dark-orange")
            .scale(h.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .reverse(False)
            .steps(64)
        )
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(c.HeatmapCellLayout.AUTO).value(what))
        .show_value(c.VisibilityMode.NEVER)
        .show_legend()
        .show_tooltip()
        .show_y_histogram()
        .y_axis(heatmap.YAxisConfig().unit(SECONDS).axis_placement(c.AxisPlacement.LEFT).reverse(False))
    )
    if repeat:
        panel.repeat(repeat).repeat_direction("h")
    return panel


def _numbered(items: Iterable[Item]) -> list[tuple[str, Item]]:
    """Return each item with the name that Grafana gives its query: A, B, C."""
    return [(chr(ord("A") + place), item) for place, item in enumerate(items)]


def _query(ref: str, expr: str, legend: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(ref)
        .datasource(SOURCE)
        .editor_mode(p.QueryEditorMode.CODE)
        .expr(expr)
        .range()
        .legend_format(legend)
        .format(p.PromQueryFormat.TIME_SERIES)
    )


def _instant(ref: str, expr: str) -> prometheus.Dataquery:
    return _query(ref, expr, "").instant().format(p.PromQueryFormat.TABLE)


def _thresholds(limits: Limits, calm: str = "green") -> dashboard.ThresholdsConfig:
    steps = [d.Threshold(value=None, color=calm)]
    steps += [d.Threshold(value=value, color=colour) for colour, value in limits.items()]
    return dashboard.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(steps)
