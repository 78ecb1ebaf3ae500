"""Waits that have not ended: read from the programs' own tables, once a second."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Hashes, Rows
from lockd.columns.structs import Columns
from lockd.sample.aggregates.identities import Identities, code_of
from lockd.sample.series.series import Series

LASTING_NS = 1_000_000_000
"""Of waits that have lasted so long it is made sure that the process still has the name that is known."""


@dataclass(frozen=True)
class Waiting:
    """The waits of one program at one moment, those of unwanted processes left out."""

    tids: Columns
    tgids: Columns
    kinds: Columns
    """An enumerator: the futex kind, the lock type; for off-CPU a reason's number."""
    addresses: Columns
    waited_ns: npt.NDArray[np.int64]
    codes: Hashes
    processes: Columns
    """(unit, comm) of each."""
    who: Columns
    """tgid and thread_comm, for the table of threads."""
    has_detail: bool
    """Whether threads and locks are to be told."""
    is_least: npt.NDArray[np.bool_]
    """Of each, whether it has lasted for longer: it began before lockd, and the kernel did not tell when."""

    def __len__(self) -> int:
        return len(self.tids)

    def put(self, series: Series, rows: Rows) -> None:
        """Set `waiting` (threads) and `waiting_ns` (the longest) of the series."""
        groups = Groups(rows)
        series["waiting"][groups.rows] = groups.sum(np.ones(len(rows)))
        series["waiting_ns"][groups.rows] = groups.max(self.waited_ns)


def waiting_of(
    tids: Columns, tgids: Columns, kinds: Columns, addresses: Columns, waited_ns: Columns,
    identities: Identities, has_detail: bool = True, is_least: npt.NDArray[np.bool_] | None = None,
) -> Waiting:  # fmt: skip
    """Name the processes of waits and leave out the unwanted."""
    processes, which = np.unique(tgids, return_inverse=True)
    began = np.where(waited_ns >= LASTING_NS, time.monotonic_ns() - waited_ns, 0)
    newest = np.zeros(len(processes), np.int64)
    np.maximum.at(newest, which, began)
    named = [identities.of_process(int(tgid), int(at)) for tgid, at in zip(processes, newest, strict=True)]
    wanted = np.array([wants for _, wants in named], np.bool_)[which]
    names = np.empty(len(named), object)
    names[:] = [name for name, _ in named]
    codes = np.array([code_of(name) for name, _ in named], np.uint64)
    which = which[wanted]
    who = np.zeros(len(which), [("tgid", np.uint32), ("thread_comm", "S16")])
    who["tgid"] = tgids[wanted]
    return Waiting(
        tids[wanted],
        tgids[wanted],
        kinds[wanted],
        addresses[wanted],
        waited_ns[wanted].astype(np.int64),
        codes[which],
        names[which],
        who,
        has_detail,
        np.zeros(len(which), np.bool_) if is_least is None else is_least[wanted],
    )
