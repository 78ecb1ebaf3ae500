"""One sampling period after another: drain, flip, fold; once a second the waits that go on."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockd import snapshot
from lockd.advice import GO
from lockd.columns.structs import Columns
from lockd.kernel.lock_owners import KernelOwners
from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries
from lockd.names.client import Resolver
from lockd.names.labels.processes import Name, Processes
from lockd.names.labels.units import Units
from lockd.names.protocol import GoWaitsAnswer, OwnersAnswer
from lockd.sample.aggregates.contention import Detail
from lockd.sample.aggregates.folding import HELD_BACK_ROWS, Aggregates, Folding
from lockd.sample.aggregates.futex import FutexAggregates
from lockd.sample.aggregates.go_waits import GoMutexWaits
from lockd.sample.aggregates.identities import Filter, Identities
from lockd.sample.aggregates.kernel_holds import KernelHoldAggregates
from lockd.sample.aggregates.kernel_locks import KernelLockAggregates
from lockd.sample.aggregates.offcpu import OffcpuAggregates
from lockd.sample.aggregates.ongoing_waits import GoingOn
from lockd.sample.budget.cpu_budget import CpuBudget
from lockd.sample.budget.own_cost import OwnCost
from lockd.sample.budget.restraint import NAMER_SHARE
from lockd.sample.drain import FOLDED_ROWS, Collector
from lockd.sample.locks.deadlocks import Deadlocks
from lockd.sample.locks.lock_waits import LockWaits
from lockd.sample.locks.user_locks import UserLocks
from lockd.sample.saved_state import Saved
from lockd.sample.series.block import Block
from lockd.sample.series.limits import Budget, Limits
from lockd.sample.series.presence import Presence
from lockd.sample.series.series import Series

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 10.0
FEW_ROWS = 256
SAVE_SECONDS = 5.0
"""Between two times that what was counted is written; what was drained since then is kept as it is."""
FORMAT = 1
"""Of what is written; to be changed with it."""
FIRST_FOLD_SECONDS = 0.5
"""Folding and looking around, each once a second, thus come in different ticks."""


@dataclass(frozen=True)
class SamplerSettings:
    """What the sampler needs of the configuration."""

    limits: Limits = field(default_factory=Limits)
    filter: Filter = field(default_factory=Filter)
    cpu_budget: float | None = None
    """A share of the machine."""
    parked: Sequence[str] = ()
    """Patterns of the names of locks that threads park on, besides those that are known."""

    @property
    def namer_share(self) -> float:
        """Of the namer's time, for a process and for a user."""
        cpus = 1.0 if self.cpu_budget is None else self.cpu_budget * (os.cpu_count() or 1)
        return NAMER_SHARE * min(cpus, 1.0)


class Sampler:
    """Aggregates of everything that the programs of `manifest` count.

    `fds` are the descriptors of its maps and then of its functions; `procfs` the root of a
    proc file system. What it counts it leaves in `saved`.
    """

    def __init__(
        self,
        manifest: Manifest,
        fds: list[int],
        settings: SamplerSettings,
        procfs: Path = Path("/proc"),
        saved: Saved | None = None,
    ) -> None:
        self._manifest = manifest
        self._saved = saved or Saved()
        self._collector = Collector(manifest, fds, self._saved)
        functions = fds[len(manifest.maps) : len(manifest.maps) + len(manifest.functions)]
        self._processes = Processes(Units(procfs), procfs)
        self._identities = Identities(self._processes, settings.filter)
        share, blocked = settings.namer_share, self._collector.blocked_processes
        self._resolver = Resolver(procfs, blocked, settings.parked, share)
        self.detail = Detail(
            self._processes.thread_comm, FOLDED_ROWS + max(2 * self._collector.largest, HELD_BACK_ROWS)
        )
        self._limits = settings.limits
        self._presence = Presence()
        self._user_locks: UserLocks | None = None
        self._go_waits: GoMutexWaits | None = None
        self.futex: FutexAggregates | None = None
        self.offcpu: OffcpuAggregates | None = None
        self.kernel_locks: KernelLockAggregates | None = None
        self.kernel_holds: KernelHoldAggregates | None = None
        budget = Budget(settings.limits)
        shared = (manifest, settings.limits, budget, self.detail)
        if "futex" in self._collector.capacities:
            assert self._collector.known_locks
            assert self._collector.hotspots
            self._user_locks = UserLocks(
                self._resolver,
                self._collector.known_locks,
                self._collector.hotspots,
                manifest.enums["futex_kind"],
                self._may_be_wanted,
                manifest.constants["CAPTURED_AGAIN_NS"],
            )
            self.futex = FutexAggregates(*shared, self._user_locks)
            self._go_waits = GoMutexWaits(budget, self._name_of)
        if "offcpu" in self._collector.capacities:
            self.offcpu = OffcpuAggregates(*shared, self._processes)
        if "kernel_locks" in self._collector.capacities:
            self.kernel_locks = KernelLockAggregates(*shared, self._resolver)
        if "kernel_holds" in self._collector.capacities:
            self.kernel_holds = KernelHoldAggregates(*shared, self._resolver, self._processes)
        self._going_on = GoingOn(manifest, self._collector, self._identities, self._aggregates)
        self._lock_waits = LockWaits(manifest, self._user_locks, self.detail)
        self._deadlocks = Deadlocks(
            self._resolver.ask,
            KernelOwners.from_manifest(manifest, functions).owner,
            self._lock_waits.about,
            lambda tgid: self._identities.of_process(tgid, 0),
            self._processes.thread_comm,
        )
        self.cpu_budget = CpuBudget(settings.cpu_budget, manifest, self._collector, self._resolver)
        self.own_cost = OwnCost(
            manifest,
            self._collector,
            [(program, fd) for (program, _), fd in zip(manifest.functions, functions, strict=True)],
            self._resolver,
            self.cpu_budget.exporter,
            procfs,
        )
        self._alive: Columns = np.empty(0, np.uint32)
        self._last_seen = self._alive
        self._folding = Folding(
            self._collector,
            self._aggregates,
            self._identities,
            self._user_locks,
            self._look_for_refused,
            manifest.constants["OF_PROCESS"],
        )
        self._only_drains = False
        """Whether the last tick left the folding to the next."""
        self._next_second = self._next_housekeeping = self._next_save = 0.0
        self._next_fold = time.monotonic() + FIRST_FOLD_SECONDS

    def reload(self, settings: SamplerSettings) -> None:
        """Go on with others, of which `parked` and the bounds on series are the same.

        What was drained so far is counted as before, but for futex calls that wait for their lock's name.
        """
        self.fold()
        self._limits = settings.limits
        for series in self._series:
            series.keep_windows(dict(settings.limits.windows))
        self._identities.want(settings.filter)
        if self._user_locks:
            advice = self._user_locks.advice.items()
            self._user_locks.advice = {tgid: one for tgid, one in advice if self._is_wanted(tgid)}
        self.cpu_budget.change(settings.cpu_budget)
        self._resolver.reload(settings.namer_share)
        self.save()

    def take_over(self) -> None:
        """Go on with maps that another sampler has used, and with what it has counted, as far as it wrote it.

        If what it wrote makes no sense that raises an exception, whichever, and this sampler is of no use:
        another one has to begin, with a file of its own.
        """
        self._collector.forget_names()
        if block := self._saved.read():
            self._restore(*snapshot.unpack(block))
        self.own_cost.interrupted_drains += self._saved.is_draining
        self.save()  # so that this is written before what tells of it is changed
        self._saved.is_draining = False

    def save(self, is_end: bool = False) -> None:
        """Leave what was counted, and how far, for the next sampler; `is_end`: no more will be counted."""
        self._next_save = time.monotonic() + SAVE_SECONDS
        self.own_cost.read()
        if not self._saved.is_kept:
            return
        try:
            self._saved.write(self._packed(is_end))
        except OSError as error:
            log.warning("what was counted is not kept for the next start: %s", error.strerror or error)
        for backlog in self._collector.backlogs.values():
            backlog.forget_folded()

    def _packed(self, is_end: bool) -> bytes:
        first, undecided = self._folding.save()
        arrays = {f"undecided {name}": array for name, array in undecided.items()}
        heads = {}
        for series in self._series:
            heads[series.family], columns = series.save()
            arrays |= {f"{series.family} {name}": array for name, array in columns.items()}
        head = {
            "form": self._form,
            "is_end": is_end,
            "first": first,
            "series": heads,
            "own_cost": self.own_cost.save(),
            "restraint_seconds": self.cpu_budget.restraint.seconds,
            "deadlocks": self._deadlocks.save(),
            "go_waits": self._go_waits.save() if self._go_waits else [],
            "ahead": self.kernel_holds.ahead.save() if self.kernel_holds else [],
            "abandoned": self._collector.abandoned,
        }
        return snapshot.pack(head, arrays)

    def _restore(self, head: dict[str, Any], arrays: dict[str, memoryview]) -> None:
        """Raises ValueError if it is of another form."""
        if head["form"] != self._form:
            raise ValueError(
                "what was counted was left by another version of lockd, or with other windows, buckets or"
                " bounds on series"
            )
        of = {name: np.asarray(array) for name, array in arrays.items()}

        def named(prefix: str) -> dict[str, Columns]:
            begin = f"{prefix} "
            return {name.removeprefix(begin): array for name, array in of.items() if name.startswith(begin)}

        self._folding.restore(head["first"], named("undecided"))
        now = time.monotonic()
        for series in self._series:
            series.restore(head["series"][series.family], named(series.family), now)
        self.own_cost.restore(head["own_cost"], head["is_end"])
        self._folding.tick = self.own_cost.ticks
        self.cpu_budget.restraint.seconds = head["restraint_seconds"]
        self._deadlocks.restore(head["deadlocks"])
        if self._go_waits:
            self._go_waits.restore(head["go_waits"])
        if self.kernel_holds:
            self.kernel_holds.ahead.restore(head["ahead"])
        self._collector.abandoned = head["abandoned"]

    @property
    def _form(self) -> list[Any]:
        """What tells whether a sampler can go on with what another one has left."""
        limits = self._limits
        bounds = [limits.max_lines, limits.top_locks, list(limits.buckets_us)]
        return [FORMAT, bounds, {series.family: series.form for series in self._series}]

    def _may_be_wanted(self, tgid: int) -> bool:
        """What a process was called that is gone already, only its events tell. One that is not wanted may
        have become another by exec."""
        if self._is_wanted(tgid):
            return True
        (_, comm), is_wanted = self._identities.of_process(tgid, time.monotonic_ns())
        return is_wanted or not comm

    def _is_wanted(self, tgid: int) -> bool:
        return self._identities.of_process(tgid, 0)[1]

    def _name_of(self, tgid: int) -> Name:
        return self._identities.of_process(tgid, 0)[0]

    @property
    def _aggregates(self) -> dict[str, Aggregates]:
        """By pair of maps."""
        every = {
            "futex": self.futex,
            "offcpu": self.offcpu,
            "kernel_locks": self.kernel_locks,
            "kernel_holds": self.kernel_holds,
        }
        return {name: one for name, one in every.items() if one}

    @property
    def _series(self) -> list[Series]:
        of_events = [series for one in self._aggregates.values() for series in one.series]
        return [*of_events, self._go_waits.series] if self._go_waits else of_events

    def tick(self) -> None:
        """Drain what was counted in the last period. Fold it, and look around, once a second each.

        What is too much to be folded at once is folded over the next ticks.
        """
        now = time.monotonic()
        if not self._collector.has_room:
            while not self._collector.has_room_once_saved:
                self._folding.some()
            self.save()
        kept = self._collector.kept_rows
        self.own_cost.ticks += self._collector.collect()
        self._folding.tick = self.own_cost.ticks
        # To drain so many is work enough for a tick, but not twice in a row: they have to be folded too.
        self._only_drains = not self._only_drains and self._collector.kept_rows - kept > FOLDED_ROWS
        is_second = now >= self._next_second
        captures = self._collector.captures()
        if captures or is_second or not self._resolver.is_idle:
            self._exchange_names(captures, now)
        self.cpu_budget.look(now)
        if self._collector.kept_rows > FOLDED_ROWS:
            if not self._only_drains:
                self._folding.some()
        elif now >= self._next_fold:
            self._next_fold = now + self.cpu_budget.look_around_seconds
            self.fold()
        if is_second:
            self._next_second = now + self.cpu_budget.look_around_seconds
            self._each_second(now)
        elif time.monotonic_ns() >= self._deadlocks.look_at:
            self._look_for_deadlocks(self._collector.threads(), self._collector.kernel_waits())
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_SECONDS
            self._housekeeping(now)
        if now >= self._next_save:
            self.save()

    def _exchange_names(self, captures: list[Entries], now: float) -> None:
        """Ask what the locks are that threads were first seen to block on, and take answers."""
        if self._user_locks:
            for keys, values in captures:
                self._user_locks.capture(keys, values, now)
            self.own_cost.captures_refused = self._user_locks.refused
        for answer in self._resolver.answers():
            if isinstance(answer, OwnersAnswer):
                self._deadlocks.answered(answer)
            elif isinstance(answer, GoWaitsAnswer):
                if self._go_waits:
                    self._go_waits.note(answer, now)
            elif answer.is_user and self._user_locks:
                if self._user_locks.answer(answer):
                    self._deadlocks.look_soon()
            elif not (self.kernel_locks and self.kernel_locks.sites.answer(answer)) and self.detail.held:
                self.detail.held.name(answer)

    def fold(self) -> None:
        """Add all that was drained to the aggregates, but for what can be told better in a moment."""
        self._folding.all()

    def has_counted(self, tick: int) -> bool:
        """Whether all that was drained up to that tick is in the aggregates, under its final names."""
        if self.own_cost.ticks < tick:
            return False
        self._fold_for_exporter()
        return self._folding.has_decided(tick)

    def _fold_for_exporter(self) -> None:
        """Many rows had to be folded anyway. With few it is the folding itself that costs, for who asks."""
        is_extra = self._collector.kept_rows <= FEW_ROWS
        with self.cpu_budget.answering() if is_extra else contextlib.nullcontext():
            self.fold()

    def _look_for_refused(self, keys: Columns) -> None:
        """Threads among these futex calls that were refused a lock, as they would wait for ever."""
        refused = self._lock_waits.refused(keys, errno.EDEADLK)
        self._deadlocks.refused(*refused, time.monotonic_ns())

    def _each_second(self, now: float) -> None:
        threads, in_kernel = self._going_on.note(now, self.cpu_budget.has_detail)
        self._last_seen = np.unique(threads[1]["tgid"])
        self._alive = np.union1d(self._alive, self._last_seen)
        self._look_for_deadlocks(threads, in_kernel)

    def _look_for_deadlocks(self, threads: Entries, in_kernel: Entries | None) -> None:
        self._deadlocks.look(self._lock_waits.now(threads, in_kernel), time.monotonic_ns())

    def _housekeeping(self, now: float) -> None:
        # Of all looks since the last time: one does not see the threads that are being switched as it looks.
        alive, self._alive = set(self._alive.tolist()), self._last_seen
        self._processes.keep(alive)
        # To those that are not wanted any more, series belong as to processes that have ended.
        names = (self._identities.of_process(tgid, 0) for tgid in alive)
        self._presence.note({name for name, is_wanted in names if is_wanted}, now)
        for series in self._series:
            series.rearrange(self._presence, self._limits.idle_seconds, now)
        self.detail.expire(now)
        if self._user_locks:
            self._user_locks.keep(alive, now)
        if self._user_locks and self._go_waits:
            self._go_waits.keep(alive & self._user_locks.advice.keys())
            go = (tgid for tgid, advice in self._user_locks.advice.items() if advice == GO)
            if question := self._go_waits.question(go):
                self._resolver.ask(question)
        if self.kernel_holds and (abandoned := self.kernel_holds.abandoned()):
            self._collector.forget_holding(*abandoned)
            self._next_save = now  # the programs' map does not tell of them any more

    def metrics(self) -> bytes:
        """The block behind /metrics."""
        self._fold_for_exporter()
        with self.cpu_budget.answering():
            self.save()  # whatever happens now, no counter will be less than is told here
            return self._metrics()

    def _metrics(self) -> bytes:
        slots = self._manifest.constants["SLOTS"]
        block = Block(self._limits.buckets_us, slots, self.own_cost.exporters_seconds)
        now = time.monotonic()
        for one in self._aggregates.values():
            one.export(block, now)
        self.own_cost.undecided_calls = self._folding.undecided_calls
        if self._user_locks and self._go_waits:
            self._user_locks.export_advice(block, self._name_of)
            self._go_waits.export(block)
        self._deadlocks.export(block)
        self.own_cost.export(block, self._series)
        self.cpu_budget.export(block)
        return block.pack()

    def close(self) -> None:
        """End the process that names are asked of."""
        self._resolver.close()

    def details(self) -> bytes:
        """The block behind /api/v1."""
        self._fold_for_exporter()
        with self.cpu_budget.answering():
            wall, now = time.time(), time.monotonic()
            advice = self._user_locks.advice if self._user_locks else {}
            tables, arrays = self.detail.tables(now, self._deadlocks.holders, advice)
            self._deadlocks.add_to(tables, arrays, time.monotonic_ns(), wall)
            return snapshot.pack({"tables": tables, "time": wall, "monotonic": now}, arrays)
