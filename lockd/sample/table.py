"""A table of numpy columns whose rows are found by hash: bounded, the longest unseen leaves first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.sample.index import Hashes, Index, Rows


class Table:
    """Columns are attributes of `columns`; `seen` is when a row was last asked for (seconds)."""

    def __init__(self, columns: Mapping[str, Any], capacity: int) -> None:
        self.capacity = capacity
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(64, dtype) for name, dtype in columns.items()
        }
        self.columns["seen"] = np.zeros(64)
        self.used = np.zeros(64, np.bool_)
        self._index = Index()

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        return self.columns[column]

    def rows(self, keys: Hashes, now: float, describe: Callable[[Rows, Rows], None]) -> Rows:
        """The row of each key. New rows are zeroed and handed to `describe(rows, positions in keys)`.

        A table that is full gives up its longest unseen rows, a tenth at a time, but none that
        was asked for `now`: those are in use, and `capacity` must be enough for them.
        """
        found = self._index.find(keys)
        self.columns["seen"][found[found >= 0]] = now  # before any row has to go
        if (found < 0).any():
            fresh, first = np.unique(keys[found < 0], return_index=True)
            positions = np.flatnonzero(found < 0)[first]
            if len(self._index) + len(fresh) > self.capacity:
                self._make_room(len(fresh), now)
            rows = self._take(len(fresh))
            self._index.add(fresh, rows)
            describe(rows, positions)
            self.columns["seen"][rows] = now
            found = self._index.find(keys)
        return found

    def find(self, keys: Hashes) -> Rows:
        """The row of each key, -1 where there is none."""
        return self._index.find(keys)

    def forget_unseen(self, before: float) -> None:
        """Drop the rows that were last asked for before `before`."""
        self._drop(self.used & (self.columns["seen"] < before))

    def drop(self, rows: Rows) -> None:
        gone = np.zeros(len(self.used), np.bool_)
        gone[rows] = True
        self._drop(gone)

    def _drop(self, gone: npt.NDArray[np.bool_]) -> None:
        if gone.any():
            self.used &= ~gone
            self._index.keep(self.used)

    def _make_room(self, wanted: int, now: float) -> None:
        idle = np.flatnonzero(self.used & (self.columns["seen"] < now))
        count = max(len(self._index) + wanted - self.capacity, self.capacity // 10)
        self.drop(idle[np.argsort(self.columns["seen"][idle], kind="stable")[:count]])

    def _take(self, count: int) -> Rows:
        free = np.flatnonzero(~self.used)
        if len(free) < count:
            grown = len(self.used) + max(count, len(self.used))
            for name, column in self.columns.items():
                self.columns[name] = np.concatenate(
                    [column, np.zeros((grown - len(column), *column.shape[1:]), column.dtype)]
                )
            self.used = np.concatenate([self.used, np.zeros(grown - len(self.used), np.bool_)])
            free = np.flatnonzero(~self.used)
        rows = free[:count]
        for column in self.columns.values():
            column[rows] = 0
        self.used[rows] = True
        return rows
