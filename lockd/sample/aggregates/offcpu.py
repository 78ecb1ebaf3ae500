"""Time off the CPU: windows folded into series per process, state and reason, and per waker."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import structs, wide_sums
from lockd.columns.index import Groups, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.wide_sums import WIDE
from lockd.kernel.manifest import Manifest
from lockd.names.labels.processes import Processes
from lockd.names.labels.reasons import REASONS, Reasons
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.aggregates.ongoing import Moment, OngoingWaits
from lockd.sample.aggregates.wait_stacks import WaitStacks
from lockd.sample.aggregates.window import Window, add_slots
from lockd.sample.series.block import Block, with_windows
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import merits
from lockd.sample.series.series import OTHER, Series

INTERRUPT = "irq"
"""The waker of a thread that an interrupt on an idle CPU woke."""
UNKNOWN = "unknown"
"""The waker of a thread whose wake-up was not seen, or whose waker had ended before its name was read."""
REASON_NAMES = list(REASONS)
STATES = 256
"""A number above every state. A reason and a state are packed into one number: reason * STATES + state."""


class OffcpuAggregates:
    """The series of time off the CPU and on the run queue."""

    def __init__(
        self, manifest: Manifest, limits: Limits, budget: LineBudget, contention: ContentionTables,
        processes: Processes,
    ) -> None:  # fmt: skip
        self._states = list(manifest.enums["state"])
        self._no_slot = manifest.constants["SLOT_NONE"]
        self._attached_ns = manifest.attached_ns
        self._reasons = Reasons(manifest.enums, manifest.constants)
        self._reason_names = np.array(REASON_NAMES, object)
        self._known_reasons: dict[tuple[int, int, int, int], int] = {}
        self._wakers: dict[int, str] = {}
        """The names of wakers that name_wakers() has looked up, by process id."""
        self._contention = contention
        self._processes = processes
        windows = dict(limits.windows)
        histogram: dict[str, Any] = {
            "slots": (np.int64, (manifest.constants["SLOTS"],)), "sum_ns": WIDE
        }  # fmt: skip
        self.blocked = Series(
            "offcpu", {**histogram, "waiting": np.int64, "waiting_ns": np.int64},
            counters={"slots": "lockd_offcpu_blocked_seconds_count",
                      "sum_ns": "lockd_offcpu_blocked_seconds_sum"},
            names=(0, 1, 3), lines=limits.histogram_lines + limits.max_gauges,
            budget=budget, others=3, maxima=("blocked",), windows=windows,
        )  # fmt: skip
        self.runqueue = Series(
            "offcpu_runqueue", histogram,
            counters={"slots": "lockd_offcpu_runqueue_seconds_count",
                      "sum_ns": "lockd_offcpu_runqueue_seconds_sum"},
            names=(0, 1), lines=limits.histogram_lines, budget=budget, others=1,
        )  # fmt: skip
        self.wakers = Series(
            "offcpu_waker", {"sum_ns": WIDE}, counters={"sum_ns": "lockd_offcpu_waker_seconds_total"},
            names=(0, 1, 2), lines=1, budget=budget, others=1,
        )  # fmt: skip
        self.series = [self.blocked, self.runqueue, self.wakers]
        self.stacks = WaitStacks()
        """The stacks of the waits off the CPU that are counted in `blocked`."""

    def fold(self, window: Window, now: float) -> None:
        """Add one window; `now` is the monotonic clock in seconds."""
        queued = window.where(window.keys["run_slot"] != self._no_slot)
        if len(queued):
            run_ns = queued.values["run_ns"]
            rows = self.runqueue.rows(queued.codes, queued.processes.__getitem__, run_ns, now)
            _add_histogram(self.runqueue, rows, queued.keys["run_slot"], queued.values["count"], run_ns)
        blocked = window.where(window.keys["blocked_slot"] != self._no_slot)
        if len(blocked):
            self._fold_blocked(blocked, now)

    def _fold_blocked(self, blocked: Window, now: float) -> None:
        keys, values = blocked.keys, blocked.values
        blocked_ns, max_ns, count = values["blocked_ns"], values["max_blocked_ns"], values["count"]
        states, reasons = keys["state"], self._reason_numbers(keys)
        rows = self.blocked.rows(
            mix(blocked.codes, states, reasons),
            lambda i: (*blocked.processes[i], self._states[states[i]], REASON_NAMES[reasons[i]]),
            merits(blocked_ns, count),
            now,
        )
        groups = _add_histogram(self.blocked, rows, keys["blocked_slot"], count, blocked_ns)
        self.blocked.note_max("blocked", groups.rows, groups.max(max_ns))
        self._fold_wakers(blocked, now)
        self.stacks.count(blocked.codes, blocked.processes, reasons, blocked_ns, count)
        if blocked.has_detail:
            threads = self._contention.thread_rows("offcpu", blocked, reasons, self._reason_names, now)
            self._contention.add_waits(self._contention.threads, threads, blocked_ns, count, max_ns)

    def _fold_wakers(self, blocked: Window, now: float) -> None:
        # Wakers are counted by comm, not by id: processes rename themselves, and ids are used again.
        keys = blocked.keys
        is_unseen = (keys["waker"] == 0) & (keys["run_slot"] == self._no_slot)
        tgids, which = np.unique(np.where(is_unseen, -1, keys["waker"].astype(np.int64)), return_inverse=True)
        wakers = [self._waker(int(tgid)) if blocked.has_detail else OTHER for tgid in tgids]
        codes = np.array([hash_labels((waker,)) for waker in wakers], np.uint64)
        blocked_ns = blocked.values["blocked_ns"]
        rows = self.wakers.rows(
            mix(blocked.codes, codes[which]),
            lambda i: (*blocked.processes[i], wakers[which[i]]),
            merits(blocked_ns, blocked.values["count"]),
            now,
        )
        wide_sums.add(self.wakers["sum_ns"], Groups(rows), blocked_ns)

    def name_wakers(self, keys: Columns) -> None:
        """Look up the names of the wakers in these keys of entries, for the next fold."""
        for tgid in set(keys["waker"].tolist()) - self._wakers.keys() - {0}:
            self._wakers[tgid] = self._waker(tgid)

    def forget_wakers(self) -> None:
        """Forget the names that name_wakers() has looked up: the processes may get other names."""
        self._wakers.clear()

    def _waker(self, tgid: int) -> str:
        if name := self._wakers.get(tgid):
            return name
        if tgid == 0:
            return INTERRUPT
        return (self._processes.comm(tgid) if tgid > 0 else "") or UNKNOWN

    def _reason_numbers(self, waits: Columns) -> npt.NDArray[np.int64]:
        """Return the index in REASON_NAMES for each wait, by its columns nr, state, iowait and detail."""
        packed = (
            (waits["nr"].astype(np.int64) + 32768) << 24
            | waits["state"].astype(np.int64) << 16
            | waits["iowait"].astype(np.int64) << 8
            | waits["detail"].astype(np.int64)
        )
        _, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
        numbers = np.array([self._reason_number(waits[i]) for i in first], np.int64)
        return numbers[inverse] if len(packed) else np.empty(0, np.int64)

    def _reason_number(self, wait: Any) -> int:
        facts = (int(wait["nr"]), int(wait["state"]), int(wait["iowait"]), int(wait["detail"]))
        number = self._known_reasons.get(facts)
        if number is None:
            nr, state, iowait, detail = facts
            number = REASON_NAMES.index(self._reasons.reason(nr, state, bool(iowait), detail))
            self._known_reasons[facts] = number
        return number

    def wait_kinds(self, threads: Columns) -> npt.NDArray[np.int64]:
        """Return reason * STATES + state of each `struct thread` that is off the CPU."""
        kinds: npt.NDArray[np.int64] = self._reason_numbers(threads) * STATES + threads["state"]
        return kinds

    def note_ongoing(self, moment: Moment) -> None:
        """Replace what is known of the threads that are off the CPU."""
        tids, threads = moment.threads
        is_asleep = moment.states.is_off_cpu(threads) & (threads["woken_at"] < threads["off_since"])
        tids, threads = tids[is_asleep], structs.take(threads, np.flatnonzero(is_asleep))
        waiting = moment.name_waits(
            tids,
            threads["tgid"],
            self.wait_kinds(threads),
            np.zeros(len(tids), np.uint64),
            moment.clock - threads["off_since"].astype(np.int64),
            threads["off_since"] == self._attached_ns,
        )
        self.note_waiting(waiting, moment.now)

    def note_waiting(self, waiting: OngoingWaits, now: float) -> None:
        """Replace what is known of the threads that are off the CPU.

        `waiting.kinds` are as wait_kinds() returns them.
        """
        self.blocked.clear_waiting()
        if waiting.has_detail or not len(waiting):  # without detail, the table keeps the last waits
            self._contention.clear_waiting("offcpu")
        if not len(waiting):
            return
        reasons, states = waiting.kinds // STATES, waiting.kinds % STATES
        rows = self.blocked.waiting_rows(
            mix(waiting.codes, states, reasons),
            lambda i: (*waiting.processes[i], self._states[states[i]], REASON_NAMES[reasons[i]]),
            waiting.waited_ns,
            now,
        )
        waiting.write_gauges(self.blocked, rows)
        if waiting.has_detail:
            self._contention.note_waiting_threads("offcpu", waiting, reasons, self._reason_names, now)

    def export(self, block: Block, now: float) -> None:
        """Write every series to a block."""
        rows, labels = self.blocked.live()
        seconds = self.blocked.seconds("sum_ns", rows)
        block.add_histogram("lockd_offcpu_blocked_seconds", labels, self.blocked["slots"][rows], seconds)
        maxima = self.blocked.current_max("blocked", rows)
        block.add("lockd_offcpu_max_blocked_us", *with_windows(labels, maxima))
        rows, labels = self.runqueue.live()
        seconds = self.runqueue.seconds("sum_ns", rows)
        block.add_histogram("lockd_offcpu_runqueue_seconds", labels, self.runqueue["slots"][rows], seconds)
        rows, labels = self.wakers.live()
        block.add("lockd_offcpu_waker_seconds_total", labels, self.wakers.seconds("sum_ns", rows))


def _add_histogram(series: Series, rows: Rows, slots: Columns, count: Columns, sum_ns: Columns) -> Groups:
    """Add waits to `rows` of a series; a row may occur several times. Return `rows` as Groups."""
    groups = Groups(rows)
    wide_sums.add(series["sum_ns"], groups, sum_ns)
    add_slots(series, rows, slots, count)
    return groups
