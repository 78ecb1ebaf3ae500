"""Waits for kernel locks, takings and holds of them, as rows of one kind, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.index import mix
from lockd.columns.structs import Columns
from lockd.kernel.pairs import Entries
from lockd.printable import printable

"""Rows of ROW, one-dimensional."""

SUMS = ("waits", "given_up", "wait_ns", "acquired", "holds", "hold_ns", "waiting", "holding")
MAXIMA = ("max_wait_ns", "max_hold_ns", "is_mmap_lock")
ROW = np.dtype(
    [
        ("lock", np.uint64),
        ("stack", np.uint64),  # number of the stack that waited, or took the lock
        ("period", np.int64),  # as the programs count them: time by period
        ("tid", np.int64),
        ("tgid", np.int64),
        ("comm", "S16"),  # of the thread
        ("type", np.int64),
        *((name, np.int64) for name in (*SUMS, *MAXIMA)),
    ]
)
"""`waits` are those that ended and, of these, `given_up` those without the lock; `waiting` and `holding` are
those that had not ended with the trace, whose times so far are in the sums."""
HELD_TYPES = 4
"""Of enum lock_type: of these the takings and releases are seen."""
KEPT_ROWS = 32768
"""Before they are added up, at least."""
SETTLED_NS = 20_000_000
"""A lock that a thread asked for so long ago, and does not wait for, is taken; with kprobes only its release
would tell."""


def rows_of(taken: dict[str, Entries]) -> Columns:
    """All that was drained; `waits` and `holds` are rows of their own."""
    parts = [np.zeros(0, ROW)]
    for name in ("kernel_locks", "kernel_holds"):
        if name in taken:
            keys, values = taken[name]
            rows = np.zeros(len(keys), ROW)
            for column in ("lock", "stack", "period", "tid", "type"):
                rows[column] = keys[column]
            rows["tgid"], rows["comm"] = values["who"]["tgid"], values["who"]["thread_comm"]
            rows["is_mmap_lock"] = values["is_mmap_lock"]
            if name == "kernel_locks":
                for column in ("waits", "given_up", "wait_ns", "max_wait_ns"):
                    rows[column] = values[column]
            else:
                for to, column in (("acquired", "acquisitions"), ("holds",) * 2, ("hold_ns",) * 2):
                    rows[to] = values[column]
                rows["max_hold_ns"] = values["max_hold_ns"]
            parts.append(rows)
    return structs.concatenate(parts)


def still_waiting(keys: Columns, waits: Columns, ended_ns: int, period_ns: int) -> Columns:
    """Entries of kernel_waits at the end, a row for each. Those of CPUs that spin are left out."""
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


def still_held(keys: Columns, holding: Columns, waiting: Columns, ended_ns: int, period_ns: int) -> Columns:
    """Entries of kernel_holding at the end, a row for each level of them; `waiting` of still_waiting()."""
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
        rows["acquired"] = (depth[which] == level).astype(np.int64)  # else it was counted then
        rows["hold_ns"] = rows["max_hold_ns"] = ended_ns - began
        parts.append(rows)
    return structs.concatenate(parts)


def merged(rows: Columns, *by: str) -> Columns:
    """Rows that are the same in the columns `by` made into one, in the order of these.

    What is neither the same nor adds up is taken from the row that waited longest, else the one with the most
    takings.
    """
    if not len(rows):
        return rows
    codes = mix(*(rows[column] for column in by))
    order = np.lexsort((-rows["acquired"], -rows["wait_ns"], codes))
    starts = np.flatnonzero(np.diff(codes[order], prepend=~codes[order[0]]))
    found = structs.take(rows, order[starts])
    for column in SUMS:
        found[column] = np.add.reduceat(rows[column][order], starts)
    for column in MAXIMA:
        found[column] = np.maximum.reduceat(rows[column][order], starts)
    return structs.take(found, np.lexsort([found[column] for column in reversed(by)]))


class Sums:
    """Rows added up by thread, lock, type and stack."""

    def __init__(self) -> None:
        self._kept = [np.zeros(0, ROW)]

    def add(self, rows: Columns) -> None:
        self._kept.append(rows)
        if sum(map(len, self._kept)) > max(2 * len(self._kept[0]), KEPT_ROWS):
            self._kept = [self.rows()]

    def rows(self) -> Columns:
        return merged(structs.concatenate(self._kept), "lock", "tid", "type", "stack")


def comm_of(row: Any) -> str:
    """The name of the thread that a row is about."""
    return printable(row["comm"].decode("utf-8", "replace"))


@dataclass
class Count:
    """What some rows add up to, whatever their stacks: those of a wait and of its taking are not the same."""

    waits: int = 0
    got: int = 0
    """Of the waits, those that ended with the lock."""
    acquired: int = 0
    holds: int = 0

    def add(self, row: Any) -> None:
        self.waits += int(row["waits"] + row["waiting"])
        self.got += int(row["waits"] - row["given_up"])
        self.acquired += int(row["acquired"])
        self.holds += int(row["holds"] + row["holding"])

    @property
    def accesses(self) -> int:
        """Waits, and takings that needed none."""
        return self.waits + max(self.acquired - self.got, 0)


class Accesses:
    """How often locks were asked for: each wait, and each taking that needed none.

    `counts_takings`: whether takings are counted, or only waits. A wait that ends right before the end of a
    period may have its taking counted in the next.
    """

    def __init__(self, counts_takings: bool) -> None:
        self._counts_takings = counts_takings
        self._early: dict[int, tuple[int, int]] = {}
        """Waits that got the lock and whose taking is still to be counted: period and number, by lock, thread
        and type."""

    def of(self, rows: Columns) -> npt.NDArray[np.int64]:
        """For each row; they are in the order of periods and no two are of the same period, lock, thread and
        type."""
        waits: npt.NDArray[np.int64] = rows["waits"] + rows["waiting"]
        if not self._counts_takings:
            return waits
        free = rows["acquired"] - (rows["waits"] - rows["given_up"])
        free[rows["type"] >= HELD_TYPES] = 0
        codes = mix(rows["lock"], rows["tid"], rows["type"])
        early = np.concatenate([codes[free < 0], np.array(list(self._early), np.uint64)])
        for at in np.flatnonzero(np.isin(codes, early)).tolist():
            period, code = int(rows["period"][at]), int(codes[at])
            noted, number = self._early.pop(code, (0, 0))
            free[at] -= number if noted == period - 1 else 0
            if free[at] < 0:
                self._early[code] = period, -int(free[at])
        found: npt.NDArray[np.int64] = waits + np.maximum(free, 0)
        return found
