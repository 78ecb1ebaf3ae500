"""Futex calls: windows folded into series per process and kind, per process, and per lock."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Hashes, Rows, mix
from lockd.kernel.manifest import Manifest
from lockd.names.protocol import ANON
from lockd.sample.aggregates.contention import NOT_CONTENTION, Detail, lock_key
from lockd.sample.aggregates.ongoing import Waiting
from lockd.sample.aggregates.window import Window
from lockd.sample.locks.lock_series import LockSeries
from lockd.sample.locks.user_locks import UserLocks
from lockd.sample.series.block import Block, with_windows
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.series import Series

ERRORS = {**errno.errorcode, errno.EDEADLK: "EDEADLK", errno.EOPNOTSUPP: "EOPNOTSUPP"}
"""Names of errors; of several the one in futex(2), where Python has EDEADLOCK and ENOTSUP."""


class FutexAggregates:
    """Everything exported about futex calls."""

    def __init__(
        self, manifest: Manifest, limits: Limits, budget: LineBudget, detail: Detail, user_locks: UserLocks
    ) -> None:
        kinds = manifest.enums["futex_kind"]
        self._kind_names = list(kinds)
        self._kinds = np.array(self._kind_names, object)
        self._wake = kinds.index("wake")
        self._slots, self._no_slot = manifest.constants["SLOTS"], manifest.constants["SLOT_NONE"]
        self._detail = detail
        self._user_locks = user_locks
        windows = dict(limits.windows)
        self.by_kind = Series(
            "futex",
            {"waits": np.int64, "slots": (np.int64, (self._slots,)), "blocked_ns": np.int64,
             "waiting": np.int64, "waiting_ns": np.int64},
            counters={"waits": "lockd_futex_waits_total", "slots": "lockd_futex_blocked_seconds_count",
                      "blocked_ns": "lockd_futex_blocked_seconds_sum"},
            names=(0, 1), lines=limits.histogram_lines + 2 + limits.max_gauges,
            budget=budget, others=4, uncontended=NOT_CONTENTION, maxima=("blocked",), windows=windows,
        )  # fmt: skip
        self.by_process = Series(
            "futex_process", {"wakes": np.int64, "sys_ns": np.int64},
            counters={"wakes": "lockd_futex_wakes_total", "sys_ns": "lockd_futex_sys_seconds_total"},
            names=(0, 1), lines=2 + limits.max_gauges,
            budget=budget, others=1, maxima=("sys",), windows=windows,
        )  # fmt: skip
        self.errors = Series(
            "futex_error", {"errors": np.int64}, counters={"errors": "lockd_futex_errors_total"},
            names=(0, 1), lines=1, budget=budget, others=16,
        )  # fmt: skip
        per_lock = 4 + limits.max_gauges
        locks = Series(
            "futex_lock",
            {"count": np.int64, "blocked_ns": np.int64, "waiting": np.int64, "waiting_ns": np.int64},
            counters={"count": "lockd_futex_lock_blocked_total",
                      "blocked_ns": "lockd_futex_lock_blocked_seconds_total"},
            names=(0, 1, 3), lines=per_lock,
            budget=budget, others=4, most=limits.top_locks, uncontended=NOT_CONTENTION,
            maxima=("blocked",), windows=windows,
        )  # fmt: skip
        self.locks = LockSeries("futex", detail, locks, self._kind_names, has_site=False)
        self.series = [self.by_kind, self.by_process, self.errors, locks]

    def fold(self, window: Window, now: float) -> None:
        """Add one window; `now` is the monotonic clock in seconds."""
        keys, values = window.keys, window.values
        keys["kind"] = self._user_locks.correct(values["who"]["tgid"], keys["uaddr"], keys["kind"])
        kind, calls, blocked = keys["kind"].astype(np.int64), values["calls"], values["blocked_ns"]

        rows = self.by_process.rows(window.codes, window.processes.__getitem__, blocked, now)
        groups = Groups(rows)
        self.by_process["sys_ns"][groups.rows] += groups.sum(values["sys_ns"])
        self.by_process["wakes"][groups.rows] += groups.sum(np.where(kind == self._wake, calls, 0))
        self.by_process.note_max("sys", groups.rows, groups.max(values["max_sys_ns"]))

        failed = window.where(keys["error"] > 0)
        if len(failed):
            codes = failed.keys["error"]
            rows = self.errors.rows(
                mix(failed.codes, codes),
                lambda i: (*failed.processes[i], ERRORS.get(int(codes[i]), str(codes[i]))),
                failed.values["blocked_ns"],
                now,
            )
            groups = Groups(rows)
            self.errors["errors"][groups.rows] += groups.sum(failed.values["calls"])

        waits = window.where(kind < self._wake)
        if len(waits):
            self._fold_waits(waits, now)

    def _fold_waits(self, waits: Window, now: float) -> None:
        kind, calls = waits.keys["kind"], waits.values["calls"]
        blocked_ns, max_ns = waits.values["blocked_ns"], waits.values["max_blocked_ns"]
        rows = self.by_kind.rows(
            mix(waits.codes, kind),
            lambda i: (*waits.processes[i], self._kind_names[kind[i]]),
            blocked_ns,
            now,
        )
        groups = Groups(rows)
        self.by_kind["waits"][groups.rows] += groups.sum(calls)
        self.by_kind["blocked_ns"][groups.rows] += groups.sum(blocked_ns)
        self.by_kind.note_max("blocked", groups.rows, groups.max(max_ns))
        blocked = waits.keys["slot"] != self._no_slot
        cells = Groups(rows[blocked] * self._slots + waits.keys["slot"][blocked])
        self.by_kind["slots"].reshape(-1)[cells.rows] += cells.sum(calls[blocked])
        if not blocked.any():
            return
        if not waits.has_detail:
            self.locks.add_nameless(kind[blocked], calls[blocked], blocked_ns[blocked], max_ns[blocked], now)
        else:
            self._fold_detail(waits.where(blocked), now)

    def _fold_detail(self, blocked: Window, now: float) -> None:
        keys, values, who = blocked.keys, blocked.values, blocked.values["who"]
        detail, kind, tids = self._detail, keys["kind"], keys["tid"]
        numbers = values["blocked_ns"], values["calls"], values["max_blocked_ns"]
        threads = detail.thread_rows(
            "futex", who, tids, kind, self._kinds, blocked.codes, blocked.processes, now
        )
        lock_rows = self._lock_rows(who["tgid"], keys["uaddr"], kind, blocked.codes, blocked.processes, now)
        detail.add(detail.threads, threads, *numbers)
        detail.add(detail.locks, lock_rows, *numbers)
        detail.note_threads_of(lock_rows, threads, tids, now)
        self.locks.add(lock_rows, values["calls"], values["blocked_ns"], values["max_blocked_ns"], now)

    def _lock_rows(
        self, tgids: npt.NDArray[Any], addresses: npt.NDArray[Any], kinds: npt.NDArray[Any],
        codes: Hashes, processes: npt.NDArray[Any], now: float,
    ) -> Rows:  # fmt: skip
        key = lock_key("futex", tgids, addresses, kinds, codes)
        rows = self.locks.lock_rows(key, tgids, addresses, kinds, processes, now)
        self._name(rows, now)
        return rows

    def _name(self, rows: Rows, now: float) -> None:
        """Give those of these locks their names that have none and are known by now.

        One that was `anon`, as no thread that waited had been captured, has its name once that is known.
        """
        locks, user_locks = self._detail.locks, self._user_locks
        rows = rows[(locks["series_code"][rows] == 0) | (locks["lock"][rows] == ANON)]
        if not len(rows):
            return
        which = locks["tgid"][rows], locks["address"][rows], locks["kind_number"][rows]
        known = user_locks.known(*which, locks["since"][rows], now)
        answered = np.flatnonzero(known >= 0)
        named, first = np.unique(rows[answered], return_index=True)
        for row, at in zip(named, known[answered[first]], strict=True):
            lock, site, stack = (user_locks.column(name, int(at)) for name in ("lock", "site", "stack"))
            if lock == locks["lock"][row]:
                continue
            self.locks.name(int(row), lock, site, stack)
            locks["sites"][row] = user_locks.column("sites", int(at))

    def note_waiting(self, waiting: Waiting, now: float) -> None:
        """Replace what is known of the calls that are blocked at this moment."""
        for series in (self.by_kind, self.locks.series):
            series.clear_waiting()
        self._detail.clear_waiting("futex")
        if not len(waiting):
            return
        kind = self._user_locks.correct(waiting.tgids, waiting.addresses, waiting.kinds)
        rows = self.by_kind.waiting_rows(
            mix(waiting.codes, kind),
            lambda i: (*waiting.processes[i], self._kind_names[kind[i]]),
            waiting.waited_ns,
            now,
        )
        waiting.put(self.by_kind, rows)
        if not waiting.has_detail:
            waiting.put(self.locks.series, self.locks.nameless_rows(kind, now))
            return
        lock_rows = self._lock_rows(
            waiting.tgids, waiting.addresses, kind, waiting.codes, waiting.processes, now
        )
        waiting.put(self.locks.series, self.locks.waiting_rows(lock_rows, waiting.waited_ns, now))
        groups = Groups(lock_rows)
        self._detail.locks["waiting"][groups.rows] = groups.sum(np.ones(len(lock_rows)))
        self._detail.locks["waiting_ns"][groups.rows] = groups.max(waiting.waited_ns)
        threads = self._detail.thread_rows(
            "futex", waiting.who, waiting.tids, kind, self._kinds, waiting.codes, waiting.processes, now
        )
        self._detail.threads["waiting_ns"][threads] = waiting.waited_ns
        self._detail.threads["waiting_is_least"][threads] = waiting.is_least
        self._detail.note_threads_of(lock_rows, threads, waiting.tids, now)

    def look_again(
        self, tids: npt.NDArray[Any], threads: npt.NDArray[Any], waited_ns: npt.NDArray[np.int64], now: float
    ) -> None:  # fmt: skip
        """Make sure of what these threads wait for, by their entries and for how long they have."""
        call = threads["call"]
        self._user_locks.look_again(
            tids, threads["tgid"], call["uaddr"], call["guess"], waited_ns, threads["thread_pointer"], now
        )

    def export(self, block: Block, now: float) -> None:
        """Write every series to a block."""
        series = self.by_kind
        rows, labels = series.live()
        block.add_histogram(
            "lockd_futex_blocked_seconds", labels, series["slots"][rows], series["blocked_ns"][rows]
        )
        block.add("lockd_futex_waits_total", labels, series["waits"][rows])
        block.add("lockd_futex_waiting", labels, series["waiting"][rows])
        block.add("lockd_futex_max_blocked_us", *with_windows(labels, series.current_max("blocked", rows)))

        series = self.by_process
        rows, labels = series.live()
        block.add("lockd_futex_wakes_total", labels, series["wakes"][rows])
        block.add("lockd_futex_sys_seconds_total", labels, series["sys_ns"][rows] / 1e9)
        block.add("lockd_futex_max_sys_us", *with_windows(labels, series.current_max("sys", rows)))

        rows, labels = self.errors.live()
        block.add("lockd_futex_errors_total", labels, self.errors["errors"][rows])

        series = self.locks.series
        rows, labels = series.live()
        block.add("lockd_futex_lock_blocked_seconds_total", labels, series["blocked_ns"][rows] / 1e9)
        block.add("lockd_futex_lock_blocked_total", labels, series["count"][rows])
        block.add("lockd_futex_lock_waiting", labels, series["waiting"][rows])
        block.add("lockd_futex_lock_threads", labels, self.locks.threads(now)[rows])
        maxima = series.current_max("blocked", rows)
        block.add("lockd_futex_lock_max_blocked_us", *with_windows(labels, maxima))
