"""Real programs that are idle: however their threads wait for work, none of them waits for a lock."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import need
from tests.support.checks import at_rest
from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import OURS, Start

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
WAITING, MAX = "lockd_futex_waiting", "lockd_futex_max_blocked_us"
CONTENTION = ("lock", "pi")
SOON_SECONDS, LONG_SECONDS = 30.0, 2.0
"""Seconds until lockd knows all about threads that have just begun to wait, and seconds for which what it
says must then stay the same."""
PAGING_US = 1_000_000
"""The time from which on the alerts call a wait long, in µs."""
RUNS, STUCK = 2, 2


def contention(metrics: Metrics, comm: str) -> tuple[float, float]:
    """Return how many threads wait for a lock, and the longest wait for a lock, ended or ongoing, in µs."""
    waiting = sum(metrics.sum(WAITING, comm=comm, kind=kind) for kind in CONTENTION)
    return waiting, max(metrics.max(MAX, comm=comm, kind=kind) for kind in CONTENTION)


def check_idle(narrow: Lockd, comm: str, threads: int) -> None:
    """Check that so many threads wait, none for a lock, and that no alert of a long wait would fire."""

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
@pytest.mark.parametrize(
    "run", [0, *(pytest.param(run, marks=pytest.mark.thorough("once more")) for run in range(1, RUNS))]
)
def test_python_with_an_executor_and_queues(narrow: Lockd, workload: Start, held_us: int, run: int) -> None:
    """The idle threads wait at addresses at which others waited for locks a moment before.

    These waits were too short for lockd to look at the locks (100 µs), or long enough (300 ms).
    """
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
    """The stuck threads wait at addresses at which they waited for an event before."""
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


@contextlib.contextmanager
def redis(directory: Path, comm: str, threads: int) -> Iterator[Path]:
    """Run a Redis server with so many threads for its clients' sockets, one of which is the main thread.

    Yields the path of the server's socket.
    """
    program, socket = directory / comm, directory / "socket"
    program.symlink_to(need("redis-check-rdb"))
    options = {"port": 0, "unixsocket": socket, "io-threads": threads, "save": "", "dir": directory}
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + SOON_SECONDS
            while not socket.exists():
                assert time.monotonic() < until and server.poll() is None
                time.sleep(0.02)
            yield socket
        finally:
            server.terminate()


@pytest.mark.thorough("fifteen seconds of nothing else")
def test_redis_whose_threads_park_on_mutexes(narrow: Lockd, tmp_path: Path) -> None:
    """The main thread holds the mutexes while there is little to do, and releases them under load."""
    need("redis-benchmark")
    comm, threads = f"idle.{os.getpid():x}.redis", 4
    with redis(tmp_path, comm, threads) as socket:
        check_idle(narrow, comm, threads - 1)
        load = ["redis-benchmark", "-s", socket, "-c", "50", "-n", "20000", "-t", "set,get", "-q"]
        subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
        check_idle(narrow, comm, threads - 1)
        rows = [row for row in narrow.api("locks", comm=comm, limit="1000") if row["program"] == "futex"]
        parked = [row for row in rows if ":io_threads_mutex" in row["lock"]]
        assert sum(row["waiting"] for row in parked) == threads - 1, rows
        assert {row["kind"] for row in parked} == {"cond"}
    waits = at_rest(narrow, comm)
    assert contention(waits, comm)[1] < PAGING_US


def test_a_lock_that_threads_park_on_by_configuration(host: None, tmp_path: Path, workload: Start) -> None:
    """A thread that is stuck by default counts as idle if `names.parked` has its lock."""
    config = {"filter": {"comms": [OURS]}, "names": {"parked": ["*:stuck_mutex"]}}
    with Lockd(tmp_path, config) as daemon:
        one = workload("stuck_mutex")
        one.run()
        check_idle(daemon, one.comm, 1)
        one.kill()
        assert daemon.stop() == 0, "".join(daemon.log)
