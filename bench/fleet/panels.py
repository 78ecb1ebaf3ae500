"""The queries of the dashboards: every expression of every panel, with the values of its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.watch_files import panel_queries

INTERVAL = 15
"""Seconds between scrapes."""
POINTS = 1000
"""The number of points of a graph on a screen, for panels without `maxDataPoints`."""
ROUND = (15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200)
"""The steps of a graph, in seconds, to which Grafana rounds."""


@dataclass(frozen=True)
class Query:
    """One expression of one panel."""

    board: str
    row: str
    panel: str
    ref: str
    expr: str
    is_instant: bool
    points: int

    @property
    def name(self) -> str:
        return f"{self.panel} {self.ref}"

    def step(self, seconds: float) -> int:
        """Seconds between the points of a graph over so many seconds, as Grafana chooses them."""
        return min(ROUND, key=lambda step: (abs(step - max(INTERVAL, seconds / self.points)), step))

    def filled(self, chosen: Mapping[str, str], seconds: float) -> str:
        """The expression with the chosen values of its variables. A variable without a value is All."""
        step = self.step(seconds)
        times = {
            "__range": f"{seconds:.0f}s",
            "__range_s": f"{seconds:.0f}",
            "__rate_interval": f"{max(step + INTERVAL, 4 * INTERVAL)}s",
        }
        return re.sub(r"\$(\w+)", lambda one: {**times, **chosen}.get(one[1], ".*"), self.expr)


def queries() -> list[Query]:
    return [
        Query(
            uid,
            row,
            panel["title"],
            target["refId"],
            target["expr"],
            bool(target.get("instant")),
            panel.get("maxDataPoints") or POINTS,
        )
        for uid, row, panel, target in panel_queries()
    ]
