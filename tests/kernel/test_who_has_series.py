"""A hot lock and a service have their series within a minute, though they came late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import Workload

COMM = "latemutex"
CONDS, THREADS = 60, 8
PLACES = 50
"""The number of locks that have series by default."""
SECONDS = 20
BLOCKED, COUNTED = "lockd_futex_lock_blocked_seconds_total", "lockd_futex_lock_blocked_total"


def locks_of(metrics: Metrics, kind: str) -> set[str]:
    return {labels["lock"] for labels in metrics.labels(COUNTED, comm=COMM, kind=kind)}


@pytest.mark.thorough("twenty seconds; tests/unit/sample has a day of it by simulation")
def test_a_mutex_is_seen_behind_sixty_condition_variables(tmp_path: Path, host: None) -> None:
    """The smallest case: all places of series.top_locks are taken when threads begin to want the mutex."""
    lockd = Lockd(tmp_path, {"filter": {"comms": [COMM]}})
    workload = Workload("late_mutex", CONDS, THREADS, SECONDS, comm=COMM)
    try:
        workload.go()
        lockd.until(lambda metrics: metrics.sum("lockd_futex_waiting", kind="cond") == CONDS, 30)
        lockd.until(lambda metrics: len(locks_of(metrics, "cond")) >= PLACES, 30)
        workload.go()
        seen = lockd.until(lambda metrics: bool(locks_of(metrics, "lock")), 60)
        truth = workload.truth()["futex"]["lock"]
        metrics = lockd.metrics()
        assert len(locks_of(metrics, "lock")) == 1
        (lock,) = locks_of(metrics, "lock")
        assert lock.endswith("late_mutex")

        # Once the mutex has its series, all waits for it are counted there, and nowhere else.
        since = seen.sum(BLOCKED, kind="lock"), metrics.sum(BLOCKED, kind="lock")
        own = seen.sum(BLOCKED, comm=COMM, kind="lock"), metrics.sum(BLOCKED, comm=COMM, kind="lock")
        assert own[1] - own[0] == pytest.approx(since[1] - since[0])
        assert own[1] > 0.5 * since[1]

        # Nothing is lost or counted twice on the way.
        count = metrics.sum("lockd_futex_blocked_seconds_count", kind="lock")
        assert metrics.sum(COUNTED, kind="lock") == count >= truth["blocked"]
        assert metrics.sum(BLOCKED, kind="lock") * 1e6 == pytest.approx(truth["blocked_us"], rel=0.05)
        shown = metrics.labels(COUNTED, comm=COMM)
        assert len(shown) <= PLACES + 1  # one that lost its place may show its last numbers
    finally:
        workload.kill()
        assert lockd.stop() == 0, "".join(lockd.log)


@pytest.mark.thorough(
    "what lasts is known after half a minute; tests/unit/sample/test_busy_host.py has a day of it"
)
def test_a_service_that_starts_late_has_its_series(tmp_path: Path, host: None) -> None:
    """Before the service starts, 400 processes with 400 names have taken all series, and ended."""
    names, service = "mp[0-9]*", "lateservice"
    config = {
        "filter": {"comms": [names, "mp-parent", service]},
        "series": {"max": 2000},
        "programs": {"futex": {"mode": "calls"}},
    }
    lockd = Lockd(tmp_path, config)
    started: list[Workload] = []
    try:
        started.append(Workload("many_procs", 400, 2, comm="mp-parent"))
        before = started[0].run()["futex"]["lock"]
        started[0].finish()
        refused = lockd.metrics()
        for family in ("futex", "futex_process", "offcpu", "offcpu_runqueue"):
            assert refused.sum("lockd_series_overflow_total", family=family) > 0, family

        started.append(Workload("mutex_handover", 2500, 20_000, comm=service))
        started[1].go()
        metrics = ("lockd_futex_waits_total", "lockd_futex_wakes_total", "lockd_offcpu_blocked_seconds_count",
                   "lockd_offcpu_runqueue_seconds_count", COUNTED)  # fmt: skip
        lockd.until(lambda m: all(m.labels(metric, comm=service) for metric in metrics), 60)
        after = started[1].truth()["futex"]["lock"]
        seen = lockd.metrics()
        for metric, key in (("lockd_futex_waits_total", "waits"), (COUNTED, "blocked")):
            counted = seen.sum(metric, kind="lock") + seen.sum("lockd_retired_value", metric=metric)
            assert counted == before[key] + after[key], metric
    finally:
        for workload in started:
            if workload.process.poll() is None:
                workload.kill()
        assert lockd.stop() == 0, "".join(lockd.log)
