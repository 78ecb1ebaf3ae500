"""Hold table: how long each kernel lock was held, and by which processes, behind /api/v1/locks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Hashes, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.table import Table
from lockd.names.client import Resolver
from lockd.names.protocol import ANON, KernelLock, LockAnswer
from lockd.sample.aggregates.identities import ProcessNames
from lockd.sample.aggregates.ongoing import OngoingWaits
from lockd.sample.series.label_hash import hash_labels

ASKED_AT_ONCE = 100
"""Most lock names that are asked for each time the held locks are noted, which is about once a second."""
SHOWN = 1000
"""The largest number of locks that get names and are shown: those that were held longest."""


class HoldTable:
    """Hold times of kernel locks: a row for each lock address, lock type, and unit and comm of the holders.

    Contended locks have another table. A walk through one directory tree takes thousands of locks, which
    would evict the few that are contended.
    """

    def __init__(self, resolver: Resolver, type_names: Sequence[str], at_once: int) -> None:
        """`type_names` are the names of enum lock_type. At most `at_once` rows are added by one call."""
        self._resolver = resolver
        self._type_names = type_names
        self._table = Table(
            {
                "acquisitions": np.int64,
                "holds": np.int64,
                "hold_ns": np.float64,  # float: the time of many readers may have more than 64 bits
                "max_ns": np.int64,
                "holding_ns": np.int64,  # of the longest hold that has not ended
                "holding_tid": np.int64,  # the thread of that hold
                "address": np.uint64,
                "type": np.int16,
                "is_mmap_lock": np.bool_,
                "process": object,
                "is_asked": np.bool_,
                "lock": object,
            },
            at_once,
        )

    def add(
        self, codes: Hashes, addresses: Columns, types: Columns, processes: ProcessNames, values: Columns,
        acquired: npt.NDArray[np.int64], now: float,
    ) -> None:  # fmt: skip
        """Add entries of the pair `kernel_holds`.

        `values` are those of the map. `acquired` has the number of acquisitions in each entry, less those
        that were counted early (early_acquisitions.py).
        """
        table = self._table
        rows = self._rows(codes, addresses, types, processes, now)
        note_mmap_locks(table, rows[values["is_mmap_lock"] != 0])
        groups = Groups(rows)
        table["acquisitions"][groups.rows] += groups.sum(acquired)
        table["holds"][groups.rows] += groups.sum(values["holds"])
        table["hold_ns"][groups.rows] += groups.float_sum(values["hold_ns"])
        longest = groups.max(values["max_hold_ns"])
        table["max_ns"][groups.rows] = np.maximum(table["max_ns"][groups.rows], longest)

    def add_acquisitions(self, locks: OngoingWaits, now: float) -> None:
        """Count one acquisition of each of these locks."""
        rows = self._rows(locks.codes, locks.addresses, locks.kinds, locks.processes, now)
        np.add.at(self._table["acquisitions"], rows, 1)

    def note_holding(self, holding: OngoingWaits, now: float) -> None:
        """Replace what is known of the locks that are held.

        `holding.waited_ns` is for how long each of them has been held.
        """
        table = self._table
        table["holding_ns"][:] = 0
        table["holding_tid"][:] = 0
        order = np.argsort(holding.waited_ns, kind="stable")  # in each row, the longest hold is written last
        rows = self._rows(holding.codes, holding.addresses, holding.kinds, holding.processes, now)[order]
        table["holding_ns"][rows] = holding.waited_ns[order]
        table["holding_tid"][rows] = holding.tids[order]
        self._find_names()

    def expire(self, before: float) -> None:
        """Forget locks that have not been held since `before` (monotonic clock in seconds)."""
        self._table.forget_unseen(before)

    def _rows(
        self, codes: Hashes, addresses: Columns, types: Columns, processes: ProcessNames, now: float
    ) -> Rows:
        keys = mix(codes, addresses, types)

        def describe(positions: Rows) -> dict[str, Any]:
            return {
                "address": addresses[positions],
                "type": types[positions],
                "process": processes[positions],
            }

        return self._table.find_or_add(keys, now, describe)

    def _top_rows(self) -> Rows:
        """Return the rows that are shown, those held longest first, holds that have not ended included."""
        table = self._table
        live = np.flatnonzero(table.used)
        weight = table["hold_ns"][live] + table["holding_ns"][live]
        if len(live) > SHOWN:
            most = np.argpartition(-weight, SHOWN)[:SHOWN]
            live, weight = live[most], weight[most]
        rows: Rows = live[np.argsort(-weight, kind="stable")]
        return rows

    def _find_names(self) -> None:
        table = self._table
        rows = self._top_rows()
        for row in rows[~table["is_asked"][rows]][:ASKED_AT_ONCE]:
            question = KernelLock(
                int(table["key"][row]),
                int(table["address"][row]),
                self._type_names[table["type"][row]],
                is_mmap_lock=bool(table["is_mmap_lock"][row]),
            )
            if known := self._resolver.known_answer(question):
                table["lock"][row], table["is_asked"][row] = known.lock, True
            else:
                table["is_asked"][row] = self._resolver.ask(question)

    def set_name(self, answer: LockAnswer) -> None:
        """Give the lock of an answer its name, unless the lock has left the table.

        A provisional answer has no name, because the namer ended before it answered. The question will be
        asked again. For a lock that is known to be an mmap_lock, the answer `anon` is ignored: its question
        was asked before that was known.
        """
        row = int(self._table.find(np.array([answer.key], np.uint64))[0])
        if row >= 0 and answer.is_provisional:
            self._table["is_asked"][row] = False
        elif row >= 0 and not (self._table["is_mmap_lock"][row] and answer.lock == ANON):
            self._table["lock"][row] = answer.lock

    def choose_shown(self, processes: Columns, addresses: Columns, types: Columns, most: int) -> ShownHolds:
        """Return the holds of these contended locks, and those of at most `most` other locks.

        If a lock comes several times, because it was waited for at several sites, its holds come only once.
        """
        codes = np.array([hash_labels(process) for process in processes], np.uint64)
        rows = self._table.find(mix(codes, addresses, types))
        is_first = np.zeros(len(rows), np.bool_)
        is_first[np.unique(rows, return_index=True)[1]] = True
        rows[~is_first] = -1
        top = self._top_rows()
        uncontended = top[np.isin(top, rows, invert=True)][:most]
        return ShownHolds(self._table, self._type_names, rows, uncontended)


def note_mmap_locks(table: Table, rows: Rows) -> None:
    """Note that the locks in these rows of a table are each the mmap_lock of an address space.

    The name of a lock that was not known to be an mmap_lock will be asked for again, because the namer cannot
    find out by itself that it is one. `rows` may have a row several times.
    """
    is_new = ~table["is_mmap_lock"][rows]
    table["is_asked"][rows[is_new]] = False
    table["is_mmap_lock"][rows] = True


class ShownHolds:
    """Holds, to be added as columns and rows to the table `locks` of /api/v1 before the next tick."""

    def __init__(self, table: Table, type_names: Sequence[str], contended: Rows, uncontended: Rows) -> None:
        self._table = table
        self._type_names = type_names
        self._contended = contended
        """Row of the holds of each contended lock; -1 where there is none."""
        self.uncontended = uncontended
        """Rows of other locks: not waited for, or for less time than the contended locks that are shown."""

    def add_to(self, locks: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Add columns to the table `locks`, whose numbers are in `arrays`, and rows at its end."""
        table, added = self._table, self.uncontended
        texts, lists = locks["text"], locks["lists"]
        names = {a: name for a, name in zip(texts["address"], texts["lock"], strict=True) if name}
        before = np.full(len(texts["address"]), -1)
        before[: len(self._contended)] = self._contended
        addresses = [f"{address:#x}" for address in table["address"][added]]
        own_names = zip(addresses, table["lock"][added], strict=True)
        added_texts: dict[str, list[str]] = {
            "program": ["kernel_locks"] * len(added),
            "unit": [unit for unit, _ in table["process"][added]],
            "comm": [comm for _, comm in table["process"][added]],
            "kind": [self._type_names[number] for number in table["type"][added]],
            "lock": [names.get(address, name or "") for address, name in own_names],
            "address": addresses,
        }
        for name, values in texts.items():
            values += added_texts.get(name, [""] * len(added))
        for values in lists.values():
            values += [[]] * len(added)
        for name in locks["numbers"]:
            array = arrays[f"locks.{name}"]
            arrays[f"locks.{name}"] = np.concatenate([array, np.zeros(len(added), array.dtype)])
        arrays["locks.key"] = np.concatenate([arrays["locks.key"], table["key"][added].view(np.int64)])
        arrays["locks.since"] = np.concatenate([arrays["locks.since"], np.zeros(len(added))])
        rows = np.concatenate([before, added])
        longest = np.maximum(table["max_ns"], table["holding_ns"])
        for name, column in {
            "acquisitions": table["acquisitions"],
            "holds": table["holds"],
            "held_us": table["hold_ns"] / 1000.0,
            "max_held_us": longest / 1000.0,
            "holding_us": table["holding_ns"] / 1000.0,
            "holding_tid": table["holding_tid"],
        }.items():
            arrays[f"locks.{name}"] = np.where(rows >= 0, column[rows], 0)
            locks["numbers"].append(name)
