"""Real programs that are idle: however their threads wait for work, none of them waits for a lock."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from checks import at_rest
from conftest import Start
from lockd_process import Lockd, Metrics

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
WAITING, MAX = "lockd_futex_waiting", "lockd_futex_max_blocked_us"
CONTENTION = ("lock", "pi")
SOON_SECONDS, LONG_SECONDS = 10.0, 2.0
"""Until all is known of threads that have just begun to wait, and how long it then must be so."""
PAGING_US = 1_000_000
"""What the alerts call a long wait."""
RUNS, STUCK = 2, 2


def contention(metrics: Metrics, comm: str) -> tuple[float, float]:
    """How many threads wait for a lock, and how long the longest has, or had, in us."""
    waiting = sum(metrics.sum(WAITING, comm=comm, kind=kind) for kind in CONTENTION)
    return waiting, max(metrics.max(MAX, comm=comm, kind=kind) for kind in CONTENTION)


def check_idle(narrow: Lockd, comm: str, threads: int) -> None:
    """That so many wait, none of them for a lock, and that nothing would be said of a long wait."""

    def is_idle(metrics: Metrics) -> bool:
        return not contention(metrics, comm)[0] and metrics.sum(WAITING, comm=comm, kind="cond") >= threads

    narrow.until(is_idle, SOON_SECONDS)
    until = time.monotonic() + LONG_SECONDS
    while time.monotonic() < until:
        metrics = narrow.metrics(settled=False)
        assert is_idle(metrics), narrow.api("threads", comm=comm, limit="1000")
        assert contention(metrics, comm)[1] < PAGING_US
        time.sleep(0.5)


@pytest.mark.parametrize("held_us", [100, 300_000])
@pytest.mark.parametrize("run", range(RUNS))
def test_python_with_an_executor_and_queues(narrow: Lockd, workload: Start, held_us: int, run: int) -> None:
    """In memory where others waited for locks a moment before: too shortly to be looked at, or not."""
    comm = f"idle.{os.getpid():x}.{run}.{held_us // 1000}"
    one = workload("/usr/bin/python3", PROGRAMS / "idle.py", held_us, comm=comm)
    truth = one.run()
    assert truth["reused"] > truth["idle"] / 2
    check_idle(narrow, comm, truth["idle"])
    one.finish()
    metrics = at_rest(narrow, comm)
    assert contention(metrics, comm)[1] < PAGING_US, "the waits were not for locks when they ended either"
    assert metrics.max(MAX, comm=comm, kind="cond") > PAGING_US


def test_python_that_is_stuck_among_idle_threads(narrow: Lockd, workload: Start) -> None:
    """In memory where it waited for an event before."""
    comm = f"idle.{os.getpid():x}.stuck"
    one = workload("/usr/bin/python3", PROGRAMS / "idle.py", 300_000, STUCK, comm=comm)
    one.run()

    def are_stuck(metrics: Metrics) -> bool:
        waiting, longest_us = contention(metrics, comm)
        return waiting == STUCK and longest_us > PAGING_US

    narrow.until(are_stuck, SOON_SECONDS)
    rows = narrow.api("locks", comm=comm, kind="lock", limit="1000")
    assert [row["lock"] for row in rows if row["waiting"]] == ["idle.py:be_stuck"] * STUCK
    one.kill()
