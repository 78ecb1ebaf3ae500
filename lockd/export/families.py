"""A snapshot's metrics as prometheus_client's metric families."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from lockd.errors import LockdError
from lockd.export.catalog import CATALOG, Metric

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily

PROCESS = "exporter"
"""What this process is called in the label `process`."""


class SnapshotError(LockdError):
    """The sampler sent a block that is not what was agreed: a bug in lockd."""


class Families(Collector):
    """The families of one block (see lockd.snapshot), with what this process itself uses.

    The head is {"metrics": [{"name": NAME, "labels": [[value, ...], ...]}, ...],
    "buckets": [upper edges in seconds, without +Inf]}. A counter or gauge has an array NAME with
    one value a row, a histogram NAME.buckets (a row of counts, not cumulative, +Inf last) and
    NAME.sum (seconds).
    """

    def __init__(self, head: Mapping[str, Any], arrays: Mapping[str, memoryview], procfs: Path) -> None:
        self._metrics: list[dict[str, Any]] = head["metrics"]
        self._edges = [repr(float(edge)) for edge in head["buckets"]] + ["+Inf"]
        self._arrays = arrays
        self._procfs = procfs

    def describe(self) -> Iterable[Family]:
        return [_empty(metric) for metric in CATALOG.values()]

    def collect(self) -> Iterator[Family]:
        own = own_usage(self._procfs)
        rows: dict[str, list[list[str]]] = {each["name"]: each["labels"] for each in self._metrics}
        for name in (*rows, *(name for name in own if name not in rows)):
            metric = CATALOG.get(name)
            if metric is None:
                raise SnapshotError(
                    f'snapshot: metric "{name}" is not in the catalogue;'
                    " rule: every metric is described in lockd/export/catalog.py"
                )
            yield self._family(metric, rows.get(name, []), own.get(name))

    def _family(self, metric: Metric, rows: list[list[str]], own: float | None) -> Family:
        family = _empty(metric)
        for row in rows:
            if len(row) != len(metric.labels):
                raise SnapshotError(
                    f"snapshot: metric {metric.name}: label values {row};"
                    f" rule: one for each of {', '.join(metric.labels) or 'no labels'}"
                )
        if isinstance(family, InfoMetricFamily):
            for row in rows:
                family.add_metric([], dict(zip(metric.labels, _clean(row), strict=True)))
        elif isinstance(family, HistogramMetricFamily):
            width = len(self._edges)
            counts = self._array(f"{metric.name}.buckets", len(rows) * width)
            sums = self._array(f"{metric.name}.sum", len(rows))
            for at, row in enumerate(rows):
                cumulative = accumulate(counts[at * width : (at + 1) * width])
                buckets = list(zip(self._edges, cumulative, strict=True))
                family.add_metric(_clean(row), buckets, sums[at])
        else:
            for row, value in zip(rows, self._array(metric.name, len(rows)), strict=True):
                family.add_metric(_clean(row), value)
            if own is not None:
                family.add_metric([PROCESS], own)
        return family

    def _array(self, name: str, length: int) -> Sequence[float]:
        array = self._arrays.get(name, ())
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
        "lockd_cpu_seconds_total": (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
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
