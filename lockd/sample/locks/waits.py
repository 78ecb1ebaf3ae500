"""The waits for locks at one moment, and the rings among them: who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lockd.columns.structs import Columns

Lock = tuple[int, int]
"""Process and address; process 0: the kernel's."""
PI, MUTEX = "pi", "mutex"
REFUSED = "refused"
"""The family of a PI lock that the kernel has refused: nobody will be given it."""


class Wait(NamedTuple):
    """One thread in one call, for one lock."""

    tid: int
    tgid: int
    address: int
    since: int
    """When the call began (monotonic clock in ns), which tells it from the thread's other calls."""
    kind: str
    """Of a futex wait; of a wait in the kernel the type of the lock."""
    family: str
    in_kernel: bool

    @property
    def lock(self) -> Lock:
        return (0 if self.in_kernel else self.tgid, self.address)

    @property
    def may_be_handed_over(self) -> bool:
        """Whether the thread may own the lock already while it is still waiting for it."""
        return self.in_kernel or (self.kind == PI and self.family != REFUSED)


class Waits:
    """One wait of each thread: of one that waits in the kernel inside a futex call, the inner one."""

    def __init__(
        self, tids: Columns, tgids: Columns, addresses: Columns, since: Columns, kinds: Columns,
        families: Columns, in_kernel: Columns,
    ) -> None:  # fmt: skip
        order = np.lexsort((~in_kernel.astype(np.bool_), tids))
        order = order[np.diff(tids[order].astype(np.int64), prepend=-1) != 0]
        self._tids = tids[order].astype(np.int64)
        self._owners = np.where(in_kernel, 0, tgids).astype(np.int64)[order]
        self._tgids, self._since = tgids[order].astype(np.int64), since[order].astype(np.int64)
        self._addresses = addresses[order].astype(np.uint64)
        self._kinds, self._families = kinds[order], families[order]
        self._in_kernel = in_kernel[order].astype(np.bool_)

    def __len__(self) -> int:
        return len(self._tids)

    def of(self, tid: int) -> Wait | None:
        """What a thread waits for."""
        at = self._at(tid)
        return self._wait(at) if at >= 0 else None

    def has(self, waits: Iterable[Wait]) -> bool:
        """Whether all of these go on: the same threads are in the same calls."""
        return all(
            (at := self._at(wait.tid)) >= 0
            and int(self._since[at]) == wait.since
            and int(self._addresses[at]) == wait.address
            for wait in waits
        )

    def redirect(self, tid: int, address: int, earliest: int, latest: int) -> None:
        """Let a thread that began to wait in a mutex's code then wait for the PI lock at `address`."""
        at = self._at(tid)
        if at < 0 or self._in_kernel[at] or self._families[at] != MUTEX:
            return
        if earliest <= self._since[at] <= latest:
            self._addresses[at], self._kinds[at], self._families[at] = address, PI, REFUSED

    def locks(self, latest: int, most: int, later: set[Lock]) -> tuple[list[Wait], int]:
        """For each lock waited for since `latest` or before, the first of its waits; the oldest first.

        If there are more than `most`, those in `later` come last; also how many were left out.
        """
        rows = np.flatnonzero(self._since <= latest)
        rows = rows[np.lexsort((self._since[rows], self._addresses[rows], self._owners[rows]))]
        owners, addresses = self._owners[rows], self._addresses[rows]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (owners[1:] != owners[:-1]) | (addresses[1:] != addresses[:-1])
        rows = rows[is_first]
        rows = rows[np.argsort(self._since[rows], kind="stable")]
        if len(rows) > most:
            keys = zip(self._owners[rows].tolist(), self._addresses[rows].tolist(), strict=True)
            rows = rows[np.argsort([key in later for key in keys], kind="stable")]
        return [self._wait(int(at)) for at in rows[:most]], max(0, len(rows) - most)

    def count(self, locks: set[Lock]) -> int:
        """How many threads wait for one of these."""
        keys = zip(self._owners.tolist(), self._addresses.tolist(), strict=True)
        return sum(key in locks for key in keys)

    def _at(self, tid: int) -> int:
        at = int(np.searchsorted(self._tids, tid))
        return at if at < len(self._tids) and self._tids[at] == tid else -1

    def _wait(self, at: int) -> Wait:
        return Wait(
            int(self._tids[at]),
            int(self._tgids[at]),
            int(self._addresses[at]),
            int(self._since[at]),
            str(self._kinds[at]),
            str(self._families[at]),
            bool(self._in_kernel[at]),
        )


def rings(waits: Waits, owners: dict[Lock, int]) -> list[tuple[tuple[Wait, ...], set[Lock]]]:
    """The rings among these waits, each with the locks that cannot be got because of it."""
    blocked = {tid: wait for tid in owners.values() if tid and (wait := waits.of(tid))}
    for tid, wait in list(blocked.items()):
        if owners.get(wait.lock) == tid and wait.may_be_handed_over:
            del blocked[tid]
    begun: dict[int, int] = {}
    found = []
    for start in blocked:
        path: list[int] = []
        tid = start
        while tid in blocked and tid not in begun:
            begun[tid] = start
            path.append(tid)
            tid = owners.get(blocked[tid].lock, 0)
        if path and begun.get(tid) == start:
            ring = [blocked[each] for each in path[path.index(tid) :]]
            first = min(range(len(ring)), key=lambda at: ring[at].since)
            found.append(((*ring[first:], *ring[:first]), _beyond(ring, blocked.values(), owners)))
    return found


def _beyond(ring: Sequence[Wait], blocked: Iterable[Wait], owners: dict[Lock, int]) -> set[Lock]:
    """The locks of a ring, and all that threads hold which wait for one of these, and so on."""
    held: dict[int, set[Lock]] = {}
    for lock, tid in owners.items():
        held.setdefault(tid, set()).add(lock)
    waiting: dict[Lock, set[int]] = {}
    for wait in blocked:
        waiting.setdefault(wait.lock, set()).add(wait.tid)
    stuck, fresh = {wait.lock for wait in ring}, {wait.tid for wait in ring}
    seen: set[int] = set()
    while fresh:
        seen |= fresh
        locks = set().union(*(held.get(tid, set()) for tid in fresh))
        stuck |= locks
        fresh = set().union(*(waiting.get(lock, set()) for lock in locks)) - seen
    return stuck
