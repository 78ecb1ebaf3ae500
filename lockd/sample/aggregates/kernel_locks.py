"""Waits for kernel locks: windows folded into series per process and type, and per lock and site."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lockd.columns import structs, wide_sums
from lockd.columns.index import Groups, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.wide_sums import WIDE
from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries
from lockd.names.client import Resolver
from lockd.names.labels.processes import Processes
from lockd.names.protocol import UNKNOWN
from lockd.sample.aggregates.contention import ContentionTables, lock_key
from lockd.sample.aggregates.hold_table import note_mmap_locks
from lockd.sample.aggregates.lock_holders import LockHolders
from lockd.sample.aggregates.lock_series import ASKED_AT_ONCE, LockSeries
from lockd.sample.aggregates.ongoing import LASTING_NS, Moment, OngoingWaits
from lockd.sample.aggregates.window import Stacks, Window, add_slots
from lockd.sample.locks.releases import Release, has_causes, processes_of
from lockd.sample.series.block import Block, with_windows
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import merits
from lockd.sample.series.series import Series

NAMELESS_SECONDS = 5.0
"""Seconds after which a release counts as `other` if its lock has no name yet, for instance because no wait
for the lock was counted."""
ENDLESS_NS = 60_000_000_000
"""Nanoseconds of a wait after which find_ended() checks whether its thread still exists."""
CHECKED_AT_ONCE = 1000
"""Most threads that are checked at a time: those that have waited longest."""


class KernelLockAggregates:
    """The series of waits for kernel locks."""

    def __init__(
        self, manifest: Manifest, limits: Limits, budget: LineBudget, contention: ContentionTables,
        resolver: Resolver,
    ) -> None:  # fmt: skip
        types = manifest.enums["lock_type"]
        self._types = list(types)
        self._type_names = np.array(self._types, object)
        self._contention = contention
        self._resolver = resolver
        self.by_type = Series(
            "kernel_lock",
            {"slots": (np.int64, (manifest.constants["SLOTS"],)), "wait_ns": WIDE,
             "waiting": np.int64, "waiting_ns": np.int64},
            counters={"slots": "lockd_kernel_lock_wait_seconds_count",
                      "wait_ns": "lockd_kernel_lock_wait_seconds_sum"},
            names=(0, 1), lines=limits.histogram_lines + 1 + limits.max_gauges,
            budget=budget, others=len(self._types),
            maxima=("wait",), windows=dict(limits.windows),
        )  # fmt: skip
        sites = Series(
            "kernel_lock_site", {"count": np.int64, "blocked_ns": WIDE},
            counters={"count": "lockd_kernel_lock_site_waits_total",
                      "blocked_ns": "lockd_kernel_lock_site_wait_seconds_total"},
            names=(0, 1, 3, 4), lines=2, budget=budget, others=len(self._types),
            most=limits.top_locks,
        )  # fmt: skip
        self.sites = LockSeries("kernel_locks", contention, sites, self._types, has_site=True)
        self.holders = (
            LockHolders(
                "kernel_lock", self._types, len(self._types), limits, budget, contention, has_causes(manifest)
            )
            if manifest.has_map("kernel_release_record")
            else None
        )
        self.series = [self.by_type, sites]
        self._has_waiting = False
        """Whether there were waits that had not ended when they were last noted."""
        self._endless: Entries | None = None
        """The waits that had lasted for ENDLESS_NS when they were last noted, the longest first."""
        if self.holders:
            self.series += self.holders.series

    def fold(self, window: Window, stacks: Stacks, now: float) -> None:
        """Add one window; `now` is the monotonic clock in seconds."""
        types, values = window.keys["type"], window.values
        rows = self.by_type.rows(
            mix(window.codes, types),
            lambda i: (*window.processes[i], self._types[types[i]]),
            merits(values["wait_ns"], values["waits"]),
            now,
        )
        groups = Groups(rows)
        wide_sums.add(self.by_type["wait_ns"], groups, values["wait_ns"])
        self.by_type.note_max("wait", groups.rows, groups.max(values["max_wait_ns"]))
        add_slots(self.by_type, rows, window.keys["slot"], values["waits"])
        if not window.has_detail:
            numbers = values["waits"], values["wait_ns"], values["max_wait_ns"]
            self.sites.add_nameless(types, *numbers, now)
        elif len(window):
            self._fold_detail(window, stacks, now)

    def _fold_detail(self, window: Window, stacks: Stacks, now: float) -> None:
        keys, values, contention = window.keys, window.values, self._contention
        numbers = values["wait_ns"], values["waits"], values["max_wait_ns"]
        positions = stacks.find(keys)
        # A lock that is waited for at two sites has two rows.
        lock_rows = self.sites.lock_rows(
            lock_key("kernel_locks", window.codes, keys["lock"], keys["type"], stacks.hashes(positions)),
            np.zeros(len(keys), np.int64),
            keys["lock"],
            keys["type"],
            window.processes,
            now,
        )
        locks = contention.locks
        note_mmap_locks(locks, lock_rows[values["is_mmap_lock"] != 0])
        frames = locks["frames"]
        for i in np.flatnonzero((positions >= 0) & ~locks["is_asked"][lock_rows]):
            frames[lock_rows[i]] = frames[lock_rows[i]] or stacks.frames(int(positions[i]))
        threads = contention.thread_rows("kernel_locks", window, keys["type"], self._type_names, now)
        contention.add_waits(contention.threads, threads, *numbers)
        contention.add_waits(locks, lock_rows, *numbers)
        contention.note_lock_threads(lock_rows, threads, keys["tid"], now)
        self.sites.find_names(self._resolver, now)  # before add(), so that known names are used
        self.sites.add(lock_rows, values["waits"], values["wait_ns"], values["max_wait_ns"], now)

    def add_releases(self, releases: Sequence[Release], now: float) -> list[Release]:
        """Add sampled releases of locks; return those of locks that have no row with a name yet.

        A release whose lock has no name after NAMELESS_SECONDS is counted as `other`.
        """
        assert self.holders
        types = np.array([release.kind for release in releases], np.int64)
        addresses = np.array([release.address for release in releases], np.uint64)
        rows = self.sites.rows_of_most_waited(addresses, types, processes_of(releases))
        has_name = (rows >= 0) & (self._contention.locks["series_code"][rows] != 0)
        is_due = has_name | np.array([now >= one.taken + NAMELESS_SECONDS for one in releases], np.bool_)
        self.holders.add(rows[is_due], list(itertools.compress(releases, is_due)), now)
        return list(itertools.compress(releases, ~is_due))

    def note_ongoing(self, moment: Moment) -> None:
        """Replace what is known of the waits that have not ended.

        Spins are left out: they take microseconds, and are counted when they have ended. An older entry of a
        spin was left behind: the spin was in an interrupt that came while another program ran, so that the
        kernel skipped the program for the end of the spin. Such an entry stays for LONGEST_SPIN_NS.
        """
        if not moment.kernel_waits:
            return
        keys, waits = moment.kernel_waits
        asleep = np.flatnonzero(keys["cpu"] == 0)
        keys, waits = structs.take(keys, asleep), structs.take(waits, asleep)
        if not len(keys) and not self._has_waiting:
            return
        self._has_waiting = len(keys) > 0
        waited_ns = moment.clock - waits["since"].astype(np.int64)
        endless = np.flatnonzero(waited_ns >= ENDLESS_NS)
        endless = endless[np.argsort(-waited_ns[endless], kind="stable")][:CHECKED_AT_ONCE]
        self._endless = structs.take(keys, endless), structs.take(waits, endless)
        waiting = moment.name_waits(keys["tid"], waits["tgid"], waits["type"], keys["lock"], waited_ns)
        self._note_waiting(waiting, moment.now)
        self.sites.forget_unwaited()

    def find_ended(self, processes: Processes) -> Columns | None:
        """Return the keys of long waits whose threads are gone, None if there are none.

        The kernel skipped the program for the end of such a wait, because another program was running on that
        CPU, and counted that (reason `recursion` of lockd_dropped_events_total). Nothing else would ever
        remove the wait from the programs' table.
        """
        if self._endless is None:
            return None
        keys, waits = self._endless
        threads = zip(waits["tgid"].tolist(), keys["tid"].tolist(), waits["since"].tolist(), strict=True)
        gone = [i for i, thread in enumerate(threads) if not processes.has_thread(*thread)]
        return structs.take(keys, np.array(gone, np.int64)) if gone else None

    def _note_waiting(self, waiting: OngoingWaits, now: float) -> None:
        self.by_type.clear_waiting()
        if waiting.has_detail or not len(waiting):  # without detail, the table keeps the last waits
            self._contention.clear_waiting("kernel_locks")
        if not len(waiting):
            return
        types = waiting.kinds
        rows = self.by_type.waiting_rows(
            mix(waiting.codes, types),
            lambda i: (*waiting.processes[i], self._types[types[i]]),
            waiting.waited_ns,
            now,
        )
        waiting.write_gauges(self.by_type, rows)
        if waiting.has_detail:
            threads = self._contention.note_waiting_threads(
                "kernel_locks", waiting, types, self._type_names, now
            )
            self._note_lasting(waiting, threads, now)

    def _note_lasting(self, waiting: OngoingWaits, threads: Rows, now: float) -> None:
        """Note for which locks threads have waited for LASTING_NS or longer.

        `threads` are the rows of the threads in the table of threads. The site of a wait is known only
        when the wait has ended. Until then the lock has a row without a site.
        """
        lasting = np.flatnonzero(waiting.waited_ns >= LASTING_NS)
        if not len(lasting):
            return
        addresses, types = waiting.addresses[lasting], waiting.kinds[lasting]
        processes, no_stack = waiting.processes.take(lasting), np.zeros(len(lasting), np.uint64)
        rows = self.sites.lock_rows(
            lock_key("kernel_locks", waiting.codes[lasting], addresses, types, no_stack),
            np.zeros(len(lasting), np.int64),
            addresses,
            types,
            processes,
            now,
        )
        locks, groups = self._contention.locks, Groups(rows)
        locks["waiting"][groups.rows] = groups.sum(np.ones(len(rows)))
        locks["waiting_ns"][groups.rows] = groups.max(waiting.waited_ns[lasting])
        self._contention.note_lock_threads(rows, threads[lasting], waiting.tids[lasting], now)
        # Without a stack the namer can name static locks only. Others may have names from earlier waits.
        new = np.flatnonzero(~locks["is_asked"][rows])[:ASKED_AT_ONCE]
        known = self.sites.rows_of_most_waited(addresses[new], types[new], processes.take(new))
        for row, other in zip(rows[new].tolist(), known.tolist(), strict=True):
            if other >= 0 and locks["series_code"][other]:
                self.sites.set_name(row, locks["lock"][other], UNKNOWN, ())
                locks["is_asked"][row] = True
        self.sites.find_names(self._resolver, now)

    def export(self, block: Block, now: float) -> None:
        """Write every series to a block."""
        series = self.by_type
        rows, labels = series.live()
        seconds = series.seconds("wait_ns", rows)
        block.add_histogram("lockd_kernel_lock_wait_seconds", labels, series["slots"][rows], seconds)
        block.add("lockd_kernel_lock_waiting", labels, series["waiting"][rows])
        block.add("lockd_kernel_lock_max_wait_us", *with_windows(labels, series.current_max("wait", rows)))
        series = self.sites.series
        rows, labels = series.live()
        block.add("lockd_kernel_lock_site_wait_seconds_total", labels, series.seconds("blocked_ns", rows))
        block.add("lockd_kernel_lock_site_waits_total", labels, series["count"][rows])
        if self.holders:
            self.holders.export(block)
