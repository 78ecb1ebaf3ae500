"""Statistics of records of locks: totals, worst periods and values over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lockd.analyze.records import Records
from lockd.errors import UsageError

Numbers: TypeAlias = "npt.NDArray[Any]"

MOST_PERIODS = 4_000_000
"""The most periods that records may span: two days in periods of 50 ms. A drawn line has a value for each."""


@dataclass(frozen=True)
class Total:
    """The totals of all records of a lock, a thread or a stack."""

    subject: int
    """The position of the lock, thread or stack in Records."""
    wait_ns: int
    accesses: int
    threads: int
    """The number of distinct threads."""
    ongoing: int
    """The number of waits that had not ended when the trace ended."""

    @property
    def average_ns(self) -> float:
        """The average access time: nanoseconds of wait for each access."""
        return self.wait_ns / self.accesses


@dataclass(frozen=True)
class LockPeriod:
    """The totals of all records of one lock in one period."""

    lock: int
    start_ns: int
    wait_ns: int
    accesses: int
    threads: int

    @property
    def average_ns(self) -> float:
        return self.wait_ns / self.accesses


def totals(records: Records, by: str) -> list[Total]:
    """The totals of each lock, thread or stack; the one with the most time waited comes first.

    `by` is `lock`, `thread` or `stack`.
    """
    rows = records.rows
    subjects, which = np.unique(rows[by], return_inverse=True)
    columns = [_sums(which, rows[name]) for name in ("wait_ns", "accesses", "ongoing")]
    threads = _distinct(which, rows["thread"])
    result = [
        Total(subject, wait, accesses, count, ongoing)
        for subject, wait, accesses, ongoing, count in zip(
            subjects.tolist(), *(column.tolist() for column in columns), threads.tolist(), strict=True
        )
    ]
    return sorted(result, key=lambda total: (-total.wait_ns, -total.accesses, total.subject))


def sort_by_threads(totals: list[Total]) -> list[Total]:
    """The totals with the most distinct threads first."""
    return sorted(totals, key=lambda total: (-total.threads, -total.wait_ns, total.subject))


def lock_periods(records: Records) -> list[LockPeriod]:
    """The totals of each lock in each period that has records of it.

    The highest average access time comes first.
    """
    rows = records.rows[records.rows["start_ns"] >= 0]
    if not len(rows):
        return []
    keys = np.column_stack([rows["lock"], rows["start_ns"]])
    keys, which = np.unique(keys, axis=0, return_inverse=True)
    wait, accesses = _sums(which, rows["wait_ns"]), _sums(which, rows["accesses"])
    threads = _distinct(which, rows["thread"])
    return [
        LockPeriod(
            int(keys[row][0]), int(keys[row][1]), int(wait[row]), int(accesses[row]), int(threads[row])
        )
        for row in np.argsort(-wait / accesses, kind="stable").tolist()
    ]


def period_starts(records: Records) -> Numbers:
    """The start of each period in ns, without gaps, from the period in which the first wait began.

    The array is empty if the records have no periods. Raises UsageError if there are too many periods.
    """
    rows = records.rows[records.rows["start_ns"] >= 0]
    if not len(rows):
        return np.zeros(0, np.int64)
    length = records.period_ns
    begins, _ = _spread(rows, length)
    first = int(np.minimum(begins, rows["start_ns"]).min()) // length * length
    last = int(rows["start_ns"].max())
    if (last - first) // length >= MOST_PERIODS:
        raise UsageError(
            f"the records span {(last - first) // length} periods of {length / 1e6:g} ms;"
            f" rule: at most {MOST_PERIODS}; --period sets their length if it was not recognized"
        )
    return np.arange(first, last + length, length, np.int64)


def seconds(records: Records, starts: Numbers) -> Numbers:
    """The starts of periods (`starts`, in ns) in seconds since the first period of all records.

    That period counts as zero even if none of its records is selected (Records.began_ns).
    """
    began = records.began_ns
    return (starts - (period_starts(records)[:1] if began is None else began)) / 1e9


def average_access(records: Records, starts: Numbers) -> Numbers:
    """The average access time in each period in ns; NaN for periods without accesses."""
    rows = records.rows[records.rows["start_ns"] >= 0]
    periods = _positions(rows["start_ns"], starts, records.period_ns)
    wait = np.bincount(periods, rows["wait_ns"], len(starts))
    accesses = np.bincount(periods, rows["accesses"], len(starts))
    with np.errstate(invalid="ignore"):
        return np.where(accesses > 0, wait / accesses, np.nan)


def worst_average_access(records: Records, starts: Numbers) -> Numbers:
    """For each period, the highest average access time of any lock in ns; NaN if it has no accesses."""
    worst = np.full(len(starts), np.nan)
    for period in reversed(lock_periods(records)):  # the highest time of a period is written last
        worst[(period.start_ns - int(starts[0])) // records.period_ns] = period.average_ns
    return worst


def waiting_threads(records: Records, starts: Numbers) -> tuple[Numbers, Numbers]:
    """Two arrays with a value for each period: how many distinct threads waited, and how many on average.

    A record has the period in which a wait ended. The wait is assumed to have ended as late as possible in
    this period. If it was longer than the period, it extends into earlier ones.
    """
    length = records.period_ns
    rows = records.rows[(records.rows["start_ns"] >= 0) & (records.rows["wait_ns"] > 0)]
    begins, ends = _spread(rows, length)
    first, last = _positions(begins, starts, length), _positions(ends - 1, starts, length)
    waited = np.zeros(len(starts))
    np.add.at(waited, first, np.minimum(starts[first] + length, ends) - begins)
    np.add.at(waited, last[last > first], (ends - starts[last])[last > first])
    whole = np.zeros(len(starts) + 1)  # time in the periods between the first and the last
    np.add.at(whole, first[last > first] + 1, length)
    np.add.at(whole, last[last > first], -length)
    threads = np.zeros(len(starts) + 1, np.int64)
    for begin, end in _spans(rows["thread"], first, last):
        threads[begin] += 1
        threads[end + 1] -= 1
    return np.cumsum(threads[:-1]), (waited + np.cumsum(whole[:-1])) / length


def _spread(rows: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """The beginning and the end of the waits of each row in ns, as if they were one wait.

    This wait is assumed to end as late as possible in the period of its row, but before the next wait of the
    same thread for the same lock begins.
    """
    begins, ends = np.zeros(len(rows), np.int64), rows["start_ns"] + length
    last_key, next_begins = (-1, -1), 0
    threads, locks, waits = (rows[name].tolist() for name in ("thread", "lock", "wait_ns"))
    for row in np.lexsort((rows["start_ns"], rows["lock"], rows["thread"]))[::-1].tolist():
        if (threads[row], locks[row]) == last_key:
            ends[row] = min(int(ends[row]), next_begins)
        last_key = threads[row], locks[row]
        begins[row] = next_begins = int(ends[row]) - waits[row]
    return begins, ends


def _spans(threads: Numbers, first: Numbers, last: Numbers) -> list[tuple[int, int]]:
    """For each span in which a thread waited, its first and last period. Overlapping rows make one span."""
    spans: list[tuple[int, int]] = []
    last_thread = -1
    for row in np.lexsort((first, threads)).tolist():
        thread, begin, end = int(threads[row]), int(first[row]), int(last[row])
        if thread == last_thread and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
        last_thread = thread
    return spans


def _positions(times: Numbers, starts: Numbers, length: int) -> Numbers:
    """The position in `starts` of the period that contains each time."""
    positions: Numbers = (times - starts[0]) // length if len(starts) else np.zeros(0, np.int64)
    return positions


def _sums(which: Numbers, column: Numbers) -> Numbers:
    """The sum of a column for each number in `which`, in integers: np.bincount() would round."""
    sums = np.zeros(int(which.max()) + 1, np.int64)
    np.add.at(sums, which, column)
    return sums


def _distinct(which: Numbers, threads: Numbers) -> Numbers:
    """The number of distinct threads for each number in `which`."""
    pairs = np.unique(np.column_stack([which, threads]), axis=0)
    return np.bincount(pairs[:, 0], minlength=int(which.max()) + 1)
