"""lockd keeps to `series.max` while 5,000 processes, each with a name of its own, wait for locks.

The daemons count only these processes, so that nothing else is in `other`. Their maps have room for every
wait of the whole run even if nothing is drained meanwhile. The sums over all series must therefore be the
truth.
"""

from __future__ import annotations

import subprocess
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from lockd.export.catalog import CATALOG
from tests.needs import need
from tests.support.lockd_process import REPEATED_SECONDS, Lockd, Metrics, unless_late
from tests.support.workload import Workload

PROCESSES, ROUNDS = 5000, 2
ENTRIES = 65536
"""Entries of each map: far more than all calls need, with one for each wait and each waking thread."""
CAUGHT_UP_SECONDS = 60.0
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
DEFAULT_MAX = 10_000
MEASURING = ("lockd_futex_", "lockd_offcpu_", "lockd_kernel_lock_")
"""Prefixes of the metrics that measure the host."""


@dataclass(frozen=True)
class Run:
    """What one daemon says after the workload has run, and the most lines it ever had."""

    most: int
    most_seen: int
    text: str
    openmetrics: str
    metrics: Metrics
    truth: dict[str, Any]


class Observed:
    """A daemon with a `series.max` of its own, which is scraped all the time."""

    def __init__(self, directory: Path, most: int) -> None:
        self.most, self.most_seen = most, 0
        series = {} if most == DEFAULT_MAX else {"series": {"max": most}}
        self.lockd = Lockd(
            directory,
            {
                "filter": {"comms": ["mp[0-9]*"]},
                "maps": {"entries": ENTRIES},
                "programs": {"futex": {"mode": "calls"}},
                **series,
            },
        )

    def look(self) -> str:
        """Return /metrics and note how many lines it has.

        The text is empty if the sampler cannot answer in time.
        """
        text = ""
        with unless_late():
            text = self.lockd.get("/metrics").decode()
        self.most_seen = max(self.most_seen, len(lines(text)))
        return text

    def caught_up(self, truth: dict[str, Any]) -> Run:
        """Return the daemon's metrics once it has counted all waits of the workload."""
        waits = truth["futex"]["lock"]["waits"]
        self.lockd.until(
            lambda m: counted(m, "lockd_futex_waits_total") >= waits - m.not_told, CAUGHT_UP_SECONDS
        )
        self.lockd.settle()  # so that waits beyond the truth would be counted now
        deadline = time.monotonic() + CAUGHT_UP_SECONDS
        while True:
            with ThreadPoolExecutor(1) as pool:  # at the same time, so that both show the same snapshot
                asked = pool.submit(get_openmetrics, self.lockd)
                text = self.look()
            openmetrics_text = ""
            with unless_late():
                openmetrics_text = asked.result()
            if text and openmetrics_text:
                return Run(self.most, self.most_seen, text, openmetrics_text, Metrics(text), truth)
            assert time.monotonic() < deadline, f"no answer within {CAUGHT_UP_SECONDS:g} s"
            time.sleep(REPEATED_SECONDS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, host: None) -> dict[int, Run]:
    """One run of the workload, seen by a daemon for each value of series.max."""
    with ExitStack() as stack:
        observed = [Observed(tmp_path_factory.mktemp("lockd"), most) for most in (DEFAULT_MAX, 2000)]
        for one in observed:
            stack.callback(one.lockd.process.kill)
        workload = Workload("many_procs", PROCESSES, ROUNDS, comm="mp-parent")
        stack.callback(workload.kill)
        truths: list[dict[str, Any]] = []
        running = threading.Thread(target=lambda: truths.append(workload.run()))
        running.start()
        while running.is_alive():
            for one in observed:
                one.look()
        found = {one.most: one.caught_up(truths[0]) for one in observed}
        workload.finish()
        assert [one.lockd.stop() for one in observed] == [0, 0]
    return found


@pytest.fixture(params=[DEFAULT_MAX, 2000])
def run(request: pytest.FixtureRequest, runs: dict[int, Run]) -> Run:
    return runs[request.param]


def get_openmetrics(daemon: Lockd) -> str:
    request = urllib.request.Request(f"http://{daemon.address}/metrics", headers={"Accept": OPENMETRICS})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return str(answer.read().decode())


def counted(metrics: Metrics, name: str) -> float:
    """Return the sum over all series, including the retired ones."""
    return metrics.sum(name) + metrics.sum("lockd_retired_value", metric=name)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_there_are_never_more_lines(run: Run) -> None:
    assert run.most * 0.5 < len(lines(run.text)) <= run.most_seen <= run.most
    assert len(lines(run.openmetrics)) == len(lines(run.text))


def test_sums_over_all_series_are_the_truth(run: Run) -> None:
    metrics, told = run.metrics, run.truth["futex"]["lock"]
    assert metrics.sum("lockd_overflow_events_total", map="futex") == 0
    for name, truth in {
        "lockd_futex_waits_total": told["waits"],
        "lockd_futex_blocked_seconds_count": told["blocked"],
        "lockd_futex_lock_blocked_total": told["blocked"],
        "lockd_futex_wakes_total": run.truth["wakes"],
    }.items():
        assert truth - metrics.not_told <= counted(metrics, name) <= truth, name
    assert metrics.sum("lockd_futex_errors_total") == 0
    blocked_us = counted(metrics, "lockd_futex_blocked_seconds_sum") * 1e6
    assert blocked_us == pytest.approx(told["blocked_us"], rel=0.03)
    by_lock = counted(metrics, "lockd_futex_lock_blocked_seconds_total") * 1e6
    assert by_lock == pytest.approx(blocked_us)


def test_what_got_no_series_is_counted_as_such(run: Run) -> None:
    metrics = run.metrics
    refused = "lockd_series_overflow_total"
    for family, name in {
        "futex": "lockd_futex_waits_total",
        "futex_process": "lockd_futex_wakes_total",
        "offcpu": "lockd_offcpu_blocked_seconds_count",
        "offcpu_runqueue": "lockd_offcpu_runqueue_seconds_count",
    }.items():
        processes = {labels["comm"] for labels in metrics.labels(name)}
        assert "other" in processes, family
        assert len(processes) < PROCESSES, family
        assert metrics.sum(name, comm="other") > 0, family
        # An event that went to an overflow map of offcpu has lost its name, so that no series is refused.
        lost = family.startswith("offcpu")
        assert metrics.sum(refused, family=family) >= (1 if lost else PROCESSES - len(processes) + 1), family


def test_a_series_is_of_its_own_or_of_its_unit_or_other(run: Run) -> None:
    """A series whose `unit` is `other` has the `comm` `other`. One with that `comm` names no lock."""
    for name in run.metrics.samples:
        if name.startswith(MEASURING):
            for labels in run.metrics.labels(name):
                assert labels["comm"] == "other" or labels["unit"] != "other", (name, labels)
                if "lock" in labels and labels["comm"] == "other":
                    assert labels["lock"] == "other", (name, labels)


def test_lockd_series_sums_to_the_lines(run: Run) -> None:
    measuring = [line for line in lines(run.text) if line.startswith((*MEASURING, "lockd_unit_info"))]
    told = Metrics(run.text).sum("lockd_series")
    assert len(measuring) == told


def test_both_formats_parse_and_agree(run: Run) -> None:
    found = []
    for parse, text in (
        (text_string_to_metric_families, run.text),
        (openmetrics.text_string_to_metric_families, run.openmetrics),
    ):
        samples = [sample for family in parse(text) for sample in family.samples]
        sets = {(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples}
        assert len(sets) == len(samples) == len(lines(text))
        found.append(sets)
    # Between the two scrapes the values of lockd's own metrics have changed, but not the set of series.
    assert found[0] == found[1]


def test_promtool_warns_of_nothing_but_microseconds(run: Run) -> None:
    """Names in _us are part of the contract: users' alerts are written on max_blocked_us."""
    need("promtool")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=run.text, capture_output=True, text=True, check=False
    )
    exported = {name for name in CATALOG if name.endswith("_us") and run.metrics.labels(name)}
    assert exported
    warned = [line for line in (checked.stdout + checked.stderr).splitlines() if line]
    expected = {f"{name} metric names should not contain abbreviated units" for name in exported}
    assert sorted(warned) == sorted(expected)
