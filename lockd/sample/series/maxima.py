"""Sliding maxima: the largest value in a window of time such as the last minute. To read a maximum does not
reset it, so that all readers see the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Rows

PARTS = 30
"""Parts that a window is kept in. A value counts for the length of the window, and at most 1/30 longer."""


class Maxima:
    """One sliding maximum per row, over a window of `length` seconds."""

    def __init__(self, length: float) -> None:
        self._part = length / PARTS
        self._parts = np.zeros((64, PARTS + 1), np.int64)
        self._now = 0

    def advance(self, now: float) -> None:
        """Forget values that are too old. `now` is the monotonic clock in seconds."""
        number = int(now / self._part)
        for passed in range(max(self._now + 1, number - PARTS), number + 1):
            self._parts[:, passed % (PARTS + 1)] = 0
        self._now = max(self._now, number)

    def note(self, rows: Rows, values: npt.NDArray[np.int64]) -> None:
        """Raise the maximum of each row to its value, at the time of the last advance().

        The rows must be distinct.
        """
        if len(rows) and rows.max() >= len(self._parts):
            grown = max(int(rows.max()) + 1, 2 * len(self._parts))
            more = np.zeros((grown - len(self._parts), PARTS + 1), np.int64)
            self._parts = np.concatenate([self._parts, more])
        column = self._parts[:, self._now % (PARTS + 1)]
        column[rows] = np.maximum(column[rows], values)

    @property
    def part(self) -> int:
        """The number of the current part. It is counted from the start of the host, as the monotonic clock
        is, so that another process can go on with it."""
        return self._now

    def save(self, rows: Rows) -> npt.NDArray[np.int64]:
        """All parts of each row, for restore(): an array with one row for each of `rows`."""
        parts = np.zeros((len(rows), PARTS + 1), np.int64)
        inside = rows < len(self._parts)
        parts[inside] = self._parts[rows[inside]]
        return parts

    def restore(self, rows: Rows, parts: npt.NDArray[np.int64], now: int) -> None:
        """Take over the result of save(), before anything is noted. `now` is what `part` was when
        save() was called."""
        self._now = now
        self.note(rows, np.zeros(len(rows), np.int64))  # so that the array has these rows
        self._parts[rows] = parts.reshape(len(rows), PARTS + 1)

    def move(self, rows: Rows, into: Rows) -> None:
        """Raise the maxima of the rows `into` to those of `rows`, one by one, and forget those of `rows`.

        A row that is moved into itself is only forgotten.
        """
        self.note(into, np.zeros(len(into), np.int64))  # so that the array has these rows
        rows, into = rows[rows < len(self._parts)], into[rows < len(self._parts)]
        np.maximum.at(self._parts, into, self._parts[rows])
        self._parts[rows] = 0

    def values(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The maximum of each row; 0 if nothing was noted for it."""
        inside = rows < len(self._parts)
        values = np.zeros(len(rows), np.int64)
        values[inside] = self._parts[rows[inside]].max(axis=1, initial=0)
        return values
