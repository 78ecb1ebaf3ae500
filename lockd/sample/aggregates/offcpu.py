"""Absences from the CPU: windows folded into series per process, state and reason, and per waker."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Rows, mix
from lockd.kernel.manifest import Manifest
from lockd.names.labels.processes import Processes
from lockd.names.labels.reasons import REASONS, Reasons
from lockd.sample.aggregates.contention import Detail
from lockd.sample.aggregates.identities import code_of
from lockd.sample.aggregates.ongoing import Waiting
from lockd.sample.aggregates.window import Window
from lockd.sample.series.block import Block, with_windows
from lockd.sample.series.limits import Budget, Limits
from lockd.sample.series.series import OTHER, Series

INTERRUPT = "irq"
"""The waker of what an interrupt woke on an idle CPU."""
REASON_NAMES = list(REASONS)


class OffcpuAggregates:
    """Everything exported about time off the CPU and on the run queue."""

    def __init__(
        self, manifest: Manifest, limits: Limits, budget: Budget, detail: Detail, processes: Processes
    ) -> None:
        self._states = manifest.enums["state"]
        self._slots, self._no_slot = manifest.constants["SLOTS"], manifest.constants["SLOT_NONE"]
        self._reasons = Reasons(manifest.enums, manifest.constants)
        self._reason_names = np.array(REASON_NAMES, object)
        self._known_reasons: dict[tuple[int, int, int, int], int] = {}
        self._detail = detail
        self._processes = processes
        windows = dict(limits.windows)
        histogram: dict[str, Any] = {"slots": (np.int64, (self._slots,)), "sum_ns": np.int64}
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
            "offcpu_waker", {"sum_ns": np.int64}, counters={"sum_ns": "lockd_offcpu_waker_seconds_total"},
            names=(0, 1, 2), lines=1, budget=budget, others=1,
        )  # fmt: skip
        self.series = [self.blocked, self.runqueue, self.wakers]

    def fold(self, window: Window, now: float) -> None:
        """Add one window; `now` is the monotonic clock in seconds."""
        queued = window.where(window.keys["run_slot"] != self._no_slot)
        if len(queued):
            run_ns = queued.values["run_ns"]
            rows = self.runqueue.rows(queued.codes, queued.processes.__getitem__, run_ns, now)
            self._add_histogram(self.runqueue, rows, queued.keys["run_slot"], queued.values["count"], run_ns)
        blocked = window.where(window.keys["blocked_slot"] != self._no_slot)
        if len(blocked):
            self._fold_blocked(blocked, now)

    def _fold_blocked(self, blocked: Window, now: float) -> None:
        keys, values = blocked.keys, blocked.values
        blocked_ns, max_ns, count = values["blocked_ns"], values["max_blocked_ns"], values["count"]
        states, reasons = keys["state"], self._reasons_of(keys)
        rows = self.blocked.rows(
            mix(blocked.codes, states, reasons),
            lambda i: (*blocked.processes[i], self._states[states[i]], REASON_NAMES[reasons[i]]),
            blocked_ns,
            now,
        )
        self._add_histogram(self.blocked, rows, keys["blocked_slot"], count, blocked_ns)
        groups = Groups(rows)
        self.blocked.note_max("blocked", groups.rows, groups.max(max_ns))
        self._fold_wakers(blocked, now)
        if blocked.has_detail:
            threads = self._detail.thread_rows(
                "offcpu",
                values["who"],
                keys["tid"],
                reasons,
                self._reason_names,
                blocked.codes,
                blocked.processes,
                now,
            )
            self._detail.add(self._detail.threads, threads, blocked_ns, count, max_ns)

    def _fold_wakers(self, blocked: Window, now: float) -> None:
        # By name: a process renames itself, and its id is used again.
        tgids, which = np.unique(blocked.keys["waker"], return_inverse=True)
        wakers = [self._waker(int(tgid)) if blocked.has_detail else OTHER for tgid in tgids]
        codes = np.array([code_of((waker,)) for waker in wakers], np.uint64)
        blocked_ns = blocked.values["blocked_ns"]
        rows = self.wakers.rows(
            mix(blocked.codes, codes[which]),
            lambda i: (*blocked.processes[i], wakers[which[i]]),
            blocked_ns,
            now,
        )
        groups = Groups(rows)
        self.wakers["sum_ns"][groups.rows] += groups.sum(blocked_ns)

    def _waker(self, tgid: int) -> str:
        return self._processes.comm(tgid) if tgid else INTERRUPT

    def _add_histogram(
        self, series: Series, rows: Rows, slots: npt.NDArray[Any], count: npt.NDArray[Any],
        sum_ns: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        groups = Groups(rows)
        series["sum_ns"][groups.rows] += groups.sum(sum_ns)
        cells = Groups(rows * self._slots + slots)
        series["slots"].reshape(-1)[cells.rows] += cells.sum(count)

    def _reasons_of(self, waits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Number of each wait's reason; `waits` has the fields nr, state, iowait and detail."""
        packed = (
            (waits["nr"].astype(np.int64) + 32768) << 24
            | waits["state"].astype(np.int64) << 16
            | waits["iowait"].astype(np.int64) << 8
            | waits["detail"].astype(np.int64)
        )
        _, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
        numbers = np.array([self._reason_of(waits[i]) for i in first], np.int64)
        return numbers[inverse] if len(packed) else np.empty(0, np.int64)

    def _reason_of(self, wait: Any) -> int:
        told = (int(wait["nr"]), int(wait["state"]), int(wait["iowait"]), int(wait["detail"]))
        known = self._known_reasons.get(told)
        if known is None:
            nr, state, iowait, detail = told
            known = REASON_NAMES.index(self._reasons.reason(nr, state, bool(iowait), detail))
            self._known_reasons[told] = known
        return known

    def reasons_of_threads(self, threads: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Reason and state of threads that are off the CPU: reason * 256 + state."""
        both: npt.NDArray[np.int64] = self._reasons_of(threads) * 256 + threads["state"]
        return both

    def note_waiting(self, waiting: Waiting, now: float) -> None:
        """Replace what is known of the threads that are off the CPU; kinds as reasons_of_threads()."""
        self.blocked.clear_waiting()
        self._detail.clear_waiting("offcpu")
        if not len(waiting):
            return
        reasons, states = waiting.kinds // 256, waiting.kinds % 256
        rows = self.blocked.waiting_rows(
            mix(waiting.codes, states, reasons),
            lambda i: (*waiting.processes[i], self._states[states[i]], REASON_NAMES[reasons[i]]),
            waiting.waited_ns,
            now,
        )
        waiting.put(self.blocked, rows)
        if not waiting.has_detail:
            return
        threads = self._detail.thread_rows(
            "offcpu",
            waiting.who,
            waiting.tids,
            reasons,
            self._reason_names,
            waiting.codes,
            waiting.processes,
            now,
        )
        self._detail.threads["waiting_ns"][threads] = waiting.waited_ns
        self._detail.threads["waiting_is_least"][threads] = waiting.is_least

    def export(self, block: Block, now: float) -> None:
        """Write every series to a block."""
        rows, labels = self.blocked.live()
        block.add_histogram(
            "lockd_offcpu_blocked_seconds", labels, self.blocked["slots"][rows], self.blocked["sum_ns"][rows]
        )
        maxima = self.blocked.current_max("blocked", rows)
        block.add("lockd_offcpu_max_blocked_us", *with_windows(labels, maxima))
        rows, labels = self.runqueue.live()
        block.add_histogram(
            "lockd_offcpu_runqueue_seconds",
            labels,
            self.runqueue["slots"][rows],
            self.runqueue["sum_ns"][rows],
        )
        rows, labels = self.wakers.live()
        block.add("lockd_offcpu_waker_seconds_total", labels, self.wakers["sum_ns"][rows] / 1e9)
