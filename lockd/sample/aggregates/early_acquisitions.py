"""Early acquisitions: kernel locks counted as taken before the programs count them at their release.

With kprobes the programs learn that a free lock was taken only when it is released. If it is held for long,
the sampler counts the acquisition (kernel_holds.py), and later subtracts one from what the programs count for
the same lock and thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockd.columns.index import mix
from lockd.columns.structs import Columns

MOST = 4096
"""Most pairs of lock and thread that are remembered. Further acquisitions count when the lock is released."""
FORGET_AFTER = 600.0
"""Seconds after which early acquisitions are forgotten, from when their lock was last seen to be held."""


@dataclass
class EarlyAcquisitions:
    """Acquisitions of one lock by one thread that were counted early."""

    count: int
    """Acquisitions that are not subtracted yet."""
    since: int
    """When the lock was asked for, in the last of these acquisitions (monotonic clock in ns)."""
    lock_type: int
    """Number of the lock type."""
    seen: float
    """When the lock was last seen to be held (monotonic clock in seconds)."""


class EarlyCounts:
    """The acquisitions that were counted early, by lock and thread."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, int], EarlyAcquisitions] = {}
        """The acquisitions by the address of the lock and the id of the thread."""
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._by_key)

    def save(self) -> list[tuple[int, int, int, int, int, float]]:
        """Return everything that is remembered, for restore()."""
        return [(*key, own.count, own.since, own.lock_type, own.seen) for key, own in self._by_key.items()]

    def restore(self, saved: list[tuple[int, int, int, int, int, float]]) -> None:
        """Go on with what save() of another sampler returned."""
        self._by_key = {
            (lock, tid): EarlyAcquisitions(count, since, lock_type, seen)
            for lock, tid, count, since, lock_type, seen in saved
        }

    def find_uncounted(
        self, locks: Columns, tids: Columns, since: Columns, now: float
    ) -> npt.NDArray[np.bool_]:
        """Return which of these locks, which are held now, are to be counted now and passed to add().

        `since` is when each lock was asked for (monotonic clock in ns). No more than MOST are remembered.
        """
        self._now = now
        is_uncounted = np.zeros(len(locks), np.bool_)
        room = MOST - len(self._by_key)
        for i, (key, asked) in enumerate(zip(_keys(locks, tids), since.tolist(), strict=True)):
            early = self._by_key.get(key)
            if early and early.since == asked:
                early.seen = now
            elif early or room > 0:
                is_uncounted[i] = True
                room -= not early
        self._forget_old()
        return is_uncounted

    def add(self, locks: Columns, tids: Columns, since: Columns, types: Columns) -> None:
        """Remember that these acquisitions were counted."""
        acquisitions = zip(_keys(locks, tids), since.tolist(), types.tolist(), strict=True)
        for key, asked, lock_type in acquisitions:
            early = self._by_key.setdefault(key, EarlyAcquisitions(0, asked, lock_type, self._now))
            early.count += 1
            early.since, early.seen = asked, self._now

    def subtract(self, locks: Columns, tids: Columns, counted: npt.NDArray[np.int64]) -> None:
        """Subtract the acquisitions that were counted early from `counted`, in place.

        `counted` has the acquisitions that the programs counted, by lock and thread.
        """
        if not self._by_key:
            return
        early = np.array(list(self._by_key), np.uint64)
        is_early = np.isin(mix(locks, tids), mix(early[:, 0], early[:, 1]))
        for row in np.flatnonzero(is_early & (counted > 0)).tolist():
            self._subtract((int(locks[row]), int(tids[row])), row, counted)

    def subtract_nameless(self, types: Columns, counted: npt.NDArray[np.int64]) -> None:
        """Subtract the acquisitions that were counted early from `counted`, in place.

        `counted` has the acquisitions of entries that name no lock and no thread, as those of an overflow
        map, and `types` their lock types. So early acquisitions of any locks of the same type are subtracted
        if these locks are no longer held.
        """
        for key, early in list(self._by_key.items()):
            if early.seen < self._now:
                for row in np.flatnonzero((types == early.lock_type) & (counted > 0)).tolist():
                    self._subtract(key, row, counted)

    def forget(self, locks: Columns, tids: Columns) -> None:
        """Forget the acquisitions of locks that these threads will never release."""
        for key in _keys(locks, tids):
            self._by_key.pop(key, None)

    def _subtract(self, key: tuple[int, int], row: int, counted: npt.NDArray[np.int64]) -> None:
        """Subtract the early acquisitions with this key, if any are left, from `counted[row]`."""
        if early := self._by_key.get(key):
            subtracted = min(early.count, int(counted[row]))
            counted[row] -= subtracted
            early.count -= subtracted
            if not early.count:
                del self._by_key[key]

    def _forget_old(self) -> None:
        old = [key for key, early in self._by_key.items() if early.seen < self._now - FORGET_AFTER]
        for key in old:
            del self._by_key[key]


def _keys(locks: Columns, tids: Columns) -> list[tuple[int, int]]:
    return list(zip(locks.tolist(), tids.tolist(), strict=True))
