"""The aggregates of held kernel locks on a simulated host, and the entries that are put into them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from lockd import messages
from lockd.kernel.manifest import Manifest
from lockd.names.client import Resolver
from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from lockd.process.clock import NS
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.aggregates.identities import Filter, Identities
from lockd.sample.aggregates.kernel_holds import KernelHoldAggregates
from lockd.sample.aggregates.window import make_window
from lockd.sample.series.block import Block
from lockd.sample.series.limits import Limits, LineBudget

MUTEX, READ, WRITE, SEMAPHORE = range(4)
NAMES = ("mutex", "rwsem_read", "rwsem_write", "semaphore", "spinlock")
SLOTS, SLOT_NONE = 28, 255
LOCK = 0xFFFF_8880_0000_0000
US = 1000
SHOP = ("", "shop", "mutex")
"""The labels of the mutexes of the process that entry() makes by default: unit, comm and lock type."""

WHO = [("cgroup", "u8"), ("comm", "S16"), ("thread_comm", "S16"), ("tgid", "u4"), ("kernel_thread", "u4")]
KEY = np.dtype([("lock", "u8"), ("tid", "u4"), ("type", "u1"), ("slot", "u1"), ("pad", "u2")])
VALUE = np.dtype(
    [("acquisitions", "u8"), ("holds", "u8"), ("hold_ns", "u8"), ("max_hold_ns", "u8"),
     ("is_mmap_lock", "u8"), ("who", WHO)]
)  # fmt: skip
HELD_KEY = np.dtype([("lock", "u8"), ("tid", "u4"), ("pad", "u4")])
HELD = np.dtype(
    [("since", "u8", 4), ("tgid", "u4"), ("depth", "u1"), ("type", "u1"), ("asked", "u1"), ("untimed", "u1")]
)

Entry = tuple[tuple[Any, ...], tuple[Any, ...]]


def slot_of(ns: int) -> int:
    return min(max(ns - 1, 0) // US, 2**27).bit_length()


def entry(
    tid: int, *, lock: int = LOCK, lock_type: int = MUTEX, acquired: int = 1, held: int | None = None,
    tgid: int = 0, comm: bytes = b"shop", cgroup: int = 1, is_mmap_lock: bool = False,
) -> Entry:  # fmt: skip
    """Return an entry of the aggregate: acquisitions, and one hold of `held` ns unless that is None."""
    slot, holds, ns = (SLOT_NONE, 0, 0) if held is None else (slot_of(held), 1, held)
    who = (cgroup, comm, b"thread", tgid or tid, 0)
    return (lock, tid, lock_type, slot, 0), (acquired, holds, ns, ns, is_mmap_lock, who)


class Host:
    """The aggregates of one host, whose processes are in `procfs`."""

    def __init__(self, procfs: Path, limits: Limits | None = None, wanted: Filter | None = None) -> None:
        limits = limits or Limits()
        processes = Processes(Units(procfs), procfs)
        manifest = Manifest(
            attached_ns=0, chosen=(), hooks=(), maps=(), functions=(),
            enums={"lock_type": NAMES},
            constants={"SLOTS": SLOTS, "SLOT_NONE": SLOT_NONE},
        )  # fmt: skip
        self.identities = Identities(processes, wanted or Filter())
        self.contention = ContentionTables(processes.thread_comm, 1000)
        self.budget, self.limits = LineBudget(limits), limits
        self.holds = KernelHoldAggregates(
            manifest, limits, self.budget, self.contention, Resolver(procfs), processes
        )
        self.clock = time.monotonic_ns()

    def fold(self, *entries: Entry, overflowed: bool = False) -> None:
        keys = np.array([key for key, _ in entries], KEY)
        values = np.array([value for _, value in entries], VALUE)
        self.holds.fold(make_window(keys, values, self.identities, overflowed), self.clock / NS)

    def look(self, *held: Entry, waits: tuple[tuple[int, int], ...] = ()) -> None:
        """Note what the table of held locks has at this moment, and (lock, tid) of each ongoing wait."""
        keys = np.array([key for key, _ in held], HELD_KEY)
        values = np.array([value for _, value in held], HELD)
        waited = np.array([(lock, tid, 0) for lock, tid in waits], HELD_KEY)
        self.holds.note_holding(keys, values, waited, self.identities, self.clock)

    def held(
        self, tid: int, *ago: float, lock: int = LOCK, lock_type: int = MUTEX, asked: bool = False,
        untimed: bool = False, tgid: int = 0,
    ) -> Entry:  # fmt: skip
        """Return the entry of a lock that was taken once for each of `ago`, so many seconds ago.

        If `asked`, the last one is only asked for.
        """
        since = [self.clock - int(seconds * NS) for seconds in ago] + [0] * (4 - len(ago))
        return (lock, tid, 0), (since, tgid or tid, len(ago) - asked, lock_type, asked, untimed)

    def exported(self) -> tuple[dict[str, dict[tuple[str, ...], float]], dict[tuple[str, ...], list[int]]]:
        """Return values by metric and labels, and the buckets of the histogram of holds."""
        block = Block(self.limits.buckets_us, SLOTS)
        self.holds.export(block, self.clock / NS)
        head, arrays = messages.unpack(memoryview(block.pack()))
        labels = {each["name"]: [tuple(row) for row in each["labels"]] for each in head["metrics"]}
        holds = "lockd_kernel_lock_hold_seconds"
        acquired = "lockd_kernel_lock_acquisitions_total"
        assert set(labels) == {holds, acquired}
        width = len(self.limits.buckets_us) + 1
        buckets = np.array(arrays[f"{holds}.buckets"]).reshape(-1, width)
        values = {
            "acquired": dict(zip(labels[acquired], arrays[acquired], strict=True)),
            "held": dict(zip(labels[holds], arrays[f"{holds}.sum"], strict=True)),
            "holds": dict(zip(labels[holds], buckets.sum(axis=1).tolist(), strict=True)),
        }
        return values, dict(zip(labels[holds], buckets.tolist(), strict=True))

    def acquired(self) -> dict[tuple[str, ...], float]:
        return self.exported()[0]["acquired"]

    def api(self) -> list[dict[str, Any]]:
        """Return the rows of /api/v1/locks."""
        tables, arrays = self.contention.tables(self.clock / NS, {}, {})
        table = tables["locks"]
        columns = {**table["text"], **table["lists"]}
        assert len(set(arrays["locks.key"].tolist())) == len(table["text"]["lock"]), "each row has its own"
        assert len(arrays["locks.since"]) == len(arrays["locks.key"])
        columns |= {name: arrays[f"locks.{name}"].tolist() for name in table["numbers"]}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
