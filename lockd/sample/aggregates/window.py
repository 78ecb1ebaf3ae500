"""One drained window: rows as columns, with their process, and the stacks that belong to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.index import Hashes, Index, Rows, mix
from lockd.columns.structs import Columns
from lockd.sample.aggregates.identities import OVERFLOWED, Identities


@dataclass(frozen=True)
class Window:
    """Keys and values of one program's entries, those of unwanted processes left out."""

    keys: Columns
    values: Columns
    codes: Hashes
    """Of the process (unit, comm) of each row."""
    numbers: Rows
    """Of its identity."""
    processes: Columns
    """(unit, comm) of each row."""
    has_detail: bool
    """Whether they tell the thread and the lock: not if a map was full, or under restraint."""

    def __len__(self) -> int:
        return len(self.keys)

    def where(self, mask: npt.NDArray[np.bool_]) -> Window:
        """The rows that `mask` chooses."""
        if mask.all():
            return self
        chosen = np.flatnonzero(mask)
        return Window(
            structs.take(self.keys, chosen),
            structs.take(self.values, chosen),
            self.codes[chosen],
            self.numbers[chosen],
            self.processes[chosen],
            self.has_detail,
        )


def windows_of(
    keys: Columns, values: Columns, identities: Identities, overflowed: bool, of_process: int
) -> list[Window]:
    """The rows whose processes are wanted; `overflowed`: the processes are not known, as a map was full.

    Rows of whole processes, which have `of_process` in place of a thread, are a window of their own.
    """
    if overflowed:
        return [window_of(keys, values, identities, overflowed=True)]
    is_whole = keys["tid"] >= of_process
    if not is_whole.any():
        return [window_of(keys, values, identities, overflowed=False)]
    return [
        window_of(structs.take(keys, at), structs.take(values, at), identities, False, has_detail)
        for has_detail, at in ((True, np.flatnonzero(~is_whole)), (False, np.flatnonzero(is_whole)))
    ]


def window_of(
    keys: Columns, values: Columns, identities: Identities, overflowed: bool, has_detail: bool = True
) -> Window:
    """One window of them."""
    if overflowed:
        numbers = np.full(len(keys), OVERFLOWED, np.int64)
    else:
        numbers = identities.of(values["who"])
    codes, names, wanted = identities.codes[numbers], identities.names[numbers], identities.wanted[numbers]
    window = Window(keys, values, codes, numbers, names, has_detail and not overflowed)
    return window if wanted.all() else window.where(wanted)


class Stacks:
    """The kernel's stacks kept in one window, by lock and thread."""

    def __init__(self, keys: Columns, values: Columns) -> None:
        self._values = values
        self._index = Index()
        hashes = mix(keys["address"], keys["tid"])
        hashes, first = np.unique(hashes, return_index=True)  # of several windows, the earliest
        self._index.add(hashes, first)

    @classmethod
    def none(cls) -> Stacks:
        """No stacks at all."""
        key = np.dtype([("address", np.uint64), ("tid", np.uint32)])
        return cls(np.empty(0, key), np.empty(0, np.uint64))

    def find(self, addresses: Columns, tids: Columns) -> Rows:
        """Positions of the stacks of these locks and threads, -1 where there is none."""
        return self._index.find(mix(addresses, tids))

    def hashes(self, positions: Rows) -> Hashes:
        """A number that stands for each kernel stack; 0 where there is none."""
        hashed = np.zeros(len(positions), np.uint64)
        there = positions >= 0
        if there.any():
            frames = self._values["kernel"][positions[there]]
            hashed[there] = mix(*(frames[:, i] for i in range(frames.shape[1])))
        return hashed

    def kernel(self, position: int) -> tuple[int, ...]:
        return tuple(filter(None, self._values["kernel"][position].tolist()))
