"""Holds of kernel locks (mode `all`): windows folded into series per process and type, and per lock."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from lockd.columns import structs, wide_sums
from lockd.columns.index import Groups, mix
from lockd.columns.structs import Columns
from lockd.columns.wide_sums import WIDE
from lockd.kernel.manifest import Manifest
from lockd.names.client import Resolver
from lockd.names.labels.processes import Processes
from lockd.process.clock import NS
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.aggregates.early_acquisitions import EarlyCounts
from lockd.sample.aggregates.hold_table import HoldTable
from lockd.sample.aggregates.identities import Identities
from lockd.sample.aggregates.ongoing import LASTING_NS, Moment, OngoingWaits, name_waits
from lockd.sample.aggregates.window import Window, add_slots
from lockd.sample.series.block import Block
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.series import Series

TYPES_HELD = 4
"""How many lock types have holds: mutexes, rwsems by readers and by writers, semaphores. The programs see no
release of another type."""
OWNED = ("mutex", "rwsem_read", "rwsem_write")
"""Types of locks that are released by the thread that took them. In the few exceptions a hold is short."""
ABANDONED_NS = 60_000_000_000
"""Nanoseconds of a hold after which it counts as abandoned if its thread is gone."""
CHECKED_AT_ONCE = 1000
"""Most threads that are looked for in procfs in one go. Each takes some 15 us."""


class KernelHoldAggregates:
    """The series of acquisitions and holds of kernel locks."""

    def __init__(
        self, manifest: Manifest, limits: Limits, budget: LineBudget, contention: ContentionTables,
        resolver: Resolver, processes: Processes,
    ) -> None:  # fmt: skip
        self._types = manifest.enums["lock_type"]
        self._owned = np.array([self._types.index(name) for name in OWNED])
        self._no_slot = manifest.constants["SLOT_NONE"]
        self._processes = processes
        self.by_type = Series(
            "kernel_hold",
            {"acquisitions": np.int64, "slots": (np.int64, (manifest.constants["SLOTS"],)),
             "hold_ns": WIDE},
            counters={"acquisitions": "lockd_kernel_lock_acquisitions_total",
                      "slots": "lockd_kernel_lock_hold_seconds_count",
                      "hold_ns": "lockd_kernel_lock_hold_seconds_sum"},
            names=(0, 1), lines=limits.histogram_lines + 1, budget=budget, others=TYPES_HELD,
        )  # fmt: skip
        self.series = [self.by_type]
        self._table = contention.holds = HoldTable(resolver, self._types, contention.locks.capacity)
        self.early = EarlyCounts()
        self._old: tuple[Columns, Columns, Columns, Columns] | None = None
        """The locks that had been held, or asked for, for ABANDONED_NS when they were last noted. The columns
        are keys, process ids, since when (monotonic clock in ns), and numbers of holds."""

    def fold(self, window: Window, now: float) -> None:
        """Add one window; `now` is the monotonic clock in seconds."""
        keys, values = window.keys, window.values
        types, slots = keys["type"], keys["slot"]
        acquired = values["acquisitions"].astype(np.int64)
        if not window.has_detail:
            self.early.subtract_nameless(types, acquired)
        else:
            self.early.subtract(keys["lock"], keys["tid"], acquired)
        rows = self.by_type.rows(
            mix(window.codes, types),
            lambda i: (*window.processes[i], self._types[types[i]]),
            values["hold_ns"],
            now,
        )
        groups = Groups(rows)
        self.by_type["acquisitions"][groups.rows] += groups.sum(acquired)
        wide_sums.add(self.by_type["hold_ns"], groups, values["hold_ns"])
        ended = np.flatnonzero(slots != self._no_slot)
        add_slots(self.by_type, rows[ended], slots[ended], values["holds"][ended])
        if window.has_detail:
            self._table.add(window.codes, keys["lock"], types, window.processes, values, acquired, now)

    def note_ongoing(self, moment: Moment) -> None:
        """Replace what is known of the locks that are held."""
        if moment.kernel_waits and moment.kernel_holding:
            clock = time.monotonic_ns()  # after the tables were read: no time in them is later
            self.note_holding(*moment.kernel_holding, moment.kernel_waits[0], moment.identities, clock)

    def note_holding(
        self, keys: Columns, holding: Columns, waits: Columns, identities: Identities, clock: int
    ) -> None:
        """Replace what is known of the locks that are held, at `clock` (monotonic, in ns).

        `keys` and `holding` are the entries of the map `kernel_holding`. `waits` are the keys of the map
        `kernel_waits`, read just before: a lock that a thread asked for LASTING_NS ago or earlier, and does
        not wait for, counts as held.
        """
        now = clock / NS
        depth, since = holding["depth"].astype(np.int64), holding["since"].astype(np.int64)
        nested = since.shape[1]
        taken = np.where(np.arange(nested) < depth[:, None], since, clock).min(axis=1, initial=clock)
        is_asked = holding["asked"] != 0
        asked = np.where(is_asked, since[np.arange(len(since)), depth % nested], clock)
        is_waited_for = np.isin(mix(keys["lock"], keys["tid"]), mix(waits["lock"], waits["tid"]))
        is_unclear = (holding["untimed"] != 0) | is_waited_for
        is_quiet = is_asked & ~is_unclear & (clock - asked >= LASTING_NS)

        def choose(mask: npt.NDArray[np.bool_], began: Columns) -> OngoingWaits:
            tgids, types, lasted = holding["tgid"][mask], holding["type"][mask], (clock - began)[mask]
            tids, locks = keys["tid"][mask], keys["lock"][mask]
            return name_waits(tids, tgids, types, locks, lasted, identities.identify_process)

        began = np.where(is_quiet, np.minimum(taken, asked), taken)
        self._table.note_holding(choose((depth > 0) | is_quiet, began), now)
        is_quiet[is_quiet] = self.early.find_uncounted(
            keys["lock"][is_quiet], keys["tid"][is_quiet], asked[is_quiet], now
        )
        if is_quiet.any():
            self._count_early(choose(is_quiet, asked), clock, now)

        first = np.minimum(taken, asked)
        is_owned = np.isin(holding["type"], self._owned)
        old = np.flatnonzero(is_owned & (clock - first >= ABANDONED_NS))
        old = old[np.argsort(first[old], kind="stable")][:CHECKED_AT_ONCE]
        self._old = structs.take(keys, old), holding["tgid"][old], first[old], (depth + is_asked)[old]

    def _count_early(self, locks: OngoingWaits, clock: int, now: float) -> None:
        """Count acquisitions that the programs will count only when the locks are released."""
        types = locks.kinds
        rows = self.by_type.rows(
            mix(locks.codes, types),
            lambda i: (*locks.processes[i], self._types[types[i]]),
            locks.waited_ns,
            now,
        )
        np.add.at(self.by_type["acquisitions"], rows, 1)
        self._table.add_acquisitions(locks, now)
        self.early.add(locks.addresses, locks.tids, clock - locks.waited_ns, types)

    def find_abandoned(self) -> tuple[Columns, int] | None:
        """Return the keys of held locks whose threads are gone, and the number of these holds.

        None if there are none.
        """
        if self._old is None:
            return None
        keys, tgids, since, holds = self._old
        threads = zip(tgids.tolist(), keys["tid"].tolist(), since.tolist(), strict=True)
        is_gone = np.array([not self._processes.has_thread(*thread) for thread in threads], np.bool_)
        if not is_gone.any():
            return None
        self.early.forget(keys["lock"][is_gone], keys["tid"][is_gone])
        return structs.take(keys, np.flatnonzero(is_gone)), int(holds[is_gone].sum())

    def export(self, block: Block, now: float) -> None:
        """Write every series to a block."""
        series = self.by_type
        rows, labels = series.live()
        block.add("lockd_kernel_lock_acquisitions_total", labels, series["acquisitions"][rows])
        seconds = series.seconds("hold_ns", rows)
        block.add_histogram("lockd_kernel_lock_hold_seconds", labels, series["slots"][rows], seconds)
