"""What the dashboards ask of Prometheus: every expression of every panel, with variables as somebody chose
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.watch_files import panel_queries

INTERVAL = 15
"""Seconds between scrapes."""
POINTS = 1000
"""Of a graph on a screen, if the panel does not say how many."""
ROUND = (15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200)
"""Seconds that Grafana rounds the step of a graph to."""


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
        """Between the points of a graph over so much time, as Grafana chooses it."""
        return min(ROUND, key=lambda step: (abs(step - max(INTERVAL, seconds / self.points)), step))

    def filled(self, chosen: Mapping[str, str], seconds: float) -> str:
        """With the chosen values in place of variables; whatever is not chosen is All."""
        step = self.step(seconds)
        times = {"__range": f"{seconds:.0f}s", "__rate_interval": f"{max(step + INTERVAL, 4 * INTERVAL)}s"}
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
