"""Entries that were drained and are not folded yet, in memory that is made once."""

from __future__ import annotations

import numpy as np

from lockd.sample import structs
from lockd.sample.maps import HashMap
from lockd.sample.pairs import Rows


class Backlog:
    """Rows of one pair of maps, of which `table` is one; the oldest first.

    There is room for two full maps and `more` rows. Memory is resident once it has been used.
    """

    def __init__(self, table: HashMap, more: int) -> None:
        self._map_entries = table.entries
        self._room = 2 * table.entries + more
        self._keys, self._values = np.empty(self._room, table.key), np.empty(self._room, table.value)
        self._keys_at, self._values_at = self._keys.ctypes.data, self._values.ctypes.data
        self._key_bytes, self._value_bytes = table.key.itemsize, table.value.itemsize
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    @property
    def has_room(self) -> bool:
        """Whether a full map can be drained into it."""
        return len(self) + self._map_entries <= self._room

    def drain(self, table: HashMap) -> int:
        """Move all entries of one of the two maps here; how many that are. There must be room."""
        if self._end + self._map_entries > self._room:
            self._move_to_front()
        end = self._end
        count = table.move(
            self._keys_at + end * self._key_bytes, self._values_at + end * self._value_bytes, self._room - end
        )
        self._end += count
        return count

    def take(self, most: int) -> Rows:
        """Hand out the oldest rows, for use until drain() is called again."""
        first, self._first = self._first, min(self._first + most, self._end)
        rows = self._keys[first : self._first], self._values[first : self._first]
        if self._first == self._end:
            self._first = self._end = 0
        return rows

    def all(self) -> Rows:
        """All rows; they stay."""
        return self._keys[self._first : self._end], self._values[self._first : self._end]

    def clear(self) -> None:
        self._first = self._end = 0

    def _move_to_front(self) -> None:
        for rows in (self._keys, self._values):
            structs.move_to_front(rows, self._first, self._end)
        self._first, self._end = 0, len(self)
