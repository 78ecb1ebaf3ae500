"""The exported series: which label sets have one of their own, and their numbers.

Totals are exact and bounded: what has no series of its own is counted in the one whose
name labels say `other`. An increment goes to one series, chosen when it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.sample.index import Hashes, Index, Rows
from lockd.sample.limits import OPEN_SHARE, Budget
from lockd.sample.maxima import Maxima

OTHER = "other"
EARNED_NS = 5_000_000
"""Beyond OPEN_SHARE a label set must have shown so much waiting since the last fold."""

MOST_REFUSED = 50_000
"""So many refused label sets are remembered, not every name that a host ever had."""


class Series:
    """One group of metrics with the same labels: a row per label set, numpy columns for its numbers.

    `names` are the positions of the labels that become `other`; `lines` is what one row
    costs in lines of exposition, taken from `budget`; room is kept for `others` rows of
    `other`, and there are never more than `most` rows besides them; `maxima` are the names
    of sliding maxima, each kept over every window in `windows` (seconds by label).
    """

    def __init__(
        self,
        family: str,
        columns: Mapping[str, Any],
        *,
        names: tuple[int, ...],
        lines: int,
        budget: Budget,
        others: int,
        most: int | None = None,
        maxima: tuple[str, ...] = (),
        windows: Mapping[str, float] | None = None,
    ) -> None:
        self.family = family
        self.lines = lines
        self.overflowed = 0
        """How often a label set was refused a series of its own."""
        self.retired = 0
        self.labels: list[tuple[str, ...] | None] = []
        self.columns = {name: np.zeros((64, *_shape(kind)), _dtype(kind)) for name, kind in columns.items()}
        self.maxima = {
            name: {window: Maxima(seconds) for window, seconds in (windows or {}).items()} for name in maxima
        }
        self.seen = np.zeros(64)
        self.names = names
        self._budget = budget
        self._quota = budget.quota(family) // lines
        self._most = most
        budget.left -= others * lines
        self._named = 0
        self._row_of: dict[tuple[str, ...], int] = {}
        self._index = Index()
        self._refused: list[int] = []
        self._free: list[int] = []

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def exported_lines(self) -> int:
        return len(self) * self.lines

    def rows(
        self, keys: Hashes, labels: Callable[[int], tuple[str, ...]], weights: npt.NDArray[Any], now: float
    ) -> Rows:
        """The row of each key, where `labels(i)` names the i-th and `weights` is its waiting in ns."""
        found = self._index.find(keys)
        if (found < 0).any():
            unknown = np.flatnonzero(found < 0)
            fresh, first, inverse = np.unique(keys[unknown], return_index=True, return_inverse=True)
            weight = np.bincount(inverse, weights=weights[unknown])
            rows = np.array(
                [
                    self._admit(labels(int(unknown[position])), float(weight[i]))
                    for i, position in enumerate(first)
                ],
                np.int64,
            )
            self._index.add(fresh, rows)
            found[unknown] = rows[inverse]
        self.seen[found] = now
        return found

    def row(self, labels: tuple[str, ...], now: float) -> int:
        """The row of one label set, admitted if there is room."""
        row = self._admit(labels, 0.0)
        self.seen[row] = now
        return row

    def reconsider(self) -> None:
        """Let refused label sets ask again, or forget that they did; once a second."""
        if self._refused and (self._budget.left >= self.lines or len(self._refused) > MOST_REFUSED):
            wanted = np.ones(len(self.labels) or 1, np.bool_)
            wanted[self._refused] = False
            self._index.keep(wanted)
            self._refused = []

    def retire(self, before: float, is_alive: Callable[[tuple[str, ...]], bool]) -> None:
        """Drop the rows with nothing new since `before` whose process lives no more."""
        gone = [
            row
            for labels, row in self._row_of.items()
            if self.seen[row] < before and not self._is_other(labels) and not is_alive(labels)
        ]
        if not gone:
            return
        for row in gone:
            labels = self.labels[row]
            assert labels is not None
            del self._row_of[labels]
            self.labels[row] = None
        self.retired += len(gone)
        self._budget.left += len(gone) * self.lines
        self._named -= len(gone)
        wanted = np.array([labels is not None for labels in self.labels])
        self._index.keep(wanted)
        rows = np.array(gone, np.int64)
        for column in self.columns.values():
            column[rows] = 0
        for windows in self.maxima.values():
            for maxima in windows.values():
                maxima.forget(rows)
        self._free += gone

    def note_max(self, name: str, rows: Rows, values: npt.NDArray[np.int64]) -> None:
        for maxima in self.maxima[name].values():
            maxima.note(rows, values)

    def advance(self, now: float) -> None:
        for windows in self.maxima.values():
            for maxima in windows.values():
                maxima.advance(now)

    def clear_waiting(self) -> None:
        """Before the waits that go on at this moment are noted anew."""
        self.columns["waiting"][:] = 0
        self.columns["waiting_ns"][:] = 0

    def current_max(self, name: str, rows: Rows) -> dict[str, npt.NDArray[np.int64]]:
        """By window, the largest that ended in it or still goes on (column `waiting_ns`, if there is one)."""
        waiting = self.columns["waiting_ns"][rows] if "waiting_ns" in self.columns else 0
        return {window: np.maximum(maxima.of(rows), waiting) for window, maxima in self.maxima[name].items()}

    def live(self) -> tuple[Rows, list[tuple[str, ...]]]:
        """Rows in use and their labels."""
        labels = list(self._row_of)
        return np.fromiter(self._row_of.values(), np.int64, len(labels)), labels

    def _is_other(self, labels: tuple[str, ...]) -> bool:
        return all(labels[position] == OTHER for position in self.names)

    def _admit(self, labels: tuple[str, ...], weight: float) -> int:
        row = self._row_of.get(labels)
        if row is not None:
            return row
        if self._is_other(labels) or self._has_room(weight):
            return self._new_row(labels)
        self.overflowed += 1
        other = tuple(OTHER if i in self.names else label for i, label in enumerate(labels))
        row = self._row_of.get(other)
        if row is None:
            row = self._new_row(other)
        self._refused.append(row)
        return row

    def _has_room(self, weight: float) -> bool:
        """Whether a label set with so much waiting gets a row; `other` rows always do."""
        if self._budget.left < self.lines or (self._most is not None and self._named >= self._most):
            return False
        if self._budget.is_plentiful or self._named < OPEN_SHARE * self._quota:
            return True
        return weight >= EARNED_NS and self._named < self._quota

    def _new_row(self, labels: tuple[str, ...]) -> int:
        if self._free:
            row = self._free.pop()
            self.labels[row] = labels
        else:
            row = len(self.labels)
            self.labels.append(labels)
            if row >= len(self.seen):
                self._grow()
        self._row_of[labels] = row
        if not self._is_other(labels):
            self._named += 1
            self._budget.left -= self.lines
        return row

    def _grow(self) -> None:
        self.seen = np.concatenate([self.seen, np.zeros(len(self.seen))])
        for name, column in self.columns.items():
            self.columns[name] = np.concatenate([column, np.zeros_like(column)])


def _shape(kind: Any) -> tuple[int, ...]:
    return kind[1] if isinstance(kind, tuple) else ()


def _dtype(kind: Any) -> Any:
    return kind[0] if isinstance(kind, tuple) else kind
