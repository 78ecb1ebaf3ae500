"""Deadlocks are found within two seconds, told once, and gone with their threads. No others are found."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import in_one_of_some_tries
from tests.support.lockd_process import CHECKOUT, Lockd, Metrics
from tests.support.workload import BUILD, NUMBERS, OURS, WITHOUT_DEBUG_FILES, Start, Workload

FOUND_SECONDS = 2.0
"""The time in which lockd promises to find a deadlock, from when the last thread asks for its lock."""
PATIENCE_SECONDS = 15.0
"""How long a test waits on a machine that has no time for lockd."""
LIVE_SECONDS = int(os.environ.get("LOCKD_TEST_LIVE_SECONDS", "20"))
EXISTING, EVER = "lockd_deadlocks", "lockd_deadlocks_found_total"
RING, READER, WRITER, PI, SELF, RECURSIVE, PROCESSES, ROBUST, PI_RING, LIVE, JOIN = range(11)

MODES = {
    "two mutexes": (RING, 2),
    "five mutexes": (RING, 5),
    "a mutex and a reader of an rwlock": (READER, 2),
    "a mutex and a writer of an rwlock": (WRITER, 2),
    "a PI mutex and a mutex": (PI, 2),
    "one mutex twice": (SELF, 1),
    "recursive mutexes": (RECURSIVE, 3),
    "two processes": (PROCESSES, 2),
    "robust mutexes": (ROBUST, 2),
    "PI mutexes": (PI_RING, 3),
    "a mutex and a join": (JOIN, 2),
}
"""Arguments of the workload `deadlock`: the mode, and the number of threads in the ring."""
AS_OTHERS = {"five mutexes", "a mutex and a reader of an rwlock", "recursive mutexes", "robust mutexes"}
"""Those of MODES whose owners are found in the same way as those of another one."""


def rows_of(narrow: Lockd, one: Workload, count: int) -> list[dict[str, Any]]:
    """Return the deadlocks of a workload as soon as there are `count` of them: an answer may be 0.2 s old."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(rows := narrow.api("deadlocks", comm=one.comm)) != count:
        assert time.monotonic() < deadline, rows
        time.sleep(0.05)
    return rows


def journal(narrow: Lockd, one: Workload) -> list[str]:
    return [line for line in narrow.log if "error deadlock in" in line and one.comm in line]


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        pytest.param(*MODES[name], id=name, marks=[pytest.mark.thorough("as others")] * (name in AS_OTHERS))
        for name in MODES
    ],
)
def test_a_deadlock(request: pytest.FixtureRequest, workload: Start, mode: int, size: int) -> None:
    # The kernel refuses the lock that would close a ring of PI locks: such a call does not block.
    daemon = request.getfixturevalue("calls" if mode == PI_RING else "narrow")
    find(daemon, lambda: workload("deadlock", mode, size, 3), mode)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon in mode calls where no debug files are installed, of the C library or of anything else."""
    program = [*WITHOUT_DEBUG_FILES, *CHECKOUT]
    config = {"filter": {"comms": [OURS]}, "programs": {"futex": {"mode": "calls"}}}
    daemon = Lockd(tmp_path_factory.mktemp("bare"), config, program)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.mark.thorough("ten seconds for hosts without debug files")
@pytest.mark.parametrize("name", ["a PI mutex and a mutex", "PI mutexes", "a mutex and a join"])
def test_a_deadlock_in_functions_that_only_the_c_library_knows(
    bare: Lockd, workload: Start, name: str
) -> None:
    mode, size = MODES[name]
    command = [*WITHOUT_DEBUG_FILES, BUILD / "deadlock", mode, size, 3]
    find(bare, lambda: workload(*command, comm=f"bare.{os.getpid():x}.{next(NUMBERS)}"), mode)


def find(narrow: Lockd, start: Callable[[], Workload], mode: int) -> None:
    def attempt() -> list[str]:
        one = start()
        truth = one.run()
        narrow.until(lambda m: m.sum(EXISTING, comm=one.comm) == 1, PATIENCE_SECONDS)
        took = (time.monotonic_ns() - truth["formed_ns"]) / 1e9
        (row,) = rows_of(narrow, one, 1)
        check_row(row, one, truth, mode)
        last = check_it_is_told_once(narrow, one, truth)
        assert last.sum(EVER, comm=one.comm) == 1
        (still,) = rows_of(narrow, one, 1)
        assert still["id"] == row["id"]
        one.kill()
        narrow.until(lambda m: m.sum(EXISTING, comm=one.comm) == 0, PATIENCE_SECONDS)
        rows_of(narrow, one, 0)
        assert narrow.metrics().sum(EVER, comm=one.comm) == 1
        assert len(journal(narrow, one)) == 1
        print(f"found after {took:.2f} s")
        return [] if took <= FOUND_SECONDS else [f"found after {took:.2f} s"]

    in_one_of_some_tries(attempt)


def check_row(row: dict[str, Any], one: Workload, truth: dict[str, Any], mode: int) -> None:
    tids = truth["tids"]
    threads = row["threads"]
    assert row["comm"] == one.comm
    assert row["threads_in_ring"] == len(tids)
    assert row["waiting"] == 3
    lasted_us = (time.monotonic_ns() - truth["formed_ns"]) / 1000
    assert 1e6 <= row["lasted_us"] < lasted_us
    assert [thread["tid"] for thread in threads] == tids  # the first of them has waited longest
    assert [thread["holder_tid"] for thread in threads] == tids[1:] + tids[:1]
    addresses = truth["mutexes"][1:] + truth["mutexes"][:1]
    for thread, address in zip(threads, addresses, strict=True):
        is_mutex = thread["tid"] != {READER: tids[-1], WRITER: tids[-1], JOIN: tids[0]}.get(mode)
        assert (thread["address"] == address) == is_mutex
        assert thread["thread_comm"] == one.comm
        assert thread["kind"] == ("cond" if mode == JOIN and not is_mutex else pi_or_lock(mode, thread, tids))
        assert thread["tgid"] == (thread["tid"] if mode == PROCESSES else one.pid)


def pi_or_lock(mode: int, thread: dict[str, Any], tids: list[int]) -> str:
    return "pi" if mode == PI_RING or (mode == PI and thread["tid"] == tids[-1]) else "lock"


def check_it_is_told_once(narrow: Lockd, one: Workload, truth: dict[str, Any]) -> Metrics:
    """Assert that the journal has one line of the deadlock; return the metrics two seconds after it came."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (lines := journal(narrow, one)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    told = time.monotonic()
    for tid in truth["tids"]:
        assert f"{one.comm}[{tid}] waits for " in lines[0]
    assert "3 more threads wait for these" in lines[0]
    last = narrow.until(lambda _: time.monotonic() > told + 2, PATIENCE_SECONDS)
    assert len(journal(narrow, one)) == 1
    assert last.sum(EXISTING, comm=one.comm) == 1
    return last


@pytest.mark.parametrize(("mode", "lock"), [(RING, "deadlock_mutexes"), (WRITER, "deadlock_mutexes")])
def test_its_locks_and_places(narrow: Lockd, workload: Start, mode: int, lock: str) -> None:
    one = workload("deadlock", mode, 2)
    one.run()
    narrow.until(lambda m: m.sum(EXISTING, comm=one.comm) == 1, PATIENCE_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    (row,) = rows_of(narrow, one, 1)
    while not all(thread["lock"] for thread in row["threads"]):  # a name is shown after the next survey
        assert time.monotonic() < deadline, row
        time.sleep(0.05)
        (row,) = rows_of(narrow, one, 1)
    assert lock in row["threads"][0]["lock"]
    for thread in row["threads"]:
        assert thread["site"] == "deadlock:take_second"
        assert "deadlock:take_second" in thread["stack"]


def test_the_holder_of_a_contended_lock(narrow: Lockd, workload: Start) -> None:
    one = workload("stuck_mutex")
    truth = one.run()
    deadline = time.monotonic() + PATIENCE_SECONDS
    holders: set[tuple[int, str]] = set()
    while holders != {(truth["owner_tid"], one.comm)}:
        assert time.monotonic() < deadline, holders
        locks = narrow.api("locks", comm=one.comm, kind="lock")
        holders = {(row["holder_tid"], row["holder"]) for row in locks if row["program"] == "futex"}
        time.sleep(0.1)
    rows_of(narrow, one, 0)


def test_the_holder_of_a_kernel_lock(narrow: Lockd, workload: Start, scratch: Path) -> None:
    """The lock is a pipe's mutex. With it held, the holder waits for a missing page, again and again."""
    one = workload("kernel_locks", 10, 1_500_000, scratch)
    one.go()
    deadline = time.monotonic() + PATIENCE_SECONDS
    holders: set[tuple[int, str]] = set()
    while not holders:
        assert time.monotonic() < deadline
        rows = [row for row in narrow.api("locks", comm=one.comm) if row["kind"] == "mutex"]
        holders = {(row["holder_tid"], row["holder"]) for row in rows if row["holder_tid"]}
        time.sleep(0.1)
    ((tid, comm),) = holders
    assert comm == one.comm
    assert tid != one.pid
    assert Path(f"/proc/{one.pid}/task/{tid}").exists()


@pytest.mark.thorough("twenty seconds of nothing else")
def test_no_deadlock_is_none(narrow: Lockd, workload: Start) -> None:
    """Much contention, chains of waits for seconds, and locks that time out may look like a deadlock."""
    one = workload("deadlock", LIVE, LIVE_SECONDS)
    os.setpriority(os.PRIO_PROCESS, one.pid, 19)  # so that it leaves time for others
    one.go()
    seen = []
    end = time.monotonic() + LIVE_SECONDS
    while time.monotonic() < end:
        seen += json.loads(narrow.get(f"/api/v1/deadlocks?comm={one.comm}"))["deadlocks"]
        time.sleep(0.5)
    truth = one.truth()
    metrics = narrow.metrics()
    waits = metrics.sum("lockd_futex_blocked_seconds_count", comm=one.comm)
    print(f"{truth['waits']} rounds, {waits:.0f} waits that blocked")
    assert seen == journal(narrow, one) == []
    assert metrics.sum(EVER, comm=one.comm) == 0
    assert metrics.max("lockd_futex_max_blocked_us", comm=one.comm, kind="lock") > 1e6
    one.finish()
