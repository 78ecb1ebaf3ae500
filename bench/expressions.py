"""Every expression of the dashboards, rules and documents, and how many rows a Prometheus has for it."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.prometheus import Prometheus, faster
from tests.support.watch_files import DOCUMENTED, EXPRESSIONS, VARIABLES, filled

OTHERS = {
    r"\b(kube|container)_[a-z_]+": "asks for what kube-state-metrics or cAdvisor export, and neither is here"
}
"""Why an expression must return nothing, by what its text has."""
LOCKS = {
    "topk(1, sum by (lock) (cluster_job_comm_lock:lockd_futex_lock_blocked_seconds:rate5m))",
    "topk(1, sum by (lock) (cluster_job_lock_type_lock:lockd_kernel_lock_site_wait_seconds:rate5m))",
}
"""Which locks to look at on the dashboard Lock: one of a program, one of the kernel."""
RANGE = "5m"
"""The time range of a dashboard."""


@dataclass
class Expression:
    """`rows` is the most that it returned at a time; `chosen` are the values of variables then."""

    where: str
    expr: str
    rows: int = 0
    chosen: str = ""


class Expressions:
    """All of them, and what they returned so far."""

    def __init__(
        self, prometheus: Prometheus, factor: int, step: float, impossible: Mapping[str, str]
    ) -> None:
        """`impossible` is as OTHERS, of what this host cannot have."""
        self._prometheus, self._factor = prometheus, factor
        self._must_be_empty = {**OTHERS, **impossible}
        self._always = {"__rate_interval": f"{4 * step:g}s", "__range": RANGE}
        self.all = [Expression(where, expr) for where, expr in [*EXPRESSIONS, *DOCUMENTED]
                    if not where.startswith("variable ")]  # fmt: skip
        self.variables = [
            Expression(f"{uid} {one['name']}", one["query"]["query"])
            for uid, one in VARIABLES
            if one["type"] == "query"
        ]
        self.looks = 0

    def look(self) -> None:
        """Ask for each of them, with every host and with one lock of each sort where one has to be chosen."""
        self.looks += 1
        hosts = self._labels("instance", "lockd_start_time_seconds")
        locks = [row["metric"]["lock"] for query in LOCKS for row in self._prometheus.rows(query)]
        for one in (*self.all, *self.variables):
            for chosen in _choices(one.expr, {"instance": hosts, "lock": locks}):
                expr = filled(one.expr, {**self._always, **chosen})
                rows = self._values(expr) if one in self.variables else self._rows(expr)
                if rows > one.rows:
                    one.rows, one.chosen = rows, ", ".join(chosen.values())

    def reason(self, one: Expression) -> str:
        """Why it must return nothing; empty if it should return something."""
        matching = (why for text, why in self._must_be_empty.items() if re.search(text, one.expr))
        return next(matching, "")

    def wrong(self) -> list[str]:
        """Those that returned nothing and should have, or the other way about."""
        return [
            f"{one.where} returned {'something, and cannot' if one.rows else 'nothing'}: {one.expr}"
            for one in (*self.all, *self.variables)
            if bool(one.rows) == bool(self.reason(one))
        ]

    def table(self) -> str:
        """As Markdown."""
        lines = ["| where | expression | rows | host or lock |", "|---|---|---|---|"]
        for one in (*self.all, *self.variables):
            expr = " ".join(one.expr.split()).replace("|", "\\|")
            rows = one.rows or f"0: {self.reason(one) or '**it should not be empty**'}"
            lines.append(f"| {one.where} | `{expr}` | {rows} | {one.chosen} |")
        return "\n".join(lines) + "\n"

    def _rows(self, expr: str) -> int:
        """Those with a number; a quantile of nothing has none."""
        answer = self._prometheus.asked("query", query=faster(expr, self._factor), time=time.time())
        if answer["resultType"] == "scalar":
            return 1
        return sum(not math.isnan(float(row["value"][1])) for row in answer["result"])

    def _values(self, query: str) -> int:
        """Of label_values(), which Grafana asks Prometheus in this way."""
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert found, query
        return len(self._labels(found[2], found[1]))

    def _labels(self, label: str, selector: str) -> list[str]:
        values: list[str] = self._prometheus.asked(f"label/{label}/values", **{"match[]": selector})
        return values


def _choices(expr: str, values: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    """Each combination of those variables that must have one value."""
    single = [name for name in values if f'="${name}"' in expr]
    for chosen in itertools.product(*(values[name] for name in single)):
        yield dict(zip(single, chosen, strict=True))
