"""How long each kernel lock was held, and by which processes: the detail behind the metrics of holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups, Hashes, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.table import Table
from lockd.names.client import Resolver
from lockd.names.protocol import KernelLock, LockAnswer
from lockd.sample.aggregates.identities import code_of
from lockd.sample.aggregates.ongoing import Waiting

ASKED_AT_ONCE = 100
"""Names asked for in a second."""
SHOWN = 1000
"""So many of the locks that were held longest have names and are shown."""


class HeldLocks:
    """A row for each lock, type and process; with at most `at_once` rows added in one go.

    It is a table of its own, not part of that of contended locks: on the way through one
    directory a host takes thousands of locks, which would drive out the few that matter.
    """

    def __init__(self, resolver: Resolver, type_names: Sequence[str], at_once: int) -> None:
        self._resolver = resolver
        self._type_names = type_names
        self._table = Table(
            {
                "acquisitions": np.int64,
                "holds": np.int64,
                "hold_ns": np.int64,
                "max_ns": np.int64,
                "holding_ns": np.int64,
                "holding_tid": np.int64,
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
        self, codes: Hashes, addresses: Columns, types: Columns, processes: Columns, values: Columns,
        acquired: npt.NDArray[np.int64], now: float,
    ) -> None:  # fmt: skip
        """Add what programs counted; `values` as in the map, but for the acquisitions."""
        table = self._table
        rows = self._rows(codes, addresses, types, processes, now)
        table["is_mmap_lock"][rows] |= values["is_mmap_lock"] != 0
        groups = Groups(rows)
        table["acquisitions"][groups.rows] += groups.sum(acquired)
        table["holds"][groups.rows] += groups.sum(values["holds"])
        table["hold_ns"][groups.rows] += groups.sum(values["hold_ns"])
        longest = groups.max(values["max_hold_ns"])
        table["max_ns"][groups.rows] = np.maximum(table["max_ns"][groups.rows], longest)

    def add_acquired(self, locks: Waiting, now: float) -> None:
        """Count one acquisition of each of these."""
        rows = self._rows(locks.codes, locks.addresses, locks.kinds, locks.processes, now)
        np.add.at(self._table["acquisitions"], rows, 1)

    def note_holding(self, held: Waiting, now: float) -> None:
        """Replace what is known of the locks held at this moment; `waited_ns` is for how long."""
        table = self._table
        table["holding_ns"][:] = 0
        table["holding_tid"][:] = 0
        order = np.argsort(held.waited_ns, kind="stable")  # of several threads the last stays
        rows = self._rows(held.codes, held.addresses, held.kinds, held.processes, now)[order]
        table["holding_ns"][rows] = held.waited_ns[order]
        table["holding_tid"][rows] = held.tids[order]
        self._ask_names()

    def expire(self, before: float) -> None:
        """Forget what has had nothing new since `before`."""
        self._table.forget_unseen(before)

    def _rows(
        self, codes: Hashes, addresses: Columns, types: Columns, processes: Columns, now: float
    ) -> Rows:
        keys = mix(codes, addresses, types)

        def describe(positions: Rows) -> dict[str, Any]:
            return {
                "address": addresses[positions],
                "type": types[positions],
                "process": processes[positions],
            }

        return self._table.find_or_add(keys, now, describe)

    def _top(self) -> Rows:
        table = self._table
        live = np.flatnonzero(table.used)
        weight = table["hold_ns"][live] + table["holding_ns"][live]
        if len(live) > SHOWN:
            most = np.argpartition(-weight, SHOWN)[:SHOWN]
            live, weight = live[most], weight[most]
        rows: Rows = live[np.argsort(-weight, kind="stable")]
        return rows

    def _ask_names(self) -> None:
        table = self._table
        rows = self._top()
        for row in rows[~table["is_asked"][rows]][:ASKED_AT_ONCE]:
            question = KernelLock(
                int(table["key"][row]),
                int(table["address"][row]),
                self._type_names[table["type"][row]],
                is_mmap_lock=bool(table["is_mmap_lock"][row]),
            )
            table["is_asked"][row] = self._resolver.ask(question)

    def name(self, answer: LockAnswer) -> None:
        """Give the lock that was asked for its name, if it is still in the table."""
        row = int(self._table.find(np.array([answer.key], np.uint64))[0])
        if row >= 0:
            self._table["lock"][row] = answer.lock

    def shown(self, processes: Columns, addresses: Columns, types: Columns, most: int) -> Shown:
        """What to show beside these locks, which were waited for, and at most so many others.

        Where a lock comes several times, as it was waited for in several places, it is beside the first.
        """
        codes = np.array([code_of(process) for process in processes], np.uint64)
        found = self._table.find(mix(codes, addresses, types))
        first = np.zeros(len(found), np.bool_)
        first[np.unique(found, return_index=True)[1]] = True
        found[~first] = -1
        top = self._top()
        return Shown(self._table, self._type_names, found, top[np.isin(top, found, invert=True)][:most])


class Shown:
    """Rows about holds for the table `locks` of /api/v1."""

    def __init__(self, table: Table, type_names: Sequence[str], beside: Rows, alone: Rows) -> None:
        self._table = table
        self._type_names = type_names
        self._beside = beside
        """Rows, each to be shown beside a lock that was waited for; -1: none."""
        self.alone = alone
        """Rows of locks that were not waited for, or not as much as others."""

    def add_to(self, locks: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Add the columns to the table `locks`, whose numbers are in `arrays`, and rows at its end."""
        table, count = self._table, len(self.alone)
        texts, lists = locks["text"], locks["lists"]
        known = {a: name for a, name in zip(texts["address"], texts["lock"], strict=True) if name}
        shown_before = len(texts["address"])
        addresses = [f"{address:#x}" for address in table["address"][self.alone]]
        processes = list(table["process"][self.alone])
        names = zip(addresses, table["lock"][self.alone], strict=True)
        rows: dict[str, list[str]] = {
            "program": ["kernel_locks"] * count,
            "unit": [unit for unit, _ in processes],
            "comm": [comm for _, comm in processes],
            "kind": [self._type_names[number] for number in table["type"][self.alone]],
            "lock": [known.get(address, name or "") for address, name in names],
            "address": addresses,
        }
        for name, values in texts.items():
            values += rows.get(name, [""] * count)
        for values in lists.values():
            values += [[]] * count
        for name in locks["numbers"]:
            array = arrays[f"locks.{name}"]
            arrays[f"locks.{name}"] = np.concatenate([array, np.zeros(count, array.dtype)])
        before = np.full(shown_before, -1)
        before[: len(self._beside)] = self._beside
        held = np.concatenate([before, self.alone])
        longest = np.maximum(table["max_ns"], table["holding_ns"])
        for name, column in {
            "acquisitions": table["acquisitions"],
            "holds": table["holds"],
            "held_us": table["hold_ns"] / 1000.0,
            "max_held_us": longest / 1000.0,
            "holding_us": table["holding_ns"] / 1000.0,
            "holding_tid": table["holding_tid"],
        }.items():
            arrays[f"locks.{name}"] = np.where(held >= 0, column[held], 0)
            locks["numbers"].append(name)
