"""Drained windows: entries as columns, with the process of each, and their kernel stacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.index import Groups, Hashes, Index, Rows, mix
from lockd.columns.structs import Columns
from lockd.sample.aggregates.identities import OVERFLOWED, Identities, ProcessNames
from lockd.sample.series.series import Series


@dataclass(frozen=True)
class Window:
    """Keys and values of one pair's entries, without those of processes that the filter excludes."""

    keys: Columns
    values: Columns
    codes: Hashes
    """Hash of the (unit, comm) of each row."""
    processes: ProcessNames
    """(unit, comm) of each row."""
    has_detail: bool
    """Whether the keys name threads and locks. They do not if a map was full or restraint left them out."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def tids(self) -> Columns:
        """Thread id of each row."""
        return self.keys["tid"]

    @property
    def who(self) -> Columns:
        """`struct who` of each row."""
        return self.values["who"]

    def where(self, mask: npt.NDArray[np.bool_]) -> Window:
        """Return a window of the rows for which the mask is true."""
        if mask.all():
            return self
        chosen = np.flatnonzero(mask)
        return Window(
            structs.take(self.keys, chosen),
            structs.take(self.values, chosen),
            self.codes[chosen],
            self.processes.take(chosen),
            self.has_detail,
        )


def make_windows(
    keys: Columns, values: Columns, identities: Identities, has_overflowed: bool, first_process_id: int
) -> list[Window]:
    """Return drained entries as one or two windows, without the processes that the filter excludes.

    Entries of an overflow map (`has_overflowed`) have no process. Entries whose thread id is
    `first_process_id` or more stand for a whole process and have no detail; they are a window of their own.
    """
    if has_overflowed:
        return [make_window(keys, values, identities, has_overflowed=True)]
    is_process = keys["tid"] >= first_process_id
    if not is_process.any():
        return [make_window(keys, values, identities, has_overflowed=False)]
    return [
        make_window(structs.take(keys, rows), structs.take(values, rows), identities, False, has_detail)
        for has_detail, rows in ((True, np.flatnonzero(~is_process)), (False, np.flatnonzero(is_process)))
    ]


def make_window(
    keys: Columns, values: Columns, identities: Identities, has_overflowed: bool, has_detail: bool = True
) -> Window:
    """Return drained entries as one window. The parameters are those of make_windows()."""
    if has_overflowed:
        numbers = np.full(len(keys), OVERFLOWED, np.int64)
    else:
        numbers = identities.numbers(values["who"])
    processes = ProcessNames(identities.names, numbers)
    window = Window(keys, values, identities.codes[numbers], processes, has_detail and not has_overflowed)
    is_wanted = identities.is_wanted[numbers]
    return window if is_wanted.all() else window.where(is_wanted)


def add_slots(series: Series, rows: Rows, slots: Columns, counts: Columns) -> None:
    """Add counts to the histograms in the column `slots` of a series; the arrays have one item per entry."""
    histograms = series["slots"]
    cells = Groups(rows * histograms.shape[1] + slots)
    histograms.reshape(-1)[cells.rows] += cells.sum(counts)


class Stacks:
    """The kernel stacks that belong to drained waits, found by lock, thread, lock type and slot.

    Waits that have all of these in common have the stack of the first one. So a long wait does not count for
    the place of short ones.
    """

    def __init__(self, keys: Columns, values: Columns) -> None:
        """Take the entries of the pair `stacks`. Of several stacks with one key the first counts."""
        self._values = values
        self._index = Index()
        key = mix(keys["address"], keys["tid"], keys["type"], keys["slot"])
        hashes, first = np.unique(key, return_index=True)
        self._index.add(hashes, first)

    def find(self, waits: Columns) -> Rows:
        """Return the position of the stack of each wait, -1 where there is none.

        `waits` are the keys of their entries in the pair `kernel_locks`.
        """
        return self._index.find(mix(waits["lock"], waits["tid"], waits["type"], waits["slot"]))

    def hashes(self, positions: Rows) -> Hashes:
        """Return a hash of the stack at each position, 0 where the position is -1."""
        hashes = np.zeros(len(positions), np.uint64)
        has_stack = positions >= 0
        if has_stack.any():
            frames = self._values["kernel"][positions[has_stack]]
            hashes[has_stack] = mix(*(frames[:, i] for i in range(frames.shape[1])))
        return hashes

    def frames(self, position: int) -> tuple[int, ...]:
        """Return the return addresses of the stack at a position, innermost first."""
        return tuple(filter(None, self._values["kernel"][position].tolist()))
