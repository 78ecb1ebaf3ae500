"""What the locks of a trace are called, and of what kind they are: from captures, as the daemon does."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence

from lockd.kernel.pairs import Entries
from lockd.names.locks.user_locks import UserLock
from lockd.names.stacks import StackNames
from lockd.names.unwind.capture import Capture, captures_of

MOST_UNCAPTURED = 10_000
"""Locks of which no thread blocked are named by their addresses alone, so many at most."""

MOST_CAPTURED = 4096
"""Captures that wait, of up to 18 KiB each; a lock that is left out is captured again, after 10 seconds."""

Lock = tuple[int, int, str]
"""Process, address, and the kind that its calls look like: an address may be used again by another sort."""


class LockNames:
    """Asks `names` about captures while there is time for that."""

    def __init__(self, names: StackNames, kinds: Sequence[str]) -> None:
        self._names, self._kinds = names, kinds
        self._known: dict[Lock, UserLock] = {}
        self._queue: deque[tuple[Lock, int, Capture]] = deque()
        self._uncaptured = 0

    def add(self, taken: dict[str, Entries]) -> None:
        """Take what was drained; the processes are looked at now, as they may end at any time."""
        if "captures" not in taken:
            return
        keys, rows = taken["captures"]
        self._names.read_mappings(set(keys["tgid"].tolist()))
        columns = keys["tgid"], keys["uaddr"], keys["guess"], rows["tid"]
        for (tgid, address, guess, tid), capture in zip(
            zip(*(column.tolist() for column in columns), strict=True), captures_of(rows), strict=True
        ):
            if len(self._queue) == MOST_CAPTURED:
                break
            self._queue.append(((tgid, address, self._kinds[guess]), tid, capture))

    def work(self, until: float) -> None:
        """Name what waits for it, until that time of time.monotonic()."""
        while self._queue and time.monotonic() < until:
            self.learn(*self._queue.popleft())

    def learn(self, lock: Lock, tid: int, capture: Capture | None) -> None:
        """One of its waits, by thread `tid`. The first that tells the name for certain decides."""
        known = self._known.get(lock)
        if known and not known.is_provisional:
            return
        tgid, address, guess = lock
        found = self._names.user_lock(tgid, tid, address, guess, capture)
        if not known or not found.is_provisional:
            self._known[lock] = found

    def name(self, tgid: int, address: int, guess: str) -> tuple[str, str]:
        """Kind and name; without a `guess`, that is of wakes alone, the kind is empty."""
        lock = tgid, address, guess
        if lock not in self._known and tgid and self._uncaptured < MOST_UNCAPTURED:
            self._uncaptured += 1
            with contextlib.suppress(OSError):
                self.learn(lock, tgid, None)
        known = self._known.get(lock)
        return (known.kind, known.lock) if known else (guess, "")
