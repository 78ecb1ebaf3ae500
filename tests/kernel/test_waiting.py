"""Waits that have not ended: seen while they last, gone when their process is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import PER_WAIT_US, at_rest, in_one_of_some_tries, mode_calls_is_thorough
from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import Start, Workload

WAITING = "lockd_futex_waiting"
MAX, LOCK_MAX = "lockd_futex_max_blocked_us", "lockd_futex_lock_max_blocked_us"
COUNT, SUM = "lockd_futex_blocked_seconds_count", "lockd_futex_blocked_seconds_sum"
ERRORS = "lockd_futex_errors_total"

SEEN_SECONDS = 2.0
"""The time within which lockd promises to show an ongoing wait. Ongoing waits are read once a second, and an
answer may be 0.2 s old.
"""
PATIENCE_SECONDS = 10.0
"""The time that the tests wait for lockd on a machine that has no time for it."""


def lock_labels(one: Workload) -> dict[str, str]:
    return {"comm": one.comm, "kind": "lock"}


def test_a_thread_that_is_stuck_shows_while_it_is(narrow: Lockd, workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload("stuck_mutex")
        truth = one.run()
        labels, since = lock_labels(one), time.monotonic()
        first = narrow.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
        seen_at = time.monotonic()
        narrow.until(lambda m: m.max(MAX, **labels) > first.max(MAX, **labels) > 0, PATIENCE_SECONDS)
        grown_at = time.monotonic()
        check_what_is_stuck(narrow, one, truth)
        check_end_of_what_was_stuck(narrow, one, truth)
        took = [round(seen_at - since, 1), round(grown_at - seen_at, 1)]
        return [] if max(took) <= SEEN_SECONDS else [f"seen, and seen to grow, after {took} s"]

    in_one_of_some_tries(attempt)


def check_what_is_stuck(narrow: Lockd, one: Workload, truth: dict[str, Any]) -> None:
    threads = narrow.api("threads", comm=one.comm, kind="lock", limit="1000")
    (thread,) = [row for row in threads if row["program"] == "futex"]
    waited_us = (time.monotonic_ns() - truth["since_monotonic_ns"]) / 1000
    assert thread["tid"] == truth["tid"]
    assert thread["tgid"] == one.pid
    assert waited_us - PATIENCE_SECONDS * 1e6 < thread["waiting_us"] < waited_us
    (lock,) = named_locks(narrow, one)
    assert lock["lock"] == "stuck_mutex:stuck_mutex"
    assert lock["address"] == truth["addr"]
    assert lock["tgid"] == one.pid
    assert (lock["waiting"], lock["threads"]) == (1, 1)
    assert lock["waiting_us"] > 0
    labels = lock_labels(one) | {"lock": lock["lock"]}
    narrow.until(lambda m: m.sum("lockd_futex_lock_waiting", **labels) == 1, PATIENCE_SECONDS)


def check_end_of_what_was_stuck(narrow: Lockd, one: Workload, truth: dict[str, Any]) -> None:
    labels = lock_labels(one)
    earliest_us = (time.monotonic_ns() - truth["since_monotonic_ns"]) / 1000
    one.kill()
    latest_us = (time.monotonic_ns() - truth["since_monotonic_ns"]) / 1000
    metrics = at_rest(narrow, one.comm)
    assert metrics.max(MAX, **labels) == metrics.max(LOCK_MAX, **labels) == 0
    assert metrics.sum("lockd_futex_lock_waiting", **labels) == 0
    assert metrics.sum(COUNT, **labels) == 1
    assert earliest_us - PER_WAIT_US < metrics.sum(SUM, **labels) * 1e6 < latest_us
    assert not any(row["waiting_us"] for row in narrow.api("threads", comm=one.comm, limit="1000"))
    assert not any(row["waiting"] for row in narrow.api("locks", comm=one.comm, limit="1000"))


def named_locks(narrow: Lockd, one: Workload) -> list[dict[str, Any]]:
    """Return the futex locks of a workload, once they have names, which takes up to a second more."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        locks = [row for row in narrow.api("locks", comm=one.comm, kind="lock") if row["program"] == "futex"]
        if all(row["lock"] for row in locks):
            return locks
        assert time.monotonic() < deadline, locks
        time.sleep(0.1)


def test_an_idle_pool_is_no_contention(narrow: Lockd, workload: Start) -> None:
    one = workload("idle_pool", 8, 5)
    cond, lock = {"comm": one.comm, "kind": "cond"}, lock_labels(one)
    one.go()
    first = narrow.until(lambda m: m.sum(WAITING, **cond) == 8, PATIENCE_SECONDS)
    second = narrow.until(lambda m: m.max(MAX, **cond) >= first.max(MAX, **cond) + 900_000, PATIENCE_SECONDS)
    truth = one.truth()
    last = at_rest(narrow, one.comm)
    assert second.sum(WAITING, **cond) == 8
    assert last.sum(COUNT, **cond) == truth["futex"]["cond"]["blocked"]
    for metrics in (first, second, last):
        assert metrics.max(MAX, **lock) == metrics.sum(COUNT, **lock) == 0
    one.finish()


def test_a_process_that_has_renamed_itself(narrow: Lockd, tmp_path: Path) -> None:
    # The process sleeps under two names. An event tells lockd the first, but only procfs the second.
    before, after = (f"{name}.{os.getpid():x}.exec" for name in "ba")
    (tmp_path / after).symlink_to("/bin/sleep")
    lines = f"""
import os, time
open("/proc/self/comm", "w").write("{before}")
time.sleep(0.1)
os.execv("{tmp_path / after}", ["sleep", "60"])
"""
    process = subprocess.Popen([sys.executable, "-c", lines])
    try:
        deadline, names = time.monotonic() + PATIENCE_SECONDS, {}
        while names != {before: 1, after: 0}:  # numbers of waits that have ended
            assert time.monotonic() < deadline, names
            time.sleep(0.1)
            rows = narrow.api("threads", limit="1000")
            sleeps = [row for row in rows if row["tid"] == process.pid and row["kind"] == "sleep"]
            names = {row["comm"]: row["blocked_count"] for row in sleeps}
        assert {row["comm"] for row in sleeps if row["waiting_us"]} == {after}
        metrics = narrow.metrics(settled=False)
        assert metrics.max("lockd_offcpu_max_blocked_us", comm=after, reason="sleep") > 0
    finally:
        process.kill()
        process.wait()


def stop(one: Workload) -> None:
    """Stop the process, and wait until it is stopped."""
    os.kill(one.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)


def check_errors(metrics: Metrics, one: Workload, **errors: int) -> None:
    """Assert that these calls failed and no others, in mode `calls`; in mode `blocked`, that there are no
    metrics of errors.
    """
    if not metrics.counts_calls:
        assert ERRORS not in metrics.samples
        return
    found = {error: metrics.sum(ERRORS, comm=one.comm, error=error) for error in errors}
    assert found == errors
    assert metrics.sum(ERRORS, comm=one.comm) == sum(errors.values())


@mode_calls_is_thorough
def test_a_timed_wait_that_is_stopped_and_continued(either: Lockd, workload: Start) -> None:
    # The kernel goes on with the wait as another system call, restart_syscall.
    one = workload("timed_wait", 10_000)
    labels = lock_labels(one)
    one.go()
    either.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
    stop(one)
    stopped = time.monotonic()
    while_stopped = at_rest(either, one.comm)
    assert while_stopped.sum(COUNT, **labels) == 1
    check_errors(while_stopped, one, EINTR=1)
    stopped_us = (time.monotonic() - stopped) * 1e6
    os.kill(one.pid, signal.SIGCONT)
    either.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
    truth = one.truth()
    last = at_rest(either, one.comm)
    assert last.sum(COUNT, **labels) == 2
    check_errors(last, one, EINTR=1, ETIMEDOUT=1)
    assert last.sum(SUM, **labels) * 1e6 == pytest.approx(truth["us"] - stopped_us, rel=0.03)
    assert last.sum("lockd_offcpu_blocked_seconds_count", comm=one.comm, reason="stopped") == 1
    one.finish()


@mode_calls_is_thorough
def test_a_wait_without_end_that_is_stopped_and_continued(either: Lockd, workload: Start) -> None:
    one = workload("stuck_mutex")
    labels = lock_labels(one)
    one.run()
    either.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
    stop(one)
    at_rest(either, one.comm)
    os.kill(one.pid, signal.SIGCONT)
    again = either.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
    assert again.sum(COUNT, **labels) == 1
    check_errors(again, one, EINTR=1)
    one.kill()
    last = at_rest(either, one.comm)
    assert last.sum(COUNT, **labels) == 2
    check_errors(last, one, EINTR=1)


@mode_calls_is_thorough
def test_a_timed_wait_that_is_stopped_and_killed(either: Lockd, workload: Start) -> None:
    one = workload("timed_wait", 60_000)
    labels = lock_labels(one)
    one.go()
    either.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
    stop(one)
    one.kill()
    last = at_rest(either, one.comm)
    assert last.sum(COUNT, **labels) == 1
    check_errors(last, one, EINTR=1)
