"""Records in milli-klockstat's format: lines for each thread, lock and period, and for each new stack."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.trace.core.output import csv_line
from lockd.trace.klock.rows import NO_STACK, ROW, Accesses, Names, comm_of, merged

ONGOING = "ongoing"
"""The tenth field of records of waits that had not ended when the trace ended."""
NO_NUMBER = -1
"""The number that is written for every stack that is not known."""
KEY = ("period", "tid", "lock", "type")
"""The columns of ROW that records are made by: one record for each combination of their values."""


class Records:
    """Makes lines `s,comm,P<pid>_T<tid>,type,0xaddress,start_ns,wait_sum_ns,accesses,stack`.

    A line `t,stack,function+0xoffset,...` comes before the first use of each stack. start_ns is the time on
    CLOCK_MONOTONIC when the period began, a multiple of the period's length. A comm that contains a comma is
    quoted as in CSV.
    """

    def __init__(self, names: Names, types: list[str], period_ns: int, accesses: Accesses) -> None:
        self._names, self._types = names, types
        self._period_ns = period_ns
        self._accesses = accesses
        self._numbers: dict[int, int] = {}
        """The numbers of stacks in the output, by their numbers in the programs."""
        self._has_unknown = False
        """Whether the line of NO_NUMBER was returned."""
        self._pending = np.zeros(0, ROW)

    def add(self, rows: Columns, settled_ns: int) -> Iterator[str]:
        """Add rows. Returns the lines of all periods that ended by `settled_ns` (ns of CLOCK_MONOTONIC).

        All rows of these periods must have been added, except for unfinished holds: these have the period in
        which they began, of which lines may have been returned already.
        """
        rows = structs.concatenate([self._pending, rows])
        is_over = (rows["period"] + 1) * self._period_ns <= settled_ns
        self._pending = structs.take(rows, np.flatnonzero(~is_over))
        return self._lines(structs.take(rows, np.flatnonzero(is_over)))

    def rest(self) -> Iterator[str]:
        """The lines of all rows that were added and not returned yet."""
        rows, self._pending = self._pending, self._pending[:0]
        return self._lines(rows)

    def _lines(self, rows: Columns) -> Iterator[str]:
        ended = merged(structs.take(rows, np.flatnonzero(rows["waiting"] == 0)), *KEY)
        yield from self._format(ended, self._accesses.counts(ended).tolist(), ())
        waiting = merged(structs.take(rows, np.flatnonzero(rows["waiting"])), *KEY)
        yield from self._format(waiting, waiting["waiting"].tolist(), (ONGOING,))

    def _format(self, rows: Columns, accesses: list[int], more: tuple[str, ...]) -> Iterator[str]:
        for row, count in zip(rows, accesses, strict=True):
            if not count:
                continue  # The period has only the release of a lock that was acquired in an earlier period.
            stack = int(row["stack"])
            if stack not in self._numbers:
                yield from self._assign_number(stack)
            yield csv_line((
                "s", comm_of(row), f"P{row['tgid']}_T{row['tid']}", self._types[int(row["type"])],
                f"{int(row['lock']):#x}", int(row["period"]) * self._period_ns, int(row["wait_ns"]), count,
                self._numbers[stack], *more,
            ))  # fmt: skip

    def _assign_number(self, stack: int) -> Iterator[str]:
        """Assign a number to the stack. Returns the line `t` of the number, unless it was returned before."""
        functions = self._names.functions(stack)
        is_unknown = functions == (NO_STACK,)
        number = self._numbers[stack] = NO_NUMBER if is_unknown else len(self._numbers)
        if not (is_unknown and self._has_unknown):
            yield csv_line(("t", number, *functions))
        self._has_unknown |= is_unknown
