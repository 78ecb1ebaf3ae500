"""How long goroutines wait for mutexes, as each program's own runtime counts it: no system call shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lockd.names.messages import GoWaits, GoWaitsAnswer
from lockd.names.processes import Name
from lockd.sample.block import Block
from lockd.sample.series import OTHER

ASKED_AT_ONCE = 500
"""Processes; of more, others have their turn as these end."""
MOST_NAMES = 200
"""Of processes, each a series; the time of further ones is that of `other`."""


class GoMutexWaits:
    """Totals by name of process; `name` tells it."""

    def __init__(self, name: Callable[[int], Name]) -> None:
        self._name = name
        self._read: dict[int, int] = {}
        self._totals: dict[Name, int] = {}

    def question(self, tgids: Iterable[int]) -> GoWaits | None:
        """What to ask of these programs in Go; none if there are none."""
        some = tuple(sorted(tgids)[:ASKED_AT_ONCE])
        return GoWaits(some) if some else None

    def note(self, answer: GoWaitsAnswer) -> None:
        """Add what is new; what a process waited before it was first read is not."""
        for tgid, waited in zip(answer.tgids, answer.waited_ns, strict=True):
            if waited < 0:
                continue
            name = self._name(tgid)
            if name not in self._totals and len(self._totals) >= MOST_NAMES:
                name = (OTHER, OTHER)
            new = waited - self._read.get(tgid, waited)
            self._totals[name] = self._totals.get(name, 0) + max(0, new)
            self._read[tgid] = waited

    def keep(self, alive: set[int]) -> None:
        """Forget what was read of processes that have ended; their totals stay."""
        self._read = {tgid: waited for tgid, waited in self._read.items() if tgid in alive}

    def export(self, block: Block) -> None:
        seconds = [total / 1e9 for total in self._totals.values()]
        block.add("lockd_go_mutex_wait_seconds_total", list(self._totals), seconds)
