"""What mode `calls` counts besides the waits that blocked: wakes and sys time per process, and errors."""

from __future__ import annotations

import numpy as np

from lockd.columns import wide_sums
from lockd.columns.index import Groups, mix
from lockd.columns.wide_sums import WIDE
from lockd.kernel.manifest import Manifest
from lockd.names.labels.system_calls import ERRORS
from lockd.sample.aggregates.window import Window
from lockd.sample.series.block import Block, with_windows
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import merits
from lockd.sample.series.series import Series


class FutexCalls:
    """The series of all futex calls, whether they block or not."""

    def __init__(self, manifest: Manifest, limits: Limits, budget: LineBudget) -> None:
        self._wake = manifest.enums["futex_kind"].index("wake")
        self.by_process = Series(
            "futex_process", {"wakes": np.int64, "sys_ns": WIDE},
            counters={"wakes": "lockd_futex_wakes_total", "sys_ns": "lockd_futex_sys_seconds_total"},
            names=(0, 1), lines=2 + limits.max_gauges,
            budget=budget, others=1, maxima=("sys",), windows=dict(limits.windows),
        )  # fmt: skip
        self.errors = Series(
            "futex_error", {"errors": np.int64}, counters={"errors": "lockd_futex_errors_total"},
            names=(0, 1), lines=1, budget=budget, others=16,
        )  # fmt: skip
        self.series = [self.by_process, self.errors]

    def fold(self, window: Window, now: float) -> None:
        """Add one window; `now` is the monotonic clock in seconds."""
        keys, values = window.keys, window.values
        waited = merits(values["blocked_ns"], values["calls"])
        rows = self.by_process.rows(window.codes, window.processes.__getitem__, waited, now)
        groups = Groups(rows)
        wide_sums.add(self.by_process["sys_ns"], groups, values["sys_ns"])
        wakes = np.where(keys["kind"] == self._wake, values["calls"], 0)
        self.by_process["wakes"][groups.rows] += groups.sum(wakes)
        self.by_process.note_max("sys", groups.rows, groups.max(values["max_sys_ns"]))

        failed = window.where(keys["error"] > 0)
        if len(failed):
            codes = failed.keys["error"]
            rows = self.errors.rows(
                mix(failed.codes, codes),
                lambda i: (*failed.processes[i], ERRORS.get(int(codes[i]), str(codes[i]))),
                merits(failed.values["blocked_ns"], failed.values["calls"]),
                now,
            )
            groups = Groups(rows)
            self.errors["errors"][groups.rows] += groups.sum(failed.values["calls"])

    def export(self, block: Block) -> None:
        """Write every series to a block."""
        series = self.by_process
        rows, labels = series.live()
        block.add("lockd_futex_wakes_total", labels, series["wakes"][rows])
        block.add("lockd_futex_sys_seconds_total", labels, series.seconds("sys_ns", rows))
        block.add("lockd_futex_max_sys_us", *with_windows(labels, series.current_max("sys", rows)))

        rows, labels = self.errors.live()
        block.add("lockd_futex_errors_total", labels, self.errors["errors"][rows])
