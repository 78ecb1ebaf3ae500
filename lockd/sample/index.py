"""Vectorised look-ups: 64-bit hashes to row numbers, and sums and maxima by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_SHIFT = np.uint64(29)


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
    """A mapping from hashes to non-negative numbers that is asked for thousands at once."""

    def __init__(self) -> None:
        self._keys: Hashes = np.empty(0, np.uint64)
        self._values: Rows = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Hashes) -> Rows:
        """The number of each key, -1 where it has none."""
        if not len(self._keys):
            return np.full(len(keys), -1, np.int64)
        at = np.searchsorted(self._keys, keys)
        at[at == len(self._keys)] = 0
        return np.where(self._keys[at] == keys, self._values[at], -1)

    def add(self, keys: Hashes, values: Rows) -> None:
        """Add keys that are not there yet, each once."""
        keys, values = np.concatenate([self._keys, keys]), np.concatenate([self._values, values])
        order = np.argsort(keys, kind="stable")
        self._keys, self._values = keys[order], values[order]

    def keep(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Forget every key whose number n has no `wanted[n]`."""
        mask = wanted[self._values]
        self._keys, self._values = self._keys[mask], self._values[mask]

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


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
