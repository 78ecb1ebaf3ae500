"""What was drained, added to the aggregates: all of it, or as much as one tick has time for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.kernel.pairs import Entries
from lockd.sample.aggregates.futex import FutexAggregates
from lockd.sample.aggregates.identities import Identities
from lockd.sample.aggregates.kernel_holds import KernelHoldAggregates
from lockd.sample.aggregates.kernel_locks import KernelLockAggregates
from lockd.sample.aggregates.offcpu import OffcpuAggregates
from lockd.sample.aggregates.window import Stacks, windows_of
from lockd.sample.drain import FOLDED_ROWS, STACKS, Collector
from lockd.sample.locks.user_locks import UserLocks

Aggregates = FutexAggregates | OffcpuAggregates | KernelLockAggregates | KernelHoldAggregates

FUTEX, KERNEL_LOCKS = "futex", "kernel_locks"
OVER = "_over"
HELD_BACK_ROWS = 20_000
"""So many rows of futex calls wait at most for the names of their locks."""


class Folding:
    """Folds what `collector` has drained into `aggregates`, by pair.

    Futex calls are held back while their locks are being looked up; `look(keys)` gets the keys of all.
    From `of_process` on, thread ids stand for whole processes.
    """

    def __init__(
        self,
        collector: Collector,
        aggregates: Mapping[str, Aggregates],
        identities: Identities,
        user_locks: UserLocks | None,
        look: Callable[[Columns], None],
        of_process: int,
    ) -> None:
        self._collector = collector
        self._aggregates = aggregates
        self._identities = identities
        self._user_locks = user_locks
        self._look = look
        self._of_process = of_process
        self._backlogs = {name: rows for name, rows in collector.backlogs.items() if name != STACKS}
        self.tick = 0
        """The tick at which the last of it was drained."""
        self._undecided: Entries | None = None
        """Rows of futex calls that are not counted yet."""
        self._undecided_since = np.zeros(0, np.int64)
        """Of each of these rows, the tick by which it had been drained."""
        self.undecided_calls = 0

    def save(self) -> tuple[dict[str, int], dict[str, npt.NDArray[Any]]]:
        """How far it has come with each pair, and the rows that wait for the names of their locks."""
        first = {name: backlog.first for name, backlog in self._collector.backlogs.items()}
        keys, values = self._undecided or (np.zeros(0, np.int64), np.zeros(0, np.int64))
        return first, {"keys": keys.view(np.int64), "values": values.view(np.int64)}

    def restore(self, first: Mapping[str, int], undecided: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on where another one was. Raises ValueError if what it had not folded is not there any more."""
        for name, backlog in self._collector.backlogs.items():
            backlog.go_back(first[name])
        if len(undecided["keys"]):
            keys, values = self._backlogs[FUTEX].all()
            rows = undecided["keys"].copy().view(keys.dtype), undecided["values"].copy().view(values.dtype)
            self._undecided, self._undecided_since = rows, np.zeros(len(rows[0]), np.int64)

    def has_decided(self, tick: int) -> bool:
        """Whether no call is undecided that was drained up to that tick."""
        return not (self._undecided_since <= tick).any()

    def all(self) -> None:
        """Fold everything, but for what can be told better in a moment."""
        now = time.monotonic()
        self._advance(now)
        if self._undecided:
            rows, since = self._undecided, self._undecided_since
            self._undecided, self._undecided_since, self.undecided_calls = None, since[:0], 0
            self._fold(FUTEX, self._decided(rows, since, now), now)
        while any(self._backlogs.values()):
            self.some()  # at a time of its own: a table has room for what is asked for at one time

    def some(self) -> None:
        """Fold FOLDED_ROWS at most: first of the pairs that have least, which thus never wait for long."""
        now = time.monotonic()
        self._advance(now)
        left = FOLDED_ROWS
        for name in sorted(self._backlogs, key=lambda name: len(self._backlogs[name])):
            rows = self._backlogs[name].take(left)
            if not len(rows[0]):
                continue
            left -= len(rows[0])
            if name == FUTEX:
                self._look(rows[0])
                rows = self._decided(rows, np.full(len(rows[0]), self.tick), now)
            self._fold(name, rows, now)
        if not self._backlogs.get(KERNEL_LOCKS):
            self._collector.forget_stacks()

    def _advance(self, now: float) -> None:
        for aggregates in self._aggregates.values():
            for series in aggregates.series:
                series.advance(now)

    def _fold(self, name: str, rows: Entries, now: float) -> None:
        aggregates = self._aggregates.get(name.removesuffix(OVER))
        if not aggregates or not len(rows[0]):
            return
        for window in windows_of(*rows, self._identities, name.endswith(OVER), self._of_process):
            if isinstance(aggregates, KernelLockAggregates):
                aggregates.fold(window, Stacks(*self._collector.stacks()), now)
            else:
                aggregates.fold(window, now)

    def _decided(self, rows: Entries, since: npt.NDArray[np.int64], now: float) -> Entries:
        """Keep the futex calls for later whose locks are being looked up; the others."""
        keys, values = rows
        if not self._user_locks:
            return rows
        later = self._user_locks.is_undecided(values["who"]["tgid"], keys["uaddr"], keys["kind"], now)
        if not later.any():
            return rows
        held = _chosen(rows, later)
        keys, values = _joined(self._undecided, held) if self._undecided else held
        since = np.concatenate([self._undecided_since, since[later]])
        surplus = max(len(keys) - HELD_BACK_ROWS, 0)  # the oldest come first
        self._undecided, self._undecided_since = (keys[surplus:], values[surplus:]), since[surplus:]
        self.undecided_calls = int(values["calls"][surplus:].sum())
        return _joined((keys[:surplus], values[:surplus]), _chosen(rows, ~later))


def _joined(rows: Entries, more: Entries) -> Entries:
    return structs.concatenate([rows[0], more[0]]), structs.concatenate([rows[1], more[1]])


def _chosen(rows: Entries, mask: npt.NDArray[np.bool_]) -> Entries:
    at = np.flatnonzero(mask)
    return structs.take(rows[0], at), structs.take(rows[1], at)
