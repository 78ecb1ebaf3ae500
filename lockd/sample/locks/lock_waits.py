"""Who waits for which lock at this moment, out of the programs' tables, and what such a wait is called."""

from __future__ import annotations

import numpy as np

from lockd.columns.structs import Columns
from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries
from lockd.sample.aggregates.contention import PROGRAMS, Detail
from lockd.sample.locks.deadlocks import About
from lockd.sample.locks.user_locks import UserLocks
from lockd.sample.locks.waits import PI, Wait, Waits

JOIN = "join"
"""The family of a wait for a thread to end: it is held up by that thread as by a lock's owner."""


class LockWaits:
    """Waits for locks in user space, where `user_locks` are known, and in the kernel."""

    def __init__(self, manifest: Manifest, user_locks: UserLocks | None, detail: Detail) -> None:
        self._user_locks, self._detail = user_locks, detail
        kinds = manifest.enums["futex_kind"]
        self._wake = kinds.index("wake")
        self._is_lock = np.array([kind in ("lock", "pi") for kind in kinds])
        self._kinds = np.array(list(kinds), object)
        types = manifest.enums.get("lock_type", ())
        self._types = np.array(list(types), object)
        self._runnable = manifest.enums["state"].index("runnable")

    def now(self, threads: Entries, in_kernel: Entries | None) -> Waits:
        """Of threads that are off the CPU in a futex call, and of those in the kernel's code of a lock."""
        parts = []
        if self._user_locks:
            parts.append(self._in_user_space(self._user_locks, *threads))
        if in_kernel and len(in_kernel[0]):
            keys, waits = in_kernel
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
        call = threads["call"]
        off = (threads["off_since"] > 0) & (threads["state"] != self._runnable)
        blocked = off & (call["since"] > 0) & (call["kind"] < self._wake) & (threads["restart"] == 0)
        tgids, addresses = threads["tgid"][blocked], call["uaddr"][blocked]
        kinds = user_locks.correct(tgids, addresses, call["kind"][blocked])
        families = user_locks.families(tgids, addresses, kinds)
        some = self._is_lock[kinds] | (families == JOIN)
        columns = (tids[blocked], tgids, addresses, call["since"][blocked], self._kinds[kinds], families)
        return (*(column[some] for column in columns), np.zeros(int(some.sum()), np.bool_))

    def refused(self, keys: Columns, edeadlk: int) -> tuple[list[int], list[int]]:
        """The threads and addresses of PI locks among futex calls that failed with this error."""
        pi = int(np.flatnonzero(self._kinds == PI)[0])
        failed = keys[(keys["error"] == edeadlk) & (keys["kind"] == pi)]
        return failed["tid"].tolist(), failed["uaddr"].tolist()

    def about(self, wait: Wait) -> About:
        """As in /api/v1/locks."""
        locks = self._detail.locks
        program = PROGRAMS.index("kernel_locks" if wait.in_kernel else "futex")
        of_lock = (locks["address"] == wait.address) & (locks["program"] == program) & locks.used
        if not wait.in_kernel:
            of_lock &= locks["tgid"] == wait.tgid
        rows = [int(row) for row in np.flatnonzero(of_lock)]
        row = max(rows, key=lambda row: (bool(locks["lock"][row]), locks["seen"][row]), default=-1)
        if row < 0:
            return About("", "", ())
        stack = tuple(str(frame) for frame in locks["stack"][row] or ())
        return About(str(locks["lock"][row] or ""), str(locks["site"][row] or ""), stack)
