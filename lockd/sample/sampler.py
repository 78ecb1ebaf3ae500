"""One sampling period after another: flip, drain, fold; once a second the waits that go on."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockd.manifest import Manifest
from lockd.names.processes import Processes
from lockd.names.resolver import Resolver
from lockd.names.units import Units
from lockd.sample.block import Block
from lockd.sample.detail import Detail
from lockd.sample.futex import FutexAggregates
from lockd.sample.identities import Filter, Identities
from lockd.sample.inflight import read_steady, waiting_of
from lockd.sample.kernel_locks import KernelLockAggregates
from lockd.sample.limits import Limits
from lockd.sample.locks import name_lock
from lockd.sample.maps import Buffers, Control, GracePeriod, HashMap, PerCpuCounters
from lockd.sample.offcpu import OffcpuAggregates
from lockd.sample.own_cost import Losses, OwnCost
from lockd.sample.series import Series
from lockd.sample.window import Stacks, window_of

log = logging.getLogger(__name__)

NS = 1_000_000_000
HOUSEKEEPING_SECONDS = 10.0


@dataclass(frozen=True)
class SamplerSettings:
    """What the sampler needs of the configuration."""

    limits: Limits = field(default_factory=Limits)
    filter: Filter = field(default_factory=Filter)


class Sampler:
    """Aggregates of everything that the programs of `manifest` count.

    `fds` are the descriptors of its maps and then of its functions; `procfs` the root of a
    proc file system.
    """

    def __init__(
        self, manifest: Manifest, fds: list[int], settings: SamplerSettings, procfs: Path = Path("/proc")
    ) -> None:
        infos = {info.name: (fd, info) for fd, info in zip(fds, manifest.maps, strict=False)}
        functions = fds[len(manifest.maps) : len(manifest.maps) + len(manifest.functions)]
        hashes = {
            name: HashMap(fd, info) for name, (fd, info) in infos.items() if name not in ("control", "losses")
        }
        self._threads, self._kernel_waits = hashes["threads"], hashes.get("kernel_waits")
        self._pairs = {
            name.removesuffix("_0"): (one, hashes[name.removesuffix("_0") + "_1"])
            for name, one in hashes.items()
            if name.endswith("_0")
        }
        self._manifest = manifest
        self._buffers = Buffers(list(hashes.values()))
        self._control = Control(infos["control"][0])
        self._grace = GracePeriod()
        self._processes = Processes(Units(procfs), procfs)
        self._identities = Identities(self._processes, settings.filter)
        self._resolver = Resolver(procfs)
        entries = max(pair[0].entries for pair in self._pairs.values())
        self.detail = Detail(self._processes.thread_comm, entries)
        self._limits = settings.limits
        self.futex: FutexAggregates | None = None
        self.offcpu: OffcpuAggregates | None = None
        self.kernel_locks: KernelLockAggregates | None = None
        shared = (manifest, settings.limits, self.detail)
        if "futex" in self._pairs:
            self.futex = FutexAggregates(*shared, self._resolver)
        if "offcpu" in self._pairs:
            self.offcpu = OffcpuAggregates(*shared, self._processes)
        if "kernel_locks" in self._pairs:
            self.kernel_locks = KernelLockAggregates(*shared, self._resolver)
        capacities = {name: pair[0].entries for name, pair in self._pairs.items()}
        capacities["threads"] = self._threads.entries
        self.own_cost = OwnCost(
            manifest,
            Losses(manifest, PerCpuCounters(*infos["losses"])),
            [(program, fd) for (program, _), fd in zip(manifest.functions, functions, strict=True)],
            capacities,
            procfs,
        )
        self._alive: set[tuple[str, str]] = set()
        self._next_second = self._next_housekeeping = 0.0

    @property
    def _aggregates(self) -> list[FutexAggregates | OffcpuAggregates | KernelLockAggregates]:
        return [one for one in (self.futex, self.offcpu, self.kernel_locks) if one]

    @property
    def _series(self) -> list[Series]:
        return [series for one in self._aggregates for series in one.series]

    def tick(self) -> None:
        """Fold the window that ended one period ago, and end the current one."""
        now = time.monotonic()
        if self._grace.over:  # else no program may be disturbed yet: next time
            for series in self._series:
                series.advance(now)
            self._fold_idle_window(now)
            self._control.flip()
            self._grace.begin()
        if now >= self._next_second:
            self._next_second = now + 1.0
            self._each_second(now)
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_SECONDS
            self._housekeeping(now)

    def drain(self) -> None:
        """Fold everything that the programs have counted until now; waits for grace periods."""
        for _ in range(2):
            self._grace.wait()
            self._fold_idle_window(time.monotonic())
            self._control.flip()
            self._grace.begin()

    def _fold_idle_window(self, now: float) -> None:
        idle = 1 - self._control.window
        stacks = Stacks(*(columns.copy() for columns in self._drain("stacks", idle)))
        for name, aggregates in (
            ("futex", self.futex),
            ("offcpu", self.offcpu),
            ("kernel_locks", self.kernel_locks),
        ):
            for pair in (name, f"{name}_over") if aggregates else ():
                keys, values = self._drain(pair, idle)
                if not len(keys):
                    continue
                window = window_of(keys, values, self._identities, overflowed=pair.endswith("_over"))
                if isinstance(aggregates, OffcpuAggregates):
                    aggregates.fold(window, now)
                elif aggregates:
                    aggregates.fold(window, stacks, now)

    def _drain(self, pair: str, index: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        keys, values = self._pairs[pair][index].drain(self._buffers)
        self.own_cost.entries[pair] = len(keys)
        return keys, values

    def _each_second(self, now: float) -> None:
        for answer in self._resolver.answers():
            name_lock(self.detail, answer)
        for series in self._series:
            series.reconsider()
        self._note_waiting(now)

    def _note_waiting(self, now: float) -> None:
        """The waits that go on: of threads that are off the CPU, and for kernel locks."""
        clock = time.monotonic_ns()
        tids, threads = read_steady(self._threads, self._buffers)
        self.own_cost.entries["threads"] = len(tids)
        self._tgids_alive = np.unique(threads["tgid"])
        runnable = self._manifest.enums["state"].index("STATE_RUNNABLE")
        off = (threads["off_since"] > 0) & (threads["state"] != runnable)
        since = threads["off_since"].astype(np.int64)
        if self.futex:
            call = threads["call"]
            wake = self._manifest.enums["futex_kind"].index("KIND_WAKE")
            blocked = off & (call["since"] > 0) & (call["kind"] < wake) & (threads["restart"] == 0)
            waited = clock - since[blocked] + threads["call_blocked"][blocked].astype(np.int64)
            self.futex.note_waiting(
                waiting_of(
                    tids[blocked],
                    threads["tgid"][blocked],
                    call["kind"][blocked],
                    call["uaddr"][blocked],
                    np.maximum(waited, 0),
                    self._identities,
                ),
                now,
            )
        if self.offcpu:
            asleep = np.flatnonzero(off & (threads["woken_at"] < threads["off_since"]))
            self.offcpu.note_waiting(
                waiting_of(
                    tids[asleep],
                    threads["tgid"][asleep],
                    self.offcpu.reasons_of_threads(threads[asleep]),
                    np.zeros(len(asleep), np.uint64),
                    np.maximum(clock - since[asleep], 0),
                    self._identities,
                ),
                now,
            )
        if self.kernel_locks and self._kernel_waits:
            keys, waits = read_steady(self._kernel_waits, self._buffers)
            waited = np.maximum(clock - waits["since"].astype(np.int64), 0)
            self.kernel_locks.note_waiting(
                waiting_of(keys["tid"], waits["tgid"], waits["type"], keys["lock"], waited, self._identities),
                now,
            )

    def _housekeeping(self, now: float) -> None:
        alive = {int(tgid) for tgid in self._tgids_alive}
        self._processes.keep(alive)
        names = {self._processes.name(tgid) for tgid in alive}
        for series in self._series:
            series.retire(now - self._limits.idle_seconds, lambda labels: labels[:2] in names)
        self.detail.expire(now)

    def metrics(self) -> bytes:
        """The block behind /metrics."""
        block = Block(self._limits.buckets_us, self._manifest.constants["SLOTS"])
        now = time.monotonic()
        for one in self._aggregates:
            one.export(block, now)
        self.own_cost.export(block, self._series)
        return block.pack()

    def details(self) -> bytes:
        """The block behind /api/v1."""
        return self.detail.pack(time.monotonic(), time.time())
