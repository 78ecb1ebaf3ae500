"""Series per lock: which locks have one, under the names that the resolver finds for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Hashes, Rows
from lockd.columns.structs import Columns
from lockd.names.client import Resolver
from lockd.names.protocol import KernelLock, LockAnswer
from lockd.sample.aggregates.contention import PROGRAMS, Detail
from lockd.sample.aggregates.identities import code_of
from lockd.sample.series.ranking import MEMORY_NS
from lockd.sample.series.series import OTHER, Series

ASKED_AT_ONCE = 100
"""Names asked for after one fold: each takes some 100 us of the resolver's thread."""


class LockSeries:
    """Joins one program's rows of `detail.locks` with the series they count in.

    Labels of the series are unit, comm, kind, lock and, with `has_site`, site. A lock that
    has no name yet counts as `other`: names are found off the sampling path.
    """

    def __init__(
        self,
        program: str,
        detail: Detail,
        series: Series,
        kind_names: Sequence[str],
        has_site: bool,
    ) -> None:
        self.series = series
        self._program = PROGRAMS.index(program)
        self._detail = detail
        self._has_site = has_site
        self._kind_names = np.array(kind_names, object)

    def lock_rows(
        self,
        keys: Hashes,
        tgids: Columns,
        addresses: Columns,
        kinds: Columns,
        processes: Columns,
        now: float,
    ) -> Rows:
        """The row in `detail.locks` of each key; the other columns describe new ones."""

        def describe(positions: Rows) -> dict[str, Any]:
            return {
                "program": self._program,
                "address": addresses[positions],
                "tgid": tgids[positions],
                "since": now,
                "kind_number": kinds[positions],
                "kind": self._kind_names[kinds[positions]],
                "process": processes[positions],
            }

        return self._detail.locks.find_or_add(keys, now, describe)

    def ask_names(self, resolver: Resolver) -> None:
        """Have the kernel's locks named on which most time was lost, some at a time."""
        locks = self._detail.locks
        rows = np.flatnonzero(locks.used & (locks["program"] == self._program) & ~locks["is_asked"])
        weight = locks["blocked_ns"][rows] + locks["waiting_ns"][rows]
        if len(rows) > ASKED_AT_ONCE:
            rows = rows[np.argpartition(-weight, ASKED_AT_ONCE)[:ASKED_AT_ONCE]]
        for row in rows:
            question = KernelLock(
                int(locks["key"][row]),
                int(locks["address"][row]),
                str(locks["kind"][row]),
                tuple(locks["frames"][row] or ()),
                bool(locks["is_mmap_lock"][row]),
            )
            if not resolver.ask(question):
                return
            locks["is_asked"][row], locks["frames"][row] = True, None

    def name(self, row: int, lock: str, site: str, stack: tuple[str, ...]) -> None:
        """Give the lock in a row of `detail.locks` its name."""
        locks = self._detail.locks
        locks["lock"][row], locks["site"][row] = lock, site
        if stack:
            locks["stack"][row] = stack
        locks["series_code"][row] = code_of(labels_of_lock(self._detail, row, self._has_site))

    def answer(self, answer: LockAnswer) -> bool:
        """Name the lock that was asked for; whether it is still in the table."""
        row = int(self._detail.locks.find(np.array([answer.key], np.uint64))[0])
        if row < 0 or self._detail.locks["program"][row] != self._program:
            return False
        self.name(row, answer.lock, answer.site, answer.stack)
        return True

    def add(self, lock_rows: Rows, count: Columns, blocked_ns: Columns, max_ns: Columns, now: float) -> None:
        """Count waits on locks."""
        # One that was long shall not count for more than many that were as long together.
        weights = np.minimum(blocked_ns, count.astype(np.int64) * MEMORY_NS)
        rows = self.series.rows(*self._names_of(lock_rows), weights, now)
        self._count(rows, count, blocked_ns, max_ns)

    def waiting_rows(self, lock_rows: Rows, waited_ns: Columns, now: float) -> Rows:
        """The series of the lock that each of these waits that go on is for."""
        return self.series.waiting_rows(*self._names_of(lock_rows), waited_ns, now)

    def add_nameless(
        self, kinds: Columns, count: Columns, blocked_ns: Columns, max_ns: Columns, now: float
    ) -> None:
        """Count waits of which nothing is known but their kind."""
        self._count(self.nameless_rows(kinds, now), count, blocked_ns, max_ns)

    def nameless_rows(self, kinds: Columns, now: float) -> Rows:
        """The series of locks of which nothing is known but their kind."""
        numbers, which = np.unique(kinds, return_inverse=True)
        rows = [self.series.row(self._other(str(self._kind_names[number])), now) for number in numbers]
        return np.array(rows, np.int64)[which]

    def _count(self, rows: Rows, count: Columns, blocked_ns: Columns, max_ns: Columns) -> None:
        groups = Groups(rows)
        self.series["blocked_ns"][groups.rows] += groups.sum(blocked_ns)
        self.series["count"][groups.rows] += groups.sum(count)
        if self.series.maxima:
            self.series.note_max("blocked", groups.rows, groups.max(max_ns))

    def threads(self, now: float) -> npt.NDArray[np.int64]:
        """Distinct threads that blocked in the last minute on the locks of each series."""
        by_lock = self._detail.threads_by_lock(now)
        mine = np.flatnonzero((self._detail.locks["program"] == self._program) & (by_lock > 0))
        rows = self.series.find(self._codes_of(mine))
        known = rows >= 0
        counts = np.bincount(rows[known], weights=by_lock[mine[known]], minlength=self.series.size)
        return counts.astype(np.int64)

    def _names_of(self, lock_rows: Rows) -> tuple[Hashes, Callable[[int], tuple[str, ...]]]:
        """What each lock is called in the series, as a number, and the labels."""
        return self._codes_of(lock_rows), lambda i: self._labels(int(lock_rows[i]))

    def _codes_of(self, lock_rows: Rows) -> Hashes:
        locks = self._detail.locks
        codes = locks["series_code"][lock_rows]
        # No name's code is as small as these.
        return np.where(codes == 0, locks["kind_number"][lock_rows].astype(np.uint64) + np.uint64(1), codes)

    def _labels(self, row: int) -> tuple[str, ...]:
        locks = self._detail.locks
        if locks["series_code"][row] == 0:
            return self._other(str(locks["kind"][row]))
        return labels_of_lock(self._detail, row, self._has_site)

    def _other(self, kind: str) -> tuple[str, ...]:
        return (OTHER, OTHER, kind, *([OTHER] * (1 + self._has_site)))


def labels_of_lock(detail: Detail, row: int, has_site: bool) -> tuple[str, ...]:
    """unit, comm, kind, lock and perhaps site of a named lock."""
    locks = detail.locks
    name = (*locks["process"][row], locks["kind"][row], locks["lock"][row])
    return (*name, locks["site"][row]) if has_site else name
