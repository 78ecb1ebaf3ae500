"""The expressions of the dashboards, rules and documents, and the number of rows that each returns."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench import results
from bench.prometheus import Prometheus, faster
from tests.support.watch_files import DOCUMENTED, EXPRESSIONS, VARIABLES, filled

OTHERS = {
    r"\b(kube|container)_[a-z_]+": "asks for what kube-state-metrics or cAdvisor export, and neither is here"
}
"""The reasons why expressions must return nothing on any host, by a pattern for their text."""
LOCKS = {
    "topk(1, sum by (lock) (cluster_job_comm_lock:lockd_futex_lock_blocked_seconds:rate5m))",
    "topk(1, sum by (lock) (cluster_job_lock_type_lock:lockd_kernel_lock_site_wait_seconds:rate5m))",
}
"""Queries for the locks to choose on the dashboard Lock: a user-space lock and a kernel lock."""
RANGE_SECONDS = 300
"""The time range of the dashboards."""


@dataclass
class Expression:
    """An expression, the most rows that it returned at a time, and the values of variables for these."""

    where: str
    expr: str
    rows: int = 0
    chosen: str = ""


class Expressions:
    """All expressions, and the most rows that each of them has returned so far."""

    def __init__(
        self,
        prometheus: Prometheus,
        factor: int,
        step: float,
        hosts: list[str],
        impossible: Mapping[str, str],
    ) -> None:
        """Collect the expressions.

        `hosts` are the values of the variable `instance`. `impossible` has the reasons why expressions must
        return nothing on this host, by a pattern for their text.
        """
        self._prometheus, self._factor = prometheus, factor
        self._hosts, self._impossible = hosts, impossible
        self._always = {"__rate_interval": f"{4 * step:g}s", "__range": f"{RANGE_SECONDS}s",
                        "__range_s": f"{RANGE_SECONDS}"}  # fmt: skip
        self.all = [Expression(where, expr) for where, expr in [*EXPRESSIONS, *DOCUMENTED]
                    if not where.startswith("variable ")]  # fmt: skip
        self.variables = [
            Expression(f"{uid} {one['name']}", one["query"]["query"])
            for uid, one in VARIABLES
            if one["type"] == "query"
        ]
        self.looks = 0

    @property
    def every(self) -> list[Expression]:
        """All expressions, and the queries for the values of variables."""
        return [*self.all, *self.variables]

    def look(self) -> None:
        """Query each expression: for each host and for each of LOCKS, if it has a variable for one."""
        self.looks += 1
        locks = [row["metric"]["lock"] for query in LOCKS for row in self._prometheus.rows(query)]
        for one in self.every:
            for chosen in _choices(one.expr, {"instance": self._hosts, "lock": locks}):
                expr = filled(one.expr, {**self._always, **chosen})
                rows = self._values(expr) if one in self.variables else self._rows(expr)
                if rows > one.rows:
                    one.rows, one.chosen = rows, ", ".join(chosen.values())

    def reason(self, one: Expression) -> str:
        """The reason why an expression must return nothing; empty if it must return something."""
        matching = (why for text, why in {**OTHERS, **self._impossible}.items() if re.search(text, one.expr))
        return next(matching, "")

    def wrong(self) -> list[str]:
        """The expressions that returned nothing without a reason, or returned something in spite of one."""
        return [
            f"{one.where} returned {'something, and cannot' if one.rows else 'nothing'}: {one.expr}"
            for one in self.every
            if bool(one.rows) == bool(self.reason(one))
        ]

    def rows(self) -> list[dict[str, object]]:
        return [dataclasses.asdict(one) for one in self.every]

    def report(self) -> str:
        """The table of all expressions, as Markdown."""
        text = "# How many rows each expression returned\n\n"
        text += f"{len(self.every)} expressions, each asked for {self.looks} times; the most rows at a time. "
        text += f"{sum(one.rows > 0 for one in self.every)} returned something, "
        text += f"{sum(not one.rows and bool(self.reason(one)) for one in self.every)} cannot here.\n\n"
        rows = []
        for one in self.every:
            expr = " ".join(one.expr.split()).replace("|", "\\|")
            count = one.rows or f"0: {self.reason(one) or '**it should not be empty**'}"
            rows.append((one.where, f"`{expr}`", count, one.chosen))
        return text + results.table("where | expression | rows | host or lock", rows)

    def _rows(self, expr: str) -> int:
        """The number of rows whose value is not NaN, which a quantile of nothing is."""
        answer = self._prometheus.asked("query", query=faster(expr, self._factor), time=time.time())
        if answer["resultType"] == "scalar":
            return 1
        return sum(not math.isnan(float(row["value"][1])) for row in answer["result"])

    def _values(self, query: str) -> int:
        """The number of values of label_values(), which Grafana reads from this path of Prometheus."""
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert found, query
        selector, label = found.groups()
        return len(self._prometheus.asked(f"label/{label}/values", **{"match[]": selector}))


def _choices(expr: str, values: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    """Each combination of values of those variables that need exactly one value."""
    single = [name for name in values if f'="${name}"' in expr]
    for chosen in itertools.product(*(values[name] for name in single)):
        yield dict(zip(single, chosen, strict=True))
