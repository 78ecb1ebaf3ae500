"""Rows of kernel locks: what is merged, how accesses are counted, what had not ended; records and tables."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockd.errors import LockdError
from lockd.kernel.pairs import Entries
from lockd.trace.core.call_stacks import CallStacks
from lockd.trace.core.session import Progress, Session
from lockd.trace.klock import klock
from lockd.trace.klock.records import Records
from lockd.trace.klock.rows import (
    NO_STACK,
    ROW,
    Accesses,
    Columns,
    Names,
    Sums,
    merged,
    unfinished_holds,
    unfinished_waits,
)
from lockd.trace.klock.tables import Layout, duration, tables

TYPES = ["mutex", "rwsem_read", "rwsem_write", "semaphore", "rtmutex"]
MUTEX, RTMUTEX = 0, 4
PERIOD = 50_000_000


def rows(*each: dict[str, Any]) -> Columns:
    found = np.zeros(len(each), ROW)
    for at, values in enumerate(each):
        for name, value in {"tid": 7, "tgid": 5, "comm": b"app", "lock": 64, **values}.items():
            found[name][at] = value
    return found


def test_rows_are_merged_and_the_longest_wait_tells_the_stack() -> None:
    found = merged(
        rows(
            {"stack": 2, "waits": 1, "wait_ns": 10, "max_wait_ns": 10},
            {"stack": 3, "waits": 2, "wait_ns": 90, "max_wait_ns": 80, "is_mmap_lock": 1},
            {"stack": 4, "acquired": 5},
            {"stack": 5, "tid": 8, "acquired": 1, "holds": 1, "hold_ns": 3, "max_hold_ns": 3},
        ),
        "tid",
        "lock",
    )
    first, second = found
    assert (first["tid"], first["stack"], first["waits"], first["wait_ns"]) == (7, 3, 3, 100)
    assert (first["max_wait_ns"], first["acquired"], first["is_mmap_lock"]) == (80, 5, 1)
    assert (second["tid"], second["hold_ns"], second["is_mmap_lock"]) == (8, 3, 0)
    assert len(merged(rows(), "tid")) == 0


def test_sums_are_bounded_and_lose_no_event() -> None:
    """Waits of keys for which there is no room are in one row for each type of lock."""
    sums = Sums(most=2)
    first = rows({"lock": 1, "waits": 1, "wait_ns": 10}, {"lock": 2, "waits": 2, "wait_ns": 20})
    sums.add(first)
    assert len(sums.rows()) == 2
    sums.add(
        rows(
            {"lock": 3, "stack": 9, "waits": 4, "wait_ns": 40, "acquired": 3},
            {"lock": 4, "stack": 9, "waiting": 1, "wait_ns": 80, "is_mmap_lock": 1},
            {"lock": 1, "waits": 8, "wait_ns": 1},
        )
    )
    nameless, *named = sums.rows()
    assert [(row["lock"], row["waits"], row["wait_ns"]) for row in named] == [(1, 9, 11), (2, 2, 20)]
    assert (nameless["lock"], nameless["tid"], nameless["comm"]) == (0, 0, b"[no room]")
    assert (nameless["waits"], nameless["waiting"], nameless["wait_ns"]) == (4, 1, 120)
    assert sums.nameless == 8
    sums.add(rows({"lock": 3, "type": RTMUTEX, "waits": 1}, {"lock": 3, "acquired": 1}))
    assert len(sums.rows()) == 4
    assert sums.nameless == 10
    assert first["lock"].tolist() == [1, 2]


@pytest.mark.parametrize("words", ["--callers", "--callers -i 0.01ms", "--format folded"])
def test_what_was_counted_without_names_is_reported(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klock, "Sums", lambda: Sums(most=0))
    session = FakeSession()
    parser = argparse.ArgumentParser()
    klock.add_options(parser)
    trace = klock.LockTrace(cast("Session", session), parser.parse_args(["--no-ongoing", *words.split()]))
    texts: Iterator[object] = trace.tables() if "--callers" in words else trace.windows()
    if "-i" in words:
        next(texts)
    session.stop()
    for _ in texts:
        pass
    trace.profile()
    (lost,) = filter(None, session.own_losses.values())
    assert lost == session.drained


def test_an_access_is_a_wait_or_a_taking_that_needed_none() -> None:
    accesses = Accesses(True)
    found = accesses.counts(
        rows(
            {"waits": 3, "given_up": 1, "acquired": 6},  # 2 waits got the lock, 4 acquisitions needed no wait
            {"tid": 8, "acquired": 4},
            {"tid": 9, "waits": 2, "given_up": 2},
            {"tid": 10, "waits": 2, "type": RTMUTEX},  # acquisitions of this type are not traced
        )
    )
    assert found.tolist() == [7, 4, 2, 2]
    assert Accesses(False).counts(rows({"waits": 3, "given_up": 1})).tolist() == [3]


def test_the_taking_after_a_wait_may_be_counted_in_the_next_period() -> None:
    accesses = Accesses(True)
    straddling = rows(
        {"period": 1, "waits": 1},
        {"period": 2, "acquired": 3},  # one of these was counted as a wait in period 1
        {"period": 3, "acquired": 1},
    )
    assert accesses.counts(straddling).tolist() == [1, 2, 1]
    assert accesses.counts(rows({"period": 4, "waits": 1})).tolist() == [1]
    assert accesses.counts(rows({"period": 5, "acquired": 1})).tolist() == [0]  # across windows too
    assert accesses.counts(rows({"period": 6, "waits": 1})).tolist() == [1]
    assert accesses.counts(rows({"period": 9, "acquired": 1})).tolist() == [1]  # too late for period 6


KEY = np.dtype([("lock", np.uint64), ("tid", np.uint32), ("cpu", np.uint32)])
WAIT = np.dtype(
    [("since", np.uint64), ("tgid", np.uint32), ("type", np.uint32), ("stack", np.uint64), ("comm", "S16")]
)
HOLDING = np.dtype(
    [("since", np.uint64, (4,)), ("tgid", np.uint32), ("depth", np.uint8), ("type", np.uint8),
     ("asked", np.uint8), ("stacks", np.uint64, (4,)), ("comm", "S16")]
)  # fmt: skip
END = 10 * PERIOD


def test_what_still_waits_or_is_held_counts_until_the_end() -> None:
    keys = np.array([(64, 7, 0), (65, 0, 1), (66, 8, 0)], KEY)
    waits = np.array([(END - 90, 5, MUTEX, 3, b"app"), (1, 5, 7, 4, b"x"), (END + 5, 5, 0, 4, b"x")], WAIT)
    (waiting,) = unfinished_waits(keys, waits, END, PERIOD)
    assert (waiting["tid"], waiting["wait_ns"], waiting["waiting"], waiting["stack"]) == (7, 90, 1, 3)
    assert waiting["period"] == 10

    long_ago = END - PERIOD
    keys = np.array([(64, 7, 0), (70, 7, 0), (71, 7, 0), (72, 7, 0)], KEY)
    holding = np.array(
        [
            ([long_ago] * 4, 5, 0, MUTEX, 1, [9] * 4, b"app"),  # the thread waits for it
            ([long_ago, END - 20, 0, 0], 5, 2, 1, 0, [1, 2, 0, 0], b"app"),  # held twice
            ([long_ago, 0, 0, 0], 5, 0, MUTEX, 1, [3, 0, 0, 0], b"app"),  # asked for long ago, and so held
            ([END - 10, 0, 0, 0], 5, 0, MUTEX, 1, [4, 0, 0, 0], b"app"),  # asked for just now, may wait
        ],
        HOLDING,
    )
    held = unfinished_holds(keys, holding, rows({"lock": 64}), END, PERIOD)
    told = [(int(one["lock"]), int(one["hold_ns"]), int(one["stack"]), int(one["acquired"])) for one in held]
    assert sorted(told) == [(70, 20, 2, 0), (70, PERIOD, 1, 0), (71, PERIOD, 3, 1)]


def test_records_come_once_their_period_is_over() -> None:
    records = Records(Names(CallStacks(), TYPES), TYPES, PERIOD, Accesses(True))
    early = rows({"period": 2, "waits": 1, "wait_ns": 30, "acquired": 1}, {"period": 3, "acquired": 2})
    assert list(records.add(early, 2 * PERIOD)) == []
    later = rows({"period": 2, "acquired": 4, "comm": b"a,\nb"}, {"period": 3, "waiting": 1, "wait_ns": 9})
    assert list(csv.reader(records.add(later, 3 * PERIOD))) == [
        ["t", "-1", "[stack lost]"],
        ["s", "app", "P5_T7", "mutex", "0x40", str(2 * PERIOD), "30", "5", "-1"],
    ]
    assert list(csv.reader(records.rest())) == [
        ["s", "app", "P5_T7", "mutex", "0x40", str(3 * PERIOD), "0", "2", "-1"],
        ["s", "app", "P5_T7", "mutex", "0x40", str(3 * PERIOD), "9", "1", "-1", "ongoing"],
    ]
    assert list(records.rest()) == []


class FakeSession:
    """A session that drains a wait of 1 ns from time to time, and once more when it is stopped."""

    def __init__(self) -> None:
        self.manifest = SimpleNamespace(enums={"lock_type": TYPES}, chosen=())
        self.stacks, self.progress = CallStacks(), Progress(sys.stderr)
        self.began_at, self.elapsed, self.ended_ns, self.events = 0.0, 1.0, 0, 0
        self.is_stopped = False
        self.own_losses: Counter[str] = Counter()
        self.drained = self.reports = 0

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def windows(self) -> Iterator[dict[str, Entries]]:
        keys = np.zeros(1, [(name, "u8") for name in ("lock", "stack", "period", "tid", "type")])
        values = np.zeros(
            1,
            [*((name, "u8") for name in ("waits", "given_up", "wait_ns", "max_wait_ns", "is_mmap_lock")),
             ("who", [("tgid", "u4"), ("thread_comm", "S16")])],
        )  # fmt: skip
        values["waits"] = values["wait_ns"] = 1
        is_last = False
        while not is_last:
            is_last = self.is_stopped
            time.sleep(0 if is_last else 0.001)
            self.drained += 1
            yield {"kernel_locks": (keys, values)}

    def stop(self) -> None:
        self.is_stopped = True

    def report(self) -> None:
        self.reports += 1


@pytest.mark.parametrize(
    ("words", "samples"), [("", 0), ("--callers", 0), ("--flamegraph x.svg -o y", 1), ("--format folded", 1)]
)
def test_only_a_profile_needs_the_rows_of_the_whole_trace(words: str, samples: int) -> None:
    session = FakeSession()
    session.stop()
    parser = argparse.ArgumentParser()
    klock.add_options(parser)
    trace = klock.LockTrace(cast("Session", session), parser.parse_args(["--no-ongoing", *words.split()]))
    assert [len(found) for found in trace.windows()] == [1]
    assert len(trace.profile().samples) == samples


def test_each_stack_has_one_line_and_all_that_are_lost_share_one() -> None:
    known = {2: ("f+0x1",), 5: ("g+0x2", "f+0x1")}
    names = SimpleNamespace(functions=lambda stack: known.get(stack, (NO_STACK,)))
    records = Records(cast("Names", names), TYPES, PERIOD, Accesses(True))
    numbers: dict[int, str] = {}
    lines: list[list[str]] = []
    for stack in (2, 3, 5, 4, 2, 3):
        *new, sample = csv.reader(records.add(rows({"acquired": 1, "stack": stack}), PERIOD))
        assert numbers.setdefault(stack, sample[-1]) == sample[-1]
        lines += new
    assert numbers[3] == numbers[4] == "-1"
    assert lines == [
        ["t", numbers[2], "f+0x1"], ["t", "-1", NO_STACK], ["t", numbers[5], "g+0x2", "f+0x1"]
    ]  # fmt: skip
    assert len({*numbers.values()}) == 3


@pytest.mark.parametrize("words", ["", "--callers -i 2ms", "--format folded"])
def test_what_cannot_be_written_costs_neither_the_flame_graph_nor_the_report(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace ends when its texts cannot be written, and the flame graph shows all of it."""
    session, graph = FakeSession(), tmp_path / "graph.svg"
    session.is_stopped = "--format" in words
    monkeypatch.setattr(klock, "Session", lambda *_, **__: session)
    parser = argparse.ArgumentParser()
    klock.add_options(parser)
    args = parser.parse_args(f"--no-ongoing {words} -o /dev/full --flamegraph {graph}".split())
    args.command_line, args.format_given = "lockd trace klock", "--format" in words
    with pytest.raises(LockdError, match="/dev/full: cannot be written: No space left on device"):
        klock.run(args)
    assert f"wait_ns: 0.{session.drained:03} us in all" in graph.read_text()
    assert session.reports == 1


def test_names_of_threads_break_no_line() -> None:
    records = Records(Names(CallStacks(), TYPES), TYPES, PERIOD, Accesses(True))
    *_, line = records.add(rows({"acquired": 1, "comm": b'a,"\n\x1b'}), PERIOD)
    assert line.count("\n") == 1
    assert next(csv.reader([line]))[1] == 'a,"\\n\\x1b'


def test_tables_mark_what_had_not_ended() -> None:
    found = rows(
        {
            "waits": 2,
            "wait_ns": 3_000_000,
            "max_wait_ns": 2_000_000,
            "acquired": 3,
            "holds": 2,
            "hold_ns": 10,
        },
        {"tid": 8, "comm": b"other", "waiting": 1, "wait_ns": 5_000_000_000, "max_wait_ns": 5_000_000_000},
    )
    places = Names(CallStacks(), TYPES)
    text = "".join(tables(found, places, TYPES, Layout(by_thread=True), True))
    waits, holds = text.split("Avg Hold")
    assert (
        "\n                 8              other      5.0 s        1      5.0 s        5.0 s* mutex" in waits
    )
    assert (
        "\n                 7                app     1.0 ms        3     2.0 ms       3.0 ms  mutex" in waits
    )
    assert "* some were still waiting at the end" in waits
    assert "*" not in holds and "app       5 ns        2" in holds
    assert "other" not in holds
    assert "other" not in "".join(
        tables(found, places, TYPES, Layout(most=1, sorts=("acq_count",), by_thread=True), False)
    )


def test_durations() -> None:
    assert [duration(ns) for ns in (0, 999, 1000, 1.5e6, 59.9e9, 60e9, 7200e9)] == [
        "0 ns", "999 ns", "1.0 us", "1.5 ms", "59.9 s", "1.0 m", "2.0 h",
    ]  # fmt: skip
