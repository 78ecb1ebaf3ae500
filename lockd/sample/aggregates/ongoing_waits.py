"""Waits that have not ended: from the programs' own tables to the aggregates, once a second."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lockd.columns.structs import Columns
from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries
from lockd.sample.aggregates.folding import Aggregates
from lockd.sample.aggregates.futex import FutexAggregates
from lockd.sample.aggregates.identities import Identities
from lockd.sample.aggregates.kernel_holds import KernelHoldAggregates
from lockd.sample.aggregates.kernel_locks import KernelLockAggregates
from lockd.sample.aggregates.offcpu import OffcpuAggregates
from lockd.sample.aggregates.ongoing import waiting_of
from lockd.sample.drain import Collector


class GoingOn:
    """Tells each of `aggregates` of its waits that go on, and of what is held."""

    def __init__(
        self,
        manifest: Manifest,
        collector: Collector,
        identities: Identities,
        aggregates: Mapping[str, Aggregates],
    ) -> None:
        self._collector = collector
        self._identities = identities
        self._aggregates = list(aggregates.values())
        self._runnable = manifest.enums["state"].index("runnable")
        self._wake = manifest.enums["futex_kind"].index("wake")
        self._attached_ns = manifest.attached_ns

    def note(self, now: float, has_detail: bool) -> tuple[Entries, Entries | None]:
        """Read the tables of threads and of waits in the kernel, and return them; `now` in seconds.

        `has_detail`: whether waits are told by thread and by lock.
        """
        clock = time.monotonic_ns()
        tids, threads = self._collector.threads()
        in_kernel = self._collector.kernel_waits()
        off = (threads["off_since"] > 0) & (threads["state"] != self._runnable)
        for one in self._aggregates:
            if isinstance(one, FutexAggregates):
                self._note_futex(one, tids, threads, off, clock, now, has_detail)
            elif isinstance(one, OffcpuAggregates):
                self._note_offcpu(one, tids, threads, off, clock, now, has_detail)
            elif isinstance(one, KernelLockAggregates) and in_kernel:
                self._note_kernel_locks(one, *in_kernel, clock, now, has_detail)
            elif isinstance(one, KernelHoldAggregates) and in_kernel:
                self._note_holding(one, in_kernel[0])
        return (tids, threads), in_kernel

    def _note_futex(
        self, futex: FutexAggregates, tids: Columns, threads: Columns, off: npt.NDArray[np.bool_], clock: int,
        now: float, has_detail: bool,
    ) -> None:  # fmt: skip
        call = threads["call"]
        blocked = off & (call["since"] > 0) & (call["kind"] < self._wake) & (threads["restart"] == 0)
        since = threads["off_since"][blocked].astype(np.int64)
        waited = clock - since + threads["call_blocked"][blocked].astype(np.int64)
        waiting = waiting_of(
            tids[blocked],
            threads["tgid"][blocked],
            call["kind"][blocked],
            call["uaddr"][blocked],
            np.maximum(waited, 0),
            self._identities,
            has_detail,
            call["since"][blocked] == self._attached_ns,
        )
        futex.note_waiting(waiting, now)
        futex.look_again(tids[blocked], threads[blocked], waited, now)

    def _note_offcpu(
        self, offcpu: OffcpuAggregates, tids: Columns, threads: Columns, off: npt.NDArray[np.bool_],
        clock: int, now: float, has_detail: bool,
    ) -> None:  # fmt: skip
        asleep = np.flatnonzero(off & (threads["woken_at"] < threads["off_since"]))
        waiting = waiting_of(
            tids[asleep],
            threads["tgid"][asleep],
            offcpu.reasons_of_threads(threads[asleep]),
            np.zeros(len(asleep), np.uint64),
            np.maximum(clock - threads["off_since"][asleep].astype(np.int64), 0),
            self._identities,
            has_detail,
            threads["off_since"][asleep] == self._attached_ns,
        )
        offcpu.note_waiting(waiting, now)

    def _note_kernel_locks(
        self, kernel_locks: KernelLockAggregates, keys: Columns, waits: Columns, clock: int, now: float,
        has_detail: bool,
    ) -> None:  # fmt: skip
        waited = np.maximum(clock - waits["since"].astype(np.int64), 0)
        waiting = waiting_of(
            keys["tid"], waits["tgid"], waits["type"], keys["lock"], waited, self._identities, has_detail
        )
        kernel_locks.note_waiting(waiting, now)

    def _note_holding(self, kernel_holds: KernelHoldAggregates, waits: Columns) -> None:
        if holding := self._collector.kernel_holding():
            clock = time.monotonic_ns()  # none of them was taken later
            kernel_holds.note_holding(*holding, waits, self._identities, clock)
