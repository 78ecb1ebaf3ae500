"""Futex waits: windows folded into series per process and kind, and per lock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockd.columns import structs, wide_sums
from lockd.columns.index import Groups, Hashes, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.wide_sums import WIDE
from lockd.kernel.manifest import Manifest
from lockd.names.protocol import ANON
from lockd.sample.aggregates.contention import NOT_CONTENTION, ContentionTables, lock_key
from lockd.sample.aggregates.futex_calls import FutexCalls
from lockd.sample.aggregates.identities import ProcessNames
from lockd.sample.aggregates.lock_holders import LockHolders
from lockd.sample.aggregates.lock_series import LockSeries
from lockd.sample.aggregates.ongoing import Moment, OngoingWaits
from lockd.sample.aggregates.window import Window, add_slots
from lockd.sample.locks.releases import Release, has_causes, processes_of
from lockd.sample.locks.user_locks import UserLocks
from lockd.sample.locks.waits import JOIN
from lockd.sample.series.block import Block, with_windows
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import merits
from lockd.sample.series.series import Series


class FutexAggregates:
    """The series of futex waits, and in mode `calls` those of all futex calls."""

    def __init__(
        self, manifest: Manifest, limits: Limits, budget: LineBudget, contention: ContentionTables,
        user_locks: UserLocks,
    ) -> None:  # fmt: skip
        kinds = manifest.enums["futex_kind"]
        self._kind_names = list(kinds)
        self._kinds = np.array(self._kind_names, object)
        self._wake = kinds.index("wake")
        self._no_slot = manifest.constants["SLOT_NONE"]
        self._attached_ns = manifest.attached_ns
        self._contention = contention
        self._user_locks = user_locks
        windows = dict(limits.windows)
        self.calls = FutexCalls(manifest, limits, budget) if manifest.counts_futex_calls else None
        # All waits, blocked or not. Only mode `calls` counts them; else they have no column and no lines.
        waits = {"waits": "lockd_futex_waits_total"} if self.calls else {}
        self.by_kind = Series(
            "futex",
            {**dict.fromkeys(waits, np.int64), "slots": (np.int64, (manifest.constants["SLOTS"],)),
             "blocked_ns": WIDE, "waiting": np.int64, "waiting_ns": np.int64},
            counters={**waits, "slots": "lockd_futex_blocked_seconds_count",
                      "blocked_ns": "lockd_futex_blocked_seconds_sum"},
            names=(0, 1), lines=limits.histogram_lines + len(waits) + 1 + limits.max_gauges,
            budget=budget, others=4, uncontended=NOT_CONTENTION, maxima=("blocked",), windows=windows,
        )  # fmt: skip
        per_lock = 4 + limits.max_gauges
        locks = Series(
            "futex_lock",
            {"count": np.int64, "blocked_ns": WIDE, "waiting": np.int64, "waiting_ns": np.int64},
            counters={"count": "lockd_futex_lock_blocked_total",
                      "blocked_ns": "lockd_futex_lock_blocked_seconds_total"},
            names=(0, 1, 3), lines=per_lock,
            budget=budget, others=4, most=limits.top_locks, uncontended=NOT_CONTENTION,
            maxima=("blocked",), windows=windows,
        )  # fmt: skip
        self.locks = LockSeries("futex", contention, locks, self._kind_names, has_site=False)
        self.holders = (
            LockHolders("futex_lock", self._kind_names, 2, limits, budget, contention, has_causes(manifest))
            if manifest.has_map("release_record")
            else None
        )
        self.series = [self.by_kind, *(self.calls.series if self.calls else ()), locks]
        if self.holders:
            self.series += self.holders.series

    def fold(self, window: Window, now: float) -> None:
        """Add one window; `now` is the monotonic clock in seconds."""
        keys, values = window.keys, window.values
        keys["kind"] = self._user_locks.correct_kinds(values["who"]["tgid"], keys["uaddr"], keys["kind"])
        if self.calls:
            self.calls.fold(window, now)
        waits = window.where(keys["kind"] < self._wake)
        if len(waits):
            self._fold_waits(waits, now)

    def _fold_waits(self, waits: Window, now: float) -> None:
        kind, calls = waits.keys["kind"], waits.values["calls"]
        blocked_ns, max_ns = waits.values["blocked_ns"], waits.values["max_blocked_ns"]
        rows = self.by_kind.rows(
            mix(waits.codes, kind),
            lambda i: (*waits.processes[i], self._kind_names[kind[i]]),
            merits(blocked_ns, calls),
            now,
        )
        groups = Groups(rows)
        if self.calls:
            self.by_kind["waits"][groups.rows] += groups.sum(calls)
        wide_sums.add(self.by_kind["blocked_ns"], groups, blocked_ns)
        self.by_kind.note_max("blocked", groups.rows, groups.max(max_ns))
        blocked = waits.keys["slot"] != self._no_slot
        add_slots(self.by_kind, rows[blocked], waits.keys["slot"][blocked], calls[blocked])
        if not blocked.any():
            return
        if not waits.has_detail:
            self.locks.add_nameless(kind[blocked], calls[blocked], blocked_ns[blocked], max_ns[blocked], now)
        else:
            self._fold_detail(waits.where(blocked), now)

    def _fold_detail(self, blocked: Window, now: float) -> None:
        keys, values, contention = blocked.keys, blocked.values, self._contention
        numbers = values["blocked_ns"], values["calls"], values["max_blocked_ns"]
        threads = contention.thread_rows("futex", blocked, keys["kind"], self._kinds, now)
        lock_rows = self._lock_rows(
            blocked.codes, blocked.processes, values["who"]["tgid"], keys["uaddr"], keys["kind"], now
        )
        contention.add_waits(contention.threads, threads, *numbers)
        contention.add_waits(contention.locks, lock_rows, *numbers)
        contention.note_lock_threads(lock_rows, threads, keys["tid"], now)
        self.locks.add(lock_rows, values["calls"], values["blocked_ns"], values["max_blocked_ns"], now)

    def add_releases(self, releases: Sequence[Release], now: float) -> list[Release]:
        """Add sampled releases of locks; return those of locks whose names are being looked up.

        A release of a lock that turns out to be of another kind than `lock` and `pi` is left out.
        """
        assert self.holders
        tgids = np.array([release.tgid for release in releases], np.int64)
        addresses = np.array([release.address for release in releases], np.uint64)
        kinds = np.array([release.kind for release in releases], np.int64)
        kinds = self._user_locks.correct_kinds(tgids, addresses, kinds)
        later = self._user_locks.is_undecided(tgids, addresses, kinds, now)
        chosen = np.flatnonzero(~later & ~np.isin(self._kinds[kinds], NOT_CONTENTION))
        if len(chosen):
            taken = [releases[i] for i in chosen.tolist()]
            codes = np.array([hash_labels(release.process) for release in taken], np.uint64)
            locks = tgids[chosen], addresses[chosen], kinds[chosen]
            self.holders.add(self._lock_rows(codes, processes_of(taken), *locks, now), taken, now)
        return [releases[i] for i in np.flatnonzero(later).tolist()]

    def _lock_rows(
        self, codes: Hashes, processes: ProcessNames, tgids: Columns, addresses: Columns, kinds: Columns,
        now: float,
    ) -> Rows:  # fmt: skip
        """Return the row in the table of locks of each wait. The arrays have one item per wait."""
        key = lock_key("futex", tgids, addresses, kinds, codes)
        rows = self.locks.lock_rows(key, tgids, addresses, kinds, processes, now)
        self._set_names(rows, now)
        return rows

    def _set_names(self, rows: Rows, now: float) -> None:
        """Give the locks in these rows their names if they have none or others, and the names are known.

        A lock is called `anon` if no thread that waited for it was captured. If its name becomes known later,
        the lock gets that name. In memory that is used again, a lock has the name of the one before it until
        its own is known.
        """
        locks, user_locks = self._contention.locks, self._user_locks
        waited_for = locks["tgid"][rows], locks["address"][rows], locks["kind_number"][rows]
        is_nameless = (locks["series_code"][rows] == 0) | (locks["lock"][rows] == ANON)
        rows = rows[is_nameless | user_locks.have_other_names(*waited_for, locks["lock"][rows])]
        if not len(rows):
            return
        waited_for = locks["tgid"][rows], locks["address"][rows], locks["kind_number"][rows]
        answered = user_locks.answered_rows(*waited_for, locks["since"][rows], now)
        is_answered = np.flatnonzero(answered >= 0)
        named, first = np.unique(rows[is_answered], return_index=True)
        for row, user_row in zip(named.tolist(), answered[is_answered[first]].tolist(), strict=True):
            name = user_locks.name(user_row)
            if name.lock != locks["lock"][row]:
                self.locks.set_name(row, name.lock, name.site, name.stack)
                locks["sites"][row] = name.sites

    def note_ongoing(self, moment: Moment) -> None:
        """Replace what is known of the futex calls that are blocked now by what `moment` shows.

        Ask the namer again about locks in reused memory for which threads have waited long: the name that is
        known may be that of an earlier lock.
        """
        tids, threads, waited_ns = self._blocked(moment)
        call, tgids = threads["call"], threads["tgid"]
        is_lower_bound = call["since"] == self._attached_ns
        waiting = moment.name_waits(tids, tgids, call["kind"], call["uaddr"], waited_ns, is_lower_bound)
        self.note_waiting(waiting, moment.now)
        self._ask_lasting(tids, threads, waited_ns, moment.now)

    def look_at_locks(self, moment: Moment) -> None:
        """Find names for locks that may be part of deadlocks.

        Ask the namer again about locks in reused memory for which threads have waited long: the name that is
        known may be that of an earlier lock.

        This is the part of note_ongoing() that cannot wait until somebody wants to see numbers.
        """
        tids, threads, waited_ns = self._blocked(moment)
        call, tgids = threads["call"], threads["tgid"]
        kinds = self._user_locks.correct_kinds(tgids, call["uaddr"], call["kind"])
        families = self._user_locks.families(tgids, call["uaddr"], kinds)
        has_holder = np.flatnonzero(~np.isin(self._kinds[kinds], NOT_CONTENTION) | (families == JOIN))
        if len(has_holder) and moment.has_detail:
            described = (one[has_holder] for one in (tids, tgids, kinds, call["uaddr"], waited_ns))
            waits = moment.name_waits(*described)
            self._lock_rows(
                waits.codes, waits.processes, waits.tgids, waits.addresses, waits.kinds, moment.now
            )
        self._ask_lasting(tids, threads, waited_ns, moment.now)

    def _blocked(self, moment: Moment) -> tuple[Columns, Columns, Columns]:
        """Return the ids of the threads that are blocked in futex calls, the `struct thread` of each, and how
        long each has been blocked so far, in nanoseconds."""
        tids, threads = moment.threads
        is_blocked = moment.states.is_in_futex(threads)
        tids, threads = tids[is_blocked], structs.take(threads, np.flatnonzero(is_blocked))
        waited_ns = moment.clock - threads["off_since"].astype(np.int64)
        if "call_blocked" in (threads.dtype.names or ()):  # mode calls: how long the call was blocked before
            waited_ns += threads["call_blocked"].astype(np.int64)
        return tids, threads, waited_ns

    def _ask_lasting(self, tids: Columns, threads: Columns, waited_ns: Columns, now: float) -> None:
        call = threads["call"]
        described = threads["tgid"], call["uaddr"], call["guess"], waited_ns, threads["thread_pointer"]
        self._user_locks.ask_lasting(tids, *described, now)

    def note_waiting(self, waiting: OngoingWaits, now: float) -> None:
        """Replace what is known of the blocked calls; `waiting` has those that are blocked now."""
        for series in (self.by_kind, self.locks.series):
            series.clear_waiting()
        if waiting.has_detail or not len(waiting):  # without detail, the table keeps the last waits
            self._contention.clear_waiting("futex")
        if not len(waiting):
            return
        kind = self._user_locks.correct_kinds(waiting.tgids, waiting.addresses, waiting.kinds)
        rows = self.by_kind.waiting_rows(
            mix(waiting.codes, kind),
            lambda i: (*waiting.processes[i], self._kind_names[kind[i]]),
            waiting.waited_ns,
            now,
        )
        waiting.write_gauges(self.by_kind, rows)
        if not waiting.has_detail:
            waiting.write_gauges(self.locks.series, self.locks.nameless_rows(kind, now))
            return
        lock_rows = self._lock_rows(
            waiting.codes, waiting.processes, waiting.tgids, waiting.addresses, kind, now
        )
        waiting.write_gauges(self.locks.series, self.locks.waiting_rows(lock_rows, waiting.waited_ns, now))
        groups = Groups(lock_rows)
        self._contention.locks["waiting"][groups.rows] = groups.sum(np.ones(len(lock_rows)))
        self._contention.locks["waiting_ns"][groups.rows] = groups.max(waiting.waited_ns)
        threads = self._contention.note_waiting_threads("futex", waiting, kind, self._kinds, now)
        self._contention.note_lock_threads(lock_rows, threads, waiting.tids, now)

    def export(self, block: Block, now: float) -> None:
        """Write every series to a block."""
        series = self.by_kind
        rows, labels = series.live()
        seconds = series.seconds("blocked_ns", rows)
        block.add_histogram("lockd_futex_blocked_seconds", labels, series["slots"][rows], seconds)
        if self.calls:
            block.add("lockd_futex_waits_total", labels, series["waits"][rows])
        block.add("lockd_futex_waiting", labels, series["waiting"][rows])
        block.add("lockd_futex_max_blocked_us", *with_windows(labels, series.current_max("blocked", rows)))
        if self.calls:
            self.calls.export(block)

        series = self.locks.series
        rows, labels = series.live()
        block.add("lockd_futex_lock_blocked_seconds_total", labels, series.seconds("blocked_ns", rows))
        block.add("lockd_futex_lock_blocked_total", labels, series["count"][rows])
        block.add("lockd_futex_lock_waiting", labels, series["waiting"][rows])
        block.add("lockd_futex_lock_threads", labels, self.locks.count_threads(now)[rows])
        maxima = series.current_max("blocked", rows)
        block.add("lockd_futex_lock_max_blocked_us", *with_windows(labels, maxima))
        if self.holders:
            self.holders.export(block)
