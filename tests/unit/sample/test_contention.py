"""Tests of which thread waited for which lock, when there are more locks than the tables have rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockd.columns.wide_sums import WIDE
from lockd.export.detail import Block, ProfileQuery, between, locks_left_out, profile_of
from lockd.messages import pack, unpack
from lockd.sample.aggregates import contention as module
from lockd.sample.aggregates.contention import (
    FORGET_AFTER,
    FORGET_ENDED_AFTER,
    PROGRAMS,
    ContentionTables,
)
from lockd.sample.aggregates.lock_holders import HoldersOfLock
from lockd.sample.aggregates.lock_series import LockSeries
from lockd.sample.locks.releases import Release
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.series import Series

CAPACITY = 64


@pytest.fixture
def detail(monkeypatch: pytest.MonkeyPatch) -> ContentionTables:
    monkeypatch.setattr(module, "MIN_ROWS", CAPACITY)
    return ContentionTables(lambda tgid, tid: f"thread{tid}", CAPACITY)


def wait(
    detail: ContentionTables, locks: list[int], tid: int, now: float, comm: str = "shop", ns: int = 1000,
    tgid: int = 0, kind: str = "lock", thread_comm: bytes = b"",
) -> None:  # fmt: skip
    """Count one wait of thread `tid` for each lock. `locks` are keys; key 1 gets the name `lock1`."""
    ones = np.ones(len(locks), np.int64)
    kinds, kind_names = np.zeros(len(locks), np.int64), np.array([kind], object)
    process = np.empty(len(locks), object)
    process[:] = [("shop.service", comm)] * len(locks)
    who = np.zeros(len(locks), [("tgid", np.uint32), ("thread_comm", "S16")])
    who["tgid"], who["thread_comm"] = tgid, thread_comm
    rows = detail.locks.find_or_add(
        np.array(locks, np.uint64),
        now,
        lambda at: {
            "program": PROGRAMS.index("futex"),
            "kind": kind,
            "lock": [f"lock{locks[i]}" for i in at],
            "process": process[at],
            "tgid": tgid,
            "since": now,
        },
    )
    waits = SimpleNamespace(tids=tid * ones, who=who, codes=ones, processes=process)
    threads = detail.thread_rows("futex", cast(Any, waits), kinds, kind_names, now)
    for table, of in ((detail.locks, rows), (detail.threads, threads)):
        detail.add_waits(table, of, ns * ones, ones, ns * ones)
    detail.note_lock_threads(rows, threads, tid * ones, now)


def test_a_row_of_the_locks_that_is_used_again_is_another_lock(detail: ContentionTables) -> None:
    """Threads that waited for the lock before are shown without a lock."""
    wait(detail, [1], tid=7, now=1.0)
    wait(detail, list(range(1000, 1000 + CAPACITY)), tid=8, now=2.0)  # these fill the table
    tables: dict[str, Any] = detail.tables(2.0, {}, {})[0]
    threads = tables["threads"]["text"]
    assert threads["thread_comm"] == ["thread8", "thread7"]
    assert threads["lock"][1] == ""
    assert threads["lock"][0].startswith("lock1")
    assert detail.count_threads(2.0).sum() == CAPACITY


def test_a_lock_that_comes_back_is_the_one_that_it_was(detail: ContentionTables) -> None:
    """When the lock has a row again, earlier waiters are shown with it again."""
    wait(detail, [1], tid=7, now=1.0)
    wait(detail, list(range(1000, 1000 + CAPACITY)), tid=8, now=2.0)
    wait(detail, [1], tid=9, now=3.0)
    threads = detail.tables(3.0, {}, {})[0]["threads"]["text"]
    assert dict(zip(threads["thread_comm"], threads["lock"], strict=True))["thread7"] == "lock1"


@pytest.mark.parametrize(
    "names",
    [
        (b"java", b"pool-1"),  # it blocked once before it was named
        (b"", b"pool-1"),  # a survey saw it first
        (b"pool-1", b""),  # a survey saw it last
    ],
)
def test_a_thread_has_the_name_that_was_seen_last(
    detail: ContentionTables, monkeypatch: pytest.MonkeyPatch, names: tuple[bytes, bytes]
) -> None:
    """It has the name even when it has ended, so that procfs does not tell its name any more."""
    monkeypatch.setattr(detail, "_thread_comm", lambda tgid, tid: "")
    for now, name in enumerate(names):
        wait(detail, [1], tid=7, now=float(now), thread_comm=name)
    assert detail.tables(1.0, {}, {})[0]["threads"]["text"]["thread_comm"] == ["pool-1"]


def test_a_thread_counts_once_for_locks_of_one_name(detail: ContentionTables) -> None:
    """If many objects each have a mutex, all these mutexes have one name."""
    series = Series(
        "futex_lock", {"count": np.int64, "blocked_ns": WIDE}, counters={"count": "c"}, names=(0, 1, 3),
        lines=1, budget=LineBudget(Limits()), others=1,
    )  # fmt: skip
    locks = LockSeries("futex", detail, series, ["lock"], has_site=False)
    for tid in (7, 8, 9):
        wait(detail, [1, 2, 3], tid=tid, now=1.0)
    wait(detail, [4], tid=7, now=1.0)
    ones = np.ones(4, np.int64)
    rows = detail.locks.find(np.array([1, 2, 3, 4], np.uint64))
    for row, name in zip(rows.tolist(), ["shop:mutex"] * 3 + ["shop:other"], strict=True):
        locks.set_name(row, name, "", ())
    locks.add(rows, ones, 1000 * ones, 1000 * ones, 1.0)
    counted = locks.count_threads(1.0)
    found = {labels[3]: int(counted[row]) for row, labels in zip(*series.live(), strict=True)}
    assert found == {"shop:mutex": 3, "shop:other": 1}


def test_a_process_is_shown_however_many_locks_others_have(
    detail: ContentionTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks /api/v1/locks for one unit or comm gets its worst locks."""
    monkeypatch.setattr(module, "SHOWN", 10)
    monkeypatch.setattr(module, "SHOWN_BY_PROCESS", 5)
    wait(detail, list(range(1000, 1020)), tid=8, now=1.0)
    wait(detail, [1, 2, 3], tid=9, now=1.0, comm="quiet", ns=1)
    comms = detail.tables(1.0, {}, {})[0]["locks"]["text"]["comm"]
    assert comms == ["shop"] * 8 + ["quiet"] * 2


def test_threads_that_wait_for_work_take_no_place_of_contention(
    detail: ContentionTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a pool wait for work for hours, each at a condition variable of its own."""
    monkeypatch.setattr(module, "SHOWN", 10)
    monkeypatch.setattr(module, "SHOWN_BY_PROCESS", 4)
    monkeypatch.setattr(module, "SHOWN_IDLE", 3)
    for number in range(20):
        wait(detail, [1000 + number], tid=1000 + number, now=1.0, ns=10**12, kind="cond")
    for number in range(9):
        wait(detail, [1 + number], tid=1 + number, now=1.0)
    tables = detail.tables(1.0, {}, {})[0]
    for name in ("locks", "threads"):
        assert tables[name]["text"]["kind"] == ["cond"] * 3 + ["lock"] * 7
    assert tables["locks"]["is_cut"]


def test_what_waits_for_work_has_the_places_that_are_left(
    detail: ContentionTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHOWN", 10)
    monkeypatch.setattr(module, "SHOWN_IDLE", 3)
    wait(detail, [1, 2], tid=1, now=1.0)
    wait(detail, list(range(1000, 1008)), tid=2, now=1.0, kind="cond")
    assert not detail.tables(1.0, {}, {})[0]["locks"]["is_cut"]
    wait(detail, list(range(1000, 1020)), tid=2, now=1.0, kind="cond")
    table = detail.tables(1.0, {}, {})[0]["locks"]
    assert table["text"]["kind"].count("cond") == 8
    assert table["is_cut"]


def snapshot(detail: ContentionTables, now: float) -> Block:
    tables, arrays = detail.tables(now, {}, {})
    return unpack(memoryview(pack({"tables": tables, "time": now, "monotonic": now}, arrays)))


@pytest.mark.parametrize("by", ["waiter", "holder"])
def test_a_profile_of_some_seconds_has_new_locks_though_the_table_is_cut(
    by: str, detail: ContentionTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that was there before and had no place in the table may have got its time at any moment."""
    monkeypatch.setattr(module, "SHOWN", 5)

    def wait_and_hold(locks: list[int], now: float, us: int) -> None:
        wait(detail, locks, tid=7, now=now, ns=us * 1000)
        for row in detail.locks.find(np.array(locks, np.uint64)).tolist():
            held = detail.locks["holders"][row] = detail.locks["holders"][row] or HoldersOfLock()
            held.add(
                Release(
                    10, ("shop.service", "shop"), 0x1000, 0, False, us * 1000, now, 0,
                    causes={"running": us * 1000}, holder="f", stack=("f",),
                )
            )  # fmt: skip

    wait(detail, [1], tid=7, now=1.0, ns=10**9)  # no holder of this lock is known yet
    wait_and_hold(list(range(2, 9)), now=1.0, us=500)
    wait_and_hold([9], now=1.0, us=1)
    earlier = snapshot(detail, 2.0)
    wait_and_hold([1], now=3.0, us=70)
    wait_and_hold([9, 10], now=3.0, us=1000)
    later = snapshot(detail, 4.0)
    assert {"lock9", "lock10"} < set(later[0]["tables"]["locks"]["text"]["lock"])
    query = ProfileQuery("futex", {"by": [by.encode()]})
    left_out = locks_left_out(earlier, later)
    found = between(profile_of(query, *earlier), profile_of(query, *later), 2.0, left_out)
    assert {one.labels["lock"]: one.values[0] for one in found.samples} == {"lock1": 70, "lock10": 1000}


@pytest.mark.parametrize(
    ("tgid", "alive", "kept"),
    [
        pytest.param(100, {100: ("shop.service", "shop")}, FORGET_AFTER, id="a process that lives"),
        pytest.param(100, {101: ("shop.service", "shop")}, FORGET_ENDED_AFTER, id="one that has ended"),
        pytest.param(0, {101: ("shop.service", "shop")}, FORGET_AFTER, id="a kernel lock"),
        pytest.param(0, {101: ("shop.service", "sh")}, FORGET_ENDED_AFTER, id="a kernel lock of nobody now"),
    ],
)
def test_what_ended_processes_leave_is_forgotten_sooner(
    detail: ContentionTables, tgid: int, alive: dict[int, tuple[str, str]], kept: float
) -> None:
    wait(detail, [1, 2], tid=7, now=1.0, tgid=tgid)
    detail.expire(1.0 + kept, alive)
    assert len(detail.locks) == 2
    assert len(detail.threads) == 1
    detail.expire(1.1 + kept, alive)
    assert len(detail.locks) == len(detail.threads) == 0


def test_what_has_news_is_kept_though_its_process_has_ended(detail: ContentionTables) -> None:
    """Windows are folded a while after their waits, and the process may have ended meanwhile."""
    wait(detail, [1], tid=7, now=1.0, tgid=100)
    wait(detail, [2], tid=8, now=500.0, tgid=100)
    detail.expire(2.0 + FORGET_ENDED_AFTER, {})
    assert [detail.locks["lock"][row] for row in np.flatnonzero(detail.locks.used)] == ["lock2"]
    assert len(detail.threads) == 1
