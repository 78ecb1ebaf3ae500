"""Waits that have not ended, read from the programs' tables at one moment, with the process of each wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Hashes, Rows
from lockd.columns.structs import Columns
from lockd.kernel.pairs import Entries
from lockd.names.labels.processes import Name
from lockd.sample.aggregates.identities import Identities, ProcessNames
from lockd.sample.locks.waits import ThreadStates
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.series import Series

LASTING_NS = 1_000_000_000
"""Nanoseconds of a wait after which the name of its process is read from procfs again: a thread that waits
has no events, which would show a new name."""


@dataclass(frozen=True)
class OngoingWaits:
    """The waits of one program at one moment, without those of processes that the filter excludes.

    The columns have one item per wait.
    """

    tids: Columns
    tgids: Columns
    kinds: Columns
    """Number of the futex kind or of the lock type; for off-CPU waits a reason and state (offcpu.py)."""
    addresses: Columns
    waited_ns: npt.NDArray[np.int64]
    codes: Hashes
    """Hash of the (unit, comm) of the process."""
    processes: ProcessNames
    """(unit, comm) of the process."""
    who: Columns
    """Structs with the `tgid` and an empty `thread_comm`, as ContentionTables.thread_rows() takes them."""
    has_detail: bool
    """Whether the waits are noted by thread and by lock, in the tables of threads and of locks."""
    is_lower_bound: npt.NDArray[np.bool_]
    """Whether the wait began before lockd, at an unknown time: it has lasted longer than `waited_ns`."""

    def __len__(self) -> int:
        return len(self.tids)

    def write_gauges(self, series: Series, rows: Rows) -> None:
        """Set the columns `waiting` (threads) and `waiting_ns` (longest wait) of the series in these rows."""
        groups = Groups(rows)
        series["waiting"][groups.rows] = groups.sum(np.ones(len(rows)))
        series["waiting_ns"][groups.rows] = groups.max(self.waited_ns)


def name_waits(
    tids: Columns, tgids: Columns, kinds: Columns, addresses: Columns, waited_ns: Columns,
    identify: Callable[[int, int], tuple[Name, bool]], has_detail: bool = True,
    is_lower_bound: npt.NDArray[np.bool_] | None = None,
) -> OngoingWaits:  # fmt: skip
    """Return waits with the names of their processes, without those that the filter excludes.

    The columns are those of OngoingWaits. `identify` is like Identities.identify_process().
    """
    tgids_once, which = np.unique(tgids, return_inverse=True)
    began = np.where(waited_ns >= LASTING_NS, time.monotonic_ns() - waited_ns, 0)
    newest = np.zeros(len(tgids_once), np.int64)
    np.maximum.at(newest, which, began)
    identified = [
        identify(tgid, since) for tgid, since in zip(tgids_once.tolist(), newest.tolist(), strict=True)
    ]
    is_wanted = np.array([wanted for _, wanted in identified], np.bool_)[which]
    names = np.empty(len(identified), object)
    names[:] = [name for name, _ in identified]
    codes = np.array([hash_labels(name) for name in names], np.uint64)
    which = which[is_wanted]
    who = np.zeros(len(which), [("tgid", np.uint32), ("thread_comm", "S16")])
    who["tgid"] = tgids[is_wanted]
    return OngoingWaits(
        tids[is_wanted],
        tgids[is_wanted],
        kinds[is_wanted],
        addresses[is_wanted],
        waited_ns[is_wanted].astype(np.int64),
        codes[which],
        ProcessNames(names, which),
        who,
        has_detail,
        np.zeros(len(which), np.bool_) if is_lower_bound is None else is_lower_bound[is_wanted],
    )


@dataclass(frozen=True)
class Moment:
    """The programs' tables of what has not ended, read at one moment."""

    identities: Identities
    states: ThreadStates
    threads: Entries
    """Thread ids, and the `struct thread` of each."""
    kernel_waits: Entries | None
    """Waits for locks of the kernel; None if they are not measured."""
    kernel_holding: Entries | None
    """Locks of the kernel that are held or asked for; None if holds are not measured."""
    clock: int
    """Monotonic clock in ns, just before the tables were read."""
    now: float
    """Monotonic clock in seconds at the beginning of the tick."""
    has_detail: bool
    """Whether waits are counted by thread and by lock."""

    def name_waits(
        self, tids: Columns, tgids: Columns, kinds: Columns, addresses: Columns, waited_ns: Columns,
        is_lower_bound: npt.NDArray[np.bool_] | None = None,
    ) -> OngoingWaits:  # fmt: skip
        """Return some of the waits of this moment with the names of their processes."""
        waits = (tids, tgids, kinds, addresses, np.maximum(waited_ns, 0))
        return name_waits(*waits, self.identities.identify_process, self.has_detail, is_lower_bound)
