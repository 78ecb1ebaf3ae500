"""Futex waits of which no program saw the beginning, or the end: they go on as a trace begins, or ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from lockd.columns.structs import Columns
from lockd.kernel.manifest import Manifest
from lockd.kernel.maps import HashMap
from lockd.kernel.pairs import Entries
from lockd.trace.futex.asleep import Asleep, all_asleep, asleep
from lockd.trace.futex.calls import CALLS, FutexCalls

PROCFS = Path("/proc")


class OpenWaits:
    """Enters what goes on as a trace begins in the programs' table, and reads what is open at the end."""

    def __init__(self, manifest: Manifest, procfs: Path = PROCFS) -> None:
        self._procfs = procfs
        self._kinds = manifest.enums["futex_kind"]
        self._runnable = manifest.enums["state"].index("runnable")
        self._interruptible = manifest.enums["state"].index("interruptible")

    def enter(self, table: HashMap, tgids: Iterable[int], now_ns: int) -> int:
        """Have the programs count the waits of these processes as if they began at `now_ns`; how many."""
        entered = 0
        for one in all_asleep(self._procfs, tgids):
            key, entry = np.array([one.tid], table.key), np.zeros(1, table.value)
            call = entry["call"]
            call["since"], call["uaddr"], call["tid"] = now_ns, one.address, one.tid
            call["kind"] = call["guess"] = self._kinds.index(one.kind)
            entry["tgid"], entry["nr"] = one.tgid, one.number
            entry["off_since"], entry["state"] = now_ns, self._interruptible
            if not table.insert(key, entry):
                continue
            if asleep(self._procfs, one.tgid, one.tid) == one:
                entered += 1
            elif table.lookup(key)["call"]["since"] == now_ns:  # else it is of another call already
                table.delete(key)
        return entered

    def add_to(
        self, calls: FutexCalls, threads: Entries, ended_ns: int, stack_of: Callable[[Asleep], int]
    ) -> int:
        """Count the waits that are open at the end; how many calls are open.

        `stack_of` is asked for the number of a stack that no program has taken.
        """
        keys, values = threads
        is_open = (values["call"]["since"] > 0) & (values["restart"] == 0)
        is_wait = is_open & (values["call"]["kind"] < calls.wake)
        tids, values, call = keys[is_wait], values[is_wait], values["call"][is_wait]
        waits_now = (values["off_since"] > 0) & (values["state"] != self._runnable)
        blocked = values["call_blocked"].astype(np.int64)
        blocked += np.where(waits_now, ended_ns - values["off_since"].astype(np.int64), 0)
        part = np.zeros(len(tids), CALLS)
        part["tgid"], part["tid"], part["uaddr"], part["kind"] = (
            values["tgid"],
            tids,
            call["uaddr"],
            call["kind"],
        )
        part["stack"], part["calls"], part["is_open"] = call["stacks"]["user"], 1, 1
        part["blocked_ns"] = part["max_blocked_ns"] = np.maximum(blocked, 0)
        sys_ns = ended_ns - call["since"].astype(np.int64) - blocked
        part["sys_ns"] = part["max_sys_ns"] = np.maximum(sys_ns, 0)
        part["slot"] = np.where(blocked > 0, slots_of(blocked), calls.no_slot)
        for row in np.flatnonzero((part["stack"] == 0) & waits_now):
            one = asleep(self._procfs, int(part["tgid"][row]), int(part["tid"][row]))
            if one and one.address == part["uaddr"][row]:
                part["stack"][row] = stack_of(one)
        for tgid in np.unique(part["tgid"]).tolist():
            with contextlib.suppress(OSError):
                comm = (self._procfs / str(tgid) / "comm").read_bytes()
                calls.name_process(tgid, comm.removesuffix(b"\n").decode(errors="replace"))
        calls.add_part(part)
        return int(is_open.sum())


def slots_of(ns: Columns) -> Columns:
    """The slots of a histogram that times fall into: slot_of() of lockd/bpf/include/common.bpf.h."""
    return np.array([((one - 1) // 1000).bit_length() for one in np.maximum(ns, 1).tolist()], np.int64)
