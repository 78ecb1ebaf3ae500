"""A generated week of fleets of 1, 100 and 1,000 hosts in Prometheus' storage, for queries of the dashboards.

Each fleet is a cluster of its own, so the dashboards' variable `cluster` chooses a fleet. The labels come
from a recorded lockd, and from the series that a real Prometheus records of it with lockd's recording rules.
All hosts run the same services. A service and a lock are thus on every host of the fleet, which is the most
expensive case for a dashboard. The values are made up: counters grow at random, and those of times are
floating-point numbers.

To save disk space, series that no dashboard reads are left out. One host of each fleet has all series that
the dashboard Host reads. All hosts have the series that Fleet reads, and those of the chosen service and
lock that Service and Lock read.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.fleet import blocks, scrape, server
from bench.fleet.blocks import Labels, Pattern
from bench.fleet.recording import Recording
from tests.support.watch_files import RECORDED, panel_queries, selectors

CLUSTERS = {"one": 1, "hundred": 100, "thousand": 1000}
"""The number of hosts of each fleet, by the name of its cluster."""
HOST = "host-0"
"""The host that the dashboard Host shows."""
HOUR = 3_600_000
BLOCK_HOURS, BLOCKS = 42, 4
"""The length of a block and the number of blocks of the week.

A Prometheus that keeps 15 days of samples has blocks of similar length, up to 36 hours.
"""
SCRAPED, EVALUATED = 15_000, 60_000
"""Milliseconds between the samples of a scraped series, and between those of a recorded series."""
KINDS = 8
"""The number of different patterns of each sort of values."""
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
OBJECTIVE = "unit:lockd_blocked_objective:ratio"
"""The recorded objective of the chosen service (deploy/prometheus/objectives.example.yml)."""
TOP = 10
"""The most hosts that a recording rule with `topk` returns."""
SECONDS = 20.0
"""Seconds for which the recording rules are evaluated to find out which series they make."""


class Values:
    """Made-up values: KINDS patterns for each sort of values and each step."""

    def __init__(self) -> None:
        self._chance = random.Random(18)
        self._patterns: dict[tuple[str, int], list[Pattern]] = {}

    def of(self, sort: str, name: str, number: int) -> Pattern:
        """A pattern of this sort, with the step of the metric `name`."""
        step = EVALUATED if name in RECORDED else SCRAPED
        if (sort, step) not in self._patterns:
            count = BLOCKS * BLOCK_HOURS * HOUR // step
            self._patterns[sort, step] = [Pattern(step, list(self._made(sort, count))) for _ in range(KINDS)]
        return self._patterns[sort, step][number % KINDS]

    def _made(self, sort: str, count: int) -> Iterator[float]:
        chance, total, start = self._chance, 0.0, self._chance.randrange(3)
        for _ in range(count):
            if sort == "time":
                total += chance.choice((0.0, chance.randrange(10**9) / 1e9))
            elif sort == "count":
                total += chance.choice((0, chance.randrange(100)))
            yield {
                "constant": start,
                "time": round(total, 9),
                "count": total,
                "rate": chance.random(),
                "gauge": chance.choice((start, start, start, chance.randrange(1000))),
            }[sort]


@dataclass(frozen=True)
class Fleet:
    """The series of all hosts of all clusters, each of which is like the recorded host."""

    recording: Recording

    @cached_property
    def unit(self) -> str:
        """The service that the dashboards show: the unit with the most series of locks."""
        return self._most("unit", {"", "kernel", "other", "harness.service", "clients.service"})

    @cached_property
    def lock(self) -> str:
        """The lock that the dashboard Lock shows: the lock of that service with the most series."""
        return self._most("lock", {"other"}, self.unit)

    def _most(self, label: str, but: set[str], unit: str = "") -> str:
        counts: dict[str, int] = {}
        for series in self.recording.series():
            name, labels = parsed(series)
            if name.startswith("lockd_futex_lock_") and unit in ("", labels["unit"]):
                counts[labels[label]] = counts.get(labels[label], 0) + 1
        return max((value for value in counts if value not in but), key=lambda value: (counts[value], value))

    def series(self, recorded: list[dict[str, str]]) -> dict[Labels, Pattern]:
        """All series. `recorded` has the labels of the series that the recording rules make of one host."""
        values, found = Values(), dict[Labels, Pattern]()

        def add(
            number: int, hosts: int, name: str, labels: Mapping[str, str], sort: str, cluster: str
        ) -> None:
            for host in range(hosts):
                target = {"cluster": cluster, "instance": f"host-{host}"}
                found[_labels(name, {**labels, **target})] = values.of(sort, name, number + host)

        asked = _asked()
        for number, (series, (first, last, is_cumulative)) in enumerate(self.recording.series().items()):
            name, labels = parsed(series)
            is_chosen = labels.get("unit") == self.unit or labels.get("lock") == self.lock
            is_everywhere = name in asked["lockd-fleet"] or (
                is_chosen and name in asked["lockd-service"] | asked["lockd-lock"]
            )
            if is_everywhere or name in asked["lockd-host"]:
                sort = sort_of(name, is_cumulative, first != last)
                for cluster, hosts in CLUSTERS.items():
                    add(
                        number, hosts if is_everywhere else 1, name, {"job": "lockd", **labels}, sort, cluster
                    )
        for number, labels in enumerate(recorded):
            name = labels["__name__"]
            for cluster, hosts in CLUSTERS.items():
                if "instance" in labels:
                    add(number, min(hosts, TOP) if ":topk_" in name else hosts, name, labels, "rate", cluster)
                else:
                    found[_labels(name, {**labels, "cluster": cluster})] = values.of("rate", name, number)
        found[_labels(OBJECTIVE, {"unit": self.unit})] = values.of("constant", OBJECTIVE, 0)
        return found


def make(directory: Path, recording: Path) -> dict[str, object]:
    """Write a week that ends at the last full hour.

    The result has the end, the chosen service and lock, and the numbers of series, samples and bytes.
    """
    fleet = Fleet(Recording.load(recording))
    end = int(time.time() * 1000) // HOUR * HOUR
    begin = end - BLOCKS * BLOCK_HOURS * HOUR
    made = blocks.write(directory, fleet.series(recorded(recording)), begin, BLOCK_HOURS * HOUR, BLOCKS)
    return {"end": end // 1000, "unit": fleet.unit, "lock": fleet.lock, **made}


def recorded(recording: Path) -> list[dict[str, str]]:
    """The labels of the series that a real Prometheus records of one host with lockd's recording rules."""
    with (
        tempfile.TemporaryDirectory(prefix="lockd-bench-fleet-", dir="/var/tmp") as place,
        scrape.simulated(1, [recording]) as (port, _),
        server.running(Path(place), scrape.configuration(1, port, "2s")) as prometheus,
    ):
        time.sleep(SECONDS)
        return prometheus.labels('{__name__=~"cluster_.+"}')


def sort_of(name: str, is_cumulative: bool, has_grown: bool) -> str:
    """The sort of values that a series gets."""
    if not is_cumulative:
        return "gauge"
    if not has_grown:
        return "constant"
    return "time" if name.endswith(("_sum", "_seconds_total")) else "count"


def parsed(series: str) -> tuple[str, dict[str, str]]:
    """The name and the labels of a series in the text format of Prometheus."""
    name, _, rest = series.partition("{")
    return name, {key: re.sub(r"\\(.)", _unescaped, text) for key, text in LABEL.findall(rest)}


def _unescaped(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]


def _labels(name: str, labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((key, text) for key, text in {**labels, "__name__": name}.items() if text))


def _asked() -> dict[str, set[str]]:
    """The names of the metrics that each dashboard reads, by the uid of the dashboard."""
    found: dict[str, set[str]] = {}
    for uid, _, _, target in panel_queries():
        names = {name for name, _ in selectors(target["expr"])}
        found.setdefault(uid, set()).update(names)
    return found
