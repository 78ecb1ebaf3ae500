"""Futex waits: what lockd says against what the programs know of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Start
from lockd_process import Lockd, Metrics

SHARE = 0.03
PER_WAIT_US = 300
"""Tolerance of times: 3% or 300 us a wait, whichever is more."""


def check_futex(metrics: Metrics, comm: str, truth: dict[str, Any]) -> None:
    """Counts exact, times within tolerance, for every kind that the truth names."""
    for kind, told in truth["futex"].items():
        labels = {"comm": comm, "kind": kind}
        assert metrics.sum("lockd_futex_waits_total", **labels) == told["waits"], kind
        assert metrics.sum("lockd_futex_blocked_seconds_count", **labels) == told["blocked"], kind
        blocked_us = metrics.sum("lockd_futex_blocked_seconds_sum", **labels) * 1e6
        allowed = max(SHARE * told["blocked_us"], PER_WAIT_US * told["blocked"])
        assert blocked_us == pytest.approx(told["blocked_us"], abs=allowed), kind
        if told["blocked"]:
            longest = metrics.max("lockd_futex_max_blocked_us", window="1m", **labels)
            assert longest == pytest.approx(told["max_us"], rel=SHARE, abs=PER_WAIT_US), kind
    if "wakes" in truth:
        assert metrics.sum("lockd_futex_wakes_total", comm=comm) == truth["wakes"]
    for error, count in truth.get("errors", {}).items():
        assert metrics.sum("lockd_futex_errors_total", comm=comm, error=error) == count, error


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("mutex_handover", (100, 2000)),
        ("mutex_handover", (10, 60_000)),
        ("pi_mutex", (50, 2000)),
        ("rwlock", (50, 2000)),
        ("semaphore", (50, 2000)),
        ("cond_pingpong", (500,)),
        ("idle_pool", (8, 3)),
        ("futex_errors", (100, 1000, 50, 1000)),
        ("requeue", (20,)),
        ("futex2", (50,)),
    ],
)
def test_counts_are_exact_and_times_right(
    lockd: Lockd, workload: Start, program: str, arguments: tuple[int, ...]
) -> None:
    one = workload(program, *arguments)
    truth = one.run()
    metrics = lockd.metrics()
    check_futex(metrics, one.comm, truth)
    assert metrics.dropped == 0
    one.finish()
