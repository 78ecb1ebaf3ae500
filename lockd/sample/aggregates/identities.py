"""Identities: the process of each entry as a number, with its label values and the verdict of the filter."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Hashes, Index, Rows, mix
from lockd.columns.structs import Columns
from lockd.names.labels.processes import Name, Processes
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.series import OTHER

MAX_IDENTITIES = 50_000
"""Most identities that are remembered. If there are more, all are forgotten; active ones are learnt again."""
OVERFLOWED = 0
"""The identity of entries from an overflow map, which have no process."""
FIRST_ROOM = 256
"""Identities that the arrays hold before they grow."""


@dataclass(frozen=True)
class Filter:
    """The processes that lockd measures.

    All fields but `pids` are lists of shell patterns. An empty field excludes no process.
    """

    units: Sequence[str] = ()
    comms: Sequence[str] = ()
    exclude_comms: Sequence[str] = ()
    pids: Sequence[int] = ()

    def is_wanted(self, tgid: int, name: Name) -> bool:
        """Whether the process with this id, unit and comm is measured."""
        unit, comm = name
        return (
            (not self.pids or tgid in self.pids)
            and (not self.units or any(fnmatch.fnmatchcase(unit, p) for p in self.units))
            and (not self.comms or any(fnmatch.fnmatchcase(comm, p) for p in self.comms))
            and not any(fnmatch.fnmatchcase(comm, p) for p in self.exclude_comms)
        )


class ProcessNames:
    """The (unit, comm) of the process of each row of a window.

    Names are looked up for the rows by which this is indexed, because only new label sets need names.
    """

    def __init__(self, names: Columns, numbers: Rows) -> None:
        """Row i has the name `names[numbers[i]]`."""
        self._names, self._numbers = names, numbers

    def __getitem__(self, rows: int | Rows) -> Any:
        """Return the name of one row as a tuple, or those of several as an array of tuples."""
        return self._names[self._numbers[rows]]

    def take(self, rows: Rows) -> ProcessNames:
        """Return the names of some of the rows."""
        return ProcessNames(self._names, self._numbers[rows])


def _has_only_id(who: Any) -> Any:
    """Whether each `struct who` has only a process id: the program that wrote it ran in another thread."""
    return (who["cgroup"] == 0) & (who["comm"] == b"")


class Identities:
    """A number for each distinct `struct who`, which indexes the arrays `names`, `codes` and `is_wanted`."""

    def __init__(self, processes: Processes, wanted: Filter) -> None:
        self._processes = processes
        self._filter = wanted
        self._index = Index()
        self._forget()

    def numbers(self, who: Columns) -> Rows:
        """Return the number of each `struct who`, valid until the next call."""
        comm = np.ascontiguousarray(who["comm"]).view(np.uint64).reshape(-1, 2)
        keys = mix(who["tgid"], who["cgroup"], comm[:, 0], comm[:, 1], who["kernel_thread"])
        has_only_id = _has_only_id(who)
        if has_only_id.any():
            keys[has_only_id] = self._keys_by_name(who["tgid"][has_only_id])
        numbers = self._index.find(keys)
        if (numbers < 0).any():
            if self._count > MAX_IDENTITIES:
                self._forget()
                numbers[:] = -1
            fresh, first = np.unique(keys[numbers < 0], return_index=True)
            # Rows of older windows come first, and so do mostly the names that processes had before an exec.
            order = np.argsort(first)
            fresh, first = fresh[order], first[order]
            positions = np.flatnonzero(numbers < 0)[first]
            learnt = np.array([self._learn(who[i]) for i in positions], np.int64)
            self._index.add(fresh, learnt)
            numbers = self._index.find(keys)
        self._is_recent[numbers] = True
        return numbers

    def keep(self, alive: set[int]) -> None:
        """Forget the identities of processes that are not in `alive` and had no entry since the last call.

        Process ids are used again. Where controllers are those of cgroup v1, the next process with the id can
        have an equal `struct who` and be in another unit. Identities with recent entries are kept, because
        more entries of a process that has just ended may come, and procfs no longer shows its unit. Numbers
        of forgotten identities are not used again, so that arrays which refer to them stay right.
        """
        is_kept = self._is_recent[: self._count].copy()
        is_kept |= np.isin(self._tgids[: self._count], np.fromiter(alive, np.int64, len(alive)))
        is_kept[OVERFLOWED] = True
        self._index.keep(is_kept)
        for who in [who for who, number in self._by_who.items() if not is_kept[number]]:
            del self._by_who[who]
        self._is_recent[:] = False

    def set_filter(self, wanted: Filter) -> None:
        """Apply another filter to everything that is counted from now on."""
        self._filter = wanted
        self._forget()

    def identify_process(self, tgid: int, since: int) -> tuple[Name, bool]:
        """Return the (unit, comm) of a live process by its id, and whether the filter wants the process.

        A name that was learnt before `since` (monotonic clock in ns) is checked in procfs.
        """
        name = self._processes.name(tgid, since)
        return name, self._filter.is_wanted(tgid, name)

    def identify_thread(self, who: Any) -> tuple[Name, bool]:
        """Return the (unit, comm) of the process in a `struct who`, and whether the filter wants it."""
        key = int(who["tgid"]), int(who["cgroup"]), who["comm"], bool(who["kernel_thread"])
        number = self._by_who.get(key)
        if number is None:
            (number,) = self.numbers(who.reshape(1)).tolist()
            if len(self._by_who) < MAX_IDENTITIES and not _has_only_id(who):
                self._by_who[key] = number
        self._is_recent[number] = True
        return self.names[number], bool(self.is_wanted[number])

    def _keys_by_name(self, tgids: npt.NDArray[Any]) -> Hashes:
        """Return a key for each process, made of its id and its present name.

        The entries of these processes have no name, so they do not show that it has changed.
        """
        processes, which = np.unique(tgids, return_inverse=True)
        codes = [hash_labels(self._processes.name(int(tgid))) for tgid in processes]
        return mix(tgids, np.array(codes, np.uint64)[which])

    def _learn(self, who: Any) -> int:
        tgid = int(who["tgid"])
        if _has_only_id(who):
            name = self._processes.name(tgid)
        else:
            name = self._processes.learn(
                tgid, int(who["cgroup"]), bytes(who["comm"]), bool(who["kernel_thread"])
            )
        return self._add(tgid, name, self._filter.is_wanted(tgid, name))

    def _forget(self) -> None:
        self._index.clear()
        self._by_who: dict[tuple[int, int, bytes, bool], int] = {}
        """The numbers of those processes for which identify_thread() was called: to look up one key in
        `_index` is slow, as numpy is slow for arrays of one element."""
        self._count = 0
        # New arrays, as a ProcessNames may still have the old ones.
        self.names: Columns = np.empty(FIRST_ROOM, object)
        """(unit, comm) of each identity."""
        self.codes: Hashes = np.zeros(FIRST_ROOM, np.uint64)
        """Hash of each identity's (unit, comm)."""
        self.is_wanted: npt.NDArray[np.bool_] = np.zeros(FIRST_ROOM, np.bool_)
        self._tgids: Rows = np.zeros(FIRST_ROOM, np.int64)
        """Process id of each identity."""
        self._is_recent: npt.NDArray[np.bool_] = np.zeros(FIRST_ROOM, np.bool_)
        """Whether each identity had an entry since the last call of keep()."""
        self._add(0, (OTHER, OTHER), is_wanted=True)

    def _add(self, tgid: int, name: Name, is_wanted: bool) -> int:
        number = self._count
        self._count += 1
        if number == len(self.codes):
            self.names = np.concatenate([self.names, np.empty_like(self.names)])
            self.codes = np.concatenate([self.codes, np.zeros_like(self.codes)])
            self.is_wanted = np.concatenate([self.is_wanted, np.zeros_like(self.is_wanted)])
            self._tgids = np.concatenate([self._tgids, np.zeros_like(self._tgids)])
            self._is_recent = np.concatenate([self._is_recent, np.zeros_like(self._is_recent)])
        self.names[number] = name
        self.codes[number] = hash_labels(name)
        self.is_wanted[number] = is_wanted
        self._tgids[number] = tgid
        return number
