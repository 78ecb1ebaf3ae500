"""Rows of waits for kernel locks and of holds, their sums, and names of their functions and locks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.index import mix
from lockd.columns.structs import Columns
from lockd.kernel.pairs import Entries
from lockd.names.protocol import ANON
from lockd.printable import printable
from lockd.trace.core.call_stacks import CallStacks

SUMS = ("waits", "given_up", "wait_ns", "acquired", "holds", "hold_ns", "waiting", "holding")
MAXIMA = ("max_wait_ns", "max_hold_ns", "is_mmap_lock")
ROW = np.dtype(
    [
        ("lock", np.uint64),
        ("stack", np.uint64),  # number of the stack with which the thread waited for the lock or acquired it
        ("period", np.int64),  # number of the period: time on CLOCK_MONOTONIC divided by the period's length
        ("tid", np.int64),
        ("tgid", np.int64),
        ("comm", "S16"),  # comm of the thread
        ("type", np.int64),
        *((name, np.int64) for name in (*SUMS, *MAXIMA)),
    ]
)
"""One row for each combination of lock, stack, thread, type and period.

`waits` counts the waits that ended, `given_up` those of them that ended without the lock. `waiting` and
`holding` count the waits and holds that had not ended when the trace ended; `wait_ns` and `hold_ns` include
their times until then.
"""
HELD_TYPES = 4
"""The number of lock types whose acquisitions and releases are traced: the first ones of enum lock_type."""
MOST_ROWS = 32768
"""The least number of rows that Sums stores before it merges them."""
MOST = 1 << 20
"""The most keys that have sums of their own. Their rows take 160 MB, and a few times that while they are
merged. Rows with further keys are counted without names."""
KEY = ("lock", "tid", "type", "stack")
"""The columns by which Sums adds up rows."""
NOBODY = b"[no room]"
"""The comm of what was counted without names."""
SETTLED_NS = 20_000_000
"""Nanoseconds after which a lock that a thread has asked for, and does not wait for, counts as acquired.

With kprobes, only the release shows that a lock was acquired without a wait.
"""
NO_STACK = "[stack lost]"
"""The text in place of the functions of a stack that could not be stored."""


def drained_rows(drained: dict[str, Entries]) -> Columns:
    """The entries of the pair `kernel_locks` (waits) and of the pair `kernel_holds` (holds) as rows."""
    parts = [np.zeros(0, ROW)]
    for name in ("kernel_locks", "kernel_holds"):
        if name in drained:
            keys, values = drained[name]
            rows = np.zeros(len(keys), ROW)
            for column in ("lock", "stack", "period", "tid", "type"):
                rows[column] = keys[column]
            rows["tgid"], rows["comm"] = values["who"]["tgid"], values["who"]["thread_comm"]
            rows["is_mmap_lock"] = values["is_mmap_lock"]
            if name == "kernel_locks":
                for column in ("waits", "given_up", "wait_ns", "max_wait_ns"):
                    rows[column] = values[column]
            else:
                rows["acquired"] = values["acquisitions"]
                for column in ("holds", "hold_ns", "max_hold_ns"):
                    rows[column] = values[column]
            parts.append(rows)
    return structs.concatenate(parts)


def unfinished_waits(keys: Columns, waits: Columns, ended_ns: int, period_ns: int) -> Columns:
    """A row for each wait in the map kernel_waits at `ended_ns`, the end of the trace.

    `keys` and `waits` are the entries of the map. Waits of CPUs that spin are left out.
    """
    slept = np.flatnonzero((keys["cpu"] == 0) & (waits["since"].astype(np.int64) < ended_ns))
    keys, waits = structs.take(keys, slept), structs.take(waits, slept)
    rows = np.zeros(len(keys), ROW)
    for column in ("lock", "tid"):
        rows[column] = keys[column]
    for column in ("stack", "tgid", "comm", "type"):
        rows[column] = waits[column]
    rows["waiting"], rows["period"] = 1, ended_ns // period_ns
    rows["wait_ns"] = rows["max_wait_ns"] = ended_ns - waits["since"].astype(np.int64)
    return rows


def unfinished_holds(
    keys: Columns, holding: Columns, waiting: Columns, ended_ns: int, period_ns: int
) -> Columns:
    """A row for each hold in the map kernel_holding at `ended_ns`, the end of the trace.

    `keys` and `holding` are the entries of the map. A thread can hold a lock several times (nested): the
    members `since` and `stacks` of an entry have an element for each level. `waiting` is the result of
    unfinished_waits().
    """
    is_waited_for = np.isin(mix(keys["lock"], keys["tid"]), mix(waiting["lock"], waiting["tid"]))
    depth, since = holding["depth"].astype(np.int64), holding["since"].astype(np.int64)
    nested = since.shape[1]
    asked_at = since[np.arange(len(since)), depth % nested]
    is_taken = (holding["asked"] != 0) & ~is_waited_for & (ended_ns - asked_at >= SETTLED_NS)
    parts = [np.zeros(0, ROW)]
    for level in range(nested):
        is_held = (level < depth) | ((level == depth) & is_taken)
        which = np.flatnonzero(is_held & (since[:, level] < ended_ns))
        rows = np.zeros(len(which), ROW)
        for column in ("lock", "tid"):
            rows[column] = keys[column][which]
        for column in ("tgid", "comm", "type"):
            rows[column] = holding[column][which]
        rows["stack"] = holding["stacks"][which, level]
        began = since[which, level]
        rows["period"] = began // period_ns
        rows["holding"] = 1
        # The programs have counted the acquisitions of lower levels; that of the level `depth` counts here.
        rows["acquired"] = (depth[which] == level).astype(np.int64)
        rows["hold_ns"] = rows["max_hold_ns"] = ended_ns - began
        parts.append(rows)
    return structs.concatenate(parts)


def merged(rows: Columns, *by: str) -> Columns:
    """One row for each combination of values in the columns `by`, sorted by these columns.

    The columns SUMS are added up, and the columns MAXIMA have the greatest value. All other columns are those
    of the row with the largest `wait_ns` or, among equals, the largest `acquired`.
    """
    if not len(rows):
        return rows
    codes = mix(*(rows[column] for column in by))
    order = np.lexsort((-rows["acquired"], -rows["wait_ns"], codes))
    starts = np.flatnonzero(np.diff(codes[order], prepend=~codes[order[0]]))
    result = structs.take(rows, order[starts])
    for column in SUMS:
        result[column] = np.add.reduceat(rows[column][order], starts)
    for column in MAXIMA:
        result[column] = np.maximum.reduceat(rows[column][order], starts)
    return structs.take(result, np.lexsort([result[column] for column in reversed(by)]))


class Sums:
    """Adds up rows by KEY. At most `most` keys have sums of their own."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._merged = np.zeros(0, ROW)
        self._parts: list[Columns] = []
        self.nameless = 0
        """Number of waits and acquisitions that were counted without names, because there were more than
        `most` keys. It is complete after rows()."""

    def add(self, rows: Columns) -> None:
        self._parts.append(rows)
        if sum(map(len, self._parts)) > max(len(self._merged), MOST_ROWS):
            self.rows()

    def rows(self) -> Columns:
        """The sums of all rows so far, and at most one row without names for each type of lock."""
        if self._parts:
            rows = structs.concatenate([self._merged, *self._parts])
            self._make_room(rows)
            self._merged, self._parts = merged(rows, *KEY), []
        return self._merged

    def _make_room(self, rows: Columns) -> None:
        """Remove the names from rows with new keys for which there is no room.

        `rows` begin with those of `_merged`.
        """
        if len(rows) <= self._most:
            return
        keys = mix(*(rows[column] for column in KEY))
        known = keys[: len(self._merged)]
        fresh = np.setdiff1d(keys, known)
        excess = fresh[max(self._most - len(known), 0) :]
        nameless = np.flatnonzero(np.isin(keys, excess))
        for column in ("waits", "waiting", "acquired"):
            self.nameless += int(rows[column][nameless].sum())
        for column in ("lock", "stack", "tid", "tgid", "is_mmap_lock"):
            rows[column][nameless] = 0
        rows["comm"][nameless] = NOBODY


def comm_of(row: Any) -> str:
    """The comm of the thread of a row, printable."""
    return printable(row["comm"].decode("utf-8", "replace"))


@dataclass
class Count:
    """Numbers of waits, acquisitions and holds.

    Rows of different stacks must be added to the same Count before `accesses` is read: a wait and the
    acquisition that ends it can have different stacks.
    """

    waits: int = 0
    got: int = 0
    """Waits that ended with the lock."""
    acquired: int = 0
    holds: int = 0

    def add(self, row: Any) -> None:
        self.waits += int(row["waits"] + row["waiting"])
        self.got += int(row["waits"] - row["given_up"])
        self.acquired += int(row["acquired"])
        self.holds += int(row["holds"] + row["holding"])

    @property
    def accesses(self) -> int:
        """Waits, and acquisitions without a wait."""
        return self.waits + max(self.acquired - self.got, 0)


class Accesses:
    """Counts accesses: each wait, and each acquisition without a wait.

    A wait that ends right before the end of a period may have its acquisition counted in the next period.
    With `has_acquisitions` False, acquisitions are not traced, and only waits are counted.
    """

    def __init__(self, has_acquisitions: bool) -> None:
        self._has_acquisitions = has_acquisitions
        self._early: dict[int, tuple[int, int]] = {}
        """Waits that ended with the lock and whose acquisitions are not counted yet: period and number of
        waits, by the hash of lock, thread and type."""

    def counts(self, rows: Columns) -> npt.NDArray[np.int64]:
        """The number of accesses of each row.

        The rows must be sorted by period, with one row for each combination of period, lock, thread and type.
        The periods of a call must be later than those of the previous call, except for unfinished holds.
        """
        waits: npt.NDArray[np.int64] = rows["waits"] + rows["waiting"]
        if not self._has_acquisitions:
            return waits
        free = rows["acquired"] - (rows["waits"] - rows["given_up"])
        free[rows["type"] >= HELD_TYPES] = 0
        codes = mix(rows["lock"], rows["tid"], rows["type"])
        early = np.concatenate([codes[free < 0], np.array(list(self._early), np.uint64)])
        for row in np.flatnonzero(np.isin(codes, early)).tolist():
            period, code = int(rows["period"][row]), int(codes[row])
            early_period, number = self._early.pop(code, (0, 0))
            free[row] -= number if early_period == period - 1 else 0
            if free[row] < 0:
                self._early[code] = period, -int(free[row])
        accesses: npt.NDArray[np.int64] = waits + np.maximum(free, 0)
        return accesses


class Names:
    """Names of the functions in kernel stacks, and of the locks that threads asked for in these stacks.

    Stacks are given by their numbers in `stacks`, lock types by their positions in `types`. Functions are
    written NAME+0xOFFSET, the innermost first.
    """

    def __init__(self, stacks: CallStacks, types: list[str]) -> None:
        self._stacks, self._types = stacks, types
        self._callers: dict[int, tuple[str, ...]] = {}
        self._locks: dict[tuple[int, int, int], str] = {}

    def functions(self, stack: int) -> tuple[str, ...]:
        """All functions of a stack, or only NO_STACK."""
        return self._stacks.names.kernel_places(self._stacks.kernel_addresses(stack)) or (NO_STACK,)

    def callers(self, stack: int) -> tuple[str, ...]:
        """The functions of a stack from the first one that is no locking code, or only NO_STACK.

        These are all functions if all are locking code.
        """
        if stack not in self._callers:
            addresses = self._stacks.kernel_addresses(stack)
            self._callers[stack] = self._stacks.names.kernel_places(addresses, True) or (NO_STACK,)
        return self._callers[stack]

    def lock(self, address: int, type_: int, stack: int, is_mmap_lock: bool = False) -> str:
        """The name of the lock that a thread asked for in that stack.

        A lock without a name gets that of the function that asked for it, or `anon` if that is unknown too.
        """
        key = address, type_, stack
        if key not in self._locks:
            addresses = self._stacks.kernel_addresses(stack)
            name = self._stacks.names.kernel_lock(address, self._types[type_], addresses, is_mmap_lock)
            # 0 stands for locks that Sums counted without names. A variable of the kernel may be there.
            self._locks[key] = name if address else ANON
        return self._locks[key]

    def matching(self, rows: Columns, caller: str, lock: str) -> npt.NDArray[np.bool_]:
        """A mask of the rows whose caller's name begins with `caller` and whose lock is `lock`.

        `lock` is a name or an address such as 0xffff888100a3c1c0. An empty argument matches all rows.
        """
        mask = np.ones(len(rows), np.bool_)
        if caller:
            stacks = [s for s in np.unique(rows["stack"]).tolist() if self.callers(s)[0].startswith(caller)]
            mask &= np.isin(rows["stack"], np.array(stacks, np.uint64))
        if lock:
            columns = (rows[name].tolist() for name in ("lock", "type", "stack", "is_mmap_lock"))
            mask &= np.array(
                [
                    lock in (f"{address:#x}", self.lock(address, *rest))
                    for address, *rest in zip(*columns, strict=True)
                ],
                np.bool_,
            )
        return mask
