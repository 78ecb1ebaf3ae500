"""The waits for user-space and kernel locks at one moment, and rings of threads that wait for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries
from lockd.sample.locks.user_locks import UserLocks

Lock = tuple[int, int]
"""Process id and address of a lock; the process id of a lock of the kernel is 0."""
PI, MUTEX = "pi", "mutex"
JOIN = "join"
"""The family of a wait for a thread to end. That thread counts as the holder of what is waited for."""
REFUSED = "refused"
"""The family of a wait for a PI lock that the kernel has refused: the thread will not be given the lock."""


class Wait(NamedTuple):
    """The wait of one thread for one lock, in one call."""

    tid: int
    tgid: int
    address: int
    since: int
    """When the call began (monotonic clock in ns). It distinguishes the thread's calls."""
    kind: str
    """Kind of a user-space lock, or lock type of a lock of the kernel."""
    family: str
    """The sort of code that locks, such as mutex or rwlock; empty for a kernel lock or if it is not known."""
    in_kernel: bool

    @property
    def lock(self) -> Lock:
        return (0 if self.in_kernel else self.tgid, self.address)

    @property
    def can_be_handed_over(self) -> bool:
        """Whether the kernel may give the lock to the thread while it is still blocked in its call."""
        return self.in_kernel or (self.kind == PI and self.family != REFUSED)

    def goes_on_as(self, later: Wait) -> bool:
        """Whether a later wait of the thread is this one: the thread is still in the same call."""
        return self.since == later.since and self.address == later.address


class LockDescription(NamedTuple):
    """The names that /api/v1/locks shows for the lock of a wait."""

    lock: str
    """Lock name; empty if it is not known yet."""
    site: str
    stack: tuple[str, ...]


class Waits:
    """One wait of each thread: the one that began last.

    A thread may wait for a kernel lock inside a futex call. It may also have an older wait for a kernel lock
    whose end the kernel did not report (docs/limits.md).
    """

    def __init__(
        self, tids: Columns, tgids: Columns, addresses: Columns, since: Columns, kinds: Columns,
        families: Columns, in_kernel: Columns,
    ) -> None:  # fmt: skip
        order = np.lexsort((~in_kernel.astype(np.bool_), -since.astype(np.int64), tids))
        order = order[np.diff(tids[order].astype(np.int64), prepend=-1) != 0]
        self._tids = tids[order].astype(np.int64)
        self._lock_tgids = np.where(in_kernel, 0, tgids).astype(np.int64)[order]
        self._tgids, self._since = tgids[order].astype(np.int64), since[order].astype(np.int64)
        self._addresses = addresses[order].astype(np.uint64)
        self._kinds, self._families = kinds[order], families[order]
        self._in_kernel = in_kernel[order].astype(np.bool_)

    def __len__(self) -> int:
        return len(self._tids)

    def find(self, tid: int) -> Wait | None:
        """Return the wait of a thread, None if it does not wait."""
        row = self._row(tid)
        return self._wait(row) if row >= 0 else None

    def find_all(self, tids: Iterable[int]) -> dict[int, Wait]:
        """Return the wait of each of these threads that waits, by thread."""
        rows = np.flatnonzero(np.isin(self._tids, np.fromiter(tids, np.int64)))
        return {int(self._tids[row]): self._wait(int(row)) for row in rows}

    def has_all(self, waits: Iterable[Wait]) -> bool:
        """Whether each of `waits`, which were read before, is among these: its thread is in the same call."""
        return all((mine := self.find(wait.tid)) is not None and wait.goes_on_as(mine) for wait in waits)

    def has_all_of(self, later: Waits, latest: int) -> bool:
        """Whether all waits of `later` are among these and began by `latest` (monotonic clock in ns)."""
        if not len(self):
            return not len(later)
        rows = np.searchsorted(self._tids, later._tids).clip(max=len(self) - 1)
        is_same = (self._tids[rows] == later._tids) & (later._since <= latest)
        for mine, theirs in (
            (self._since, later._since),
            (self._addresses, later._addresses),
            (self._kinds, later._kinds),
            (self._families, later._families),
        ):
            is_same &= (mine[rows] == theirs).astype(np.bool_)
        return bool(is_same.all())

    def redirect(self, tid: int, address: int, earliest: int, latest: int) -> None:
        """Count a thread as waiting for the PI lock at `address` if it is blocked in a mutex's code.

        Its call must have begun between `earliest` and `latest` (monotonic clock in ns).
        """
        row = self._row(tid)
        if row < 0 or self._in_kernel[row] or self._families[row] != MUTEX:
            return
        if earliest <= self._since[row] <= latest:
            self._addresses[row], self._kinds[row], self._families[row] = address, PI, REFUSED

    def first_waits(
        self, latest: int, most: int, asked_at: Mapping[Lock, int]
    ) -> tuple[list[Wait], list[Lock]]:
        """Return the oldest wait for each of at most `most` locks, and the locks that are left out.

        Waits that began after `latest` (monotonic clock in ns) do not count. If there are too many locks,
        those are taken for which nobody has asked for the longest time: since `asked_at`, or since their
        oldest wait began. So a lock has its turn however many others come and go.
        """
        rows = np.flatnonzero(self._since <= latest)
        rows = rows[np.lexsort((self._since[rows], self._addresses[rows], self._lock_tgids[rows]))]
        tgids, addresses = self._lock_tgids[rows], self._addresses[rows]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (tgids[1:] != tgids[:-1]) | (addresses[1:] != addresses[:-1])
        rows = rows[is_first]
        rows = rows[np.argsort(self._since[rows], kind="stable")]
        left_out: list[Lock] = []
        if len(rows) > most:
            locks = self._locks(rows)
            asked = np.array([asked_at.get(lock, 0) for lock in locks], np.int64)
            order = np.argsort(np.maximum(asked, self._since[rows]), kind="stable")
            left_out = [locks[i] for i in order[most:].tolist()]
            rows = rows[order]
        return [self._wait(int(row)) for row in rows[:most]], left_out

    def count_waiters(self) -> Counter[Lock]:
        """Return how many threads wait for each lock."""
        return Counter(self._locks(np.arange(len(self))))

    def _locks(self, rows: npt.NDArray[np.int64]) -> list[Lock]:
        return list(zip(self._lock_tgids[rows].tolist(), self._addresses[rows].tolist(), strict=True))

    def _row(self, tid: int) -> int:
        row = int(np.searchsorted(self._tids, tid))
        return row if row < len(self._tids) and self._tids[row] == tid else -1

    def _wait(self, row: int) -> Wait:
        return Wait(
            int(self._tids[row]),
            int(self._tgids[row]),
            int(self._addresses[row]),
            int(self._since[row]),
            str(self._kinds[row]),
            str(self._families[row]),
            bool(self._in_kernel[row]),
        )


def find_rings(held: Mapping[Lock, Wait]) -> list[tuple[tuple[Wait, ...], set[Lock]]]:
    """Return each ring of waits, and with it the locks that no thread can get because of the ring.

    `held` has the locks whose holders wait, with the wait of the holder. A ring begins with its oldest wait.
    """
    blocked = {wait.tid: wait for wait in held.values()}
    for tid, wait in list(blocked.items()):
        if wait.lock in held and held[wait.lock].tid == tid and wait.can_be_handed_over:
            del blocked[tid]
    visited_from: dict[int, int] = {}
    rings: list[tuple[Wait, ...]] = []
    for start in blocked:
        path: list[int] = []
        tid = start
        while tid in blocked and tid not in visited_from:
            visited_from[tid] = start
            path.append(tid)
            lock = blocked[tid].lock
            tid = held[lock].tid if lock in held else 0
        if path and visited_from.get(tid) == start:
            ring = [blocked[member] for member in path[path.index(tid) :]]
            first = min(range(len(ring)), key=lambda i: ring[i].since)
            rings.append((*ring[first:], *ring[:first]))
    locks = _unavailable_locks(rings, blocked.values(), held) if rings else []
    return list(zip(rings, locks, strict=True))


def _unavailable_locks(
    rings: Iterable[Sequence[Wait]], blocked: Iterable[Wait], held: Mapping[Lock, Wait]
) -> list[set[Lock]]:
    """Return for each ring its locks, and those held by threads that wait for them, directly or
    indirectly."""
    held_by: dict[int, set[Lock]] = {}
    for lock, holder in held.items():
        held_by.setdefault(holder.tid, set()).add(lock)
    waiters: dict[Lock, set[int]] = {}
    for wait in blocked:
        waiters.setdefault(wait.lock, set()).add(wait.tid)
    of_rings = []
    for ring in rings:
        unavailable, fresh = {wait.lock for wait in ring}, {wait.tid for wait in ring}
        seen: set[int] = set()
        while fresh:
            seen |= fresh
            locks = set().union(*(held_by.get(tid, set()) for tid in fresh))
            unavailable |= locks
            fresh = set().union(*(waiters.get(lock, set()) for lock in locks)) - seen
        of_rings.append(unavailable)
    return of_rings


class ThreadStates:
    """Tells by the entries of the map `threads` which threads are off the CPU, and which in a futex call."""

    def __init__(self, manifest: Manifest) -> None:
        self._runnable = manifest.enums["state"].index("runnable")
        self._wake = manifest.enums["futex_kind"].index("wake")

    def is_off_cpu(self, threads: Columns) -> npt.NDArray[np.bool_]:
        """Whether each `struct thread` is off the CPU and not runnable."""
        is_off: npt.NDArray[np.bool_] = (threads["off_since"] > 0) & (threads["state"] != self._runnable)
        return is_off

    def is_in_futex(self, threads: Columns) -> npt.NDArray[np.bool_]:
        """Whether each `struct thread` is blocked in a futex call that waits.

        It is false for all threads if futex waits are not measured.
        """
        if "call" not in (threads.dtype.names or ()):
            return np.zeros(len(threads), np.bool_)
        call = threads["call"]
        is_waiting: npt.NDArray[np.bool_] = (
            self.is_off_cpu(threads)
            & (call["since"] > 0)
            & (call["kind"] < self._wake)
            & (call["restart"] == 0)
        )
        return is_waiting


class LockWaitReader:
    """Makes Waits from the entries of the maps `threads` and `kernel_waits`."""

    def __init__(self, manifest: Manifest, user_locks: UserLocks | None) -> None:
        """`user_locks` is None if futex calls are not measured."""
        self._user_locks = user_locks
        self._states = ThreadStates(manifest)
        kinds = manifest.enums["futex_kind"]
        self._is_lock = np.array([kind in ("lock", "pi") for kind in kinds])
        self._kinds = np.array(list(kinds), object)
        types = manifest.enums.get("lock_type", ())
        self._types = np.array(list(types), object)

    def read_waits(self, threads: Entries, in_kernel: Entries | None) -> Waits:
        """Return the waits for kernel locks, and those in futex calls for a lock or for a thread to end.

        Spinlocks and rwlocks are left out: their entries are of CPUs that spin, and have no thread.
        """
        parts = []
        if self._user_locks:
            parts.append(self._in_user_space(self._user_locks, *threads))
        if in_kernel:
            sleeping = np.flatnonzero(in_kernel[0]["cpu"] == 0)
            keys, waits = (structs.take(rows, sleeping) for rows in in_kernel)
            families = np.full(len(keys), "", object)
            is_kernel = np.ones(len(keys), np.bool_)
            kinds = self._types[waits["type"]]
            parts.append(
                (keys["tid"], waits["tgid"], keys["lock"], waits["since"], kinds, families, is_kernel)
            )
        if not parts:
            return Waits(*([np.empty(0, np.int64)] * len(Wait._fields)))
        return Waits(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _in_user_space(self, user_locks: UserLocks, tids: Columns, threads: Columns) -> tuple[Columns, ...]:
        # A thread that was woken may run: some kernels call no program when certain threads get a CPU.
        blocked = self._states.is_in_futex(threads) & (threads["woken_at"] < threads["off_since"])
        call = threads["call"]
        tgids, addresses = threads["tgid"][blocked], call["uaddr"][blocked]
        kinds = user_locks.correct_kinds(tgids, addresses, call["kind"][blocked])
        families = user_locks.families(tgids, addresses, kinds)
        is_held = self._is_lock[kinds] | (families == JOIN)
        columns = (tids[blocked], tgids, addresses, call["since"][blocked], self._kinds[kinds], families)
        return (*(column[is_held] for column in columns), np.zeros(int(is_held.sum()), np.bool_))

    def find_refused(self, keys: Columns, error: int) -> tuple[list[int], list[int]]:
        """Return thread ids and addresses of the calls for PI locks that failed with this error number.

        `keys` are keys of the pair `futex`.
        """
        pi = int(np.flatnonzero(self._kinds == PI)[0])
        failed = keys[(keys["error"] == error) & (keys["kind"] == pi)]
        return failed["tid"].tolist(), failed["uaddr"].tolist()
