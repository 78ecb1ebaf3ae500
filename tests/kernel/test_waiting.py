"""Waits that have not ended: seen while they last, gone when their process is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import Start
from lockd_process import Lockd
from workload import Workload

WAITS, WAITING = "lockd_futex_waits_total", "lockd_futex_waiting"
MAX, LOCK_MAX = "lockd_futex_max_blocked_us", "lockd_futex_lock_max_blocked_us"
COUNT, SUM = "lockd_futex_blocked_seconds_count", "lockd_futex_blocked_seconds_sum"
ERRORS = "lockd_futex_errors_total"

SCAN_SECONDS = 2.0
"""Waits that go on are read once a second, and an answer may be 0.2 s old."""
GONE_SECONDS = 5.0


def lock_labels(one: Workload) -> dict[str, str]:
    return {"comm": one.comm, "kind": "lock"}


def test_a_thread_that_is_stuck_shows_while_it_is(narrow: Lockd, workload: Start) -> None:
    one = workload("stuck_mutex")
    labels = lock_labels(one)
    truth = one.run()
    first = narrow.until(lambda m: m.sum(WAITING, **labels) == 1, SCAN_SECONDS)
    narrow.until(lambda m: m.max(MAX, **labels) > first.max(MAX, **labels) > 0, SCAN_SECONDS)

    threads = narrow.api("threads", comm=one.comm, kind="lock")
    (thread,) = [row for row in threads if row["program"] == "futex"]
    waited_us = (time.monotonic_ns() - truth["since_monotonic_ns"]) / 1000
    assert thread["tid"] == truth["tid"]
    assert thread["tgid"] == one.pid
    assert waited_us - SCAN_SECONDS * 1e6 < thread["waiting_us"] < waited_us
    (lock,) = named_locks(narrow, one)
    assert re.fullmatch(r"stuck_mutex\+0x[0-9a-f]+", lock["lock"])
    assert lock["address"] == truth["addr"]
    assert lock["tgid"] == one.pid
    assert (lock["waiting"], lock["threads"]) == (1, 1)
    assert lock["waiting_us"] > 0

    named = labels | {"lock": lock["lock"]}
    narrow.until(lambda m: m.sum("lockd_futex_lock_waiting", **named) == 1, SCAN_SECONDS)
    killed_us = (time.monotonic_ns() - truth["since_monotonic_ns"]) / 1000
    one.kill()
    gone = narrow.until(
        lambda m: m.sum(WAITING, **labels) == m.max(MAX, **labels) == m.max(LOCK_MAX, **labels) == 0,
        GONE_SECONDS,
    )
    assert gone.sum("lockd_futex_lock_waiting", **labels) == 0
    assert gone.sum(WAITS, **labels) == gone.sum(COUNT, **labels) == 1
    assert gone.sum(SUM, **labels) * 1e6 == pytest.approx(killed_us, rel=0.03, abs=50_000)
    assert not any(row["waiting_us"] for row in narrow.api("threads", comm=one.comm))
    assert not any(row["waiting"] for row in narrow.api("locks", comm=one.comm))


def named_locks(narrow: Lockd, one: Workload) -> list[dict[str, Any]]:
    """Its futex locks, once they have names, which takes up to a second more."""
    deadline = time.monotonic() + SCAN_SECONDS
    while True:
        locks = [row for row in narrow.api("locks", comm=one.comm, kind="lock") if row["program"] == "futex"]
        if all(row["lock"] for row in locks):
            return locks
        assert time.monotonic() < deadline, locks
        time.sleep(0.1)


def test_an_idle_pool_is_no_contention(narrow: Lockd, workload: Start) -> None:
    one = workload("idle_pool", 8, 4)
    cond, lock = {"comm": one.comm, "kind": "cond"}, lock_labels(one)
    one.go()
    first = narrow.until(lambda m: m.sum(WAITING, **cond) == 8, 4)
    second = narrow.until(lambda m: m.max(MAX, **cond) >= first.max(MAX, **cond) + 900_000, 4)
    truth = one.truth()
    last = narrow.until(lambda m: m.sum(WAITING, **cond) == 0, GONE_SECONDS)
    assert second.sum(WAITING, **cond) == 8
    assert last.sum(COUNT, **cond) == truth["futex"]["cond"]["blocked"]
    for metrics in (first, second, last):
        assert metrics.max(MAX, **lock) == metrics.sum(WAITS, **lock) == 0
    one.finish()


def test_a_process_that_has_renamed_itself(lockd: Lockd) -> None:
    # It sleeps under two names: an event tells the first, and only procfs the second.
    lines = "import os, time; time.sleep(0.1); os.execv('/bin/sleep', ['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", lines]) as process:
        deadline = time.monotonic() + GONE_SECONDS
        comms: set[str] = set()
        while comms != {"sleep"}:
            assert time.monotonic() < deadline, comms
            time.sleep(0.1)
            rows = lockd.api("threads", limit="1000")
            comms = {row["comm"] for row in rows if row["tid"] == process.pid and row["waiting_us"]}
        process.kill()


def stop(one: Workload) -> None:
    """Stop the process, and wait until it is."""
    os.kill(one.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_timed_wait_that_is_stopped_and_continued(narrow: Lockd, workload: Start) -> None:
    # The kernel goes on with it as another system call, restart_syscall.
    one = workload("timed_wait", 10_000)
    labels = lock_labels(one)
    one.go()
    narrow.until(lambda m: m.sum(WAITING, **labels) == 1, SCAN_SECONDS)
    stop(one)
    stopped = time.monotonic()
    while_stopped = narrow.until(lambda m: m.sum(WAITING, **labels) == 0, SCAN_SECONDS)
    assert while_stopped.sum(WAITS, **labels) == while_stopped.sum(ERRORS, comm=one.comm, error="EINTR") == 1
    stopped_us = (time.monotonic() - stopped) * 1e6
    os.kill(one.pid, signal.SIGCONT)
    narrow.until(lambda m: m.sum(WAITING, **labels) == 1, SCAN_SECONDS)
    truth = one.truth()
    last = narrow.until(lambda m: m.sum(WAITING, **labels) == 0, GONE_SECONDS)
    assert last.sum(WAITS, **labels) == last.sum(COUNT, **labels) == 2
    assert last.sum(ERRORS, comm=one.comm, error="EINTR") == 1
    assert last.sum(ERRORS, comm=one.comm, error="ETIMEDOUT") == 1
    assert last.sum(ERRORS, comm=one.comm) == 2
    assert last.sum(SUM, **labels) * 1e6 == pytest.approx(truth["us"] - stopped_us, rel=0.03)
    assert last.sum("lockd_offcpu_blocked_seconds_count", comm=one.comm, reason="stopped") == 1
    one.finish()


def test_a_wait_without_end_that_is_stopped_and_continued(narrow: Lockd, workload: Start) -> None:
    one = workload("stuck_mutex")
    labels = lock_labels(one)
    one.run()
    narrow.until(lambda m: m.sum(WAITING, **labels) == 1, SCAN_SECONDS)
    stop(one)
    narrow.until(lambda m: m.sum(WAITING, **labels) == 0, SCAN_SECONDS)
    os.kill(one.pid, signal.SIGCONT)
    again = narrow.until(lambda m: m.sum(WAITING, **labels) == 1, SCAN_SECONDS)
    assert again.sum(COUNT, **labels) == again.sum(ERRORS, comm=one.comm, error="EINTR") == 1
    one.kill()
    last = narrow.until(lambda m: m.sum(WAITING, **labels) == 0, GONE_SECONDS)
    assert last.sum(WAITS, **labels) == last.sum(COUNT, **labels) == 2
    assert last.sum(ERRORS, comm=one.comm) == 1


def test_a_timed_wait_that_is_stopped_and_killed(narrow: Lockd, workload: Start) -> None:
    one = workload("timed_wait", 60_000)
    labels = lock_labels(one)
    one.go()
    narrow.until(lambda m: m.sum(WAITING, **labels) == 1, SCAN_SECONDS)
    stop(one)
    one.kill()
    last = narrow.until(
        lambda m: m.sum(WAITING, **labels) == 0 and m.sum(ERRORS, comm=one.comm) == 1, GONE_SECONDS
    )
    assert last.sum(WAITS, **labels) == last.sum(COUNT, **labels) == 1
