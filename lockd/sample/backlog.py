"""Entries that were drained and are not folded yet, in memory that is made once."""

from __future__ import annotations

import numpy as np

from lockd.columns import structs
from lockd.kernel.maps import HashMap
from lockd.kernel.pairs import Entries
from lockd.sample.saved_state import Saved

BASE, END = 0, 1
"""Words before the rows."""
WORDS_BYTES = 16
MOST = 1 << 60
"""Rows, from the first one on: more than there will ever be."""


class Backlog:
    """Rows of one pair of maps, of which `table` is one; the oldest first.

    There is room for two full maps and `more` rows. Memory is resident once it has been used.

    Entries are numbered from the first one on, whatever became of it. If the memory is `saved` in a file they
    stay until forget_folded(), and another process finds there whatever was not written as counted: each
    step below ends with one word that changes.
    """

    def __init__(self, table: HashMap, more: int, saved: Saved | None = None) -> None:
        self._map_entries = table.entries
        self._room = 2 * table.entries + more
        self._key_bytes, self._value_bytes = table.key.itemsize, table.value.itemsize
        values_from = WORDS_BYTES + -(-self._room * self._key_bytes // 8) * 8
        saved = saved or Saved()
        self._is_saved = saved.is_kept
        memory = saved.memory(values_from + self._room * self._value_bytes)
        self._words = memoryview(memory)[:WORDS_BYTES].cast("q")
        self._keys = np.frombuffer(memory, table.key, self._room, WORDS_BYTES)
        self._values = np.frombuffer(memory, table.value, self._room, values_from)
        self._keys_at, self._values_at = self._keys.ctypes.data, self._values.ctypes.data
        self._base, self._end = self._words[BASE], self._words[END]
        """The number of the row in the first place, and that of the next row."""
        if not 0 <= self._base <= self._end <= min(self._base + self._room, MOST):
            raise ValueError(f"rows {self._base} to {self._end} are not what {self._room} places can have")
        self.first = self._kept = self._base
        """The next to be folded, and the first that must not be overwritten."""

    def __len__(self) -> int:
        return self._end - self.first

    @property
    def has_room(self) -> bool:
        """Whether a full map can be drained into it."""
        return self._would_have_room(self._kept)

    @property
    def has_room_once_saved(self) -> bool:
        """The same after forget_folded()."""
        return self._would_have_room(self.first)

    def _would_have_room(self, kept_from: int) -> bool:
        """If the rows before that one may be overwritten."""
        if self._end - self._base + self._map_entries <= self._room:
            return True
        kept = self._end - kept_from
        # They are moved to the front; in a file only to where none of themselves is.
        return kept + self._map_entries <= self._room and (
            not self._is_saved or kept <= kept_from - self._base
        )

    def drain(self, table: HashMap) -> int:
        """Move all entries of one of the two maps here; how many that are. There must be room."""
        if self._end - self._base + self._map_entries > self._room:
            self._move_to_front()
        end = self._end - self._base
        count = table.drain_into(
            self._keys_at + end * self._key_bytes, self._values_at + end * self._value_bytes, self._room - end
        )
        self._end += count
        self._words[END] = self._end
        return count

    def take(self, most: int) -> Entries:
        """Hand out the oldest rows, for use until drain() is called again."""
        first, self.first = self.first, min(self.first + most, self._end)
        rows = self._rows(first, self.first)
        if not self._is_saved:
            self.forget_folded()
        return rows

    def all(self) -> Entries:
        """All rows; they stay."""
        return self._rows(self.first, self._end)

    def clear(self) -> None:
        self.take(len(self))

    def forget_folded(self) -> None:
        """What was handed out is written as counted."""
        self._kept = self.first
        if self._kept == self._end:
            self._set_base(self._end)

    def go_back(self, first: int) -> None:
        """Hand out again what comes from the row of that number on, which must be there still.

        Raises ValueError if it is not.
        """
        if not self._base <= first <= self._end:
            raise ValueError(f"of the rows from {first} on those before {self._base} are gone")
        self.first = self._kept = first

    def _rows(self, first: int, end: int) -> Entries:
        first, end = first - self._base, end - self._base
        return self._keys[first:end], self._values[first:end]

    def _move_to_front(self) -> None:
        for rows in (self._keys, self._values):
            structs.move_to_front(rows, self._kept - self._base, self._end - self._base)
        self._set_base(self._kept)

    def _set_base(self, base: int) -> None:
        self._base = self._words[BASE] = base
