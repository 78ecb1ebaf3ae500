"""Waits that began before the daemon are seen at once, with the time they have lasted, and counted once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import at_rest
from tests.support.lockd_process import Lockd, Metrics
from tests.support.mechanisms import Daemons
from tests.support.workload import OURS, Start, Workload

WAITING = "lockd_futex_waiting"
MAX, LOCK_MAX = "lockd_futex_max_blocked_us", "lockd_futex_lock_max_blocked_us"
COUNT, SUM = "lockd_futex_blocked_seconds_count", "lockd_futex_blocked_seconds_sum"
OFFCPU_COUNT, OFFCPU_MAX = "lockd_offcpu_blocked_seconds_count", "lockd_offcpu_max_blocked_us"
OFFCPU_SUM = "lockd_offcpu_blocked_seconds_sum"

BEFORE_SECONDS = 2.0
"""How long threads wait, at least, before the daemon starts."""
CLOCKS_US = 50_000
"""How much the scheduler's clock may differ, on a busy or emulated machine, from the clock of the tests."""
PATIENCE_SECONDS = 20.0

VFORK = """
import ctypes
open("/proc/self/comm", "w").write("{comm}")
libc = ctypes.CDLL(None)
child = ctypes.cast(libc.pause, ctypes.c_void_p)
stack = ctypes.create_string_buffer(65536)
top = ctypes.c_void_p((ctypes.addressof(stack) + 65536) & ~15)
print("ready", flush=True)
CLONE_VM, CLONE_VFORK, SIGCHLD = 0x100, 0x4000, 17
libc.clone(child, top, CLONE_VM | CLONE_VFORK | SIGCHLD, None)
"""


@pytest.fixture
def daemon(tmp_path: Path, host: None) -> Iterator[Callable[[], Lockd]]:
    """A function that starts a daemon which sees only the programs of these tests."""
    started: list[Lockd] = []

    def start() -> Lockd:
        started.append(Lockd(tmp_path, {"filter": {"comms": [OURS]}}))
        return started[-1]

    yield start
    for one in started:
        assert one.stop() == 0, "".join(one.log)


def waited_us(truth: dict[str, Any]) -> float:
    return (time.monotonic_ns() - int(truth["since_monotonic_ns"])) / 1000


def thread_of(lockd: Lockd, program: str, tid: int) -> dict[str, Any]:
    (row,) = [
        row for row in lockd.api("threads", limit="1000") if (row["program"], row["tid"]) == (program, tid)
    ]
    return row


def test_a_thread_that_was_stuck_before(daemon: Callable[[], Lockd], workload: Start) -> None:
    one = workload("stuck_mutex")
    truth, labels = one.run(), {"comm": one.comm, "kind": "lock"}
    time.sleep(BEFORE_SECONDS)
    lockd = daemon()
    earliest = waited_us(truth)
    metrics = lockd.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
    assert earliest - 1e6 - CLOCKS_US < metrics.max(MAX, **labels) < waited_us(truth) + CLOCKS_US
    for program in ("futex", "offcpu"):
        earliest = waited_us(truth)
        thread = thread_of(lockd, program, truth["tid"])
        assert earliest - 2e6 < thread["waiting_us"] < waited_us(truth) + CLOCKS_US
        assert (thread["tgid"], thread["kind"], thread["waiting_is_least"]) == (one.pid, "lock", 0)
    named = labels | {"lock": "stuck_mutex:stuck_mutex"}
    lockd.until(lambda m: m.sum("lockd_futex_lock_waiting", **named) == 1, PATIENCE_SECONDS)
    earliest = waited_us(truth)
    one.kill()
    latest = waited_us(truth)
    metrics = at_rest(lockd, one.comm)
    assert metrics.sum(COUNT, **labels) == 1
    assert earliest - CLOCKS_US < metrics.sum(SUM, **labels) * 1e6 < latest + CLOCKS_US
    assert metrics.sum(OFFCPU_COUNT, comm=one.comm, reason="lock") == 1
    assert metrics.sum(OFFCPU_SUM, comm=one.comm, reason="lock") * 1e6 < latest + CLOCKS_US


def test_a_32_bit_program_that_was_stuck_before(daemon: Callable[[], Lockd], workload: Start) -> None:
    try:
        one = workload("compat_futex", 1, 600_000_000)
    except OSError as error:
        pytest.skip(f"host: this kernel runs no 32-bit programs: {error}")
    labels = {"comm": one.comm, "kind": "lock"}
    one.go()
    time.sleep(BEFORE_SECONDS)
    lockd = daemon()
    metrics = lockd.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
    assert metrics.max(MAX, **labels) > BEFORE_SECONDS * 1e6 - CLOCKS_US
    one.kill()
    metrics = at_rest(lockd, one.comm)
    assert metrics.sum(COUNT, **labels) == metrics.sum(COUNT, comm=one.comm) == 1


def test_waits_that_end_later_are_counted_once(daemon: Callable[[], Lockd], workload: Start) -> None:
    for seconds in (6, 30, 120):
        one = workload("idle_pool", 8, seconds)
        labels = {"comm": one.comm, "kind": "cond"}
        one.go()
        time.sleep(BEFORE_SECONDS)
        lockd = daemon()
        if lockd.metrics().sum(WAITING, **labels) == 8:
            break
        one.finish()  # the waits have ended: this machine took longer than that to start the daemon
    told = one.truth()["futex"]["cond"]
    metrics = at_rest(lockd, one.comm)
    assert metrics.sum(COUNT, **labels) == told["blocked"] == 8
    assert metrics.sum(OFFCPU_COUNT, comm=one.comm, reason="cond") == 8
    assert metrics.sum(SUM, **labels) * 1e6 == pytest.approx(told["blocked_us"], abs=8 * CLOCKS_US)
    one.finish()


@pytest.mark.thorough("lockd chooses tracepoints wherever there are any")
def test_an_older_wait_that_is_followed_by_another(tmp_path: Path, workload: Start) -> None:
    """With fentry and kprobes, the end of a futex call that began before the daemon is not seen. The threads
    here wait again at once, and make no other system call in between in which they could sleep."""
    threads, rounds, found = 4, 2, {}
    for seconds in (6, 30, 120):
        one = workload("crowd", threads, rounds, seconds * 1_000_000, 1)
        one.go()
        began = time.monotonic()
        time.sleep(BEFORE_SECONDS)
        directory = tmp_path / str(seconds)
        directory.mkdir()
        daemons = Daemons(directory, ("fentry", "kprobe"), of_mode_calls)
        try:
            if not daemons.running:
                _ = daemons["fentry"]  # skips the test
            if time.monotonic() > began + seconds:
                continue  # the first waits have ended: this machine took longer than that to start a daemon
            told = one.truth()["futex"]["lock"]
            labels = {"comm": one.comm, "kind": "lock"}
            for by, lockd in daemons.running.items():
                metrics = at_rest(lockd, one.comm)
                missed = metrics.sum("lockd_dropped_events_total", map="futex", reason="return_missed")
                found[by] = metrics.sum(COUNT, **labels), metrics.sum(SUM, **labels) * 1e6, missed
            break
        finally:
            one.kill()
            daemons.stop()
    assert found, "no daemon started before the first waits had ended"
    print(f"truth {told}; by mechanism waits, us and missed returns: {found}")
    assert told["blocked"] == threads * rounds
    for count, blocked_us, missed in found.values():
        assert told["blocked"] - missed <= count <= told["blocked"]
        if count == told["blocked"]:
            assert blocked_us == pytest.approx(told["blocked_us"], abs=count * CLOCKS_US)


def of_mode_calls(mechanism: str) -> dict[str, Any]:
    """Return the configuration of a daemon that counts only the futex calls of these tests' programs."""
    off = {"enabled": False}
    programs = {"futex": {"mode": "calls", "mechanism": mechanism}, "offcpu": off, "kernel_locks": off}
    return {"programs": programs, "filter": {"comms": [OURS]}}


def test_where_the_scheduler_does_not_tell_since_when(daemon: Callable[[], Lockd], workload: Start) -> None:
    """The scheduler does not tell it for a thread of a real-time class. Then a wait counts from the daemon's
    start on, and is marked as at least that long."""
    one = workload("stuck_mutex")
    truth, labels = one.run(), {"comm": one.comm, "kind": "lock"}
    try:
        os.sched_setscheduler(truth["tid"], os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        pytest.skip("host: no real-time threads in this control group (CONFIG_RT_GROUP_SCHED)")
    time.sleep(BEFORE_SECONDS)
    before = time.monotonic_ns()
    lockd = daemon()
    lockd.until(lambda m: m.sum(WAITING, **labels) == 1, PATIENCE_SECONDS)
    for program in ("futex", "offcpu"):
        thread = thread_of(lockd, program, truth["tid"])
        assert 0 < thread["waiting_us"] < (time.monotonic_ns() - before) / 1000
        assert thread["waiting_is_least"] == 1
    one.kill()
    metrics = at_rest(lockd, one.comm)
    assert metrics.sum(COUNT, **labels) == 1
    assert metrics.sum(SUM, **labels) < (time.monotonic_ns() - before) / 1e9


def test_an_uninterruptible_wait(daemon: Callable[[], Lockd]) -> None:
    """The parent of a vfork waits uninterruptibly while its child neither executes a program nor ends."""
    comm = f"vfork.{os.getpid():x}.0"
    parent = subprocess.Popen(
        [sys.executable, "-c", VFORK.format(comm=comm)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert parent.stdout and parent.stdout.readline() == "ready\n"
        since = time.monotonic()
        state = Path(f"/proc/{parent.pid}/stat")
        while state.read_text().rpartition(") ")[2][0] != "D":
            assert time.monotonic() < since + PATIENCE_SECONDS
            time.sleep(0.01)
        time.sleep(BEFORE_SECONDS)
        lockd = daemon()
        least = BEFORE_SECONDS * 1e6 - CLOCKS_US
        labels = {"comm": comm, "reason": "child", "state": "uninterruptible"}

        def is_seen(metrics: Metrics) -> bool:
            return metrics.max(OFFCPU_MAX, **labels) > least

        metrics = lockd.until(is_seen, PATIENCE_SECONDS)
        assert metrics.max(OFFCPU_MAX, **labels) < (time.monotonic() - since) * 1e6 + CLOCKS_US
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def test_threads_that_come_and_go_meanwhile_are_counted_once(
    daemon: Callable[[], Lockd], workload: Start
) -> None:
    """Threads wait and are woken all the time while lockd looks at them at its start. None of them is said to
    have waited since before, and no wait is longer than it can be."""
    busy: Workload = workload("cond_pingpong", 1_000_000)  # goes on for minutes
    began = time.monotonic()
    busy.go()
    lockd = daemon()
    lockd.until(lambda m: m.sum(COUNT, comm=busy.comm, kind="cond") > 0, PATIENCE_SECONDS)
    metrics = lockd.metrics()
    most_us = (time.monotonic() - began) * 1e6 + CLOCKS_US
    rows = [row for row in lockd.api("threads", limit="1000") if row["comm"] == busy.comm]
    busy.kill()
    assert {row["program"] for row in rows} >= {"futex", "offcpu"}
    assert not any(row["waiting_is_least"] for row in rows)
    for name in (MAX, OFFCPU_MAX):
        assert 0 < metrics.max(name, comm=busy.comm) < most_us, name
