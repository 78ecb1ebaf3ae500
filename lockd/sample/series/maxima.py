"""Sliding maxima: the largest value of the last minute, the same for every reader."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Rows

PARTS = 30
"""A window is kept in so many parts: a maximum is shown for the window and at most 1/30 longer."""


class Maxima:
    """One sliding maximum per row, over a window of `length` seconds."""

    def __init__(self, length: float) -> None:
        self._part = length / PARTS
        self._parts = np.zeros((64, PARTS + 1), np.int64)
        self._now = 0

    def advance(self, now: float) -> None:
        """Let the parts that are too old go; `now` in seconds, never backwards."""
        number = int(now / self._part)
        for passed in range(max(self._now + 1, number - PARTS), number + 1):
            self._parts[:, passed % (PARTS + 1)] = 0
        self._now = max(self._now, number)

    def note(self, rows: Rows, values: npt.NDArray[np.int64]) -> None:
        """Rows must be distinct."""
        if len(rows) and rows.max() >= len(self._parts):
            grown = max(int(rows.max()) + 1, 2 * len(self._parts))
            more = np.zeros((grown - len(self._parts), PARTS + 1), np.int64)
            self._parts = np.concatenate([self._parts, more])
        column = self._parts[:, self._now % (PARTS + 1)]
        column[rows] = np.maximum(column[rows], values)

    @property
    def part(self) -> int:
        """The number of the part that is kept now: of the monotonic clock, so that it goes on elsewhere."""
        return self._now

    def save(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The parts of each row."""
        parts = np.zeros((len(rows), PARTS + 1), np.int64)
        inside = rows < len(self._parts)
        parts[inside] = self._parts[rows[inside]]
        return parts

    def restore(self, rows: Rows, parts: npt.NDArray[np.int64], now: int) -> None:
        """Take over what save() gave when `now` was the part, before anything is noted."""
        self._now = now
        self.note(rows, np.zeros(len(rows), np.int64))  # which makes room
        self._parts[rows] = parts.reshape(len(rows), PARTS + 1)

    def forget(self, rows: Rows) -> None:
        self._parts[rows[rows < len(self._parts)]] = 0

    def of(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The maximum of each row; 0 if there was nothing."""
        inside = rows < len(self._parts)
        values = np.zeros(len(rows), np.int64)
        values[inside] = self._parts[rows[inside]].max(axis=1, initial=0)
        return values
