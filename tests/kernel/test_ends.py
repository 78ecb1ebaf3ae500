"""Threads and processes that end: inside a call, by exec, by the thousand. Totals hold, nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checks import about, at_rest
from conftest import Start
from lockd_process import Lockd, Metrics
from workload import Workload

WAITS, WAKES, ERRORS = "lockd_futex_waits_total", "lockd_futex_wakes_total", "lockd_futex_errors_total"
COUNT, SUM = "lockd_futex_blocked_seconds_count", "lockd_futex_blocked_seconds_sum"
MAX = "lockd_futex_max_blocked_us"

SETTLED_SECONDS = 5.0
MOST_LINES = 10_000
"""series.max"""
STRAYS = 200
"""Threads that other programs on the host may start or end between two looks."""


def lock_labels(one: Workload) -> dict[str, str]:
    return {"comm": one.comm, "kind": "lock"}


def test_a_call_whose_thread_is_killed_in_it(lockd: Lockd, workload: Start) -> None:
    one = workload("exit_in_call", 8)
    labels = lock_labels(one)
    truth = one.run()
    told = truth["futex"]["lock"]
    metrics = at_rest(lockd, one.comm)
    assert metrics.max(MAX, **labels) == 0
    assert metrics.sum(WAITS, **labels) == told["waits"]
    assert metrics.sum(COUNT, **labels) == told["blocked"]
    assert metrics.sum(SUM, **labels) * 1e6 >= told["blocked"] * truth["held_us"]
    assert metrics.max("lockd_futex_lock_max_blocked_us", **labels) == 0
    assert metrics.sum(ERRORS, comm=one.comm) == 0
    assert metrics.dropped == 0
    one.finish()


def test_exec_by_a_thread_that_is_not_the_leader(lockd: Lockd, workload: Start) -> None:
    others = 4
    one = workload("exec_thread", 20, others)
    labels = lock_labels(one)
    truth = one.run()
    told = truth["futex"]["lock"]
    assert truth["tid"] == one.pid
    metrics = at_rest(lockd, one.comm)
    assert metrics.sum(WAITS, **labels) == told["waits"] + others
    assert metrics.sum(COUNT, **labels) == told["blocked"] + others
    blocked_us = metrics.sum(SUM, **labels) * 1e6 - truth["others_us"]
    assert blocked_us >= about(told["blocked_us"], told["blocked"]) or blocked_us > told["blocked_us"]
    assert metrics.max(MAX, window="1m", **labels) == about(told["max_us"])
    assert metrics.sum(ERRORS, comm=one.comm) == truth["errors"]["ETIMEDOUT"]
    rows = [row for row in lockd.api("threads", comm=one.comm, kind="lock") if row["program"] == "futex"]
    assert {row["tgid"] for row in rows} == {one.pid}
    assert sum(row["blocked_count"] for row in rows) == told["blocked"] + others
    assert [row["blocked_count"] for row in rows if row["tid"] == one.pid] == [told["blocked"] / 2]
    assert not any(row["waiting_us"] for row in rows)
    one.finish()


def check_futex_totals(metrics: Metrics, one: Workload, truth: dict[str, Any]) -> None:
    labels, told = lock_labels(one), truth["futex"]["lock"]
    assert metrics.sum(WAITS, comm=one.comm) == metrics.sum(WAITS, **labels) == told["waits"]
    assert metrics.sum(COUNT, **labels) == told["blocked"]
    assert metrics.sum(SUM, **labels) * 1e6 == about(told["blocked_us"], told["blocked"])
    assert metrics.sum(WAKES, comm=one.comm) == truth["wakes"]
    for error, count in truth["errors"].items():
        assert metrics.sum(ERRORS, comm=one.comm, error=error) == count, error
    assert metrics.sum(ERRORS, comm=one.comm) == sum(truth["errors"].values())


def live_threads() -> int:
    return sum(1 for _ in Path("/proc").glob("[0-9]*/task/*"))


def nothing_is_left(lockd: Lockd, one: Workload) -> Metrics:
    """No thread is remembered in the kernel that lives no more; nothing is said to wait."""

    def holds(metrics: Metrics) -> bool:
        remembered = metrics.sum("lockd_map_entries", map="threads")
        return remembered <= live_threads() + STRAYS

    at_rest(lockd, one.comm)
    return lockd.until(holds, SETTLED_SECONDS)


def lines(metrics: Metrics, **labels: str) -> int:
    return sum(len(metrics.labels(name, **labels)) for name in metrics.samples)


def test_a_storm_of_short_lived_processes(lockd: Lockd, workload: Start) -> None:
    # What is kept of threads and locks has room for so many that one storm may fill it: a second
    # one shows whether it goes on growing.
    processes, grown_mib = 20_000, []
    for _ in range(2):
        before = lockd.metrics()
        one = workload("fork_storm", processes)
        truth = one.run()
        one.finish()
        metrics = nothing_is_left(lockd, one)
        report(before,metrics)
        check_futex_totals(metrics, one, truth)
        assert lines(metrics, comm=one.comm) < 1000  # one process to the reader, not 20,000
        assert lines(metrics) <= MOST_LINES
        resident = "lockd_resident_bytes"
        grown = metrics.sum(resident, process="sampler") - before.sum(resident, process="sampler")
        grown_mib.append(grown / 2**20)
        print(grown_mib, lines(metrics, comm=one.comm), lines(metrics), truth)


def test_a_churn_of_short_lived_threads(lockd: Lockd, workload: Start) -> None:
    before = lockd.metrics()
    one = workload("clone_churn", 100_000)
    truth = one.run()
    metrics = nothing_is_left(lockd, one)
    report(before,metrics)
    check_futex_totals(metrics, one, truth)
    assert lines(metrics, comm=one.comm) < 1000
    one.finish()

def report(before, m):
    for n in ("lockd_dropped_events_total","lockd_overflow_events_total","lockd_tick_late_seconds_bucket","lockd_tick_seconds_bucket","lockd_unseen_switches_total","lockd_ticks_total"):
        for k,v in m.samples[n].items():
            d=v-before.samples[n].get(k,0)
            if d: print(n,k,d)
