"""A bounded table of numpy columns, whose rows are found by hash.

A full table drops the rows that were used least recently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Hashes, Index, Rows, distinct_positions


class Table:
    """A table with the columns of `columns` (dtypes by name), `key` and `seen`, and at most `capacity` rows.

    `key` is the hash by which a row is found. `seen` is the caller's time `now` at which find_or_add() last
    returned the row; find() does not change it.
    """

    def __init__(self, columns: Mapping[str, Any], capacity: int) -> None:
        self.capacity = capacity
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(64, dtype)
            for name, dtype in {**columns, "key": np.uint64, "seen": np.float64}.items()
        }
        """Arrays by column name. They are replaced as the table grows."""
        self.used = np.zeros(64, np.bool_)
        """Whether each row is in use."""
        self._index = Index()

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """Return a column, indexed by row number; rows that are not in use have arbitrary values."""
        return self.columns[column]

    def find_or_add(self, keys: Hashes, now: float, describe: Callable[[Rows], Mapping[str, Any]]) -> Rows:
        """Return the row number of each key; add rows for keys that have none.

        `describe(positions)` returns the columns of new rows by name; `positions` are those of their keys in
        `keys`. Columns that it leaves out are 0. A full table drops the rows with the oldest `seen`, at least
        a quarter of the capacity at a time. It drops none whose `seen` is `now`: `capacity` must be enough
        for those.
        """
        rows, places = self._index.find_with_places(keys)
        missing = np.flatnonzero(rows < 0)
        if not len(missing):
            self.columns["seen"][rows] = now
            return rows
        self.columns["seen"][rows[rows >= 0]] = now  # so that _make_room() keeps these rows
        positions = missing[distinct_positions(keys[missing])]
        fresh = keys[positions]
        if len(self._index) + len(fresh) > self.capacity:
            self._make_room(len(fresh), now)
        new_rows = self._take_free(len(fresh))
        self._index.add(fresh, new_rows, places[positions])
        values = {**describe(positions), "key": fresh, "seen": now}
        for name, column in self.columns.items():
            column[new_rows] = values.get(name, 0)
        rows[positions] = new_rows
        if len(positions) < len(missing):
            rows[missing] = self._index.find(keys[missing])
        return rows

    def find(self, keys: Hashes) -> Rows:
        """Return the row number of each key, -1 for a key without a row."""
        return self._index.find(keys)

    def forget_unseen(self, before: float) -> None:
        """Drop the rows whose `seen` is before the time `before`."""
        self.drop(np.flatnonzero(self.used & (self.columns["seen"] < before)))

    def drop(self, rows: Rows) -> None:
        """Drop distinct rows that are in use."""
        self.used[rows] = False
        self._index.remove(self.columns["key"][rows])

    def _make_room(self, wanted: int, now: float) -> None:
        """Drop the rows with the oldest `seen` to make room for `wanted` rows.

        At least a quarter of the capacity is freed, or all rows whose `seen` is before `now` if these are
        fewer.
        """
        idle = np.flatnonzero(self.used & (self.columns["seen"] < now))
        count = max(len(self._index) + wanted - self.capacity, self.capacity // 4)
        if count < len(idle):
            idle = idle[np.argpartition(self.columns["seen"][idle], count)[:count]]
        self.drop(idle)

    def _take_free(self, count: int) -> Rows:
        """Mark `count` free rows as used and return their numbers; grow the columns if there are too few."""
        free = np.flatnonzero(~self.used)
        if len(free) < count:
            # The columns double, but grow beyond the capacity only as far as `count` rows need it.
            grown = max(min(2 * len(self.used), self.capacity), len(self.used) + count - len(free))
            for name, column in self.columns.items():
                self.columns[name] = np.concatenate(
                    [column, np.zeros((grown - len(column), *column.shape[1:]), column.dtype)]
                )
            self.used = np.concatenate([self.used, np.zeros(grown - len(self.used), np.bool_)])
            free = np.flatnonzero(~self.used)
        rows = free[:count]
        self.used[rows] = True
        return rows
