"""Which names have processes at present, and which of them have had one for a while."""

from __future__ import annotations

from collections.abc import Iterable

from lockd.names.labels.processes import Name

LASTING = 15.0
"""Seconds for which a name must have had a process to count as one that lasts, and not as a helper's."""
GONE, THERE, LASTS = range(3)


class Presence:
    """Names (unit, comm) of processes, as they are noted every few seconds."""

    def __init__(self) -> None:
        self._since: dict[Name, float] = {}
        """Since when the name has had a process whenever it was looked."""
        self._lasting: set[Name] = set()
        self._units: dict[str, int] = {}

    def note(self, names: Iterable[Name], now: float) -> None:
        """Take `names` as those that have a process now; all others have none."""
        self._since = {name: self._since.get(name, now) for name in names}
        self._lasting = {name for name, since in self._since.items() if now - since >= LASTING}
        self._units = dict.fromkeys((unit for unit, _ in self._since), THERE)
        self._units.update(dict.fromkeys((unit for unit, _ in self._lasting), LASTS))

    def of(self, name: Name) -> int:
        """GONE, THERE or LASTS."""
        return LASTS if name in self._lasting else THERE if name in self._since else GONE

    def of_unit(self, unit: str) -> int:
        """The same of any of its processes."""
        return self._units.get(unit, GONE)
