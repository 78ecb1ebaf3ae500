"""Names and kinds of the user-space locks of a trace, found from captures as the daemon finds them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence

from lockd.kernel.pairs import Entries
from lockd.names.locks.user_locks import UserLock
from lockd.names.stacks import StackNames
from lockd.names.unwind.capture import Capture, decode_captures

MOST_UNCAPTURED = 10_000
"""The most locks that are named from their address alone, because no thread was captured as it blocked on
them. Further such locks have no name."""

MOST_CAPTURED = 4096
"""The most captures that wait to be examined, of up to 18 KiB each. Further ones are dropped. If a thread
blocks on the lock of a dropped capture more than 10 seconds later, the programs make a new capture."""

Lock = tuple[int, int, str]
"""The process and the address of a lock, and the kind that the arguments of its futex calls suggest. The kind
is included because a process can use an address again for another kind of lock."""


class LockNames:
    """Names of locks, which `names` finds from captures. `kinds` are the members of enum futex_kind."""

    def __init__(self, names: StackNames, kinds: Sequence[str]) -> None:
        self._names, self._kinds = names, kinds
        self._known: dict[Lock, UserLock] = {}
        self._queue: deque[tuple[Lock, int, Capture]] = deque()
        self._uncaptured = 0

    def add(self, taken: dict[str, Entries]) -> None:
        """Add the captures of a window, and read the mappings of their processes before they end."""
        if "captures" not in taken:
            return
        keys, rows = taken["captures"]
        self._names.read_mappings(set(keys["tgid"].tolist()))
        columns = keys["tgid"], keys["uaddr"], keys["guess"], rows["tid"]
        for (tgid, address, guess, tid), capture in zip(
            zip(*(column.tolist() for column in columns), strict=True), decode_captures(rows), strict=True
        ):
            if len(self._queue) == MOST_CAPTURED:
                break
            self._queue.append(((tgid, address, self._kinds[guess]), tid, capture))

    def examine_captures(self, until: float) -> None:
        """Name locks until no capture is left or time.monotonic() reaches `until`."""
        while self._queue and time.monotonic() < until:
            self.learn(*self._queue.popleft())

    def learn(self, lock: Lock, tid: int, capture: Capture | None) -> None:
        """Name a lock from one wait of thread `tid`, unless another wait has named it for certain."""
        known = self._known.get(lock)
        if known and not known.is_provisional:
            return
        tgid, address, guess = lock
        answer = self._names.user_lock(tgid, tid, address, guess, capture)
        if not known or not answer.is_provisional:
            self._known[lock] = answer

    def name(self, tgid: int, address: int, guess: str) -> tuple[str, str]:
        """Kind and name of a lock. The name is empty if it is not known.

        The kind is empty only if it is not known and `guess` is empty. `guess` can be empty for calls that
        wake.
        """
        lock = tgid, address, guess
        if lock not in self._known and tgid and self._uncaptured < MOST_UNCAPTURED:
            self._uncaptured += 1
            with contextlib.suppress(OSError):
                self.learn(lock, tgid, None)
        known = self._known.get(lock)
        return (known.kind, known.lock) if known else (guess, "")
