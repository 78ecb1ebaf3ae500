"""Waits of goroutines for mutexes, as the Go runtime of a process counts them: no system call shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lockd.columns import wide_sums
from lockd.columns.wide_sums import MOST, UNIT, WIDE
from lockd.names.labels.processes import Name
from lockd.names.protocol import GoWaits, GoWaitsAnswer
from lockd.sample.series.block import Block
from lockd.sample.series.limits import LineBudget
from lockd.sample.series.series import Series

ASKED_AT_ONCE = 500
"""Most processes in one question to the namer: those with the lowest ids. The namer is not asked about other
processes until some of these end."""
WAITED = "lockd_go_mutex_wait_seconds_total"


class GoMutexWaits:
    """The series of waits for Go mutexes, by unit and comm.

    `name(tgid)` returns the (unit, comm) of a process.
    """

    def __init__(self, budget: LineBudget, name: Callable[[int], Name]) -> None:
        self._name = name
        self._last_ns: dict[int, int] = {}
        """The waited time that each process reported last, in nanoseconds, by process id."""
        self.is_asked = False
        """Whether a question waits for its answer."""
        self.series = Series(
            "go_mutex", {"waited_ns": WIDE}, counters={"waited_ns": WAITED},
            names=(0, 1), lines=1, budget=budget, others=1,
        )  # fmt: skip

    def question(self, tgids: Iterable[int]) -> GoWaits | None:
        """Return the question that asks the namer for the waits in these processes.

        None if there are no processes, or if the last question has no answer yet.
        """
        if self.is_asked:
            return None
        asked = tuple(sorted(tgids)[:ASKED_AT_ONCE])
        return GoWaits(asked) if asked else None

    def note_answer(self, answer: GoWaitsAnswer, now: float) -> None:
        """Add the waits since the last answer. Waits before a process's first answer are not counted."""
        self.is_asked = False
        for tgid, waited in zip(answer.tgids, answer.waited_ns, strict=True):
            if waited < 0:
                continue
            row = self.series.row(self._name(tgid), now)
            more = max(0, waited - self._last_ns.get(tgid, waited))
            total = self.series["waited_ns"][row : row + 1]
            # The time is read from a process, which can write any number there: so the total has a bound.
            total[0] = divmod(min(wide_sums.to_ints(total)[0] + more, MOST), UNIT)
            self._last_ns[tgid] = waited

    def forget_ended(self, alive: set[int]) -> None:
        """Forget the answers of processes that are not in `alive`. Their totals stay."""
        self._last_ns = {tgid: waited for tgid, waited in self._last_ns.items() if tgid in alive}

    def save(self) -> list[tuple[int, int]]:
        """Return the last answer of each process, for restore()."""
        return list(self._last_ns.items())

    def restore(self, saved: list[tuple[int, int]]) -> None:
        """Go on with what save() of another sampler returned."""
        self._last_ns = dict(saved)

    def export(self, block: Block) -> None:
        """Write the series to a block."""
        rows, labels = self.series.live()
        block.add(WAITED, labels, self.series.seconds("waited_ns", rows))
