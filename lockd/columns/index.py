"""Vectorised look-ups from 64-bit hashes to row numbers, and sums and maxima by row."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Hashes: TypeAlias = "npt.NDArray[np.uint64]"
"""64-bit hashes that stand for keys, one-dimensional."""
Rows: TypeAlias = "npt.NDArray[np.int64]"
"""Row numbers or positions in an array, one-dimensional."""

_SHIFT = np.uint64(29)
_HIGH, _ODD = np.uint64(40), np.uint64(1)
_NONE, _REMOVED = -1, -2
"""Marks in Index._values for places without a number: never used, or emptied by remove()."""
_LOW = 0xFFFF

SMALLEST = 64
"""Number of places of an empty index, a power of two."""


class Seed(NamedTuple):
    """The numbers on which the hashes of mix() depend."""

    start: np.uint64
    """The value from which the hash of each row begins."""
    first: np.uint64
    """An odd number by which the hash is multiplied after each column is added. As long as it is secret,
    nobody can tell which value of the next column would make up for a difference in this one."""
    second: np.uint64
    """An odd number by which the hash is then multiplied once more."""


SEED_BYTES = 24
"""The number of random bytes of which a seed is made: eight for each of its numbers."""


def make_seed(secret: bytes) -> Seed:
    """Return a seed made of `secret`, which is SEED_BYTES random bytes."""
    start, first, second = np.frombuffer(secret, np.uint64)
    return Seed(start, first | _ODD, second | _ODD)


SEED = make_seed(os.urandom(SEED_BYTES))
"""The seed of this process, which nobody else knows.

Equal hashes count as equal keys, and users choose parts of the keys: the name of a process, the address of a
lock. With a known seed, users could choose these parts so that their events count as somebody else's.
"""


def mix(*columns: npt.NDArray[Any], seed: Seed | None = None) -> Hashes:
    """Return a 64-bit hash of each row of the integer `columns`, which have the same length.

    The probability that any two of a million different rows have the same hash is below 1e-7, also for rows
    that somebody has chosen who does not know the seed. Without `seed` it is SEED: such hashes mean nothing
    to another process, and must not be saved.
    """
    start, first, second = seed or SEED
    hashed = np.full(len(columns[0]), start)
    for column in columns:
        hashed += column.astype(np.uint64)
        hashed *= first
        hashed ^= hashed >> _SHIFT
        hashed *= second
        hashed ^= hashed >> _SHIFT
    return hashed


def distinct_positions(keys: Hashes) -> Rows:
    """Return one position in `keys` for each distinct key, in no particular order.

    Sorting the keys would take five times as long.
    """
    positions = np.arange(len(keys))
    table = np.empty(1 << (4 * len(keys)).bit_length(), np.int64)
    places = keys.view(np.int64) & (len(table) - 1)
    table[places] = positions
    winners = table.take(places)  # of several positions with the same place, the last one stays
    chosen = np.flatnonzero(winners == positions)
    losers = np.flatnonzero(keys.take(winners) != keys)
    if len(losers):
        chosen = np.concatenate([chosen, losers[np.unique(keys[losers], return_index=True)[1]]])
    return chosen


class Index:
    """A mapping from hashes to non-negative numbers, for thousands of keys in one call.

    It is a hash table with open addressing in two arrays, at most half full. All keys of a call take the
    first step of their search together, then those that met another key take the second step, and so on.
    """

    def __init__(self) -> None:
        self._count = self._removed = 0
        self._make_places(SMALLEST)

    def __len__(self) -> int:
        return self._count

    def find(self, keys: Hashes) -> Rows:
        """Return the number of each key, -1 for a key without one."""
        return self._values.take(self._places(keys))

    def find_with_places(self, keys: Hashes) -> tuple[Rows, Rows]:
        """Return the number of each key as find() does, and the place where the key is or would be.

        The places are for add().
        """
        places = self._places(keys)
        return self._values.take(places), places

    def add(self, keys: Hashes, values: Rows, places: Rows | None = None) -> None:
        """Add distinct keys that are not in the index, with their numbers `values`.

        `places`, if given, are the places of the keys from find_with_places(). Since that call only remove(),
        and no other method that changes the index, may have been called.
        """
        self._count += len(keys)
        if 2 * (self._count + self._removed) > len(self._values):
            is_used = self._values >= 0
            keys, values = (
                np.concatenate([self._keys[is_used], keys]),
                np.concatenate([self._values[is_used], values]),
            )
            self._removed = 0
            self._make_places(1 << (2 * self._count).bit_length())
            places = None
        if places is None:
            places = self._places(keys)
        while len(keys):
            self._keys[places], self._values[places] = keys, values
            # Of several keys with the same place the last one stays; the others are added in the next round.
            rest = (self._keys.take(places) != keys).nonzero()[0]
            keys, values = keys[rest], values[rest]
            places = self._places(keys)

    def remove(self, keys: Hashes) -> None:
        """Remove distinct keys that are in the index."""
        self._values[self._places(keys)] = _REMOVED
        self._count -= len(keys)
        self._removed += len(keys)

    def keep(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Remove every key whose number n has a false `wanted[n]`."""
        places = np.flatnonzero(self._values >= 0)
        places = places[wanted[self._values[places]]]
        keys, values = self._keys[places], self._values[places]
        self.clear()
        self.add(keys, values)

    def clear(self) -> None:
        """Forget all keys."""
        self._count = self._removed = 0
        self._make_places(SMALLEST)

    def _make_places(self, count: int) -> None:
        """Replace the table by an empty one with `count` places, a power of two."""
        self._keys: Hashes = np.zeros(count, np.uint64)
        self._values: Rows = np.full(count, _NONE, np.int64)
        self._mask = count - 1

    def _places(self, keys: Hashes) -> Rows:
        """Return the place of each key; for a missing key, the first never used place of its search."""
        places = keys.view(np.int64) & self._mask
        open_ = self._unresolved(keys, places)
        if len(open_):
            steps = (keys[open_] >> _HIGH | _ODD).view(np.int64)  # an odd step visits every place
        while len(open_):
            next_places = places[open_] = (places[open_] + steps) & self._mask
            remaining = self._unresolved(keys[open_], next_places)
            open_, steps = open_[remaining], steps[remaining]
        return places

    def _unresolved(self, keys: Hashes, places: Rows) -> Rows:
        """Return the positions of the keys whose place has another key, or a key that was removed."""
        values = self._values.take(places)
        is_other = (self._keys.take(places) != keys) & (values != _NONE)
        positions: Rows = (is_other | (values == _REMOVED)).nonzero()[0]
        return positions


class Groups:
    """Values grouped by row: the grouping is computed once, then applied to column after column.

    `rows` has the row number of each value, from 0 to 2^32 - 1; a row number may occur several times. A
    column has one value for each item of `rows`.
    """

    def __init__(self, rows: Rows) -> None:
        self._order = _ascending(rows)
        ordered = rows.take(self._order)
        self._starts = (
            np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(rows) else rows
        )
        self.rows: Rows = ordered.take(self._starts)
        """The distinct row numbers, ascending. The results of sum(), float_sum() and max() have one value for
        each."""

    def sum(self, column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the sum of the column's values for each row number in `self.rows`.

        A sum has 64 bits, which the times of many threads may exceed. Such times need float_sum() or
        lockd/columns/wide_sums.py.
        """
        if not len(self.rows):
            return np.empty(0, np.int64)
        return np.add.reduceat(column[self._order].astype(np.int64), self._starts)

    def float_sum(self, column: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return the sum of the column's values for each row number in `self.rows`, rounded from 2^53 on."""
        if not len(self.rows):
            return np.empty(0, np.float64)
        return np.add.reduceat(column[self._order].astype(np.float64), self._starts)

    def max(self, column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the largest of the column's values for each row number in `self.rows`."""
        if not len(self.rows):
            return np.empty(0, np.int64)
        return np.maximum.reduceat(column[self._order].astype(np.int64), self._starts)


def _ascending(rows: Rows) -> Rows:
    """Return the positions in `rows`, in ascending order of the row numbers there.

    The row numbers are sorted by 16 bits at a time, because numpy sorts 16-bit integers by radix.
    """
    order = np.argsort(rows.astype(np.uint16), kind="stable")
    if rows.max(initial=0) > _LOW:
        order = order.take(np.argsort((rows >> 16).astype(np.uint16).take(order), kind="stable"))
    return order
