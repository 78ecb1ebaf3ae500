"""A table of numpy columns whose rows are found by hash: bounded, the longest unseen leaves first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Hashes, Index, Rows, one_of_each


class Table:
    """Columns of the dtypes in `columns`, and besides them `key` and `seen`.

    A row is found by its key; when it was last asked for (seconds) is in `seen`.
    """

    def __init__(self, columns: Mapping[str, Any], capacity: int) -> None:
        self.capacity = capacity
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(64, dtype)
            for name, dtype in {**columns, "key": np.uint64, "seen": np.float64}.items()
        }
        self.used = np.zeros(64, np.bool_)
        self._index = Index()

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        return self.columns[column]

    def rows(self, keys: Hashes, now: float, describe: Callable[[Rows], Mapping[str, Any]]) -> Rows:
        """The row of each key. `describe(positions in keys)` gives columns of new rows; the others are 0.

        A table that is full gives up its longest unseen rows, a quarter at a time, but none that
        was asked for `now`: those are in use, and `capacity` must be enough for them.
        """
        found, places = self._index.look(keys)
        missing = np.flatnonzero(found < 0)
        if not len(missing):
            self.columns["seen"][found] = now
            return found
        self.columns["seen"][found[found >= 0]] = now  # before any row has to go
        positions = missing[one_of_each(keys[missing])]
        fresh = keys[positions]
        if len(self._index) + len(fresh) > self.capacity:
            self._make_room(len(fresh), now)
        rows = self._take(len(fresh))
        self._index.add(fresh, rows, places[positions])
        described = {**describe(positions), "key": fresh, "seen": now}
        for name, column in self.columns.items():
            column[rows] = described.get(name, 0)
        found[positions] = rows
        if len(positions) < len(missing):
            found[missing] = self._index.find(keys[missing])
        return found

    def find(self, keys: Hashes) -> Rows:
        """The row of each key, -1 where there is none."""
        return self._index.find(keys)

    def forget_unseen(self, before: float) -> None:
        """Drop the rows that were last asked for before `before`."""
        self.drop(np.flatnonzero(self.used & (self.columns["seen"] < before)))

    def drop(self, rows: Rows) -> None:
        """Forget these rows, which are in use, each once."""
        self.used[rows] = False
        self._index.remove(self.columns["key"][rows])

    def _make_room(self, wanted: int, now: float) -> None:
        idle = np.flatnonzero(self.used & (self.columns["seen"] < now))
        count = max(len(self._index) + wanted - self.capacity, self.capacity // 4)
        if count < len(idle):
            idle = idle[np.argpartition(self.columns["seen"][idle], count)[:count]]
        self.drop(idle)

    def _take(self, count: int) -> Rows:
        free = np.flatnonzero(~self.used)
        if len(free) < count:
            # In steps of twice as many, but to no more rows than there may be.
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
