"""The text of /metrics, made from snapshots.

prometheus_client formats the lines of a label set when the label set first occurs. The lines are stored, and
later scrapes only fill in numbers. This takes a quarter of the time of formatting all lines again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.utils import floatToGoString

from lockd.errors import LockdError
from lockd.export.catalog import CATALOG, Metric

if TYPE_CHECKING:
    from prometheus_client.registry import Collector
else:
    Collector = object  # prometheus_client has Collector since 0.14; Ubuntu 22.04 has 0.9

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily
Encode = Callable[[CollectorRegistry], bytes]
"""A function of prometheus_client that formats all metrics of a registry."""
Labels = tuple[str, ...]
_number: Callable[[float], str] = floatToGoString

PROCESS = "exporter"
"""The value of the label `process` for this process."""
CPU_SECONDS = "lockd_cpu_seconds_total"
PLAIN = 1_000_000
"""prometheus_client writes counts below this one with all their digits. A format string does that faster."""


class SnapshotError(LockdError):
    """The block from the sampler breaks a rule, because of a bug in lockd."""


class Exposition:
    """Turns one block (see lockd.messages) after another into text of one format.

    The head of a block is {"metrics": [{"name": NAME, "labels": [[value, ...], ...]}, ...],
    "buckets": [upper edges in seconds, without +Inf], "cpu_seconds_before": CPU seconds of the exporters
    that this process replaces}. A counter or gauge has an array NAME with one value for each label set. A
    histogram has the arrays NAME.buckets (for each label set its counts, not cumulative, +Inf last) and
    NAME.sum (seconds).
    """

    def __init__(self, encode: Encode, procfs: Path = Path("/proc")) -> None:
        self._encode, self._procfs = encode, procfs
        self._edges: list[str] = []
        self._headers: dict[str, str] = {}
        """The HELP and TYPE lines of each metric."""
        self._lines: dict[str, dict[Labels, str]] = {}
        """All lines of each metric and label set of the last block, with a %s in place of each number."""
        self._end = encode(CollectorRegistry())

    def text(self, head: Mapping[str, Any], arrays: Mapping[str, memoryview]) -> bytes:
        """The text of a block, including the CPU time and memory of this process. Raises SnapshotError."""
        edges = [repr(float(edge)) for edge in head["buckets"]] + ["+Inf"]
        if edges != self._edges:
            self._edges, self._lines = edges, {}
        own = own_usage(self._procfs)
        own[CPU_SECONDS] += head.get("cpu_seconds_before", 0.0)
        rows: dict[str, list[list[str]]] = {metric["name"]: metric["labels"] for metric in head["metrics"]}
        last_lines, self._lines = self._lines, {}
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
                numbers.append(_number(own[name]))
            lines = self._row_lines(metric, labels, last_lines.get(name, {}))
            self._lines[name] = dict(zip(labels, lines, strict=True))
            parts.append(self._headers[name])
            parts += map(mod, lines, numbers)
        return "".join(parts).encode() + self._end

    def _row_lines(self, metric: Metric, rows: Sequence[Labels], stored: dict[Labels, str]) -> list[str]:
        """The lines of each label set, from `stored` or formatted now."""
        fresh = [row for row in rows if row not in stored]
        if fresh or metric.name not in self._headers:
            stored = stored | dict(zip(fresh, self._format(metric, fresh), strict=True))
        return [stored[row] for row in rows]

    def _format(self, metric: Metric, rows: Sequence[Labels]) -> list[str]:
        """The lines of each label set as prometheus_client formats them, with %s in place of each number."""
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
        registry.register(_SingleFamily(family))
        text = self._encode(registry).removesuffix(self._end).decode().split("\n")[:-1]
        header = [line for line in text if line.startswith("#")]
        self._headers[metric.name] = "".join(f"{line}\n" for line in header)
        lines = [line.rpartition(" ")[0].replace("%", "%%") + " %s\n" for line in text[len(header) :]]
        count = len(lines) // max(len(rows), 1)
        return ["".join(lines[row * count : (row + 1) * count]) for row in range(len(rows))]

    def _numbers(
        self, metric: Metric, rows: int, arrays: Mapping[str, memoryview]
    ) -> list[str | tuple[str, ...]]:
        """The numbers of each label set, in the order of its lines."""
        if metric.kind == "info":
            return ["1.0"] * rows
        if metric.kind != "histogram":
            return [_number(value) for value in _array(arrays, metric.name, rows)]
        width = len(self._edges)
        counts = _array(arrays, f"{metric.name}.buckets", rows * width)
        sums = _array(arrays, f"{metric.name}.sum", rows)
        numbers: list[str | tuple[str, ...]] = []
        for row, total in enumerate(sums):
            cumulative = list(accumulate(counts[row * width : (row + 1) * width]))
            is_plain = cumulative[-1] < PLAIN
            buckets = [f"{count}.0" for count in cumulative] if is_plain else [*map(_number, cumulative)]
            numbers.append((*buckets, buckets[-1], _number(total)))  # the lines _bucket, _count and _sum
        return numbers


class _SingleFamily(Collector):
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
    """CPU time in seconds and resident memory in bytes of this process, by metric."""
    # Field 2 is the comm, which may contain blanks and brackets; it ends at the last ")".
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
    """Label values as valid UTF-8: comms can contain any bytes."""
    return [
        value if value.isascii() else value.encode("utf-8", "backslashreplace").decode() for value in values
    ]
