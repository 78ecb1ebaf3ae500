"""Vectorised look-ups: 64-bit hashes to row numbers, and sums and maxima by row."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Hashes: TypeAlias = "npt.NDArray[np.uint64]"
Rows: TypeAlias = "npt.NDArray[np.int64]"

_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_SHIFT = np.uint64(29)
_HIGH, _ODD = np.uint64(40), np.uint64(1)

SMALLEST = 64
"""Places of an index."""


def mix(*columns: npt.NDArray[Any]) -> Hashes:
    """A 64-bit hash of each row of the integer `columns`.

    Two different rows among a million share one with a probability below 1e-7.
    """
    hashed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashed += column.astype(np.uint64)
        hashed *= _MULTIPLIERS[0]
        hashed ^= hashed >> _SHIFT
        hashed *= _MULTIPLIERS[1]
        hashed ^= hashed >> _SHIFT
    return hashed


class Index:
    """A mapping from hashes to non-negative numbers that is asked for thousands at once.

    A hash table in two arrays, at most half full. All keys of a call take their first step together, then
    those that met another key their second, and so on.
    """

    def __init__(self) -> None:
        self._count = 0
        self._make_places(SMALLEST)

    def __len__(self) -> int:
        return self._count

    def find(self, keys: Hashes) -> Rows:
        """The number of each key, -1 where it has none."""
        found = np.full(len(keys), -1, np.int64)
        asked = np.arange(len(keys))
        at, steps = self._start(keys)
        while len(asked):
            values = self._values[at]
            hit = (self._keys[at] == keys) & (values >= 0)
            found[asked[hit]] = values[hit]
            on = np.flatnonzero(~hit & (values >= 0))
            asked, keys, steps = asked[on], keys[on], steps[on]
            at = (at[on] + steps) & self._mask
        return found

    def add(self, keys: Hashes, values: Rows) -> None:
        """Add keys that are not there yet, each once."""
        self._count += len(keys)
        if 2 * self._count > len(self._values):
            there = self._values >= 0
            keys, values = (
                np.concatenate([self._keys[there], keys]),
                np.concatenate([self._values[there], values]),
            )
            self._make_places(1 << (2 * self._count).bit_length())
        at, steps = self._start(keys)
        while len(keys):
            free = self._values[at] < 0
            self._keys[at[free]], self._values[at[free]] = keys[free], values[free]
            on = np.flatnonzero(self._keys[at] != keys)  # of several that meet, the last one stays
            keys, values, steps = keys[on], values[on], steps[on]
            at = (at[on] + steps) & self._mask

    def keep(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Forget every key whose number n has no `wanted[n]`."""
        there = np.flatnonzero(self._values >= 0)
        there = there[wanted[self._values[there]]]
        keys, values = self._keys[there], self._values[there]
        self.clear()
        self.add(keys, values)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _make_places(self, count: int) -> None:
        """Empty ones, a power of two."""
        self._keys: Hashes = np.zeros(count, np.uint64)
        self._values: Rows = np.full(count, -1, np.int64)
        self._mask = count - 1

    def _start(self, keys: Hashes) -> tuple[Rows, Rows]:
        """Where each key looks first, and how far it goes on, which is odd: it comes by every place."""
        return keys.view(np.int64) & self._mask, (keys >> _HIGH | _ODD).view(np.int64)


class Groups:
    """Rows that occur many times, brought together once, then summed column by column."""

    def __init__(self, rows: Rows) -> None:
        self._order = np.argsort(rows, kind="stable")
        ordered = rows[self._order]
        self._starts = (
            np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(rows) else rows
        )
        self.rows: Rows = ordered[self._starts]
        """Each row that occurs, once, ascending."""

    def sum(self, column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if not len(self.rows):
            return np.empty(0, np.int64)
        return np.add.reduceat(column[self._order].astype(np.int64), self._starts)

    def max(self, column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if not len(self.rows):
            return np.empty(0, np.int64)
        return np.maximum.reduceat(column[self._order].astype(np.int64), self._starts)
