"""The order in which label sets get series of their own, where there is not room for all of them.

The merit of a label set is the time for which threads have waited there; a wait counts half after HALF_LIFE.
Label sets of processes rank by the presence of the process, then by whether the merit reaches EARNED_NS, then
by the merit. For locks, EARNED_NS comes before the presence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Rows
from lockd.names.labels.processes import Name

HALF_LIFE = 60.0
"""Seconds after which a wait that has ended counts half."""
MEMORY_NS = int(HALF_LIFE / math.log(2) * 1e9)
"""The merit, in nanoseconds, that the waits of one thread reach if it waits all the time. No wait counts for
more, however long it is: else threads that wait for minutes would take turns, each at the end of its wait."""
EARNED_NS = 5_000_000
"""The least merit, in nanoseconds, with which a label set takes the place of another."""
STAYS = 2.0
"""A label set takes the place of a series only if it has this many times the merit of that series; otherwise
the two would take turns."""
FLOOR = 2
"""How many label sets of each owner, such as a unit, rank before all others: no owner can take all series."""
LASTING = 15.0
"""Seconds for which processes with a name must have existed for the name to count as lasting. Most helper
processes end earlier."""
GONE, THERE, LASTS = range(3)
"""The presence of a name: no process has it; a process has it; a process has had it for LASTING seconds."""


def merits(waited_ns: npt.NDArray[Any], waits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What waits that have ended add to the merits. Each item is the time of so many waits together."""
    return np.minimum(waited_ns, waits.astype(np.int64) * MEMORY_NS)


class Presence:
    """The presence of names (unit, comm) of processes, which is noted every few seconds."""

    def __init__(self) -> None:
        self._since: dict[Name, float] = {}
        """By name, the time since which every call of note() has found a process with that name."""
        self._lasting: set[Name] = set()
        self._units: dict[str, int] = {}

    def note(self, names: Iterable[Name], now: float) -> None:
        """Note that processes with these names exist, and none with other names. `now` is in seconds."""
        self._since = {name: self._since.get(name, now) for name in names}
        self._lasting = {name for name, since in self._since.items() if now - since >= LASTING}
        self._units = dict.fromkeys((unit for unit, _ in self._since), THERE)
        self._units.update(dict.fromkeys((unit for unit, _ in self._lasting), LASTS))

    def state(self, name: Name) -> int:
        """GONE, THERE or LASTS."""
        return LASTS if name in self._lasting else THERE if name in self._since else GONE

    def unit_state(self, unit: str) -> int:
        """The highest state of the names of a unit: GONE, THERE or LASTS."""
        return self._units.get(unit, GONE)


def rank(
    tiers: npt.NDArray[np.int64],
    merits: npt.NDArray[np.float64],
    owners: npt.NDArray[np.int64],
    has_floor: npt.NDArray[np.bool_],
    floors: int,
) -> Rows:
    """The positions of label sets in the order of their rank, the best first.

    The arrays have one item for each label set; `owners` has the numbers of their owners. The order is by
    tier, the highest first, then by merit. Before all others come the best FLOOR label sets of each owner, if
    they have `has_floor`: first the best of each owner, then the second of each. There are `floors` of these
    at most.
    """
    order = np.lexsort((-merits, -tiers))
    by_owner = np.argsort(owners[order], kind="stable")
    ordered = owners[order][by_owner]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    turn = np.empty(len(order), np.int64)
    turn[by_owner] = np.arange(len(order)) - starts
    chosen = np.flatnonzero((turn < FLOOR) & has_floor[order])
    chosen = chosen[np.argsort(turn[chosen], kind="stable")][:floors]
    is_chosen = np.zeros(len(order), np.bool_)
    is_chosen[chosen] = True
    return np.concatenate([order[chosen], order[~is_chosen]])
