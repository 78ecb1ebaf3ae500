"""The aggregates behind the metrics: what each thread and each lock waited, bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Hashes, Rows, mix
from lockd.columns.table import Table
from lockd.names.labels.processes import Name, text
from lockd.sample.aggregates.hold_table import HeldLocks

PROGRAMS = ("futex", "offcpu", "kernel_locks")
OFFCPU = PROGRAMS.index("offcpu")
NOT_CONTENTION = ("cond", "other")
MIN_ROWS = 20_000
FORGET_AFTER = 3600.0
"""Seconds after which a thread or lock with nothing new is forgotten."""
RECENT = 60.0
"""Seconds: the threads of a lock are those that blocked on it so recently."""
SHOWN = 1000
"""Rows that one answer to /api/v1 holds at most."""
SHOWN_UNCONTENDED = 250
"""Of them for locks that were held and not waited for, whatever else there is."""


class Detail:
    """Threads, locks, and which threads blocked on which lock."""

    def __init__(self, thread_comm: Callable[[int, int], str], at_once: int) -> None:
        """`thread_comm(tgid, tid)` names a live thread whose name no event told; at most
        `at_once` rows are added in one go.
        """
        rows = max(MIN_ROWS, at_once)
        self._thread_comm = thread_comm
        waits = {"blocked_ns": np.int64, "count": np.int64, "max_ns": np.int64, "waiting_ns": np.int64}
        about = {"program": np.int8, "kind": object, "process": object, "tgid": np.int64}
        self.threads = Table(
            {**waits, **about, "tid": np.int64, "thread_comm": "S16", "lock_key": np.uint64,
             "waiting_is_least": np.bool_}, rows,
        )  # fmt: skip
        self.locks = Table(
            {
                **waits,
                **about,
                "address": np.uint64,
                "since": np.float64,
                "waiting": np.int64,
                "kind_number": np.int16,
                "is_mmap_lock": np.bool_,
                "frames": object,
                "is_asked": np.bool_,
                "lock": object,
                "site": object,
                "stack": object,
                "sites": object,
                "series_code": np.uint64,
            },
            rows,
        )
        self._pairs = Table({"lock_key": np.uint64}, rows)
        self.held: HeldLocks | None = None
        """What is known of holds, in mode `all`."""

    def thread_rows(
        self, program: str, who: npt.NDArray[Any], tids: npt.NDArray[Any], kinds: npt.NDArray[Any],
        kind_names: npt.NDArray[Any], codes: Hashes, processes: npt.NDArray[Any], now: float,
    ) -> Rows:  # fmt: skip
        """The row of each thread and kind of wait; `kind_names` are by kind, the rest by row."""
        number = PROGRAMS.index(program)

        def describe(positions: Rows) -> dict[str, Any]:
            return {
                "program": number,
                "tid": tids[positions],
                "tgid": who["tgid"][positions],
                "kind": kind_names[kinds[positions]],
                "process": processes[positions],
                "thread_comm": who["thread_comm"][positions],
            }

        keys = mix(tids, who["tgid"], codes, kinds, np.full(len(tids), number))
        return self.threads.find_or_add(keys, now, describe)

    def add(
        self, table: Table, rows: Rows, blocked_ns: npt.NDArray[Any], count: npt.NDArray[Any],
        max_ns: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        """Add waits to rows, which may repeat; rows below 0 are left out."""
        found = rows >= 0
        groups = Groups(rows[found])
        table["blocked_ns"][groups.rows] += groups.sum(blocked_ns[found])
        table["count"][groups.rows] += groups.sum(count[found])
        table["max_ns"][groups.rows] = np.maximum(table["max_ns"][groups.rows], groups.max(max_ns[found]))

    def note_threads_of(self, lock_rows: Rows, threads: Rows, tids: npt.NDArray[Any], now: float) -> None:
        """Remember which threads blocked on which lock; `threads` are their rows.

        By the locks' keys: the row of a lock that is forgotten is used for another.
        """
        lock_keys = self.locks["key"][lock_rows]
        self.threads["lock_key"][threads] = lock_keys
        self._pairs.find_or_add(
            mix(lock_keys, tids), now, lambda positions: {"lock_key": lock_keys[positions]}
        )

    def threads_by_lock(self, now: float) -> npt.NDArray[np.int64]:
        """Distinct threads that blocked on each lock in the last minute, by row of `locks`."""
        recent = self._pairs.used & (self._pairs["seen"] >= now - RECENT)
        rows = self.locks.find(self._pairs["lock_key"][recent])
        return np.bincount(rows[rows >= 0], minlength=len(self.locks.used))

    def clear_waiting(self, program: str) -> None:
        """Before the waits that go on at this moment are noted anew."""
        number = PROGRAMS.index(program)
        of_program = self.threads["program"] == number
        self.threads["waiting_ns"][of_program] = 0
        self.threads["waiting_is_least"][of_program] = False
        of_program = self.locks["program"] == number
        self.locks["waiting_ns"][of_program] = 0
        self.locks["waiting"][of_program] = 0

    def expire(self, now: float) -> None:
        self._pairs.forget_unseen(now - RECENT)
        self.threads.forget_unseen(now - FORGET_AFTER)
        self.locks.forget_unseen(now - FORGET_AFTER)
        if self.held:
            self.held.expire(now - FORGET_AFTER)

    def _name_of_thread(self, row: int) -> str:
        table = self.threads
        told = text(bytes(table["thread_comm"][row]))
        return told or self._thread_comm(int(table["tgid"][row]), int(table["tid"][row]))

    def tables(
        self, now: float, holders: Mapping[tuple[int, int], int], advice: Mapping[int, str]
    ) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """The tables behind /api/v1: the rows with the most blocked time, waits still going on included.

        `holders` are the threads that hold locks, by process (0: the kernel) and address; `advice` is that of
        UserLocks, by process.
        """
        tables: dict[str, Any] = {}
        arrays: dict[str, npt.NDArray[Any]] = {}
        threads = _top(self.threads)
        locks = self.locks
        lock_of = locks.find(self.threads["lock_key"][threads])
        lock_names = [str(locks["lock"][row] or "") if row >= 0 else "" for row in lock_of]
        tables["threads"] = {
            "text": {
                **_about(self.threads, threads),
                "thread_comm": [self._name_of_thread(row) for row in threads],
                "lock": lock_names,
                "advice": [advice.get(tgid, "") for tgid in self.threads["tgid"][threads].tolist()],
            },
            "numbers": _numbers(
                "threads", self.threads, threads, ("tid", "tgid", "waiting_is_least"), arrays
            ),
            "lists": {},
        }
        rows = _top(locks)
        if self.held:
            first = rows[: SHOWN - SHOWN_UNCONTENDED]
            known = locks["process"][first], locks["address"][first], locks["kind_number"][first]
            shown = self.held.shown(*known, most=SHOWN - len(first))
            rows = rows[: SHOWN - len(shown.alone)]
        by_lock = self.threads_by_lock(now)
        arrays["locks.holder_tid"] = self._holders(rows, holders)
        arrays["locks.threads"] = by_lock[rows].astype(np.int64)
        tables["locks"] = {
            "text": {
                **_about(locks, rows),
                "lock": [str(name or "") for name in locks["lock"][rows]],
                "site": [str(site or "") for site in locks["site"][rows]],
                "address": [f"{address:#x}" for address in locks["address"][rows]],
                "holder": [self._comm_of(int(tid)) for tid in arrays["locks.holder_tid"]],
            },
            "numbers": [
                "threads",
                "holder_tid",
                *_numbers("locks", locks, rows, ("tgid", "waiting"), arrays),
            ],
            "lists": {
                "stack": [list(stack or ()) for stack in locks["stack"][rows]],
                "sites": [_sites(counter) for counter in locks["sites"][rows]],
            },
        }
        if self.held:
            shown.add_to(tables["locks"], arrays)
        return tables, arrays

    def _holders(self, rows: Rows, holders: Mapping[tuple[int, int], int]) -> npt.NDArray[np.int64]:
        """Who holds each of these locks, if somebody waits for it; 0: nobody known."""
        locks = self.locks
        in_kernel = locks["program"][rows] == PROGRAMS.index("kernel_locks")
        whose = np.where(in_kernel, 0, locks["tgid"][rows]).tolist()
        found = map(holders.get, zip(whose, locks["address"][rows].tolist(), strict=True))
        return np.array([tid or 0 for tid in found], np.int64)

    def _comm_of(self, tid: int) -> str:
        return self._thread_comm(tid, tid) if tid else ""


def _sites(counter: Counter[str] | None) -> list[dict[str, Any]]:
    """Where threads were seen to wait for a lock, and how often, the most frequent first."""
    return [{"site": site, "seen": count} for site, count in (counter or Counter()).most_common()]


def lock_key(
    program: str, tgids: npt.NDArray[Any], addresses: npt.NDArray[Any], *rest: npt.NDArray[Any]
) -> Hashes:
    """What tells locks apart: program, process, address, and what else the program says."""
    return mix(np.full(len(addresses), PROGRAMS.index(program)), tgids, addresses, *rest)


def _top(table: Table) -> Rows:
    live = np.flatnonzero(table.used)
    weight = table["blocked_ns"][live] + table["waiting_ns"][live]
    # What is stuck now must not be cut off by what waited much before.
    is_contended = np.isin(table["kind"][live].astype(str), NOT_CONTENTION, invert=True)
    is_stuck = (table["waiting_ns"][live] > 0) & (table["program"][live] != OFFCPU) & is_contended
    rows: Rows = live[np.lexsort((-weight, ~is_stuck))[:SHOWN]]
    return rows


def _about(table: Table, rows: Rows) -> dict[str, list[str]]:
    processes: Sequence[Name] = list(table["process"][rows])
    return {
        "program": [PROGRAMS[number] for number in table["program"][rows]],
        "unit": [unit for unit, _ in processes],
        "comm": [comm for _, comm in processes],
        "kind": [str(kind) for kind in table["kind"][rows]],
    }


def _numbers(
    name: str, table: Table, rows: Rows, plain: tuple[str, ...], arrays: dict[str, npt.NDArray[Any]]
) -> list[str]:
    for column in plain:
        arrays[f"{name}.{column}"] = table[column][rows].astype(np.int64)
    arrays[f"{name}.blocked_count"] = table["count"][rows]
    for column, source in (
        ("blocked_us", "blocked_ns"),
        ("max_blocked_us", "max_ns"),
        ("waiting_us", "waiting_ns"),
    ):
        arrays[f"{name}.{column}"] = table[source][rows] / 1000.0
    longest = np.maximum(table["max_ns"][rows], table["waiting_ns"][rows])
    arrays[f"{name}.max_blocked_us"] = longest / 1000.0
    return [*plain, "blocked_count", "blocked_us", "max_blocked_us", "waiting_us"]
