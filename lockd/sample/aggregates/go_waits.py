"""How long goroutines wait for mutexes, as each program's own runtime counts it: no system call shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lockd.names.labels.processes import Name
from lockd.names.protocol import GoWaits, GoWaitsAnswer
from lockd.sample.series.block import Block
from lockd.sample.series.limits import LineBudget
from lockd.sample.series.series import Series

ASKED_AT_ONCE = 500
"""Processes; of more, others have their turn as these end."""
WAITED = "lockd_go_mutex_wait_seconds_total"
MOST_NS = 1 << 60
"""Where a total stays, 36 years: each process says by itself what it has waited, and the sum has 64 bits."""


class GoMutexWaits:
    """Totals by name of process; `name` tells it."""

    def __init__(self, budget: LineBudget, name: Callable[[int], Name]) -> None:
        self._name = name
        self._read: dict[int, int] = {}
        self.series = Series(
            "go_mutex", {"waited_ns": np.int64}, counters={"waited_ns": WAITED},
            names=(0, 1), lines=1, budget=budget, others=1,
        )  # fmt: skip

    def question(self, tgids: Iterable[int]) -> GoWaits | None:
        """What to ask of these programs in Go; none if there are none."""
        some = tuple(sorted(tgids)[:ASKED_AT_ONCE])
        return GoWaits(some) if some else None

    def note(self, answer: GoWaitsAnswer, now: float) -> None:
        """Add what is new; what a process waited before it was first read is not."""
        for tgid, waited in zip(answer.tgids, answer.waited_ns, strict=True):
            if waited < 0:
                continue
            row = self.series.row(self._name(tgid), now)
            more = max(0, waited - self._read.get(tgid, waited))
            total = self.series["waited_ns"]
            total[row] = min(int(total[row]) + more, max(int(total[row]), MOST_NS))
            self._read[tgid] = waited

    def keep(self, alive: set[int]) -> None:
        """Forget what was read of processes that have ended; their totals stay."""
        self._read = {tgid: waited for tgid, waited in self._read.items() if tgid in alive}

    def save(self) -> list[tuple[int, int]]:
        """What was read, for restore()."""
        return list(self._read.items())

    def restore(self, read: list[tuple[int, int]]) -> None:
        self._read = dict(read)

    def export(self, block: Block) -> None:
        rows, labels = self.series.live()
        block.add(WAITED, labels, self.series["waited_ns"][rows] / 1e9)
