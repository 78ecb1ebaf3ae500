"""Folding: adds drained entries to the aggregates, all of them or as many as one tick has time for."""

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
from lockd.sample.aggregates.window import Stacks, make_windows
from lockd.sample.drain import FOLDED_ROWS, KERNEL_LOCKS, STACKS, Collector
from lockd.sample.locks.user_locks import UserLocks

Aggregates = FutexAggregates | OffcpuAggregates | KernelLockAggregates | KernelHoldAggregates

FUTEX = "futex"
OVER = "_over"
"""Suffix of the name of an overflow map's pair."""
MOST_ROWS = 8 * FOLDED_ROWS
"""Most rows that are folded in one go where a tick has to fold more than FOLDED_ROWS. A fold has a fixed
cost, and rows of one key are cheaper together."""
HELD_BACK_ROWS = 20_000
"""Most entries of futex calls that are held back until the names of their locks are known."""


class Folding:
    """Folds the entries that `collector` has drained into `aggregates`, a mapping by the name of the pair.

    Entries of futex calls are held back while the names of their locks are being asked for.
    """

    def __init__(
        self,
        collector: Collector,
        aggregates: Mapping[str, Aggregates],
        identities: Identities,
        user_locks: UserLocks | None,
        note_futex_calls: Callable[[Columns], None],
        first_process_id: int,
    ) -> None:
        """`note_futex_calls(keys)` gets the key of each drained entry of futex calls, once.

        A thread id in a key stands for a whole process if it is `first_process_id` or more.
        """
        self._collector = collector
        self._aggregates = aggregates
        self._identities = identities
        self._user_locks = user_locks
        self._note_futex_calls = note_futex_calls
        self._first_process_id = first_process_id
        self._backlogs = {name: rows for name, rows in collector.backlogs.items() if name != STACKS}
        self._seen: dict[str, int] = {}
        """For each pair, the number of the first entry that look_at_new_rows() has not seen."""
        self.tick = 0
        """The number of the tick in which entries were last drained."""
        self._undecided: Entries | None = None
        """Entries of futex calls that are held back."""
        self._undecided_since = np.zeros(0, np.int64)
        """The number of the tick by which each entry of `_undecided` was drained."""
        self.undecided_calls = 0
        """The number of futex calls in `_undecided`."""

    def save(self) -> tuple[dict[str, int], dict[str, npt.NDArray[Any]]]:
        """Return two dicts: for each pair the number of its next entry to fold; and `keys` and `values` of
        the entries that are held back, as 64-bit words."""
        first = {name: backlog.first for name, backlog in self._collector.backlogs.items()}
        keys, values = self._undecided or (np.zeros(0, np.int64), np.zeros(0, np.int64))
        return first, {"keys": keys.view(np.int64), "values": values.view(np.int64)}

    def restore(self, first: Mapping[str, int], undecided: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on with what save() of another sampler returned.

        Raises ValueError if entries that the other sampler had not folded are gone.
        """
        for name, backlog in self._collector.backlogs.items():
            backlog.go_back(first[name])
        if len(undecided["keys"]):
            keys, values = self._backlogs[FUTEX].all()
            rows = undecided["keys"].copy().view(keys.dtype), undecided["values"].copy().view(values.dtype)
            self._undecided, self._undecided_since = rows, np.zeros(len(rows[0]), np.int64)

    def has_decided(self, tick: int) -> bool:
        """Whether no entry that was drained in the tick `tick` or before is still held back."""
        return not (self._undecided_since <= tick).any()

    def fold_all(self) -> None:
        """Fold all entries, except futex calls for locks whose names are still being asked for."""
        now = time.monotonic()
        self._advance(now)
        if self._undecided:
            rows, since = self._undecided, self._undecided_since
            self._undecided, self._undecided_since, self.undecided_calls = None, since[:0], 0
            self._fold(FUTEX, self._hold_back(rows, since, now), now)
        while any(self._backlogs.values()):
            # Each call reads the clock again. A full table drops no rows that were used at the time of this
            # call, but may drop rows that only the call before used.
            self.fold_some(MOST_ROWS)

    def fold_some(self, most: int = FOLDED_ROWS) -> None:
        """Fold `most` entries at most, shortest backlogs first: their entries never wait for long."""
        now = time.monotonic()
        self._advance(now)
        left = most
        for name in sorted(self._backlogs, key=lambda name: len(self._backlogs[name])):
            first = self._backlogs[name].first
            rows = self._backlogs[name].take(left)
            if not len(rows[0]):
                continue
            left -= len(rows[0])
            if name == FUTEX:
                unseen = max(self._seen.get(FUTEX, 0) - first, 0)  # look_at_new_rows() has seen those before
                self._note_futex_calls(rows[0][unseen:])
                rows = self._hold_back(rows, np.full(len(rows[0]), self.tick), now)
            self._fold(name, rows, now)
        if not self._backlogs.get(KERNEL_LOCKS):
            self._collector.forget_stacks()
        for name, aggregates in self._aggregates.items():
            if isinstance(aggregates, OffcpuAggregates) and not self._backlogs[name]:
                aggregates.forget_wakers()

    def look_at_new_rows(self) -> None:
        """Do what cannot wait until the new entries are folded.

        Processes and their cgroups may be gone by then, so that the names of all processes are looked up, and
        remembered. Calls that were refused a lock are looked for, as they are part of deadlocks.
        """
        for name, backlog in self._backlogs.items():
            keys, values = backlog.since(self._seen.get(name, 0))
            self._seen[name] = backlog.end
            if name.endswith(OVER) or not len(keys):
                continue
            for who in values["who"]:  # there are few, so that this takes less time than numbers()
                self._identities.identify_thread(who)
            aggregates = self._aggregates.get(name)
            if isinstance(aggregates, OffcpuAggregates):
                aggregates.name_wakers(keys)
            elif name == FUTEX:
                self._note_futex_calls(keys)

    def _advance(self, now: float) -> None:
        for aggregates in self._aggregates.values():
            for series in aggregates.series:
                series.advance(now)

    def _fold(self, name: str, rows: Entries, now: float) -> None:
        aggregates = self._aggregates.get(name.removesuffix(OVER))
        if not aggregates or not len(rows[0]):
            return
        for window in make_windows(*rows, self._identities, name.endswith(OVER), self._first_process_id):
            if isinstance(aggregates, KernelLockAggregates):
                aggregates.fold(window, Stacks(*self._collector.stacks()), now)
            else:
                aggregates.fold(window, now)

    def _hold_back(self, rows: Entries, since: npt.NDArray[np.int64], now: float) -> Entries:
        """Hold back futex calls whose locks are being asked for, and return the other rows, to be folded.

        `since` has the number of the tick by which each row was drained. If more than HELD_BACK_ROWS entries
        were held back, the oldest are returned too.
        """
        keys, values = rows
        if not self._user_locks:
            return rows
        later = self._user_locks.is_undecided(values["who"]["tgid"], keys["uaddr"], keys["kind"], now)
        if not later.any():
            return rows
        held_back = _select(rows, later)
        keys, values = _join(self._undecided, held_back) if self._undecided else held_back
        since = np.concatenate([self._undecided_since, since[later]])
        surplus = max(len(keys) - HELD_BACK_ROWS, 0)  # the oldest come first
        self._undecided, self._undecided_since = (keys[surplus:], values[surplus:]), since[surplus:]
        self.undecided_calls = int(values["calls"][surplus:].sum())
        return _join((keys[:surplus], values[:surplus]), _select(rows, ~later))


def _join(rows: Entries, more: Entries) -> Entries:
    return structs.concatenate([rows[0], more[0]]), structs.concatenate([rows[1], more[1]])


def _select(rows: Entries, mask: npt.NDArray[np.bool_]) -> Entries:
    positions = np.flatnonzero(mask)
    return structs.take(rows[0], positions), structs.take(rows[1], positions)
