"""Contention tables: how long each thread and each lock waited, in bounded tables behind /api/v1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Hashes, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.table import Table
from lockd.names.labels.processes import Name, text
from lockd.sample.aggregates.hold_table import HoldTable, ShownHolds
from lockd.sample.aggregates.identities import ProcessNames
from lockd.sample.aggregates.ongoing import OngoingWaits
from lockd.sample.locks.waits import LockDescription, Wait
from lockd.sample.series.ranking import rank

PROGRAMS = ("futex", "offcpu", "kernel_locks")
OFFCPU = PROGRAMS.index("offcpu")
NOT_CONTENTION = ("cond", "other")
"""Kinds of user-space locks on which threads wait for work rather than for each other."""
MIN_ROWS = 20_000
"""Rows that each table has room for at least."""
FORGET_AFTER = 3600.0
"""Seconds without an ended or ongoing wait after which a thread or lock is forgotten."""
FORGET_ENDED_AFTER = 600.0
"""Seconds after which the threads and locks of ended processes are forgotten. A build leaves hundreds of them
in a minute."""
RECENT = 60.0
"""Seconds for which a thread that blocked on a lock counts as one of the lock's threads."""
SHOWN = 1000
"""Rows that one table of an answer to /api/v1 has at most."""
SHOWN_BY_PROCESS = 500
"""Up to this many rows are shared out among the processes before the others are chosen: first the best row
of each process, then the second, up to ranking.FLOOR. This number is for rows of contention and for other
rows separately."""
SHOWN_IDLE = 250
"""Rows, out of SHOWN, that are kept for waits that are no contention: for work, or off the CPU."""
SHOWN_UNCONTENDED = 250
"""Rows, out of SHOWN, that are kept for locks that were held and not waited for."""


class ThreadRows(Protocol):
    """Waits with their threads and processes, one per row: a drained window, or waits that have not ended."""

    @property
    def tids(self) -> Columns: ...
    @property
    def who(self) -> Columns: ...
    @property
    def codes(self) -> Hashes: ...
    @property
    def processes(self) -> ProcessNames: ...


class ContentionTables:
    """The tables of threads and of locks, and of which threads blocked on which lock.

    Tables refer to each other's rows by key, never by row number: a row that is evicted is used for another
    thread or lock.
    """

    def __init__(self, thread_comm: Callable[[int, int], str], at_once: int) -> None:
        """`thread_comm(tgid, tid)` returns the name of a live thread whose name came with no event.

        `at_once` is the largest number of rows that one call adds to a table. Tables have room for as many.
        """
        capacity = max(MIN_ROWS, at_once)
        self._thread_comm = thread_comm
        # The time of all threads of a lock may have more than 64 bits. A float will do, as readers of the
        # table get floats: while a sum is below 292 years, an addition is off by a microsecond at most.
        waits = {"blocked_ns": np.float64, "count": np.int64, "max_ns": np.int64, "waiting_ns": np.int64}
        about = {"program": np.int8, "kind": object, "process": object, "tgid": np.int64}
        self.threads = Table(
            {**waits, **about, "tid": np.int64, "thread_comm": "S16", "lock_key": np.uint64,
             "waiting_is_least": np.bool_}, capacity,
        )  # fmt: skip
        self.locks = Table(
            {
                **waits,
                **about,
                "address": np.uint64,
                "since": np.float64,  # when the row was made (monotonic clock in seconds)
                "waiting": np.int64,  # threads that wait now
                "kind_number": np.int16,
                "is_mmap_lock": np.bool_,
                "frames": object,  # kernel stack of one wait, until the name of the lock is known
                "is_asked": np.bool_,
                "lock": object,
                "site": object,
                "stack": object,
                "sites": object,  # Counter of the sites of waits, shared with UserLocks
                "holders": object,  # HoldersOfLock; 0 or None if no release was sampled
                "series_code": np.uint64,  # hash of the label set, 0 while the lock has no name
            },
            capacity,
        )
        self._pairs = Table({"lock_key": np.uint64, "tid": np.int64}, capacity)
        """A row for each pair of a lock and a thread that blocked on it."""
        self.holds: HoldTable | None = None
        """Holds of kernel locks; None unless lockd runs in mode `all`."""

    def thread_rows(
        self, program: str, waits: ThreadRows, kinds: Columns, kind_names: Columns, now: float
    ) -> Rows:
        """Return for each wait the row of its thread and kind in `threads`.

        `kinds` has the number of the kind of each wait, by which `kind_names` is indexed. A row gets the name
        that its thread has in `waits`, as threads are often named only after they have begun to run.
        """
        number = PROGRAMS.index(program)
        tids, who = waits.tids, waits.who

        def describe(positions: Rows) -> dict[str, Any]:
            return {
                "program": number,
                "tid": tids[positions],
                "tgid": who["tgid"][positions],
                "kind": kind_names[kinds[positions]],
                "process": waits.processes[positions],
                "thread_comm": who["thread_comm"][positions],
            }

        keys = mix(tids, who["tgid"], waits.codes, kinds, np.full(len(tids), number))
        rows = self.threads.find_or_add(keys, now, describe)
        is_named = who["thread_comm"] != b""
        self.threads["thread_comm"][rows[is_named]] = who["thread_comm"][is_named]
        return rows

    def add_waits(
        self, table: Table, rows: Rows, blocked_ns: Columns, count: Columns, max_ns: Columns
    ) -> None:
        """Add waits to `rows` of `table`. A row may occur several times; waits with row -1 are left out."""
        is_known = rows >= 0
        groups = Groups(rows[is_known])
        table["blocked_ns"][groups.rows] += groups.float_sum(blocked_ns[is_known])
        table["count"][groups.rows] += groups.sum(count[is_known])
        longest = groups.max(max_ns[is_known])
        table["max_ns"][groups.rows] = np.maximum(table["max_ns"][groups.rows], longest)

    def note_lock_threads(self, lock_rows: Rows, thread_rows: Rows, tids: Columns, now: float) -> None:
        """Remember which thread blocked on which lock. The arrays have one item per wait."""
        lock_keys = self.locks["key"][lock_rows]
        self.threads["lock_key"][thread_rows] = lock_keys
        self._pairs.find_or_add(
            mix(lock_keys, tids),
            now,
            lambda positions: {"lock_key": lock_keys[positions], "tid": tids[positions]},
        )

    def recent_waits(self, now: float) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Return the pairs of a lock and a thread that blocked on it in the last minute.

        They are returned as rows in `locks` and as thread ids.
        """
        recent = self._pairs.used & (self._pairs["seen"] >= now - RECENT)
        rows = self.locks.find(self._pairs["lock_key"][recent])
        return rows[rows >= 0], self._pairs["tid"][recent][rows >= 0]

    def count_threads(self, now: float) -> npt.NDArray[np.int64]:
        """Return for each row of `locks` how many threads blocked on its lock in the last minute."""
        return np.bincount(self.recent_waits(now)[0], minlength=len(self.locks.used))

    def clear_waiting(self, program: str) -> None:
        """Forget which of a program's waits have not ended, before the waits that go on now are noted."""
        number = PROGRAMS.index(program)
        is_program = self.threads["program"] == number
        self.threads["waiting_ns"][is_program] = 0
        self.threads["waiting_is_least"][is_program] = False
        is_program = self.locks["program"] == number
        self.locks["waiting_ns"][is_program] = 0
        self.locks["waiting"][is_program] = 0

    def note_waiting_threads(
        self, program: str, waiting: OngoingWaits, kinds: Columns, kind_names: Columns, now: float
    ) -> Rows:
        """Note for how long threads have waited; the parameters and the result are as in thread_rows()."""
        rows = self.thread_rows(program, waiting, kinds, kind_names, now)
        self.threads["waiting_ns"][rows] = waiting.waited_ns
        self.threads["waiting_is_least"][rows] = waiting.is_lower_bound
        return rows

    def expire(self, now: float, alive: Mapping[int, Name]) -> None:
        """Forget threads and locks without a wait, and holds of locks without a hold, for a long time.

        `alive` are the names of the living processes by id. Threads and locks of ended processes are
        forgotten sooner. The row of a kernel lock has no process id: it belongs to all processes with its
        (unit, comm).
        """
        self._pairs.forget_unseen(now - RECENT)
        names = set(alive.values())
        for table in (self.threads, self.locks):
            table.forget_unseen(now - FORGET_AFTER)
            old = np.flatnonzero(table.used & (table["seen"] < now - FORGET_ENDED_AFTER))
            owners = zip(table["tgid"][old].tolist(), table["process"][old], strict=True)
            is_ended = [tgid not in alive if tgid else name not in names for tgid, name in owners]
            table.drop(old[np.array(is_ended, np.bool_)])
        if self.holds:
            self.holds.expire(now - FORGET_AFTER)

    def describe_lock(self, wait: Wait) -> LockDescription:
        """Return what /api/v1/locks shows of the lock of a wait; all fields are empty for an unknown lock."""
        locks = self.locks
        program = PROGRAMS.index("kernel_locks" if wait.in_kernel else "futex")
        is_lock = (locks["address"] == wait.address) & (locks["program"] == program) & locks.used
        if not wait.in_kernel:
            is_lock &= locks["tgid"] == wait.tgid
        rows = [int(row) for row in np.flatnonzero(is_lock)]
        row = max(rows, key=lambda row: (bool(locks["lock"][row]), locks["seen"][row]), default=-1)
        if row < 0:
            return LockDescription("", "", ())
        stack = tuple(str(frame) for frame in locks["stack"][row] or ())
        return LockDescription(str(locks["lock"][row] or ""), str(locks["site"][row] or ""), stack)

    def tables(
        self, now: float, holders: Mapping[tuple[int, int], int], advice: Mapping[int, str]
    ) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the tables behind /api/v1, and the arrays with their numbers.

        _top_rows() chooses their rows. `holders` has the id of the thread that holds a lock, by process id (0
        for locks of the kernel) and address of the lock. `advice` is by process id.
        """
        arrays: dict[str, npt.NDArray[Any]] = {}
        return {
            "threads": self._threads_table(advice, arrays),
            "locks": self._locks_table(now, holders, arrays),
        }, arrays

    def _threads_table(
        self, advice: Mapping[int, str], arrays: dict[str, npt.NDArray[Any]]
    ) -> dict[str, Any]:
        threads, locks = self.threads, self.locks
        rows = _top_rows(threads, SHOWN)
        lock_rows = locks.find(threads["lock_key"][rows])
        return {
            "text": {
                **_label_columns(threads, rows),
                "thread_comm": [self._thread_name(row) for row in rows],
                "lock": [str(locks["lock"][row] or "") if row >= 0 else "" for row in lock_rows],
                "advice": [advice.get(tgid, "") for tgid in threads["tgid"][rows].tolist()],
            },
            "numbers": _number_columns("threads", threads, rows, ("tid", "tgid", "waiting_is_least"), arrays),
            "lists": {},
        }

    def _locks_table(
        self, now: float, holders: Mapping[tuple[int, int], int], arrays: dict[str, npt.NDArray[Any]]
    ) -> dict[str, Any]:
        locks = self.locks
        rows = _top_rows(locks, SHOWN)
        if self.holds:
            first = _top_rows(locks, SHOWN - SHOWN_UNCONTENDED)
            rows = _top_rows(locks, SHOWN - len(self._choose_holds(self.holds, first).uncontended))
            holds = self._choose_holds(self.holds, rows)  # chosen again: `rows` may be more than `first`
        # For a profile of some seconds, the exporter finds the same lock in two answers by its key. This key
        # is no column of the table, because /api/v1 does not show it.
        arrays["locks.key"] = locks["key"][rows].view(np.int64)
        arrays["locks.holder_tid"] = self._holders(rows, holders)
        arrays["locks.threads"] = self.count_threads(now)[rows].astype(np.int64)
        arrays["locks.since"] = locks["since"][rows]  # only for profiles of some seconds
        table = {
            "is_cut": len(rows) < len(locks),  # only for profiles of some seconds
            "text": {
                **_label_columns(locks, rows),
                "lock": [str(name or "") for name in locks["lock"][rows]],
                "site": [str(site or "") for site in locks["site"][rows]],
                "address": [f"{address:#x}" for address in locks["address"][rows]],
                "holder": [
                    self._thread_comm(tid, tid) if tid else "" for tid in arrays["locks.holder_tid"].tolist()
                ],
            },
            "numbers": [
                "threads",
                "holder_tid",
                *_number_columns("locks", locks, rows, ("tgid", "waiting"), arrays),
            ],
            "lists": {
                "stack": [list(stack or ()) for stack in locks["stack"][rows]],
                "sites": [_sites(counter) for counter in locks["sites"][rows]],
                "holders": [holders.rows() if holders else [] for holders in locks["holders"][rows]],
            },
        }
        if self.holds:
            holds.add_to(table, arrays)
        return table

    def _choose_holds(self, holds: HoldTable, rows: Rows) -> ShownHolds:
        """Return the holds of the locks in these rows, and of other locks up to SHOWN locks in all."""
        locks = self.locks
        contended = locks["process"][rows], locks["address"][rows], locks["kind_number"][rows]
        return holds.choose_shown(*contended, most=SHOWN - len(rows))

    def _thread_name(self, row: int) -> str:
        table = self.threads
        name = text(bytes(table["thread_comm"][row]))
        return name or self._thread_comm(int(table["tgid"][row]), int(table["tid"][row]))

    def _holders(self, rows: Rows, holders: Mapping[tuple[int, int], int]) -> npt.NDArray[np.int64]:
        """Return the thread that holds the lock in each row, 0 where none is known."""
        locks = self.locks
        in_kernel = locks["program"][rows] == PROGRAMS.index("kernel_locks")
        tgids = np.where(in_kernel, 0, locks["tgid"][rows]).tolist()
        tids = map(holders.get, zip(tgids, locks["address"][rows].tolist(), strict=True))
        return np.array([tid or 0 for tid in tids], np.int64)


def _sites(counter: Counter[str] | None) -> list[dict[str, Any]]:
    """Return the sites at which threads were seen to wait for a lock, the most frequent first."""
    return [{"site": site, "seen": count} for site, count in (counter or Counter()).most_common()]


def lock_key(program: str, tgids: Columns, addresses: Columns, *rest: Columns) -> Hashes:
    """Return the keys of locks in the table: hashes of program, process, address, and the columns `rest`."""
    return mix(np.full(len(addresses), PROGRAMS.index(program)), tgids, addresses, *rest)


def _top_rows(table: Table, most: int) -> Rows:
    """Return at most `most` rows to show: those with ongoing contention first, then by blocked time.

    Up to SHOWN_IDLE rows are chosen among waits that are no contention, all others among contention if there
    is enough: threads that wait for work, as in a pool, wait much longer. As far as SHOWN_BY_PROCESS allows,
    each process has rows, so that a query for one process or unit finds it on a busy host as well.
    """
    live = np.flatnonzero(table.used)
    weight = table["blocked_ns"][live] + table["waiting_ns"][live]
    is_contention = np.isin(table["kind"][live].astype(str), NOT_CONTENTION, invert=True)
    is_contention &= table["program"][live] != OFFCPU
    # Threads that wait now must not be left out because others waited for longer before.
    is_stuck = is_contention & (table["waiting_ns"][live] > 0)
    chosen = np.arange(len(live))
    if len(live) > most:
        numbers: dict[Name, int] = {}
        owners = np.array([numbers.setdefault(name, len(numbers)) for name in table["process"][live]])

        def best(of: Rows, count: int) -> Rows:
            tiers, has_floor = is_stuck[of].astype(np.int64), np.ones(len(of), np.bool_)
            found: Rows = of[rank(tiers, weight[of], owners[of], has_floor, SHOWN_BY_PROCESS)[:count]]
            return found

        idle = np.flatnonzero(~is_contention)
        contended = best(np.flatnonzero(is_contention), most - min(len(idle), SHOWN_IDLE))
        chosen = np.concatenate([contended, best(idle, most - len(contended))])
    rows: Rows = live[chosen][np.lexsort((-weight[chosen], ~is_stuck[chosen]))]
    return rows


def _label_columns(table: Table, rows: Rows) -> dict[str, list[str]]:
    processes: Sequence[Name] = list(table["process"][rows])
    return {
        "program": [PROGRAMS[number] for number in table["program"][rows]],
        "unit": [unit for unit, _ in processes],
        "comm": [comm for _, comm in processes],
        "kind": [str(kind) for kind in table["kind"][rows]],
    }


def _number_columns(
    name: str, table: Table, rows: Rows, plain: tuple[str, ...], arrays: dict[str, npt.NDArray[Any]]
) -> list[str]:
    """Write the numbers in `rows` to `arrays`, and return the names of the columns.

    Times are written in microseconds. `plain` are the names of further columns, which are not times.
    """
    columns: dict[str, npt.NDArray[Any]] = {column: table[column][rows].astype(np.int64) for column in plain}
    columns["blocked_count"] = table["count"][rows]
    columns["blocked_us"] = table["blocked_ns"][rows] / 1000.0
    columns["max_blocked_us"] = np.maximum(table["max_ns"][rows], table["waiting_ns"][rows]) / 1000.0
    columns["waiting_us"] = table["waiting_ns"][rows] / 1000.0
    arrays.update((f"{name}.{column}", values) for column, values in columns.items())
    return list(columns)
