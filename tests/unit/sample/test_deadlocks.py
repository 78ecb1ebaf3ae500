"""Tests of deadlocks: each real one is found and reported once, and nothing else is reported."""

from __future__ import annotations

import itertools
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockd.export.detail import parse_query, render_table
from lockd.messages import pack, unpack
from lockd.names.labels.processes import Name
from lockd.names.protocol import NOT_READ, Owners, OwnersAnswer
from lockd.process.clock import NS
from lockd.sample.locks import deadlocks as deadlocks_module
from lockd.sample.locks.deadlocks import (
    LASTING_NS,
    LOG_PERIOD_NS,
    LOGGED_NS,
    MOST_ASKED,
    MOST_LOGGED,
    MOST_NAMES,
    MOST_SAVED,
    MOST_SHOWN,
    NEVER,
    SOON_NS,
    Deadlocks,
)
from lockd.sample.locks.waits import LockDescription, Wait, Waits
from lockd.sample.series.block import Block
from lockd.sample.series.series import OTHER

MS = 1_000_000
START = 1_000_000 * MS
TGID = 100


def waits_of(*waits: Wait) -> Waits:
    columns = list(zip(*waits, strict=True)) or [()] * len(Wait._fields)
    kinds = (np.int64, np.int64, np.uint64, np.int64, object, object, np.bool_)
    return Waits(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))


def wait(tid: int, address: int, since: int = START, kind: str = "lock", **more: Any) -> Wait:
    return Wait(
        tid, more.get("tgid", TGID), address, since, kind, more.get("family", "mutex"), kind == "rwsem"
    )


@dataclass
class Bench:
    """Deadlocks with a stand-in for the namer, which knows that thread `owners[lock]` holds a lock."""

    owners: dict[tuple[int, int], int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)
    asked: list[Owners] = field(default_factory=list)
    described: list[Wait] = field(default_factory=list)
    is_resting: bool = False
    """Whether the namer rests: it takes only questions that are needed."""

    def __post_init__(self) -> None:
        self.deadlocks = Deadlocks(
            ask=self._ask,
            kernel_holder=lambda address, waiter: self.owners.get((0, address), 0),
            describe_lock=self._describe,
            identify=lambda tgid, since: ((f"unit-{tgid}", f"comm-{tgid}"), tgid not in self.unwanted),
            thread_comm=lambda tgid, tid: f"thread-{tid}",
        )

    def _describe(self, w: Wait) -> LockDescription:
        self.described.append(w)
        return LockDescription(self.names.get(w.address, ""), f"site-{w.address}", ("f", "main"))

    def _ask(self, question: Owners, is_needed: bool) -> bool:
        if is_needed or not self.is_resting:
            self.asked.append(question)
            return True
        return False

    def answer(self) -> None:
        """Answer all questions with the threads that hold the locks now."""
        while self.asked:
            question = self.asked.pop()
            tids = tuple(self.owners.get((lock.tgid, lock.address), 0) for lock in question.locks)
            self.deadlocks.take_holders(OwnersAnswer(question.token, tids))

    def look(self, clock: int, *waits: Wait) -> None:
        """Check the waits as in each second, and again at once if the answer to a question calls for it."""
        self.deadlocks.check_waits(waits_of(*waits), clock)
        self.answer()
        if self.deadlocks.next_check == 0:
            self.deadlocks.check_waits(waits_of(*waits), clock + 50 * MS)

    @property
    def tids(self) -> list[list[int]]:
        return [[w.tid for w in one.threads] for one in self.deadlocks.reported]

    def rows(self, clock: int) -> list[dict[str, Any]]:
        tables: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        self.deadlocks.add_table(tables, arrays, clock, 1700.0)
        block = memoryview(pack({"tables": tables, "time": 1700.0, "monotonic": 170.0}, arrays))
        rows: list[dict[str, Any]] = json.loads(
            render_table("deadlocks", *unpack(block), query=parse_query({}))
        )["deadlocks"]
        return rows


def ring(size: int, since: int = START) -> tuple[dict[tuple[int, int], int], list[Wait]]:
    """Return the owners and the waits of a ring in which thread 1 waits for thread 2, and so on.

    Each wait began a millisecond after the one before.
    """
    owners = {(TGID, 10 * tid): tid for tid in range(1, size + 1)}
    return owners, [wait(tid, 10 * (tid % size + 1), since + tid * MS) for tid in range(1, size + 1)]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_ring_is_reported_when_it_has_lasted_a_second(size: int) -> None:
    owners, waits = ring(size)
    bench = Bench(owners)
    formed = waits[-1].since
    bench.look(formed + 20 * MS, *waits)
    assert bench.tids == []
    assert bench.deadlocks.next_check == formed + LASTING_NS
    bench.deadlocks.check_waits(waits_of(*waits), formed + LASTING_NS - 1)
    assert bench.tids == []
    bench.look(formed + LASTING_NS, *waits)
    assert bench.tids == [list(range(1, size + 1))]
    bench.look(formed + 2 * LASTING_NS, *waits)
    assert bench.tids == [list(range(1, size + 1))]
    assert bench.deadlocks.next_check == NEVER


def test_it_has_the_name_that_its_process_had_when_it_formed() -> None:
    """A process may have waited under another name before, which the filter may not want."""
    bench = Bench({(TGID, 1): 2, (TGID, 2): 1}, {1: "app:first", 2: "app:second"})
    renamed = START + 1

    def identify(tgid: int, since: int) -> tuple[Name, bool]:
        is_renamed = since > renamed
        return ("unit", "new" if is_renamed else "old"), is_renamed

    bench.deadlocks._identify = identify
    bench.look(START + 2 * LASTING_NS, wait(1, 1), wait(2, 2, since=START + 2))
    assert [one.process for one in bench.deadlocks.reported] == [("unit", "new")]


def test_many_rings_are_one_pass_over_the_waits_and_a_description_of_each_lock() -> None:
    passes: list[Waits] = []

    class Counted(Waits):
        def count_waiters(self, *args: Any) -> Any:
            passes.append(self)
            return super().count_waiters(*args)

    waits = [wait(tid, tid ^ 1) for tid in range(2, 42)]  # 2 and 3 wait for each other, as do 4 and 5 etc.
    bench = Bench({(TGID, tid): tid for tid in range(2, 42)}, dict.fromkeys(range(2, 42), "app:lock"))
    bench.look(START + 2 * LASTING_NS, *waits)
    assert len(bench.tids) == 20
    assert len(bench.described) == len(set(bench.described)) == 40
    again = waits_of(*waits, wait(99, 2))
    again.__class__ = Counted
    bench.deadlocks.check_waits(again, START + 3 * LASTING_NS)
    assert len(passes) == 1
    assert [one.waiting for one in bench.deadlocks.reported] == [1] + 19 * [0]


def test_it_is_found_within_two_seconds_wherever_the_looks_fall() -> None:
    for phase in range(0, 1000, 10):
        owners, waits = ring(2)
        bench = Bench(owners)
        formed = waits[-1].since
        clock = formed + phase * MS - 1000 * MS
        next_second = clock
        while not bench.tids:
            if clock >= min(next_second, bench.deadlocks.next_check):
                next_second += 1000 * MS * (clock >= next_second)
                there = [w for w in waits if w.since <= clock]
                bench.deadlocks.check_waits(waits_of(*there), clock)
            clock += 50 * MS  # the next tick
            if clock % (200 * MS) < 50 * MS:  # the namer answers only every 200 ms
                bench.answer()
        assert LASTING_NS <= clock - formed < 1.5 * LASTING_NS


def test_the_journal_has_it_once(caplog: pytest.LogCaptureFixture) -> None:
    owners, waits = ring(2)
    bench = Bench(owners, {10: "app:a", 20: "app:b"})
    for second in range(5):
        bench.look(START + second * LASTING_NS + 20 * MS, *waits, wait(9, 10, START + 500 * MS))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == (
        "deadlock in comm-100 (unit-100) for 1.0 s: thread-1[1] waits for app:b in site-20,"
        " held by thread-2[2] waits for app:a in site-10, held by thread-1[1]; 1 more threads wait for these"
    )
    assert record.__dict__["LOCKD_TIDS"] == "1 2"
    assert record.__dict__["LOCKD_DEADLOCK"] == bench.rows(START)[0]["id"]


def test_the_journal_waits_for_names_but_not_long(caplog: pytest.LogCaptureFixture) -> None:
    owners, waits = ring(2)
    bench = Bench(owners, {10: "app:a"})
    formed = waits[-1].since
    bench.look(formed + LASTING_NS, *waits)
    assert bench.tids == [[1, 2]]
    assert not caplog.records
    assert bench.deadlocks.next_check == formed + LOGGED_NS
    bench.look(bench.deadlocks.next_check, *waits)
    (record,) = caplog.records
    assert "waits for 0x14 in site-20" in record.getMessage()


def suspended_after_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, int, list[Wait]]:
    """Return a bench that has found a deadlock before the host was suspended for an hour, the time of its
    clock, and the waits."""
    owners, waits = ring(2)
    bench = Bench(owners)
    clock = waits[-1].since + 2 * LASTING_NS
    bench.look(clock, *waits)
    running = time.clock_gettime_ns
    monkeypatch.setattr(time, "clock_gettime_ns", lambda which: running(which) + 3600 * NS)
    return bench, clock, waits


def test_a_suspend_of_the_host_does_not_change_when_a_deadlock_began(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, clock, _ = suspended_after_a_deadlock(monkeypatch)
    (row,) = bench.rows(clock)
    assert row["since"] == pytest.approx(1700.0 - 2 - 3600, abs=0.5)
    assert row["lasted_us"] == 2_000_000


def test_a_restart_after_a_suspend_does_not_change_when_a_deadlock_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, clock, waits = suspended_after_a_deadlock(monkeypatch)
    bench = started_again(started_again(bench))
    bench.look(clock, *waits)
    (row,) = bench.rows(clock)
    assert row["since"] == pytest.approx(1700.0 - 2 - 3600, abs=0.5)


def test_rows_and_metrics() -> None:
    owners, waits = ring(2)
    bench = Bench(owners, {10: "app:a", 20: "app:b"})
    owners[TGID, 50] = 9
    victims = [wait(9, 10), wait(8, 50), wait(7, 50), wait(6, 60)]  # 8 and 7 wait for what 9 holds
    clock = START + 2 * LASTING_NS
    bench.look(clock, *waits, *victims)
    (row,) = bench.rows(clock)
    assert (row["unit"], row["comm"]) == ("unit-100", "comm-100")
    assert (row["threads_in_ring"], row["waiting"]) == (2, 3)
    assert row["lasted_us"] == (clock - START - 2 * MS) / 1000
    assert row["since"] == pytest.approx(1700.0 - 1.998, abs=0.05)  # two clocks are read
    assert row["threads"] == [
        {
            "tid": 1, "tgid": TGID, "thread_comm": "thread-1", "kind": "lock", "lock": "app:b",
            "address": "0x14", "site": "site-20", "stack": ["f", "main"], "holder_tid": 2,
        },
        {
            "tid": 2, "tgid": TGID, "thread_comm": "thread-2", "kind": "lock", "lock": "app:a",
            "address": "0xa", "site": "site-10", "stack": ["f", "main"], "holder_tid": 1,
        },
    ]  # fmt: skip
    assert metrics(bench) == {"lockd_deadlocks": {("unit-100", "comm-100"): 1.0}, "found": 1.0}
    bench.look(clock + LASTING_NS)
    assert bench.rows(clock) == []
    assert metrics(bench) == {"lockd_deadlocks": {}, "found": 1.0}


def metrics(bench: Bench) -> dict[str, Any]:
    block = Block([1], 2)
    bench.deadlocks.export(block)
    head, arrays = unpack(memoryview(block.pack()))
    labels = {each["name"]: [tuple(label) for label in each["labels"]] for each in head["metrics"]}
    name = "lockd_deadlocks"
    return {
        name: dict(zip(labels[name], arrays[name], strict=True)),
        "found": sum(arrays["lockd_deadlocks_found_total"]),
    }


def test_a_thread_that_went_on_ends_it() -> None:
    owners, waits = ring(3)
    bench = Bench(owners)
    clock = START + 2 * LASTING_NS
    bench.look(clock, *waits)
    assert bench.tids == [[1, 2, 3]]
    # An interrupted thread makes its call again: that is another wait of the same thread.
    again = waits[1]._replace(since=clock)
    bench.look(clock + LASTING_NS // 2, waits[0], again, waits[2])
    assert bench.tids == []
    bench.look(clock + 2 * LASTING_NS, waits[0], again, waits[2])
    assert bench.tids == [[1, 2, 3]]


def test_what_was_read_while_a_thread_ran_is_not_believed() -> None:
    # When the namer is asked, thread 2 holds the lock for which thread 1 waits. Then thread 2 releases it and
    # waits for the lock that thread 1 holds.
    owners, (first, second) = ring(2)
    bench = Bench(owners)
    bench.deadlocks.check_waits(waits_of(first), START + 20 * MS)
    bench.answer()
    assert bench.deadlocks.next_check == NEVER
    bench.deadlocks.check_waits(waits_of(first, second), START + 2000 * MS)
    bench.deadlocks.take_holders(OwnersAnswer(0, (1, 2)))  # answers another question
    assert bench.deadlocks.next_check == NEVER
    bench.answer()
    bench.deadlocks.check_waits(waits_of(first, second._replace(since=START + 2001 * MS)), START + 4000 * MS)
    assert bench.tids == []


@pytest.mark.parametrize(
    ("kind", "family", "is_one"), [("pi", "mutex", 0), ("rwsem", "", 0), ("lock", "", 1)]
)
def test_a_lock_that_is_handed_over_to_a_thread_still_asleep(kind: str, family: str, is_one: int) -> None:
    one = wait(1, 10, START, kind, family=family)
    bench = Bench({one.lock: 1})
    bench.look(START + 2 * LASTING_NS, one)
    assert len(bench.tids) == is_one


def test_rings_with_locks_of_the_kernel_and_of_several_processes() -> None:
    in_kernel = wait(1, 77, START, "rwsem")
    bench = Bench({(0, 77): 2, (TGID, 10): 3, (200, 5): 1})
    waits = [in_kernel, wait(1, 999, START - MS), wait(2, 10, START + MS), wait(3, 5, START + MS, tgid=200)]
    bench.look(START + 2 * LASTING_NS, *waits)
    assert bench.tids == [[1, 2, 3]]
    bench = Bench({(0, 77): 2, (0, 88): 1})  # kernel locks: nobody is asked
    bench.look(START + 2 * LASTING_NS, in_kernel, wait(2, 88, START + MS, "rwsem"))
    assert bench.tids == [[1, 2]]


def test_a_kernel_wait_that_was_left_over_hides_no_ring() -> None:
    """A kernel that preempts itself may not report the end of a wait. The thread has gone on since."""
    bench = Bench({(TGID, 10): 2, (TGID, 20): 1, (0, 77): 9})
    left_over = wait(1, 77, START - MS, "rwsem")
    bench.look(START + 2 * LASTING_NS, left_over, wait(1, 10, START), wait(2, 20, START + MS))
    assert bench.tids == [[1, 2]]


def test_a_ring_of_pi_locks_which_the_kernel_has_refused_to_make() -> None:
    owners = {(TGID, 10): 1, (TGID, 20): 2}
    # A libc has the refused thread wait for ever, for a word on its own stack.
    first, second = wait(1, 20, START, "pi"), wait(2, 0x7FFF0000, START + 5 * MS)
    clock = START + 2 * LASTING_NS
    bench = Bench(owners)
    bench.look(clock, first, second)
    assert bench.tids == []
    bench.deadlocks.note_refused([2], [10], START + 100 * MS)
    bench.look(clock + LASTING_NS, first, second)
    assert bench.tids == [[1, 2]]
    for other in (second._replace(family="cond"), second._replace(since=START + 200 * MS)):
        bench = Bench(owners)
        bench.deadlocks.note_refused([2], [10], START + 100 * MS)
        bench.look(clock, first, other)
        assert bench.tids == []
    bench = Bench(owners)
    bench.deadlocks.note_refused([1], [10], START + 100 * MS)  # thread 1 holds that lock itself
    bench.look(clock, wait(1, 0x7FFF0000))
    assert bench.tids == [[1]]


def test_a_look_that_is_wanted_soon() -> None:
    bench = Bench()
    bench.look(START)
    assert bench.deadlocks.next_check == NEVER
    bench.deadlocks.check_soon()
    assert bench.deadlocks.next_check == START + SOON_NS
    bench.look(START + SOON_NS)
    assert bench.deadlocks.next_check == NEVER


def test_processes_that_are_not_wanted() -> None:
    owners, waits = ring(2)
    bench = Bench(owners, unwanted={TGID})
    bench.look(START + 2 * LASTING_NS, *waits)
    assert bench.tids == []
    assert bench.deadlocks.next_check == NEVER


def test_lines_rows_and_counts_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Any user can run any number of processes, each with a name of its own and a deadlock."""
    waits = [wait(tid, tid ^ 1, START + tid, tgid=tid // 2) for tid in range(2, 2 * MOST_SHOWN + 42)]
    bench = Bench({(tid // 2, tid): tid for tid in range(2, 2 * MOST_SHOWN + 42)})
    bench.look(START + 2 * LASTING_NS, *waits)
    bench.look(START + 3 * LASTING_NS, *waits)
    found = MOST_SHOWN + 20
    assert len(bench.tids) == metrics(bench)["found"] == found
    gauges = metrics(bench)["lockd_deadlocks"]
    assert len(gauges) == MOST_NAMES + 1
    assert gauges[OTHER, OTHER] == found - MOST_NAMES
    assert sum(gauges.values()) == found
    assert len(caplog.records) == MOST_LOGGED
    bench.described.clear()
    bench.rows(START)
    assert bench.described == waits[: 2 * MOST_SHOWN]
    clock = START + 2 * LASTING_NS + LOG_PERIOD_NS
    bench.look(clock, *waits, wait(1, 1, clock - 2 * LASTING_NS))
    assert caplog.messages[MOST_LOGGED].startswith(f"{found - MOST_LOGGED} more deadlocks")
    bench.owners[TGID, 1] = 1
    bench.look(clock + LASTING_NS, *waits, wait(1, 1, clock - 2 * LASTING_NS))
    assert caplog.messages[MOST_LOGGED + 1].startswith("deadlock in comm-100 ")
    assert len(caplog.records) == MOST_LOGGED + 2


def test_another_filter_applies_to_a_deadlock_that_is_known(caplog: pytest.LogCaptureFixture) -> None:
    owners, waits = ring(2)
    bench = Bench(owners, unwanted={TGID})
    clocks = itertools.count(START + 2 * LASTING_NS, LASTING_NS)
    bench.look(next(clocks), *waits)
    for unwanted, tids in ((set(), [[1, 2]]), ({TGID}, []), (set(), [[1, 2]])):
        bench.unwanted = unwanted
        bench.look(next(clocks), *waits)
        assert bench.tids == tids
        assert len(bench.deadlocks.save()["reported"]) == 1
        assert metrics(bench)["found"] == len(caplog.records) == 1


def started_again(bench: Bench) -> Bench:
    """Return what a start makes of the bench: the state is saved, and another process restores it."""
    saved, _ = unpack(memoryview(pack(bench.deadlocks.save(), {})))
    after = Bench(bench.owners)
    after.deadlocks.restore(saved)
    return after


def test_a_deadlock_is_told_once_over_two_starts_in_quick_succession(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second start comes before the first one has found the deadlock again."""
    owners, waits = ring(2)
    bench = Bench(owners)
    bench.look(START + 2 * LASTING_NS, *waits)
    bench.look(START + 3 * LASTING_NS, *waits)
    assert metrics(bench)["found"] == len(caplog.records) == 1
    identifier = bench.rows(START)[0]["id"]
    bench = started_again(started_again(bench))
    bench.look(START + 4 * LASTING_NS, *waits)
    bench.look(START + 5 * LASTING_NS, *waits)
    assert bench.tids == [[1, 2]]
    assert bench.rows(START)[0]["id"] == identifier
    assert metrics(bench)["found"] == len(caplog.records) == 1


def test_deadlocks_that_earlier_samplers_reported_are_forgotten_some_day() -> None:
    bench = Bench()
    for start in range(3):
        rings = [([(tid, START + start)], 0) for tid in range(MOST_SAVED)]
        saved = bench.deadlocks.save()
        bench.deadlocks.restore({**saved, "reported": rings + saved["reported"]})
        assert bench.deadlocks.save()["reported"] == rings


def test_two_at_a_time_and_a_thread_that_leads_to_one() -> None:
    owners, first = ring(2)
    second = [wait(11, 120, START - 5 * MS), wait(12, 110, START - 3 * MS)]
    owners |= {(TGID, 110): 11, (TGID, 120): 12, (TGID, 130): 13}
    bench = Bench(owners)
    bench.look(START + 2 * LASTING_NS, *first, *second, wait(13, 120), wait(14, 130))
    assert bench.tids == [[11, 12], [1, 2]]
    assert [one.waiting for one in bench.deadlocks.reported] == [2, 0]


def test_more_locks_than_are_asked_about_at_once_take_turns() -> None:
    crowd = [wait(1000 + i, 100_000 + i, START - LASTING_NS) for i in range(MOST_ASKED)]
    owners, waits = ring(2)
    bench = Bench(owners)
    clock = START + 2 * LASTING_NS
    bench.look(clock, *crowd, *waits)
    assert bench.tids == []
    bench.look(clock + LASTING_NS, *crowd, *waits)
    assert bench.tids == [[1, 2]]
    many = [wait(2000 + i, 10) for i in range(MOST_ASKED)]  # a crowd at one lock is one question
    bench = Bench(owners)
    bench.look(clock, *many, *waits)
    assert bench.tids == [[1, 2]]
    assert bench.deadlocks.reported[0].waiting == MOST_ASKED


@pytest.mark.parametrize(("locks", "ring_at"), [(600, (450, 550)), (1202, (1100, 1201)), (1202, (100, 1201))])
def test_a_ring_is_found_whose_locks_are_never_in_one_question(locks: int, ring_at: tuple[int, int]) -> None:
    """Each of many locks is waited for by one thread, and two of these threads hold each other's lock."""
    waits = [wait(1000 + i, 100_000 + i, START - LASTING_NS + i * 1000) for i in range(locks)]
    first, second = (waits[at] for at in ring_at)
    bench = Bench({first.lock: second.tid, second.lock: first.tid})
    for search in range(1 + locks // MOST_ASKED):
        bench.look(START + (2 + search) * LASTING_NS, *waits)
    assert bench.tids == [[first.tid, second.tid]]


def test_an_older_answer_does_not_count_once_its_holder_has_gone_on() -> None:
    """The holder of a lock gets what it waits for, releases all, and waits for a lock that is read later."""
    older = [wait(1000 + i, 100_000 + i, START - 3 * LASTING_NS) for i in range(MOST_ASKED - 1)]
    younger = [wait(3000 + i, 200_000 + i, START - LASTING_NS) for i in range(MOST_ASKED - 1)]
    first, third = wait(1, 10, START - 2 * LASTING_NS), wait(3, 20, START - LASTING_NS)
    bench = Bench({(TGID, 10): 2, (TGID, 20): 1})
    bench.look(START, first, wait(2, 30, START - LASTING_NS), third, *older, *younger)
    assert set(bench.deadlocks.holders) == {one.lock for one in (first, *older)}
    del bench.owners[TGID, 10]
    for search in range(1, 4):
        clock = START + search * LASTING_NS
        bench.look(clock, first, wait(2, 20, START + 500 * MS), third, *older, *younger)
        assert bench.tids == []
    assert bench.deadlocks.holders[TGID, 20] == 1


def test_a_lock_has_its_turn_however_many_others_come_and_go() -> None:
    owners, waits = ring(2)
    bench = Bench(owners)
    for search in range(2, 6):
        clock = START + search * LASTING_NS
        crowd = [wait(1000 + i, search << 20 | i, clock - 500 * MS) for i in range(MOST_ASKED)]
        # The first question is asked while thread 2 does not wait yet.
        bench.look(clock, *crowd, waits[0], *waits[1:][: search > 2])
    assert bench.tids == [[1, 2]]


def test_answers_that_never_come_do_not_end_it() -> None:
    owners, waits = ring(2)
    bench = Bench(owners)
    bench.deadlocks.check_waits(waits_of(*waits), START + LASTING_NS)
    bench.asked.clear()
    bench.look(START + 2 * LASTING_NS, *waits)
    assert not bench.asked
    bench.look(START + 300 * LASTING_NS, *waits)
    assert bench.tids == [[1, 2]]


THREADS, LOCKS = 4, 2


class World:
    """Threads that lock and unlock at will, one step at a time. Their locks behave like a libc's mutexes."""

    def __init__(self) -> None:
        self.clock = START
        self.holder: dict[int, int] = {}
        self.wants: dict[int, Wait] = {}

    def step(self, thread: int, lock: int) -> None:
        """Have a thread release the lock if it holds it, else ask for it. A blocked thread does nothing."""
        self.clock += 400 * MS
        if thread in self.wants:
            return
        if self.holder.get(lock) != thread:
            self.wants[thread] = wait(thread, lock, self.clock)
        else:
            del self.holder[lock]
        for tid, one in sorted(self.wants.items()):
            if one.address not in self.holder:
                self.holder[one.address] = tid
                del self.wants[tid]
                break

    def stuck(self) -> set[int]:
        """Return the threads that are in rings."""
        found = set()
        for start in self.wants:
            tid = start
            for _ in range(THREADS + 1):
                if tid not in self.wants:
                    break
                tid = self.holder[self.wants[tid].address]
                if tid == start:
                    found.add(start)
                    break
        return found


STEPS = st.tuples(st.integers(1, THREADS), st.integers(1, LOCKS))
EVENTS = st.lists(
    st.one_of(STEPS, STEPS, STEPS, st.sampled_from(["look", "answer one", "answer all"])), max_size=80
)


HOLDER_CHANGES = [
    *((2, 2), (3, 1), (2, 1), (1, 1), (4, 2), "look", "answer one"),
    *((3, 1), (3, 2), "look", "answer all", "look"),
]
"""Events that must not be taken for a ring. Thread 2 holds lock 2 and waits for lock 1.

Thread 3 is read as the holder of lock 1. It releases lock 1 to thread 1, and only then waits for lock 2.
"""


def test_threads_that_go_on_waiting_need_no_namer() -> None:
    """In many programs, the main thread waits all the time for another thread to end."""
    bench = Bench(owners={(TGID, 10): 9}, is_resting=True)
    waits = [wait(1, 10), wait(2, 10, family="join")]
    bench.deadlocks.check_waits(waits_of(*waits), START + LASTING_NS)
    assert len(bench.asked) == 1
    bench.answer()
    bench.deadlocks.check_waits(waits_of(*waits), START + 2 * LASTING_NS)
    bench.deadlocks.check_waits(waits_of(waits[0]), START + 3 * LASTING_NS)
    assert not bench.asked
    assert bench.deadlocks.holders == {(TGID, 10): 9}
    bench.deadlocks.check_waits(waits_of(*waits, wait(3, 10, START + 2 * LASTING_NS)), START + 4 * LASTING_NS)
    assert len(bench.asked) == 1, "another thread waits"


def test_a_ring_is_found_although_the_first_answers_are_lost_or_have_locks_that_were_not_read() -> None:
    """The process had used up its share of the namer's time. Since then, no other thread began to wait."""
    owners, waits = ring(2)
    bench = Bench(owners, is_resting=True)
    for second, read in enumerate(((NOT_READ, NOT_READ), (2, NOT_READ))):
        bench.deadlocks.check_waits(waits_of(*waits), START + (1 + second) * LASTING_NS)
        question = bench.asked.pop()
        answer = question.fallback() if second == 0 else OwnersAnswer(question.token, read)
        bench.deadlocks.take_holders(answer)
        assert set(bench.deadlocks.holders.values()) == {max(tid, 0) for tid in read}
    bench.look(START + 4 * LASTING_NS, *waits)
    assert bench.tids == [[1, 2]]
    bench.look(START + 5 * LASTING_NS, *waits)
    assert bench.deadlocks.holders == owners, "this was answered"


def test_an_answer_counts_even_if_the_next_one_is_lost() -> None:
    bench = Bench(owners={(TGID, 10): 9})
    bench.look(START + LASTING_NS, wait(1, 10))
    bench.deadlocks.check_waits(waits_of(wait(1, 10)), START + 2 * LASTING_NS)
    answer = bench.asked.pop().fallback()
    assert isinstance(answer, OwnersAnswer)
    bench.deadlocks.take_holders(answer)
    bench.is_resting = True
    bench.deadlocks.check_waits(waits_of(wait(1, 10)), START + 3 * LASTING_NS)
    assert not bench.asked, "no thread has begun to wait since the first answer"


@pytest.mark.parametrize("most_asked", [1, MOST_ASKED])
@pytest.mark.parametrize("is_resting", [False, True])
@settings(max_examples=500, deadline=None)
@given(events=EVENTS)
@example(events=HOLDER_CHANGES)
def test_whatever_threads_do_meanwhile(is_resting: bool, most_asked: int, events: list[Any]) -> None:
    """Owners are read one by one while threads run on. Every deadlock found is real, and all are found in the
    end.

    This also holds if the namer rests whenever no question needs it, and if only one lock can be asked about
    at a time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlocks_module, "MOST_ASKED", most_asked)
        live_on(is_resting, events)


def live_on(is_resting: bool, events: list[Any]) -> None:
    world, bench = World(), Bench(is_resting=is_resting)
    read: dict[int, int] = {}

    def look() -> None:
        world.clock += 50 * MS
        bench.deadlocks.check_waits(waits_of(*world.wants.values()), world.clock)
        assert {w.tid for one in bench.deadlocks.reported for w in one.threads} <= world.stuck()

    def read_one() -> None:
        if bench.asked:
            question = bench.asked[0]
            at = len(read)
            read[at] = world.holder.get(question.locks[at].address, 0)
            if len(read) == len(question.locks):
                bench.asked.clear()
                bench.deadlocks.take_holders(OwnersAnswer(question.token, tuple(read.values())))
                read.clear()

    for event in events:
        if event == "look":
            look()
        elif event == "answer one":
            read_one()
        elif event == "answer all":
            while bench.asked:
                read_one()
        else:
            world.step(*event)
    for _ in range(4 * LOCKS):
        world.clock += LASTING_NS
        look()
        while bench.asked:
            read_one()
    assert {w.tid for one in bench.deadlocks.reported for w in one.threads} == world.stuck()
