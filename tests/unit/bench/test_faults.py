"""Tests of what bench/faults.py concludes from metrics, and of what makes its run fail."""

from __future__ import annotations

from typing import Any

import pytest

from bench import faults

TEXT = """\
# HELP lockd_futex_waits_total Calls.
# TYPE lockd_futex_waits_total counter
lockd_futex_waits_total{comm="a b",kind="lock",unit=""} 7.0
# TYPE lockd_futex_waiting gauge
lockd_futex_waiting{comm="a b",kind="lock",unit=""} 1.0
# TYPE lockd_tick_late_seconds histogram
lockd_tick_late_seconds_bucket{le="0.001"} 2.0
lockd_tick_late_seconds_bucket{le="+Inf"} 5.0
lockd_tick_late_seconds_sum 1.5
# TYPE lockd_cpu_seconds_total counter
lockd_cpu_seconds_total{process="exporter"} 3.0
lockd_cpu_seconds_total{process="namer"} 4.0
"""


def test_what_may_not_fall() -> None:
    assert faults.counters(TEXT) == {
        'lockd_futex_waits_total{comm="a b",kind="lock",unit=""}': 7.0,
        'lockd_tick_late_seconds_bucket{le="0.001"}': 2.0,
        'lockd_tick_late_seconds_bucket{le="+Inf"}': 5.0,
        "lockd_tick_late_seconds_sum": 1.5,
        'lockd_cpu_seconds_total{process="namer"}': 4.0,
    }


def test_how_late_ticks_were() -> None:
    assert faults.lateness(faults.Metrics(TEXT)) == {"0.001": 2, "+Inf": 3}


@pytest.mark.parametrize(
    ("values", "most_grown", "is_flat"),
    [
        ([5, 5, 5, 5], 0.0, True),
        ([5, 5, 5, 6, 5, 5], 0.0, True),
        ([5, 5, 6, 6], 0.0, False),
        ([50, 50, 54, 54], 0.1, True),
        ([50, 50, 56, 56], 0.1, False),
        ([50], 0.1, True),
    ],
)
def test_what_is_flat(values: list[float], most_grown: float, is_flat: bool) -> None:
    found = faults.halves([(float(at), value) for at, value in enumerate(values)], most_grown)
    assert found["is flat"] is is_flat


def test_what_a_workload_did() -> None:
    truth = {
        "futex": {"lock": {"waits": 3, "blocked": 2}},
        "wakes": 1,
        "errors": {"EAGAIN": 1},
        "kernel": {"mutex": {"waits": 4}, "rwsem_read": {"waits": 5}},
    }
    assert faults.events_of(truth) == {
        ("lockd_futex_waits_total", "kind", "lock"): 3,
        ("lockd_futex_blocked_seconds_count", "kind", "lock"): 2,
        ("lockd_futex_wakes_total", "", ""): 1,
        ("lockd_futex_errors_total", "error", "EAGAIN"): 1,
        ("lockd_kernel_lock_wait_seconds_count", "lock_type", "mutex"): 4,
    }


def test_what_fails_a_run() -> None:
    grown = {"what": "MB", "process": "namer", "first": 1.0, "second": 2.0, "is flat": False}
    good: dict[str, Any] = {
        "wrong": [], "fallen": [], "left in the kernel": [], "errors": {}, "log": ["all is well"],
        "minutes": 5.0, "resources": [grown],
    }  # fmt: skip
    assert faults.failures(good) == []
    for what, value in {
        "wrong": ["lockd ended"],
        "fallen": ["x: 2, then 1"],
        "left in the kernel": [("prog", "7")],
        "errors": {"scrape": ["OSError"]},
        "log": ["Traceback (most recent call last):"],
        "minutes": faults.JUDGED_MINUTES,
    }.items():
        assert len(faults.failures({**good, what: value})) == 1, what


def test_no_fault_has_the_name_of_another() -> None:
    names = [fault.name for fault in faults.faults()]
    assert len(set(names)) == len(names)
