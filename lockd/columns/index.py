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
_NONE, _REMOVED = -1, -2
"""In an index, no number."""
_LOW = 0xFFFF

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


def one_of_each(keys: Hashes) -> Rows:
    """One position of each key that occurs. Sorting them would take five times as long."""
    numbers = np.arange(len(keys))
    places = np.empty(1 << (4 * len(keys)).bit_length(), np.int64)
    at = keys.view(np.int64) & (len(places) - 1)
    places[at] = numbers
    there = places.take(at)  # of several that meet, the last one stays
    chosen = np.flatnonzero(there == numbers)
    others = np.flatnonzero(keys.take(there) != keys)
    if len(others):
        chosen = np.concatenate([chosen, others[np.unique(keys[others], return_index=True)[1]]])
    return chosen


class Index:
    """A mapping from hashes to non-negative numbers that is asked for thousands at once.

    A hash table in two arrays, at most half full. All keys of a call take their first step together, then
    those that met another key their second, and so on.
    """

    def __init__(self) -> None:
        self._count = self._removed = 0
        self._make_places(SMALLEST)

    def __len__(self) -> int:
        return self._count

    def find(self, keys: Hashes) -> Rows:
        """The number of each key, -1 where it has none."""
        return self._values.take(self._places(keys))

    def look(self, keys: Hashes) -> tuple[Rows, Rows]:
        """The same, and for add() the place where each key is or would be."""
        at = self._places(keys)
        return self._values.take(at), at

    def add(self, keys: Hashes, values: Rows, at: Rows | None = None) -> None:
        """Add keys that are not there yet, each once; `at`: their places, if none was added since look()."""
        self._count += len(keys)
        if 2 * (self._count + self._removed) > len(self._values):
            there = self._values >= 0
            keys, values = (
                np.concatenate([self._keys[there], keys]),
                np.concatenate([self._values[there], values]),
            )
            self._removed = 0
            self._make_places(1 << (2 * self._count).bit_length())
            at = None
        if at is None:
            at = self._places(keys)
        while len(keys):
            self._keys[at], self._values[at] = keys, values
            on = (self._keys.take(at) != keys).nonzero()[0]  # of several that meet, the last one stays
            keys, values = keys[on], values[on]
            at = self._places(keys)

    def remove(self, keys: Hashes) -> None:
        """Forget keys that are there, each once."""
        self._values[self._places(keys)] = _REMOVED
        self._count -= len(keys)
        self._removed += len(keys)

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
        self._values: Rows = np.full(count, _NONE, np.int64)
        self._mask = count - 1

    def _places(self, keys: Hashes) -> Rows:
        """Where each key is; if it is nowhere, the first empty place on its way."""
        at = keys.view(np.int64) & self._mask
        on = self._elsewhere(keys, at)
        if len(on):
            steps = (keys[on] >> _HIGH | _ODD).view(np.int64)  # odd: a key comes by every place
        while len(on):
            places = at[on] = (at[on] + steps) & self._mask
            still = self._elsewhere(keys[on], places)
            on, steps = on[still], steps[still]
        return at

    def _elsewhere(self, keys: Hashes, at: Rows) -> Rows:
        """Which of the keys meet another in these places, or one that was removed."""
        values = self._values.take(at)
        is_other = (self._keys.take(at) != keys) & (values != _NONE)
        on: Rows = (is_other | (values == _REMOVED)).nonzero()[0]
        return on


class Groups:
    """Rows that occur many times, brought together once, then summed column by column."""

    def __init__(self, rows: Rows) -> None:
        """Rows are not negative and below 2^32."""
        self._order = _ascending(rows)
        ordered = rows.take(self._order)
        self._starts = (
            np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(rows) else rows
        )
        self.rows: Rows = ordered.take(self._starts)
        """Each row that occurs, once, ascending."""

    def sum(self, column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if not len(self.rows):
            return np.empty(0, np.int64)
        return np.add.reduceat(column[self._order].astype(np.int64), self._starts)

    def max(self, column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if not len(self.rows):
            return np.empty(0, np.int64)
        return np.maximum.reduceat(column[self._order].astype(np.int64), self._starts)


def _ascending(rows: Rows) -> Rows:
    """Positions in ascending order; by 16 bits at a time, for which numpy has a radix sort."""
    order = np.argsort(rows.astype(np.uint16), kind="stable")
    if rows.max(initial=0) > _LOW:
        order = order.take(np.argsort((rows >> 16).astype(np.uint16).take(order), kind="stable"))
    return order
