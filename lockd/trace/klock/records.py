"""Kernel locks as milli-klockstat's records: a line per thread, lock and period, and one per new stack."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import numpy as np

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.trace.klock.places import NO_STACK, Places
from lockd.trace.klock.rows import ROW, Accesses, comm_of, merged

ONGOING = "ongoing"
"""A tenth field, of waits alone that had not ended with the trace."""
NONE = -1
"""Number of a stack that is not known."""
KEY = ("period", "tid", "lock", "type")


class Records:
    """Lines `s,comm,P<pid>_T<tid>,type,0xaddress,start_ns,wait_sum_ns,accesses,stack` and, before a stack's
    first use, `t,stack,function+0xoffset,...`.

    start_ns is when the period began (CLOCK_MONOTONIC), a multiple of its length. A comm with a comma in it
    is quoted as CSV is.
    """

    def __init__(self, places: Places, types: tuple[str, ...], period_ns: int, accesses: Accesses) -> None:
        self._places, self._types = places, types
        self._period_ns = period_ns
        self._accesses = accesses
        self._numbers: dict[int, int] = {}
        """Of stacks in the output, by those of the programs."""
        self._pending = np.zeros(0, ROW)

    def add(self, rows: Columns, settled_ns: int) -> Iterator[str]:
        """The lines of all periods that ended before `settled_ns`, until when everything was added."""
        rows = structs.concatenate([self._pending, rows])
        is_over = (rows["period"] + 1) * self._period_ns <= settled_ns
        self._pending = structs.take(rows, np.flatnonzero(~is_over))
        return self._lines(structs.take(rows, np.flatnonzero(is_over)))

    def rest(self) -> Iterator[str]:
        """The lines of what was added and not returned yet."""
        rows, self._pending = self._pending, self._pending[:0]
        return self._lines(rows)

    def _lines(self, rows: Columns) -> Iterator[str]:
        ended = merged(structs.take(rows, np.flatnonzero(rows["waiting"] == 0)), *KEY)
        yield from self._written(ended, self._accesses.of(ended).tolist(), ())
        waiting = merged(structs.take(rows, np.flatnonzero(rows["waiting"])), *KEY)
        yield from self._written(waiting, waiting["waiting"].tolist(), (ONGOING,))

    def _written(self, rows: Columns, accesses: list[int], more: tuple[str, ...]) -> Iterator[str]:
        for row, count in zip(rows, accesses, strict=True):
            if not count:
                continue  # a release alone, of a lock that was taken in an earlier period
            stack = int(row["stack"])
            if stack not in self._numbers:
                yield from self._number(stack)
            yield _line(
                "s", comm_of(row), f"P{row['tgid']}_T{row['tid']}", self._types[int(row["type"])],
                f"{int(row['lock']):#x}", int(row["period"]) * self._period_ns, int(row["wait_ns"]), count,
                self._numbers[stack], *more,
            )  # fmt: skip

    def _number(self, stack: int) -> Iterator[str]:
        """Give it a number, and say which; all that are not known have the same."""
        functions = self._places.whole(stack)
        number = NONE if functions == (NO_STACK,) else len(self._numbers)
        if number not in self._numbers.values():
            yield _line("t", number, *functions)
        self._numbers[stack] = number


def _line(*fields: object) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue()
