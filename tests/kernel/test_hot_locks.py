"""A lock that becomes hot late has its series within a minute, though others came before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from lockd_process import Lockd, Metrics
from workload import Workload

COMM = "latemutex"
CONDS, THREADS = 60, 8
PLACES = 50
"""As many locks have series by default."""
BEFORE_SECONDS, SECONDS = 2, 25
BLOCKED, COUNTED = "lockd_futex_lock_blocked_seconds_total", "lockd_futex_lock_blocked_total"


def locks_of(metrics: Metrics, kind: str) -> set[str]:
    return {labels["lock"] for labels in metrics.labels(COUNTED, comm=COMM, kind=kind)}


def test_a_mutex_is_seen_behind_sixty_condition_variables(tmp_path: Path, host: None) -> None:
    """The smallest case: the places of series.top_locks are all taken when the fight begins."""
    lockd = Lockd(tmp_path, {"filter": {"comms": [COMM]}})
    workload = Workload("late_mutex", CONDS, THREADS, BEFORE_SECONDS, SECONDS, comm=COMM)
    try:
        workload.go()
        lockd.until(lambda metrics: metrics.sum("lockd_futex_waiting", kind="cond") == CONDS, 30)
        lockd.until(lambda metrics: len(locks_of(metrics, "cond")) >= PLACES, 30)
        seen = lockd.until(lambda metrics: bool(locks_of(metrics, "lock")), 60)
        truth = workload.truth()["futex"]["lock"]
        metrics = lockd.metrics()
        assert len(locks_of(metrics, "lock")) == 1
        (lock,) = locks_of(metrics, "lock")
        assert lock.endswith("late_mutex")

        for m in (seen, metrics):
            print([(labels, m.sum(BLOCKED, **labels), m.sum(COUNTED, **labels)) for labels in m.labels(BLOCKED, kind="lock")])

        # From then on all waits for it are counted there, and nowhere else.
        since = seen.sum(BLOCKED, kind="lock"), metrics.sum(BLOCKED, kind="lock")
        own = seen.sum(BLOCKED, comm=COMM, kind="lock"), metrics.sum(BLOCKED, comm=COMM, kind="lock")
        assert own[1] - own[0] == pytest.approx(since[1] - since[0])
        assert own[1] > 0.5 * since[1]

        # Nothing is lost or counted twice on the way.
        count = metrics.sum("lockd_futex_blocked_seconds_count", kind="lock")
        assert metrics.sum(COUNTED, kind="lock") == count >= truth["blocked"]
        assert metrics.sum(BLOCKED, kind="lock") * 1e6 == pytest.approx(truth["blocked_us"], rel=0.05)
        shown = metrics.labels(COUNTED, comm=COMM)
        assert len(shown) <= PLACES + 2, [(labels, metrics.sum(COUNTED, **labels)) for labels in shown]
    finally:
        workload.kill()
        assert lockd.stop() == 0, "".join(lockd.log)
