"""Series per lock: the series in which each row of the table of locks counts, under the name of its lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import wide_sums
from lockd.columns.index import Groups, Hashes, Rows
from lockd.columns.structs import Columns
from lockd.names.client import Resolver
from lockd.names.labels.processes import Name
from lockd.names.protocol import KernelLock, LockAnswer
from lockd.sample.aggregates.contention import PROGRAMS, ContentionTables
from lockd.sample.aggregates.identities import ProcessNames
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.ranking import merits
from lockd.sample.series.series import OTHER, Series

ASKED_AT_ONCE = 100
"""Most lock names that are asked for after one fold. Each takes the namer some 100 us."""
WORTH_A_NAMER_NS = 1_000_000
"""Nanoseconds that threads have to wait for a lock in all before a namer is started or kept for its name.

On a quiet host, code of the kernel waits some microseconds for spinlocks all the time, now and then in a
stack that is new.
"""


class LockSeries:
    """Joins one program's rows of the table of locks with the series in which they count.

    The labels of the series are unit, comm, kind, lock and, with `has_site`, site. A lock that has no name
    yet counts as `other`: the namer finds names in a process of its own, and no count waits for it here.
    """

    def __init__(
        self,
        program: str,
        contention: ContentionTables,
        series: Series,
        kind_names: Sequence[str],
        has_site: bool,
    ) -> None:
        self.series = series
        self._program = PROGRAMS.index(program)
        self._contention = contention
        self._has_site = has_site
        self._kind_names = np.array(kind_names, object)

    def lock_rows(
        self,
        keys: Hashes,
        tgids: Columns,
        addresses: Columns,
        kinds: Columns,
        processes: ProcessNames,
        now: float,
    ) -> Rows:
        """Return the row in the table of locks of each key; the other arguments describe new rows."""

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

        return self._contention.locks.find_or_add(keys, now, describe)

    def rows_of_most_waited(self, addresses: Columns, kinds: Columns, processes: ProcessNames) -> Rows:
        """Return the row in the table of locks for each pair of a lock and a process that waits for it.

        The arguments have one item for each pair. If there are several rows, for several sites, it is the one
        with the most blocked time. It is -1 if no row has a wait that has ended.
        """
        names = [processes[i] for i in range(len(addresses))]
        waited_for = list(zip(addresses.tolist(), kinds.tolist(), names, strict=True))
        rows = {one: self._most_waited(*one) for one in set(waited_for)}
        return np.array([rows[one] for one in waited_for], np.int64)

    def _most_waited(self, address: int, kind: int, process: Name) -> int:
        locks = self._contention.locks
        is_lock = (locks["address"] == np.uint64(address)) & (locks["kind_number"] == kind) & locks.used
        found = np.flatnonzero(is_lock & (locks["program"] == self._program) & (locks["count"] > 0))
        found = found[[locks["process"][row] == process for row in found.tolist()]]
        return int(found[np.argmax(locks["blocked_ns"][found])]) if len(found) else -1

    def forget_unwaited(self) -> None:
        """Drop the rows of locks for which no wait was counted and none is ongoing."""
        locks = self._contention.locks
        is_waited_for = (locks["count"] > 0) | (locks["waiting"] > 0)
        locks.drop(np.flatnonzero(locks.used & (locks["program"] == self._program) & ~is_waited_for))

    def find_names(self, resolver: Resolver, now: float) -> None:
        """Give kernel locks the names that are known, and ask the namer for the names of others.

        One call does so for ASKED_AT_ONCE locks at most: those with the longest waits. `now` is the time of
        this fold, which the rows of new locks have in `since`.
        """
        locks = self._contention.locks
        rows = np.flatnonzero(locks.used & (locks["program"] == self._program) & ~locks["is_asked"])
        waited_ns = locks["blocked_ns"][rows] + locks["waiting_ns"][rows]
        if resolver.is_quiet:  # without new answers, only new locks can have known names
            is_due = (waited_ns >= WORTH_A_NAMER_NS) | (locks["since"][rows] == now)
            rows, waited_ns = rows[is_due], waited_ns[is_due]
        if len(rows) > ASKED_AT_ONCE:
            most = np.argpartition(-waited_ns, ASKED_AT_ONCE)[:ASKED_AT_ONCE]
            rows, waited_ns = rows[most], waited_ns[most]
        for row, is_needed in zip(rows, waited_ns >= WORTH_A_NAMER_NS, strict=True):
            question = KernelLock(
                int(locks["key"][row]),
                int(locks["address"][row]),
                str(locks["kind"][row]),
                tuple(locks["frames"][row] or ()),
                bool(locks["is_mmap_lock"][row]),
            )
            if known := resolver.known_answer(question):
                self.set_name(row, known.lock, known.site, known.stack)
                locks["is_asked"][row], locks["frames"][row] = True, None
            else:
                locks["is_asked"][row] = resolver.ask(question, bool(is_needed))

    def set_name(self, row: int, lock: str, site: str, stack: tuple[str, ...]) -> None:
        """Give the lock in a row of the table of locks its name, site and stack."""
        locks = self._contention.locks
        locks["lock"][row], locks["site"][row] = lock, site
        if stack:
            locks["stack"][row] = stack
        locks["series_code"][row] = hash_labels(self._labels_of_named(row))

    def note_answer(self, answer: LockAnswer) -> bool:
        """Give the lock of an answer its name. Returns whether the table has it as a lock of this program.

        A provisional answer has no name, because the namer ended before it answered. The question will be
        asked again.
        """
        locks = self._contention.locks
        row = int(locks.find(np.array([answer.key], np.uint64))[0])
        if row < 0 or locks["program"][row] != self._program:
            return False
        if answer.is_provisional:
            locks["is_asked"][row] = False
        else:
            self.set_name(row, answer.lock, answer.site, answer.stack)
            locks["frames"][row] = None
        return True

    def add(self, lock_rows: Rows, count: Columns, blocked_ns: Columns, max_ns: Columns, now: float) -> None:
        """Count waits for the locks in these rows of the table of locks."""
        rows = self.series.rows(*self._label_sets(lock_rows), merits(blocked_ns, count), now)
        self._count(rows, count, blocked_ns, max_ns)

    def waiting_rows(self, lock_rows: Rows, waited_ns: Columns, now: float) -> Rows:
        """Return for each wait that has not ended the row in `series` in which its lock counts.

        `lock_rows` are the rows of the locks in the table of locks.
        """
        return self.series.waiting_rows(*self._label_sets(lock_rows), waited_ns, now)

    def add_nameless(
        self, kinds: Columns, count: Columns, blocked_ns: Columns, max_ns: Columns, now: float
    ) -> None:
        """Count waits whose locks are not known; `kinds` are their kinds or types."""
        self._count(self.nameless_rows(kinds, now), count, blocked_ns, max_ns)

    def nameless_rows(self, kinds: Columns, now: float) -> Rows:
        """Return for each of `kinds` the row in `series` of all locks of this kind that are not known."""
        numbers, which = np.unique(kinds, return_inverse=True)
        rows = [self.series.row(self._other_labels(str(self._kind_names[number])), now) for number in numbers]
        return np.array(rows, np.int64)[which]

    def _count(self, rows: Rows, count: Columns, blocked_ns: Columns, max_ns: Columns) -> None:
        groups = Groups(rows)
        wide_sums.add(self.series["blocked_ns"], groups, blocked_ns)
        self.series["count"][groups.rows] += groups.sum(count)
        if self.series.maxima:
            self.series.note_max("blocked", groups.rows, groups.max(max_ns))

    def count_threads(self, now: float) -> npt.NDArray[np.int64]:
        """Return for each row of `series` how many threads blocked on its locks in the last minute.

        A thread counts once for a series, which may be that of many locks.
        """
        lock_rows, tids = self._contention.recent_waits(now)
        is_mine = self._contention.locks["program"][lock_rows] == self._program
        rows = self.series.find(self._label_codes(lock_rows[is_mine]))
        pairs = np.unique(np.column_stack([rows, tids[is_mine]])[rows >= 0], axis=0)
        return np.bincount(pairs[:, 0], minlength=self.series.size)

    def _label_sets(self, lock_rows: Rows) -> tuple[Hashes, Callable[[int], tuple[str, ...]]]:
        """Return a hash of each lock's label set, and a function that makes the i-th label set."""
        return self._label_codes(lock_rows), lambda i: self._labels(int(lock_rows[i]))

    def _label_codes(self, lock_rows: Rows) -> Hashes:
        locks = self._contention.locks
        codes = locks["series_code"][lock_rows]
        # A lock without a name has its kind + 1 as code. It is very unlikely that a hash is so small.
        return np.where(codes == 0, locks["kind_number"][lock_rows].astype(np.uint64) + np.uint64(1), codes)

    def _labels(self, row: int) -> tuple[str, ...]:
        locks = self._contention.locks
        if locks["series_code"][row] == 0:
            return self._other_labels(str(locks["kind"][row]))
        return self._labels_of_named(row)

    def _labels_of_named(self, row: int) -> tuple[str, ...]:
        locks = self._contention.locks
        labels = (*locks["process"][row], locks["kind"][row], locks["lock"][row])
        return (*labels, locks["site"][row]) if self._has_site else labels

    def _other_labels(self, kind: str) -> tuple[str, ...]:
        return (OTHER, OTHER, kind, *([OTHER] * (1 + self._has_site)))
