"""Who an aggregate entry is about: its process as a number, its label values, and whether it is wanted."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

try:
    from _blake2 import blake2b  # hashlib would load OpenSSL as well, which takes 3 MB
except ImportError:
    from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Hashes, Index, Rows, mix
from lockd.names.labels.processes import Name, Processes
from lockd.sample.series.series import OTHER

MAX_KNOWN = 50_000
"""Identities remembered; then all are forgotten and those that are still active learnt again."""
OVERFLOWED = 0
"""The number of events whose names are lost."""


@dataclass(frozen=True)
class Filter:
    """Which processes count at all; shell patterns, empty lists ask for everything."""

    units: Sequence[str] = ()
    comms: Sequence[str] = ()
    exclude_comms: Sequence[str] = ()
    pids: Sequence[int] = ()

    def wants(self, tgid: int, name: Name) -> bool:
        unit, comm = name
        return (
            (not self.pids or tgid in self.pids)
            and (not self.units or any(fnmatch.fnmatchcase(unit, p) for p in self.units))
            and (not self.comms or any(fnmatch.fnmatchcase(comm, p) for p in self.comms))
            and not any(fnmatch.fnmatchcase(comm, p) for p in self.exclude_comms)
        )


@functools.lru_cache(MAX_KNOWN)
def code_of(name: tuple[str, ...]) -> int:
    """A 64-bit number that stands for a tuple of label values, the same for ever."""
    digest = blake2b("\0".join(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _is_untold(who: Any) -> Any:
    """Whether the program could only tell the id: another thread did what was counted."""
    return (who["cgroup"] == 0) & (who["comm"] == b"")


class Identities:
    """Numbers for `struct who`; arrays below are indexed by them."""

    def __init__(self, processes: Processes, wanted: Filter) -> None:
        self._processes = processes
        self._filter = wanted
        self._index = Index()
        self.names: npt.NDArray[Any] = np.empty(256, object)
        """(unit, comm) of each."""
        self._count = 0
        self.codes: Hashes = np.zeros(256, np.uint64)
        self.wanted: npt.NDArray[np.bool_] = np.zeros(256, np.bool_)
        self._forget()

    def of(self, who: npt.NDArray[Any]) -> Rows:
        """The number of each `struct who`."""
        comm = np.ascontiguousarray(who["comm"]).view(np.uint64).reshape(-1, 2)
        keys = mix(who["tgid"], who["cgroup"], comm[:, 0], comm[:, 1], who["kernel_thread"])
        untold = _is_untold(who)
        if untold.any():
            keys[untold] = self._keys_by_name(who["tgid"][untold])
        found = self._index.find(keys)
        if (found < 0).any():
            if self._count > MAX_KNOWN:
                self._forget()
                found[:] = -1
            fresh, first = np.unique(keys[found < 0], return_index=True)
            positions = np.flatnonzero(found < 0)[first]
            numbers = np.array([self._learn(who[i]) for i in positions], np.int64)
            self._index.add(fresh, numbers)
            found = self._index.find(keys)
        return found

    def want(self, wanted: Filter) -> None:
        """Go on with another filter."""
        self._filter = wanted
        self._forget()

    def of_process(self, tgid: int, since: int) -> tuple[Name, bool]:
        """The name of a live process that has had no event since then, and whether it is wanted."""
        name = self._processes.name(tgid, since)
        return name, self._filter.wants(tgid, name)

    def _keys_by_name(self, tgids: npt.NDArray[Any]) -> Hashes:
        """Keys that change when the process is called something else, which no event may tell."""
        processes, which = np.unique(tgids, return_inverse=True)
        codes = [code_of(self._processes.name(int(tgid))) for tgid in processes]
        return mix(tgids, np.array(codes, np.uint64)[which])

    def _learn(self, who: Any) -> int:
        tgid = int(who["tgid"])
        if _is_untold(who):
            name = self._processes.name(tgid)
        else:
            name = self._processes.learn(
                tgid, int(who["cgroup"]), bytes(who["comm"]), bool(who["kernel_thread"])
            )
        return self._add(name, self._filter.wants(tgid, name))

    def _add(self, name: Name, wanted: bool) -> int:
        number = self._count
        self._count += 1
        if number == len(self.codes):
            self.names = np.concatenate([self.names, np.empty_like(self.names)])
            self.codes = np.concatenate([self.codes, np.zeros_like(self.codes)])
            self.wanted = np.concatenate([self.wanted, np.zeros_like(self.wanted)])
        self.names[number] = name
        self.codes[number] = code_of(name)
        self.wanted[number] = wanted
        return number

    def _forget(self) -> None:
        self._index.clear()
        self._count = 0
        self._add((OTHER, OTHER), wanted=True)
