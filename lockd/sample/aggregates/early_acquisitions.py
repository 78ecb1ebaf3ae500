"""Acquisitions counted ahead of the programs, which learn of some only when the lock is released.

With kprobes a lock that is free when it is asked for is known to have been taken once it is
released. If that is long in coming, the sampler counts the acquisition (see kernel_holds.py),
and takes back one of what the programs count for the same lock and thread afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Hashes, Index, mix
from lockd.columns.structs import Columns

MOST = 4096
"""So many are remembered; what is more is counted when the lock is released."""
FORGET_AFTER = 600.0
"""Seconds after which what is neither held nor was released under its name is forgotten."""


@dataclass
class Ahead:
    """Acquisitions of one lock by one thread."""

    count: int
    """Of them not taken back yet."""
    since: int
    """When the last of them was asked for: monotonic clock in ns."""
    lock_type: int
    seen: float
    """When the lock was last seen to be held (seconds)."""


class CountedAhead:
    """What was counted ahead, by lock and thread; as long as there is nothing, it costs nothing."""

    def __init__(self) -> None:
        self._known: dict[int, Ahead] = {}
        self._hashes = Index()
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._known)

    def save(self) -> list[tuple[int, int, int, int, float]]:
        """What is remembered, for restore()."""
        return [(key, one.count, one.since, one.lock_type, one.seen) for key, one in self._known.items()]

    def restore(self, known: list[tuple[int, int, int, int, float]]) -> None:
        self._known = {key: Ahead(count, since, kind, seen) for key, count, since, kind, seen in known}
        self._reindex()

    def unknown(self, locks: Columns, tids: Columns, since: Columns, now: float) -> npt.NDArray[np.bool_]:
        """Which of the locks held at this moment are to be counted; room for more than MOST there is not."""
        self._now = now
        unknown = np.zeros(len(locks), np.bool_)
        room = MOST - len(self._known)
        for i, (key, asked) in enumerate(zip(mix(locks, tids).tolist(), since.tolist(), strict=True)):
            ahead = self._known.get(key)
            if ahead and ahead.since == asked:
                ahead.seen = now
            elif ahead or room > 0:
                unknown[i] = True
                room -= not ahead
        self._forget_old()
        return unknown

    def add(self, locks: Columns, tids: Columns, since: Columns, types: Columns) -> None:
        """These were counted."""
        told = zip(mix(locks, tids).tolist(), since.tolist(), types.tolist(), strict=True)
        for key, asked, lock_type in told:
            ahead = self._known.setdefault(key, Ahead(0, asked, lock_type, self._now))
            ahead.count += 1
            ahead.since, ahead.seen = asked, self._now
        self._reindex()

    def take_back(self, locks: Columns, tids: Columns, counted: npt.NDArray[np.int64]) -> None:
        """Subtract from what the programs `counted`, by lock and thread, what was counted before."""
        if not self._known:
            return
        hashes = mix(locks, tids)
        self._settle(hashes, np.flatnonzero((self._hashes.find(hashes) >= 0) & (counted > 0)), counted)

    def take_back_nameless(self, types: Columns, counted: npt.NDArray[np.int64]) -> None:
        """The same where a full map lost lock and thread: of locks of the type that are held no more."""
        for key, ahead in list(self._known.items()):
            if ahead.seen < self._now:
                rows = np.flatnonzero((types == ahead.lock_type) & (counted > 0))
                self._settle(np.full(len(types), key, np.uint64), rows, counted)

    def forget(self, locks: Columns, tids: Columns) -> None:
        """These will never be released."""
        for key in mix(locks, tids).tolist():
            self._known.pop(key, None)
        self._reindex()

    def _settle(self, hashes: Hashes, rows: npt.NDArray[np.int64], counted: npt.NDArray[np.int64]) -> None:
        for row in rows:
            ahead = self._known.get(int(hashes[row]))
            if ahead:
                taken = min(ahead.count, int(counted[row]))
                counted[row] -= taken
                ahead.count -= taken
                if not ahead.count:
                    del self._known[int(hashes[row])]
        if len(rows):
            self._reindex()

    def _forget_old(self) -> None:
        old = [key for key, ahead in self._known.items() if ahead.seen < self._now - FORGET_AFTER]
        for key in old:
            del self._known[key]
        if old:
            self._reindex()

    def _reindex(self) -> None:
        self._hashes.clear()
        if self._known:
            keys = np.fromiter(self._known, np.uint64, len(self._known))
            self._hashes.add(keys, np.zeros(len(keys), np.int64))
