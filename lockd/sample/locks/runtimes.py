"""Where language runtimes (HotSpot, CPython) keep in memory what the BPF programs read of a process.

The namer finds these places out, and the sampler writes them to maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from lockd.columns.structs import Columns
from lockd.kernel.maps import HashMap
from lockd.names.protocol import CPythonPlaces, HotSpotPlaces

HOTSPOT = tuple(field.name for field in fields(HotSpotPlaces))
CPYTHON = tuple(field.name for field in fields(CPythonPlaces))
"""Members of struct hotspot and struct cpython, in the order of the namer's answers."""


class RuntimePlaces:
    """A map from process ids to the places where a runtime keeps what the programs read."""

    def __init__(self, table: HashMap, members: Sequence[str]) -> None:
        """`members` are those of the struct that is the map's value, in the order of write()'s numbers."""
        self._table, self._members = table, members
        self._written: dict[int, tuple[int, ...]] = {}
        self._missing: set[int] = set()
        """Processes that were not alive at the last keep()."""

    def of(self, tgid: int) -> tuple[int, ...]:
        """The numbers that were written for a process; empty if none were."""
        return self._written.get(tgid, ())

    def write(self, tgid: int, numbers: tuple[int, ...]) -> None:
        """Write the numbers for a process, even if they are not new: the LRU map may have dropped them."""
        value = np.zeros(1, self._table.value)
        for name, number in zip(self._members, numbers, strict=True):
            value[name] = number
        self._table.update(self._key(tgid), value)
        self._written[tgid] = numbers

    def keep(self, alive: set[int]) -> None:
        """Forget the processes that were in `alive` neither this time nor the last time.

        A process that has just begun may not be in `alive` yet.
        """
        missing = self._written.keys() - alive
        for tgid in missing & self._missing:
            del self._written[tgid]
            self._table.delete(self._key(tgid))
        self._missing = missing

    def _key(self, tgid: int) -> Columns:
        key = np.zeros(1, self._table.key)
        key.view(np.uint32)[0] = tgid
        return key
