"""Numbers from records of locks: totals, worst periods, and how things went over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lockd.analyze.records import Records
from lockd.errors import UsageError

Numbers: TypeAlias = "npt.NDArray[Any]"

MOST_PERIODS = 4_000_000
"""Two days of the usual length. Everything that is drawn has a number for each."""


@dataclass(frozen=True)
class Total:
    """What some records come to. `subject` is the position of a lock, a thread or a stack in Records."""

    subject: int
    wait_ns: int
    accesses: int
    threads: int
    """Distinct ones."""
    ongoing: int
    """Waits that had not ended."""

    @property
    def average_ns(self) -> float:
        """Average access time: wait by access."""
        return self.wait_ns / self.accesses


@dataclass(frozen=True)
class Window:
    """One lock in one period."""

    lock: int
    start_ns: int
    wait_ns: int
    accesses: int
    threads: int

    @property
    def average_ns(self) -> float:
        return self.wait_ns / self.accesses


def totals(records: Records, by: str) -> list[Total]:
    """For each `lock`, `thread` or `stack`; the one waited for longest first."""
    rows = records.rows
    subjects, which = np.unique(rows[by], return_inverse=True)
    columns = [_sums(which, rows[name]) for name in ("wait_ns", "accesses", "ongoing")]
    threads = _distinct(which, rows["thread"])
    found = [
        Total(subject, wait, accesses, count, ongoing)
        for subject, wait, accesses, ongoing, count in zip(
            subjects.tolist(), *(column.tolist() for column in columns), threads.tolist(), strict=True
        )
    ]
    return sorted(found, key=lambda total: (-total.wait_ns, -total.accesses, total.subject))


def by_threads(found: list[Total]) -> list[Total]:
    """The same with the most distinct threads first."""
    return sorted(found, key=lambda total: (-total.threads, -total.wait_ns, total.subject))


def windows(records: Records) -> list[Window]:
    """Each lock in each period that has records of it; the highest average access time first."""
    rows = records.rows[records.rows["start_ns"] >= 0]
    if not len(rows):
        return []
    keys = np.column_stack([rows["lock"], rows["start_ns"]])
    keys, which = np.unique(keys, axis=0, return_inverse=True)
    wait, accesses = _sums(which, rows["wait_ns"]), _sums(which, rows["accesses"])
    threads = _distinct(which, rows["thread"])
    return [
        Window(int(keys[at][0]), int(keys[at][1]), int(wait[at]), int(accesses[at]), int(threads[at]))
        for at in np.argsort(-wait / accesses, kind="stable").tolist()
    ]


def periods(records: Records) -> Numbers:
    """When each period began, without gaps, from where the first wait began; empty if there are none."""
    rows = records.rows[records.rows["start_ns"] >= 0]
    if not len(rows):
        return np.zeros(0, np.int64)
    length = records.period_ns
    begins, _ = _spread(rows, length)
    first = int(np.minimum(begins, rows["start_ns"]).min()) // length * length
    last = int(rows["start_ns"].max())
    if (last - first) // length >= MOST_PERIODS:
        raise UsageError(
            f"the records are of {(last - first) // length} periods of {length / 1e6:g} ms;"
            f" rule: at most {MOST_PERIODS}, whose length --period tells if the records do not"
        )
    return np.arange(first, last + length, length, np.int64)


def average_access(records: Records, starts: Numbers) -> Numbers:
    """The average access time in each period, in ns; NaN in those without accesses."""
    rows = records.rows[records.rows["start_ns"] >= 0]
    at = _positions(rows["start_ns"], starts, records.period_ns)
    wait = np.bincount(at, rows["wait_ns"], len(starts))
    accesses = np.bincount(at, rows["accesses"], len(starts))
    with np.errstate(invalid="ignore"):
        return np.where(accesses > 0, wait / accesses, np.nan)


def worst_average(records: Records, starts: Numbers) -> Numbers:
    """The same of the lock that has the highest in that period."""
    worst = np.full(len(starts), np.nan)
    for window in reversed(windows(records)):  # the highest last
        at = (window.start_ns - int(starts[0])) // records.period_ns
        worst[at] = window.average_ns
    return worst


def waiting(records: Records, starts: Numbers) -> tuple[Numbers, Numbers]:
    """In each period, how many distinct threads waited, and how many did on average over its time.

    A record tells the period in which a wait ended. The wait is put as late as can be, so that it reaches
    back into earlier periods if it was longer.
    """
    length = records.period_ns
    rows = records.rows[(records.rows["start_ns"] >= 0) & (records.rows["wait_ns"] > 0)]
    begins, ends = _spread(rows, length)
    first, last = _positions(begins, starts, length), _positions(ends - 1, starts, length)
    waited = np.zeros(len(starts))
    np.add.at(waited, first, np.minimum(starts[first] + length, ends) - begins)
    np.add.at(waited, last[last > first], (ends - starts[last])[last > first])
    whole = np.zeros(len(starts) + 1)  # periods between the two
    np.add.at(whole, first[last > first] + 1, length)
    np.add.at(whole, last[last > first], -length)
    threads = np.zeros(len(starts) + 1, np.int64)
    for begin, end in _spans(rows["thread"], first, last):
        threads[begin] += 1
        threads[end + 1] -= 1
    return np.cumsum(threads[:-1]), (waited + np.cumsum(whole[:-1])) / length


def _spread(rows: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """When the waits of each row began and ended, taken for one: as late as can be, and before the next of
    the same thread for the same lock."""
    begins, ends = np.zeros(len(rows), np.int64), rows["start_ns"] + length
    before, next_begins = (-1, -1), 0
    threads, locks, waits = (rows[name].tolist() for name in ("thread", "lock", "wait_ns"))
    for at in np.lexsort((rows["start_ns"], rows["lock"], rows["thread"]))[::-1].tolist():
        if (threads[at], locks[at]) == before:
            ends[at] = min(int(ends[at]), next_begins)
        before = threads[at], locks[at]
        begins[at] = next_begins = int(ends[at]) - waits[at]
    return begins, ends


def _spans(threads: Numbers, first: Numbers, last: Numbers) -> list[tuple[int, int]]:
    """Periods from the first to the last of each row, those of one thread joined where they overlap."""
    found: list[tuple[int, int]] = []
    before = -1
    for at in np.lexsort((first, threads)).tolist():
        thread, begin, end = int(threads[at]), int(first[at]), int(last[at])
        if thread == before and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
        before = thread
    return found


def _positions(times: Numbers, starts: Numbers, length: int) -> Numbers:
    """Which of the periods each of these times is in."""
    at: Numbers = (times - starts[0]) // length if len(starts) else np.zeros(0, np.int64)
    return at


def _sums(which: Numbers, column: Numbers) -> Numbers:
    """Of a column, exactly, for each number in `which`."""
    found = np.zeros(int(which.max()) + 1, np.int64)
    np.add.at(found, which, column)
    return found


def _distinct(which: Numbers, threads: Numbers) -> Numbers:
    """How many threads there are for each number in `which`."""
    pairs = np.unique(np.column_stack([which, threads]), axis=0)
    return np.bincount(pairs[:, 0], minlength=int(which.max()) + 1)
