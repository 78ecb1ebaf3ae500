"""One sampling period after another: flip, drain, fold; once a second the waits that go on."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockd import snapshot
from lockd.manifest import Manifest
from lockd.names.messages import OwnersAnswer
from lockd.names.processes import Processes
from lockd.names.resolver import Resolver
from lockd.names.units import Units
from lockd.sample import structs
from lockd.sample.block import Block
from lockd.sample.collect import Collector
from lockd.sample.cpu_budget import CpuBudget
from lockd.sample.deadlocks import Deadlocks
from lockd.sample.detail import Detail
from lockd.sample.futex import FutexAggregates
from lockd.sample.identities import Filter, Identities
from lockd.sample.inflight import waiting_of
from lockd.sample.kernel_holds import KernelHoldAggregates
from lockd.sample.kernel_locks import KernelLockAggregates
from lockd.sample.kernel_owners import KernelOwners
from lockd.sample.limits import Budget, Limits
from lockd.sample.lock_waits import LockWaits
from lockd.sample.offcpu import OffcpuAggregates
from lockd.sample.own_cost import OwnCost
from lockd.sample.pairs import Columns, Rows
from lockd.sample.series import Series
from lockd.sample.user_locks import UserLocks
from lockd.sample.window import Stacks, windows_of

log = logging.getLogger(__name__)

NS = 1_000_000_000
HOUSEKEEPING_SECONDS = 10.0
FOLDED_ROWS = 4096
HELD_BACK_ROWS = 20_000
"""So many rows are folded at once, without waiting for the second to end."""


@dataclass(frozen=True)
class SamplerSettings:
    """What the sampler needs of the configuration."""

    limits: Limits = field(default_factory=Limits)
    filter: Filter = field(default_factory=Filter)
    cpu_budget: float | None = None
    """A share of the machine."""


Aggregates = FutexAggregates | OffcpuAggregates | KernelLockAggregates | KernelHoldAggregates


class Sampler:
    """Aggregates of everything that the programs of `manifest` count.

    `fds` are the descriptors of its maps and then of its functions; `procfs` the root of a
    proc file system.
    """

    def __init__(
        self, manifest: Manifest, fds: list[int], settings: SamplerSettings, procfs: Path = Path("/proc")
    ) -> None:
        self._manifest = manifest
        self._collector = Collector(manifest, fds)
        functions = fds[len(manifest.maps) : len(manifest.maps) + len(manifest.functions)]
        self._processes = Processes(Units(procfs), procfs)
        self._identities = Identities(self._processes, settings.filter)
        self._resolver = Resolver(procfs, self._collector.blocked_processes)
        self.detail = Detail(self._processes.thread_comm, FOLDED_ROWS + 2 * self._collector.largest)
        self._limits = settings.limits
        self._user_locks: UserLocks | None = None
        self._undecided: list[Rows] = []
        """Rows of futex calls that are not counted yet."""
        self.futex: FutexAggregates | None = None
        self.offcpu: OffcpuAggregates | None = None
        self.kernel_locks: KernelLockAggregates | None = None
        self.kernel_holds: KernelHoldAggregates | None = None
        shared = (manifest, settings.limits, Budget(settings.limits), self.detail)
        if "futex" in self._collector.capacities:
            assert self._collector.known_locks
            self._user_locks = UserLocks(
                self._resolver,
                self._collector.known_locks,
                [name.removeprefix("KIND_").lower() for name in manifest.enums["futex_kind"]],
                self._may_be_wanted,
            )
            self.futex = FutexAggregates(*shared, self._user_locks)
        if "offcpu" in self._collector.capacities:
            self.offcpu = OffcpuAggregates(*shared, self._processes)
        if "kernel_locks" in self._collector.capacities:
            self.kernel_locks = KernelLockAggregates(*shared, self._resolver)
        if "kernel_holds" in self._collector.capacities:
            self.kernel_holds = KernelHoldAggregates(*shared, self._resolver, self._processes)
        self._lock_waits = LockWaits(manifest, self._user_locks, self.detail)
        self._deadlocks = Deadlocks(
            self._resolver.ask,
            KernelOwners.of(manifest, functions).owner,
            self._lock_waits.about,
            lambda tgid: self._identities.of_process(tgid, 0),
            self._processes.thread_comm,
        )
        self.own_cost = OwnCost(
            manifest,
            self._collector,
            [(program, fd) for (program, _), fd in zip(manifest.functions, functions, strict=True)],
            self._resolver,
            procfs,
        )
        self.cpu_budget = CpuBudget(settings.cpu_budget, manifest, self._collector, self._resolver)
        self._tgids_alive: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self._next_second = self._next_housekeeping = 0.0

    def _may_be_wanted(self, tgid: int) -> bool:
        """What a process was called that is gone already, only its events tell."""
        (_, comm), is_wanted = self._identities.of_process(tgid, 0)
        return is_wanted or not comm

    @property
    def _aggregates(self) -> list[Aggregates]:
        return [one for one in (self.futex, self.offcpu, self.kernel_locks, self.kernel_holds) if one]

    @property
    def _series(self) -> list[Series]:
        return [series for one in self._aggregates for series in one.series]

    def tick(self) -> None:
        """Drain what was counted in the last period; fold it and look around once a second."""
        now = time.monotonic()
        self.own_cost.ticks += self._collector.collect()
        self._exchange_names(now)
        self.cpu_budget.look(now)
        if now >= self._next_second:
            self._next_second = now + self.cpu_budget.look_around_seconds
            self.fold()
            self._each_second(now)
        else:
            if self._collector.kept_rows >= FOLDED_ROWS:
                self.fold()
            if time.monotonic_ns() >= self._deadlocks.look_at:
                self._look_for_deadlocks(self._collector.threads(), self._collector.kernel_waits())
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_SECONDS
            self._housekeeping(now)

    def _exchange_names(self, now: float) -> None:
        """Ask what the locks are that threads were first seen to block on, and take answers."""
        captures = self._collector.captures()
        if self._user_locks:
            for keys, values in captures:
                self._user_locks.capture(keys, values, now)
            self.own_cost.captures_refused = self._user_locks.refused
        for answer in self._resolver.answers():
            if isinstance(answer, OwnersAnswer):
                self._deadlocks.answered(answer)
            elif answer.is_user and self._user_locks:
                if self._user_locks.answer(answer):
                    self._deadlocks.look_soon()
            elif not (self.kernel_locks and self.kernel_locks.sites.answer(answer)) and self.detail.held:
                self.detail.held.name(answer)

    def fold(self) -> None:
        """Add all that was drained to the aggregates, but for what can be told better in a moment."""
        now = time.monotonic()
        for series in self._series:
            series.advance(now)
        taken = self._collector.take()
        if "futex" in taken:
            refused = self._lock_waits.refused(taken["futex"][0], errno.EDEADLK)
            self._deadlocks.refused(*refused, time.monotonic_ns())
        self._hold_back(taken, now)
        stacks = Stacks(*taken["stacks"]) if "stacks" in taken else Stacks.none()
        for name, aggregates in (
            ("futex", self.futex),
            ("offcpu", self.offcpu),
            ("kernel_locks", self.kernel_locks),
            ("kernel_holds", self.kernel_holds),
        ):
            for pair in (name, f"{name}_over"):
                if pair not in taken or not aggregates:
                    continue
                overflowed, of_process = pair.endswith("_over"), self._manifest.constants["OF_PROCESS"]
                for window in windows_of(*taken[pair], self._identities, overflowed, of_process):
                    if isinstance(aggregates, KernelLockAggregates):
                        aggregates.fold(window, stacks, now)
                    else:
                        aggregates.fold(window, now)

    def _hold_back(self, taken: dict[str, Rows], now: float) -> None:
        """Keep the futex calls for later whose locks are being looked up, and add those kept before."""
        parts = [*self._undecided, *([taken.pop("futex")] if "futex" in taken else [])]
        self._undecided = []
        if not parts or not self._user_locks:
            return
        keys, values = (structs.concatenate([part[at] for part in parts]) for at in (0, 1))
        later = self._user_locks.is_undecided(values["who"]["tgid"], keys["uaddr"], keys["kind"], now)
        later[np.flatnonzero(later)[:-HELD_BACK_ROWS]] = False  # the oldest come first
        self.own_cost.undecided_calls = int(values["calls"][later].sum())
        if later.any():
            self._undecided = [_chosen(keys, values, later)]
            keys, values = _chosen(keys, values, ~later)
        if len(keys):
            taken["futex"] = keys, values

    def _each_second(self, now: float) -> None:
        for series in self._series:
            series.reconsider()
        self._note_waiting(now)

    def _note_waiting(self, now: float) -> None:
        """The waits that go on: of threads that are off the CPU, and for kernel locks."""
        clock = time.monotonic_ns()
        tids, threads = self._collector.threads()
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
                    self.cpu_budget.has_detail,
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
                    self.cpu_budget.has_detail,
                ),
                now,
            )
        in_kernel = self._collector.kernel_waits()
        if self.kernel_locks and in_kernel:
            keys, waits = in_kernel
            waited = np.maximum(clock - waits["since"].astype(np.int64), 0)
            self.kernel_locks.note_waiting(
                waiting_of(
                    keys["tid"],
                    waits["tgid"],
                    waits["type"],
                    keys["lock"],
                    waited,
                    self._identities,
                    self.cpu_budget.has_detail,
                ),
                now,
            )
        self._look_for_deadlocks((tids, threads), in_kernel)
        holding = self._collector.kernel_holding()
        if self.kernel_holds and holding and in_kernel:
            clock = time.monotonic_ns()  # none of them was taken later
            self.kernel_holds.note_holding(*holding, in_kernel[0], self._identities, clock)

    def _look_for_deadlocks(self, threads: Rows, in_kernel: Rows | None) -> None:
        self._deadlocks.look(self._lock_waits.now(threads, in_kernel), time.monotonic_ns())

    def _housekeeping(self, now: float) -> None:
        alive = {int(tgid) for tgid in self._tgids_alive}
        self._processes.keep(alive)
        names = {self._processes.name(tgid) for tgid in alive}
        for series in self._series:
            series.retire(now - self._limits.idle_seconds, lambda labels: labels[:2] in names)
        self.detail.expire(now)
        if self._user_locks:
            self._user_locks.keep(alive, now)
        if self.kernel_holds and (abandoned := self.kernel_holds.abandoned()):
            self._collector.forget_holding(*abandoned)

    def metrics(self) -> bytes:
        """The block behind /metrics."""
        self.fold()
        block = Block(self._limits.buckets_us, self._manifest.constants["SLOTS"])
        now = time.monotonic()
        for one in self._aggregates:
            one.export(block, now)
        self._deadlocks.export(block)
        self.own_cost.export(block, self._series)
        self.cpu_budget.export(block)
        return block.pack()

    def close(self) -> None:
        """End the process that names are asked of."""
        self._resolver.close()

    def details(self) -> bytes:
        """The block behind /api/v1."""
        self.fold()
        wall = time.time()
        tables, arrays = self.detail.tables(time.monotonic(), self._deadlocks.holders)
        self._deadlocks.add_to(tables, arrays, time.monotonic_ns(), wall)
        return snapshot.pack({"tables": tables, "time": wall}, arrays)


def _chosen(keys: Columns, values: Columns, mask: npt.NDArray[np.bool_]) -> Rows:
    at = np.flatnonzero(mask)
    return structs.take(keys, at), structs.take(values, at)
