"""The text of /metrics, made of a snapshot.

prometheus_client writes the lines of a label set when it is first seen. They are kept, and who scrapes next
gets them with other numbers: that takes a quarter of the time of writing all of them anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mod
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lockd.errors import LockdError
from lockd.export.catalog import CATALOG, Metric

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily
Encode = Callable[[CollectorRegistry], bytes]
"""One of prometheus_client's formats."""
Labels = tuple[str, ...]
_text: Callable[[float], str] = floatToGoString

PROCESS = "exporter"
"""What this process is called in the label `process`."""
CPU_SECONDS = "lockd_cpu_seconds_total"
PLAIN = 1_000_000
"""Below, prometheus_client writes counts with all their digits: what that is needs not be asked for each."""


class SnapshotError(LockdError):
    """The sampler sent a block that is not what was agreed: a bug in lockd."""


class Exposition:
    """The text in one format, of one block (see lockd.messages) after another, with what this process uses.

    The head is {"metrics": [{"name": NAME, "labels": [[value, ...], ...]}, ...],
    "buckets": [upper edges in seconds, without +Inf], "cpu_seconds_before": CPU time of those in whose place
    this process is}. A counter or gauge has an array NAME with
    one value a row, a histogram NAME.buckets (a row of counts, not cumulative, +Inf last) and
    NAME.sum (seconds).
    """

    def __init__(self, encode: Encode, procfs: Path) -> None:
        self._encode, self._procfs = encode, procfs
        self._edges: list[str] = []
        self._headers: dict[str, str] = {}
        """By metric."""
        self._lines: dict[str, dict[Labels, str]] = {}
        """By metric and row: all of the row's lines, with a %s for each number; of the last block's rows."""
        self._end = encode(CollectorRegistry())

    def text(self, head: Mapping[str, Any], arrays: Mapping[str, memoryview]) -> bytes:
        edges = [repr(float(edge)) for edge in head["buckets"]] + ["+Inf"]
        if edges != self._edges:
            self._edges, self._lines = edges, {}
        own = own_usage(self._procfs)
        own[CPU_SECONDS] += head.get("cpu_seconds_before", 0.0)
        rows: dict[str, list[list[str]]] = {each["name"]: each["labels"] for each in head["metrics"]}
        before, self._lines = self._lines, {}
        parts: list[str] = []
        for name in (*rows, *(name for name in own if name not in rows)):
            metric = CATALOG.get(name)
            if metric is None:
                raise SnapshotError(
                    f'snapshot: metric "{name}" is not in the catalogue;'
                    " rule: every metric is described in lockd/export/catalog.py"
                )
            labels = [tuple(row) for row in rows.get(name, ())]
            numbers = self._numbers(metric, len(labels), arrays)
            if name in own:
                labels.append((PROCESS,))
                numbers.append(_text(own[name]))
            lines = self._lines_of(metric, labels, before.get(name, {}))
            self._lines[name] = dict(zip(labels, lines, strict=True))
            parts.append(self._headers[name])
            parts += map(mod, lines, numbers)
        return "".join(parts).encode() + self._end

    def _lines_of(self, metric: Metric, rows: Sequence[Labels], kept: dict[Labels, str]) -> list[str]:
        """Of each row, those that are not kept written now."""
        fresh = [row for row in rows if row not in kept]
        if fresh or metric.name not in self._headers:
            kept = kept | dict(zip(fresh, self._written(metric, fresh), strict=True))
        return [kept[row] for row in rows]

    def _written(self, metric: Metric, rows: Sequence[Labels]) -> list[str]:
        """Have the lines of rows written, and put %s in the places of their numbers."""
        family = _empty(metric)
        for row in rows:
            if len(row) != len(metric.labels):
                raise SnapshotError(
                    f"snapshot: metric {metric.name}: label values {list(row)};"
                    f" rule: one for each of {', '.join(metric.labels) or 'no labels'}"
                )
            if isinstance(family, InfoMetricFamily):
                family.add_metric([], dict(zip(metric.labels, _clean(row), strict=True)))
            elif isinstance(family, HistogramMetricFamily):
                family.add_metric(_clean(row), [(edge, 0) for edge in self._edges], 0)
            else:
                family.add_metric(_clean(row), 0)
        registry = CollectorRegistry()
        registry.register(_Only(family))
        written = self._encode(registry).removesuffix(self._end).decode().split("\n")[:-1]
        header = [line for line in written if line.startswith("#")]
        self._headers[metric.name] = "".join(f"{line}\n" for line in header)
        lines = [line.rpartition(" ")[0].replace("%", "%%") + " %s\n" for line in written[len(header) :]]
        of_each = len(lines) // max(len(rows), 1)
        return ["".join(lines[at * of_each : (at + 1) * of_each]) for at in range(len(rows))]

    def _numbers(
        self, metric: Metric, rows: int, arrays: Mapping[str, memoryview]
    ) -> list[str | tuple[str, ...]]:
        """Of each row, in the order of its lines."""
        if metric.kind == "info":
            return ["1.0"] * rows
        if metric.kind != "histogram":
            return [_text(value) for value in _array(arrays, metric.name, rows)]
        width = len(self._edges)
        counts = _array(arrays, f"{metric.name}.buckets", rows * width)
        sums = _array(arrays, f"{metric.name}.sum", rows)
        numbers: list[str | tuple[str, ...]] = []
        for at, total in enumerate(sums):
            up_to = list(accumulate(counts[at * width : (at + 1) * width]))
            is_plain = up_to[-1] < PLAIN
            buckets = [f"{count}.0" for count in up_to] if is_plain else [*map(_text, up_to)]
            numbers.append((*buckets, buckets[-1], _text(total)))  # the last but one is _count
        return numbers


class _Only(Collector):
    """One family."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterable[Family]:
        return [self._family]


def _array(arrays: Mapping[str, memoryview], name: str, length: int) -> Sequence[float]:
    array = arrays.get(name, ())
    if len(array) != length:
        raise SnapshotError(
            f'snapshot: array "{name}" has {len(array)} values; rule: {length},'
            " by the rows and buckets of the head"
        )
    return array


def own_usage(procfs: Path) -> dict[str, float]:
    """What this process has used: CPU time in seconds and resident memory in bytes."""
    # Field 2 is the process's name, which may hold blanks and brackets; it ends at the last ")".
    stat = (procfs / "self" / "stat").read_text().rpartition(")")[2].split()
    resident = (procfs / "self" / "statm").read_text().split()[1]
    return {
        CPU_SECONDS: (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
        "lockd_resident_bytes": int(resident) * os.sysconf("SC_PAGE_SIZE"),
    }


def _empty(metric: Metric) -> Family:
    match metric.kind:
        case "counter":
            return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        case "gauge":
            return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        case "histogram":
            return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        case "info":
            return InfoMetricFamily(metric.name.removesuffix("_info"), metric.help)


def _clean(values: Sequence[str]) -> list[str]:
    """Label values that can be encoded: names of processes need not be UTF-8."""
    return [
        value if value.isascii() else value.encode("utf-8", "backslashreplace").decode() for value in values
    ]
