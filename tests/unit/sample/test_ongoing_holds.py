"""Tests of holds of kernel locks that go on, of their rows in the API, and of holders that are gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from lockd.names.protocol import ANON, UNKNOWN, KernelLock, LockAnswer
from lockd.process.clock import NS
from lockd.sample.aggregates.kernel_holds import ABANDONED_NS
from tests.support.kernel_hold_host import LOCK, MUTEX, READ, SEMAPHORE, US, WRITE, Host, entry
from tests.support.small_procfs import Procfs


def test_the_longest_hold_in_progress(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop")
    host.fold(entry(7, acquired=2, held=2 * NS))
    host.look(
        host.held(7, 3.0),
        host.held(8, 5.0, 0.5, tgid=7),  # the outer of two nested holds
        host.held(9, 0.01, asked=True, tgid=7),  # too short ago to count as held
        host.held(7, 0.25, 4.0, lock=LOCK + 64, lock_type=READ, asked=True),
    )
    mutex, rwsem = sorted(host.api(), key=lambda row: str(row["kind"]))
    assert (mutex["holding_us"], mutex["holding_tid"]) == (5e6, 8)
    assert (mutex["held_us"], mutex["max_held_us"]) == (2e6, 5e6)
    assert (rwsem["kind"], rwsem["holding_us"], rwsem["acquisitions"]) == ("rwsem_read", 4e6, 1)
    host.look()
    assert [(row["holding_us"], row["holding_tid"]) for row in host.api()] == [(0, 0)] * 2
    assert {row["max_held_us"] for row in host.api()} == {2e6, 0}


def test_four_nested_and_one_more_asked_for(host: Host, procfs: Procfs) -> None:
    """An entry has room for four times: that of the first hold gave way to that of the fifth, asked for."""
    procfs.add(7, b"shop")
    (key, (since, *rest)) = host.held(7, 0.01, 8.0, 7.0, 6.0, lock_type=SEMAPHORE)
    host.look((key, (since, *rest[:-2], True, False)))
    (row,) = host.api()
    assert row["holding_us"] == 8e6
    assert host.acquired() == {}


def test_the_api_shows_holds_beside_the_waits_for_the_same_lock(host: Host) -> None:
    locks, processes = host.contention.locks, np.empty(3, object)
    processes[:] = [("", "shop")] * 3

    def describe(positions: npt.NDArray[np.int64]) -> dict[str, Any]:
        return {
            "program": 2,
            "address": np.array([LOCK, LOCK, LOCK + 64], np.uint64)[positions],
            "kind": "mutex",
            "kind_number": MUTEX,
            "process": processes[positions],
            "site": np.array(["here", "there", "here"], object)[positions],
            "lock": np.array(["named", "named", ""], object)[positions],
            "blocked_ns": np.array([5, 9, 7])[positions],
        }

    locks.find_or_add(np.arange(1, 4).astype(np.uint64), 0.0, describe)
    host.fold(
        entry(7, acquired=4, held=40 * US),
        entry(7, lock=LOCK + 128, acquired=1, held=50 * US),
        entry(9, comm=b"other one", acquired=1, held=10 * US),
    )
    rows = host.api()
    told = [(r["address"], r["comm"], r["lock"], r["site"], r["acquisitions"], r["held_us"]) for r in rows]
    assert told == [
        (hex(LOCK), "shop", "named", "there", 4, 40.0),  # only in the row with most blocked time
        (hex(LOCK + 64), "shop", "", "here", 0, 0.0),
        (hex(LOCK), "shop", "named", "here", 0, 0.0),
        (hex(LOCK + 128), "shop", "", "", 1, 50.0),
        (hex(LOCK), "other one", "named", "", 1, 10.0),
    ]
    assert {row["program"] for row in rows} == {"kernel_locks"}
    assert all(row["blocked_us"] == 0 and row["stack"] == [] for row in rows[3:])


def test_a_flood_of_locks_leaves_room_for_both_kinds_of_rows(host: Host) -> None:
    locks, process = host.contention.locks, np.empty(1, object)
    process[0] = ("", "shop")

    def describe(positions: npt.NDArray[np.int64]) -> dict[str, Any]:
        return {
            "program": 2,
            "kind": "mutex",
            "address": positions,
            "blocked_ns": 1 + positions,
            "process": process,
        }

    locks.find_or_add(np.arange(1, 5001).astype(np.uint64), 0.0, describe)
    for start in range(0, 40_000, 4000):
        host.fold(*(entry(7, lock=LOCK + 64 * i, held=i + 1) for i in range(start, start + 4000)))
    rows = host.api()
    assert len(rows) == 1000
    assert [row["holds"] for row in rows] == [0] * 750 + [1] * 250
    assert rows[0]["blocked_us"] == 5.0
    assert [rows[at]["held_us"] for at in (750, 751)] == [40.0, 39.999]
    assert sum(host.acquired().values()) == 40_000


def test_idle_threads_do_not_shift_the_holds_of_contended_locks(host: Host) -> None:
    """The second choice of rows has more of those that wait for work, and these may come before locks."""
    locks, process = host.contention.locks, np.empty(1, object)
    process[0] = ("", "shop")

    def describe(positions: npt.NDArray[np.int64]) -> dict[str, Any]:
        is_idle = positions < 900
        return {
            "program": np.where(is_idle, 0, 2),
            "kind": np.where(is_idle, "cond", "mutex").astype(object),
            "kind_number": MUTEX,
            "address": np.uint64(LOCK) + np.uint64(64) * positions.astype(np.uint64),
            "blocked_ns": np.where(is_idle, 10**12, 10**6),
            "process": process,
        }

    locks.find_or_add(np.arange(1, 906).astype(np.uint64), 0.0, describe)
    host.fold(*(entry(7, lock=LOCK + 64 * i, held=5 * US) for i in range(900, 925)))
    rows = host.api()
    held = {row["address"] for row in rows if row["held_us"]}
    assert held == {hex(LOCK + 64 * i) for i in range(900, 925)}
    assert {row["program"] for row in rows if row["held_us"]} == {"kernel_locks"}


def test_locks_held_longest_get_names(procfs: Procfs) -> None:
    (procfs.root / "kallsyms").write_text(f"{LOCK:x} D init_task\n{LOCK + 64:x} D some_lock\n")
    host = Host(procfs.root)
    host.fold(entry(7, lock=LOCK + 64, held=9), entry(7, lock=LOCK + 2**32, held=5))
    host.look()
    asked = {row["address"]: row["lock"] for row in host.api()}
    assert set(asked.values()) == {""}
    named: dict[str, str] = {}
    deadline = time.monotonic() + 30
    while set(named.values()) != {"some_lock", "anon"}:
        assert time.monotonic() < deadline, named
        for answer in host.holds._table._resolver.answers():
            assert isinstance(answer, LockAnswer)
            host.holds._table.set_name(answer)
        named = {row["address"]: row["lock"] for row in host.api()}
        time.sleep(0.01)
    assert named[hex(LOCK + 64)] == "some_lock"


def test_a_held_lock_whose_question_was_lost_with_a_namer_is_asked_for_again(host: Host) -> None:
    host.fold(entry(7, lock=LOCK + 64, held=9))
    host.look()
    table = host.holds._table
    (row,) = np.flatnonzero(table._table["is_asked"])
    answer = KernelLock(int(table._table["key"][row]), LOCK + 64, "mutex").fallback()
    assert isinstance(answer, LockAnswer)
    table.set_name(answer)
    assert not table._table["is_asked"].any()
    assert [row["lock"] for row in host.api()] == [""]
    host.look()
    assert table._table["is_asked"].any()


def test_the_mmap_lock_gets_its_name_when_it_is_known_as_one(host: Host, procfs: Procfs) -> None:
    """It is so when the hold ends. While the hold goes on, the namer cannot name it."""
    procfs.add(7, b"shop")
    table = host.holds._table
    host.look(host.held(7, 2.0, lock_type=WRITE))
    (row,) = np.flatnonzero(table._table["is_asked"])
    key = int(table._table["key"][row])
    table.set_name(LockAnswer(key, False, ANON, UNKNOWN))
    host.fold(entry(7, lock_type=WRITE, held=2 * NS, is_mmap_lock=True))
    host.look()
    *_, question = table._resolver._queue
    assert isinstance(question, KernelLock)
    assert (question.key, question.is_mmap_lock) == (key, True)
    table.set_name(LockAnswer(key, False, "mmap_lock", UNKNOWN))
    table.set_name(LockAnswer(key, False, ANON, UNKNOWN))  # had waited, with the first question
    assert [row["lock"] for row in host.api()] == ["mmap_lock"]
    host.fold(entry(7, lock_type=WRITE, held=2 * NS, is_mmap_lock=True))
    assert table._table["is_asked"][row]


@pytest.mark.parametrize("of_own", [(True, False), (False, True)])
def test_it_is_known_as_one_by_any_of_several_holds(host: Host, of_own: tuple[bool, bool]) -> None:
    """A hold that another thread ended does not tell."""
    host.fold(*(entry(7 + i, tgid=7, is_mmap_lock=is_own) for i, is_own in enumerate(of_own)))
    (row,) = np.flatnonzero(host.holds._table._table.used)
    assert host.holds._table._table["is_mmap_lock"][row]


# --- Holders that are gone ------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[tuple[int, threading.Event]]:
    """Return the id of a thread of this process, and the event that ends the thread."""
    end, started = threading.Event(), threading.Event()
    ids: list[int] = []

    def work() -> None:
        ids.append(threading.get_native_id())
        started.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    yield ids[0], end
    end.set()
    thread.join()


def test_a_lock_whose_holder_is_gone_is_given_up(worker: tuple[int, threading.Event]) -> None:
    tid, end = worker
    host = Host(Path("/proc"))
    host.clock += 2 * ABANDONED_NS  # so that it began all holds after its start
    held = [
        host.held(tid, 70.0, asked=True, tgid=os.getpid()),
        host.held(tid, 70.0, 65.0, lock=LOCK + 1, lock_type=READ, tgid=os.getpid()),
        host.held(tid, 70.0, lock=LOCK + 2, lock_type=SEMAPHORE, tgid=os.getpid()),
        host.held(tid, 59.0, lock=LOCK + 3, tgid=os.getpid()),
    ]
    host.look(*held)
    assert sum(host.acquired().values()) == 1
    assert host.holds.find_abandoned() is None
    end.set()
    deadline = time.monotonic() + 30
    while Path(f"/proc/self/task/{tid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gone = host.holds.find_abandoned()
    assert gone
    keys, holds = gone
    assert sorted(keys["lock"].tolist()) == [LOCK, LOCK + 1]
    assert holds == 3
    assert sum(host.acquired().values()) == 1  # it was taken, and the programs will not count it
    host.fold(entry(tid, acquired=1))
    assert sum(host.acquired().values()) == 2


def test_a_thread_that_has_the_id_of_one_that_is_gone(worker: tuple[int, threading.Event]) -> None:
    tid, _ = worker
    processes = Processes(Units(Path("/proc")))
    now = time.monotonic_ns()
    assert processes.has_thread(os.getpid(), tid, now)
    assert not processes.has_thread(os.getpid(), tid, now - 3600 * NS)
    assert not processes.has_thread(os.getpid(), 1, now)
