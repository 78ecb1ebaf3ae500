"""The chart of a comparison: a panel for each load, with a row for each variant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.comparison import FLOOR, LOCKD, UNTRACED, Comparison

COLUMNS = 4
ROW_INCHES, PANEL_INCHES = 0.19, 2.6
COLOURS = ((UNTRACED, "#8a8a8a"), (FLOOR, "#444444"), (LOCKD, "#1f6fb2"), ("", "#c4601a"))
"""The colours of variants, by the beginning of their names: ours, and the last one for tools of others."""
TICKS = (1, 0.9, 0.8, 0.5, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30)
APART = 0.14
"""The least distance of two ticks, as a share of the axis."""
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lockd",  # the same figures make the same file
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(found: Comparison, path: Path) -> None:
    """Write the chart as SVG.

    Its axis is logarithmic: twice as slow and half as slow are equally far from untraced.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    loads = [name for name, *_ in found.loads if any(found.each_slower(one, name) for one in found.figures)]
    variants = list(found.figures)
    columns = min(COLUMNS, len(loads))
    rows = math.ceil(len(loads) / columns)
    size = (1.3 + columns * PANEL_INCHES, rows * (ROW_INCHES * len(variants) + 0.6) + 0.4)
    with matplotlib.rc_context(STYLE):
        figure, panels = pyplot.subplots(
            rows, columns, sharey=True, squeeze=False, figsize=size, layout="constrained"
        )
        for panel in panels.flat[len(loads) :]:
            panel.set_axis_off()
        for load, panel in zip(loads, panels.flat, strict=False):
            _panel(panel, found, load, variants)
        figure.suptitle("How many times as slow as untraced: median, least to most")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _panel(panel: Any, found: Comparison, load: str, variants: list[str]) -> None:
    edges = [1.0]
    for row, variant in enumerate(variants):
        each = found.each_slower(variant, load)
        if not each:
            continue
        spread = found.slower(variant, load)
        colour = next(colour for beginning, colour in COLOURS if variant.startswith(beginning))
        panel.plot([spread.least, spread.most], [row, row], color=colour, linewidth=1.2, alpha=0.6)
        panel.plot([spread.median], [row], "o", color=colour, markersize=4)
        panel.annotate(f"{spread.median:.2f}", (spread.most, row), xytext=(6, 0), va="center",
                       textcoords="offset points", color=colour, fontsize=7)  # fmt: skip
        edges += [spread.least, spread.most]
    panel.axvline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
    low, high = min(edges), max(edges)
    margin = max(math.log(high / low), math.log(1.2))
    panel.set_xscale("log")
    panel.set_xlim(low * math.exp(-0.08 * margin), high * math.exp(0.3 * margin))
    ticks = _ticks(low, high, margin)
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_title(load, fontsize=9, loc="left")
    panel.set_yticks(range(len(variants)), variants)
    panel.set_ylim(len(variants) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)


def _ticks(low: float, high: float, span: float) -> list[float]:
    """The numbers of TICKS that fit on the axis. 1, which is untraced, is always one of them."""
    shown: list[float] = []
    for tick in TICKS:
        is_apart = all(abs(math.log(tick / other)) > APART * span for other in shown)
        if is_apart and low * 0.99 <= tick <= high * 1.05:
            shown.append(tick)
    return shown
