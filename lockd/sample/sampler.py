"""The sampler: each tick drains the kernel's maps; rows are folded and ongoing waits read less often.

Sampler owns the aggregates of everything that the programs count, saves them for the next start, and makes of
them the blocks with which the exporter answers requests.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from lockd import messages
from lockd.advice import GO
from lockd.columns.structs import Columns
from lockd.kernel.lock_owners import KernelOwners
from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries
from lockd.kernel.rings import RingReader
from lockd.names.client import Resolver
from lockd.names.labels.processes import Name, Processes
from lockd.names.labels.units import Units
from lockd.names.protocol import GoWaitsAnswer, HolderAnswer, OwnersAnswer, StackAnswer
from lockd.process.clock import NS
from lockd.sample.aggregates.bottlenecks import bottlenecks_table
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.aggregates.futex import FutexAggregates
from lockd.sample.aggregates.go_waits import GoMutexWaits
from lockd.sample.aggregates.identities import Filter, Identities
from lockd.sample.aggregates.kernel_holds import KernelHoldAggregates
from lockd.sample.aggregates.kernel_locks import KernelLockAggregates
from lockd.sample.aggregates.offcpu import OffcpuAggregates
from lockd.sample.aggregates.ongoing import Moment
from lockd.sample.aggregates.wait_stacks import WaitStacks
from lockd.sample.budget.cpu_budget import CpuBudget
from lockd.sample.budget.restraint import NAMER_SHARE
from lockd.sample.drain import FOLDED_ROWS, Collector
from lockd.sample.folding import HELD_BACK_ROWS, MOST_ROWS, Aggregates, Folding
from lockd.sample.locks.deadlocks import Deadlocks
from lockd.sample.locks.releases import Releases
from lockd.sample.locks.runtimes import CPYTHON, HOTSPOT, RuntimePlaces
from lockd.sample.locks.user_locks import UserLocks
from lockd.sample.locks.waits import LockWaitReader, ThreadStates
from lockd.sample.own_cost import OwnCost
from lockd.sample.saved_state import SavedState
from lockd.sample.series.block import Block
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import Presence
from lockd.sample.series.series import Series
from lockd.sample.series.unit_info import UnitInfo, units_of
from lockd.sample.wait_samples import WaitSamples

log = logging.getLogger(__name__)

WINDOWS = 3
"""So many calls of Collector.drain() that return True drain all events before a Collector.end_window(): their
window ends, a grace period passes (lockd/kernel/pairs.py), and the window is drained."""
HOUSEKEEPING_SECONDS = 10.0
FEW_ROWS = 256
"""Up to this number of rows, a fold costs hardly more than its fixed part."""
LONGEST_UNFOLDED = 10.0
"""Seconds after which rows are folded even if they are few, or are all about lockd and kernel threads."""
SAVE_SECONDS = 5.0
"""Most seconds from a fold until its counts are saved. Rows that are not folded yet need no saving: they have
been in the file since they were drained (Backlog)."""
FORMAT = 4
"""Version of the saved counts; to be raised when their form changes."""
FIRST_FOLD_SECONDS = 0.5
"""Seconds from the start to the first fold. Folds and surveys, each once a second, then come in different
ticks."""


@dataclass(frozen=True)
class SamplerSettings:
    """The part of the configuration that the sampler needs."""

    limits: Limits = field(default_factory=Limits)
    filter: Filter = field(default_factory=Filter)
    cpu_budget: float | None = None
    """The share of the machine that lockd may take; None for no limit."""
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    """The number of processors of the machine. A virtual machine can get more of them while it runs."""
    parked: Sequence[str] = ()
    """Patterns for names of locks that idle threads park on, besides the locks that lockd knows."""
    samples_per_second: int = 20
    """About how many releases of locks are sampled in a second on a busy host, if the programs sample any."""
    waits_per_second: int = 20
    """About how many waits off the CPU are sampled in a second on a busy host, if the programs sample any."""

    @property
    def namer_share(self) -> float:
        """The part of one CPU's time that the namer may spend on any one process, or on any one user."""
        cpus = 1.0 if self.cpu_budget is None else self.cpu_budget * self.cpus
        return NAMER_SHARE * min(cpus, 1.0)


class Sampler:
    """Counts everything that the programs of `manifest` report.

    `fds` are the descriptors of the manifest's maps, then of its functions; `procfs` is the root of a proc
    file system. The counts are saved in `saved`.
    """

    def __init__(
        self,
        manifest: Manifest,
        fds: list[int],
        settings: SamplerSettings,
        procfs: Path = Path("/proc"),
        saved: SavedState | None = None,
    ) -> None:
        self._manifest = manifest
        self._saved = saved or SavedState()
        self._collector = Collector(manifest, fds, self._saved)
        functions = fds[len(manifest.maps) : len(manifest.maps) + len(manifest.functions)]
        self._units = Units(procfs)
        self._processes = Processes(self._units, procfs)
        self._identities = Identities(self._processes, settings.filter)
        share, blocked = settings.namer_share, self._collector.blocked_processes
        self._resolver = Resolver(procfs, blocked, settings.parked, share)
        # One survey can add two waits of each thread: for a lock, and off the CPU.
        waits = 2 * self._collector.capacities["threads"]
        at_once = max(2 * self._collector.largest, HELD_BACK_ROWS, waits)
        self.contention = ContentionTables(self._processes.thread_comm, MOST_ROWS + at_once)
        self._limits = settings.limits
        self._presence = Presence()
        self._user_locks: UserLocks | None = None
        self._go_waits: GoMutexWaits | None = None
        self.futex: FutexAggregates | None = None
        self.offcpu: OffcpuAggregates | None = None
        self.kernel_locks: KernelLockAggregates | None = None
        self.kernel_holds: KernelHoldAggregates | None = None
        budget = LineBudget(settings.limits)
        self._unit_info = UnitInfo(budget)
        shared = (manifest, settings.limits, budget, self.contention)
        hotspots, cpythons = self._collector.hotspots, self._collector.cpythons
        self._hotspots = RuntimePlaces(hotspots, HOTSPOT) if hotspots else None
        self._cpythons = RuntimePlaces(cpythons, CPYTHON) if cpythons else None
        if "futex" in self._collector.capacities:
            assert self._collector.known_locks
            assert self._hotspots
            self._user_locks = UserLocks(
                self._resolver,
                self._collector.known_locks,
                self._hotspots,
                self._cpythons,
                manifest.enums["futex_kind"],
                self._may_be_wanted,
                manifest.constants["CAPTURED_AGAIN_NS"],
                procfs=procfs,
            )
            self.futex = FutexAggregates(*shared, self._user_locks)
            self._go_waits = GoMutexWaits(budget, self._name_of)
        if "offcpu" in self._collector.capacities:
            self.offcpu = OffcpuAggregates(*shared, self._processes)
        if "kernel_locks" in self._collector.capacities:
            self.kernel_locks = KernelLockAggregates(*shared, self._resolver)
        if "kernel_holds" in self._collector.capacities:
            self.kernel_holds = KernelHoldAggregates(*shared, self._resolver, self._processes)
        self._thread_states = ThreadStates(manifest)
        self._lock_waits = LockWaitReader(manifest, self._user_locks)
        self._deadlocks = Deadlocks(
            self._resolver.ask,
            KernelOwners.from_manifest(manifest, functions).owner,
            self.contention.describe_lock,
            self._identities.identify_process,
            self._processes.thread_comm,
        )
        self.cpu_budget = CpuBudget(
            settings.cpu_budget,
            self._collector.control,
            self._collector.program_times,
            self._resolver,
            settings.cpus,
        )
        self.own_cost = OwnCost(
            manifest,
            self._collector,
            [(program, fd) for (program, _), fd in zip(manifest.functions, functions, strict=True)],
            self._resolver,
            self.cpu_budget.exporter,
            procfs,
        )
        self._releases = self._sampled_releases(manifest, settings.samples_per_second)
        self.own_cost.releases = self._releases
        self._wait_samples = self._sampled_waits(manifest, settings.waits_per_second)
        self.own_cost.wait_samples = self._wait_samples
        self._alive: Columns = np.empty(0, np.uint32)
        """Processes that had a thread in any survey since the last housekeeping."""
        self._last_seen = self._alive
        """Processes that had a thread in the last survey."""
        self._folding = Folding(
            self._collector,
            self._aggregates,
            self._identities,
            self._user_locks,
            self._look_for_refused,
            manifest.constants["OF_PROCESS"],
        )
        self._has_many_rows = self._only_drains = False
        """Whether there are so many unfolded rows that every tick folds some, and whether this tick folds
        none because it has just drained many."""
        self._next_survey = self._next_housekeeping = self._next_save = 0.0
        self._surveyed = -inf
        """When a whole survey (see _survey()) was last made, by the monotonic clock in seconds."""
        self._surveyed_window = self._collector.control.number
        """The number of the window in which a survey was last made."""
        self._next_fold = time.monotonic() + FIRST_FOLD_SECONDS
        self._folded = -inf
        """When all rows were last folded, by the monotonic clock in seconds."""

    def _sampled_releases(self, manifest: Manifest, per_second: int) -> Releases | None:
        """The sampled releases of locks; None if the programs sample none."""
        collector = self._collector
        if not collector.releases or not collector.refused_releases:
            return None
        return Releases(
            collector.releases,
            collector.release_record,
            collector.kernel_release_record,
            manifest.enums,
            manifest.constants,
            collector.refused_releases,
            collector.control,
            self._resolver,
            self._identities.identify_thread,
            per_second,
            time.monotonic(),
        )

    def _sampled_waits(self, manifest: Manifest, per_second: int) -> WaitSamples | None:
        """The sampled waits off the CPU; None if the programs sample none."""
        collector = self._collector
        if not collector.wait_samples or not collector.refused_waits or not self.offcpu:
            return None
        return WaitSamples(
            collector.wait_samples,
            collector.wait_sample_record,
            manifest.enums,
            manifest.constants,
            collector.refused_waits,
            collector.control,
            self._resolver,
            self._cpythons,
            self._identities.identify_thread,
            self._processes.comm,
            per_second,
            time.monotonic(),
        )

    def reload(self, settings: SamplerSettings) -> None:
        """Take other settings, which differ in the filter, budget, `cpus`, `idle_seconds` and windows only.

        There must be no more windows than at the start. Rows that are drained already are counted by the old
        settings, except futex calls that are held back until their locks have names.
        """
        self.fold()
        self._limits = settings.limits
        for series in self._series:
            series.keep_windows(dict(settings.limits.windows))
        self._identities.set_filter(settings.filter)
        if self._user_locks:
            advice = self._user_locks.advice.items()
            self._user_locks.advice = {tgid: text for tgid, text in advice if self._is_wanted(tgid)}
        self.cpu_budget.set_budget(settings.cpu_budget, settings.cpus)
        self._resolver.reload(settings.namer_share)
        self.save()

    def follow_exporter(self, pid: int) -> None:
        """Note the process id of the exporter that runs from now on; 0 if none runs."""
        self.cpu_budget.exporter.follow(pid)
        self._collector.control.set_exporter(pid)

    def take_over(self) -> None:
        """Go on with the maps and the saved counts of another sampler.

        Any exception means that the saved counts make no sense. This sampler is then of no use: the caller
        has to begin another one with an empty file.
        """
        self._collector.forget_names()
        if block := self._saved.read():
            self._restore(*messages.unpack(block))
        self.own_cost.interrupted_drains += self._saved.is_draining
        self.save()  # the interrupted drain must be saved before its mark is removed
        self._saved.is_draining = False

    def save(self, is_end: bool = False) -> None:
        """Save the counts for the next start, with the number of each pair's first row that is not in them.

        `is_end` says that nothing is counted afterwards.
        """
        self._next_save = inf
        if is_end:
            if self._releases:
                self._releases.refuse_waiting()
            if self._wait_samples:
                self._wait_samples.refuse_waiting()
        self.own_cost.read()
        if not self._saved.has_file:
            return
        try:
            self._saved.write(self._packed(is_end))
        except OSError as error:
            log.warning("the counts cannot be saved for the next start: %s", error.strerror or error)
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
            "ahead": self.kernel_holds.early.save() if self.kernel_holds else [],
            "abandoned": self._collector.abandoned,
        }
        return messages.pack(head, arrays)

    def _restore(self, head: dict[str, Any], arrays: dict[str, memoryview]) -> None:
        """Take over saved counts. Raises ValueError if their form is not that of this sampler's counts."""
        if head["form"] != self._form:
            raise ValueError(
                "what was counted was left by another version of lockd, or with other windows, buckets or"
                " bounds on series"
            )

        def named(prefix: str) -> dict[str, Columns]:
            begin = f"{prefix} "
            return {
                name.removeprefix(begin): np.asarray(array)
                for name, array in arrays.items()
                if name.startswith(begin)
            }

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
            self.kernel_holds.early.restore(head["ahead"])
        self._collector.abandoned = head["abandoned"]

    @property
    def _form(self) -> list[Any]:
        """The form of the saved counts: a sampler can take over only counts of its own form."""
        limits = self._limits
        bounds = [limits.max_lines, limits.top_locks, list(limits.buckets_us)]
        return [FORMAT, bounds, {series.family: series.form for series in self._series}]

    def _may_be_wanted(self, tgid: int) -> bool:
        """Whether a process may pass the filter.

        The process may have another name since its last exec, so before it is left out its name is read from
        procfs again. True for a process that is gone, as only its events know its name.
        """
        if self._is_wanted(tgid):
            return True
        (_, comm), is_wanted = self._identities.identify_process(tgid, time.monotonic_ns())
        return is_wanted or not comm

    def _is_wanted(self, tgid: int) -> bool:
        return self._identities.identify_process(tgid, 0)[1]

    def _name_of(self, tgid: int) -> Name:
        return self._identities.identify_process(tgid, 0)[0]

    @property
    def _aggregates(self) -> dict[str, Aggregates]:
        """The aggregates of what is measured, by pair of maps."""
        aggregates = {
            "futex": self.futex,
            "offcpu": self.offcpu,
            "kernel_locks": self.kernel_locks,
            "kernel_holds": self.kernel_holds,
        }
        return {pair: of_pair for pair, of_pair in aggregates.items() if of_pair}

    @property
    def _series(self) -> list[Series]:
        of_events = [series for aggregates in self._aggregates.values() for series in aggregates.series]
        return [*of_events, self._go_waits.series] if self._go_waits else of_events

    def tick(self) -> None:
        """Drain what programs have written, exchange names with the namer; fold, survey and save if due.

        Rows that are too many for one tick are folded over the next ticks.
        """
        now = time.monotonic()
        is_survey_due = now >= self._next_survey
        self._drain()
        if self._releases:
            self._releases.read(now, self.own_cost.ticks)
        if self._wait_samples and self.offcpu:
            self._wait_samples.read(now, self.own_cost.ticks, self.offcpu.stacks.waits)
        self._exchange_names(now, is_survey_due)
        self.cpu_budget.judge_costs(now)
        self._fold_due_rows(now)
        if is_survey_due:
            self._next_survey = now + self.cpu_budget.survey_seconds
        is_housekeeping_due = now >= self._next_housekeeping
        if is_housekeeping_due and self._collector.unfolded_rows and not self._has_many_rows:
            self.fold()  # a wait that has just ended counts in the ranking, as it did when it was ongoing
        if is_housekeeping_due or (is_survey_due and self._may_find_news()):
            # Housekeeping needs the living processes, and ranks series also by waits that have not ended.
            self._survey(now, is_whole=is_housekeeping_due)
        elif time.monotonic_ns() >= self._deadlocks.next_check:
            threads, _ = self._collector.threads(self._thread_states.is_in_futex)
            self._look_for_deadlocks(threads, self._collector.kernel_waits())
        if is_housekeeping_due:
            self._keep_house(now)
        if now >= self._next_save:
            self.save()

    @property
    def wakeups(self) -> RingReader | None:
        """Readable once a program has ended a sleep(); None if no program can."""
        return self._collector.wakeups

    def sleep(self) -> float:
        """Have the programs wake the sampler, until awake(), when they write what cannot wait.

        Returns when the next tick is due even if they do not, by the monotonic clock in seconds: 0.0 if there
        is something to do that the next tick goes on with.
        """
        has_postponed = self._user_locks is not None and self._user_locks.has_postponed
        if self._has_many_rows or has_postponed or not self._resolver.is_idle:
            return 0.0
        rare = (self._next_survey, self._next_fold, self._next_housekeeping, self._next_save)
        return min(self._collector.sleep(), self._deadlocks.next_check / NS, *rare)

    def awake(self) -> None:
        """End a sleep()."""
        self._collector.awake()

    def _drain(self) -> None:
        """Drain what has been written. If the backlogs lack room for that, fold rows first."""
        if not self._collector.has_ended_window:
            self.own_cost.ticks += self._collector.drain()
            self._only_drains = False
            return
        if not self._collector.has_room:
            while not self._collector.has_room_once_saved:
                self._folding.fold_some(MOST_ROWS)
            self.save()
        before = self._collector.unfolded_rows
        self.own_cost.ticks += self._collector.drain()
        self._folding.tick = self.own_cost.ticks
        # A tick that has drained many rows folds none, but the next tick does: the rows must not pile up.
        unfolded = self._collector.unfolded_rows
        drained = unfolded - before
        self._has_many_rows = unfolded > FOLDED_ROWS
        self._only_drains = not self._only_drains and drained > FOLDED_ROWS

    def _fold_due_rows(self, now: float) -> None:
        """Fold some rows at once if there are many. Once a second, fold all if that is due, and count the
        samples."""
        if self._has_many_rows:
            if not self._only_drains:
                self._folding.fold_some()
                self._has_many_rows = self._collector.unfolded_rows > FOLDED_ROWS
                self._fold_samples(now)
                self._next_save = min(self._next_save, now + SAVE_SECONDS)
        elif now >= self._next_fold:
            self._next_fold = now + self.cpu_budget.survey_seconds
            if self._is_fold_due(now):
                self.fold()
            else:
                if self._collector.has_rows_of_processes:
                    self._folding.look_at_new_rows()
                self._fold_samples(now)

    def _is_fold_due(self, now: float) -> bool:
        """Whether all rows are to be folded, though nobody has asked for their counts.

        Calls are held back, and sampled releases are kept, for some seconds only. A kernel stack counts for
        later waits of its thread for the lock as well, so that it must not be kept for long.
        """
        if self._folding.undecided_calls or (self._releases and self._releases.has_waiting):
            return True
        are_many = self._collector.unfolded_rows > FEW_ROWS or self._collector.has_kernel_waits
        is_urgent = are_many and self._collector.has_rows_of_processes
        return is_urgent or now >= self._folded + LONGEST_UNFOLDED

    def _exchange_names(self, now: float, is_survey_due: bool) -> None:
        """Ask the namer about locks that were captured, and take its answers."""
        captures = self._collector.captures()
        has_postponed = self._user_locks is not None and self._user_locks.has_postponed
        if not captures and not has_postponed and not is_survey_due and self._resolver.is_idle:
            return
        if self._user_locks:
            self._user_locks.ask_captured(captures, now)
            self.own_cost.captures_refused = self._user_locks.refused_captures
        for answer in self._resolver.answers():
            if isinstance(answer, OwnersAnswer):
                self._deadlocks.take_holders(answer)
            elif isinstance(answer, HolderAnswer):
                if self._releases:
                    self._releases.note_answer(answer)
            elif isinstance(answer, StackAnswer):
                if self._wait_samples:
                    self._wait_samples.note_answer(answer, now)
            elif isinstance(answer, GoWaitsAnswer):
                if self._go_waits:
                    self._go_waits.note_answer(answer, now)
            elif answer.is_user and self._user_locks:
                if self._user_locks.note_answer(answer):
                    self._deadlocks.check_soon()
            elif (
                not (self.kernel_locks and self.kernel_locks.sites.note_answer(answer))
                and self.contention.holds
            ):
                self.contention.holds.set_name(answer)

    def fold(self) -> None:
        """Fold all drained rows, except futex calls whose locks are being looked up."""
        self._folded = now = time.monotonic()
        self._collector.has_rows_of_processes = False
        self._next_save = min(self._next_save, now + SAVE_SECONDS)
        self._folding.fold_all()
        self._fold_samples(now)

    def _fold_samples(self, now: float) -> None:
        """Count the sampled releases whose holders are known, except those of locks without a name yet, and
        the sampled waits whose stacks are known."""
        if self._wait_samples and self._wait_samples.has_waiting and self.offcpu:
            self.offcpu.stacks.add(self._wait_samples.take(now))
        if not self._releases or not self._releases.has_waiting:
            return
        releases = self._releases.take(now)
        for aggregates, in_kernel in ((self.futex, False), (self.kernel_locks, True)):
            of_its_locks = [release for release in releases if release.in_kernel == in_kernel]
            if aggregates and of_its_locks:
                later = aggregates.add_releases(of_its_locks, now)
                self._releases.give_back(later)

    def begin_settling(self) -> int:
        """Have all that has happened so far counted soon; return the tick to pass to has_counted()."""
        self._collector.end_window()
        return self.own_cost.ticks + WINDOWS

    def has_counted(self, tick: int) -> bool:
        """Fold, and return whether all rows that were drained and all samples that were read up to the tick
        `tick` are in the aggregates under their final names."""
        if self.own_cost.ticks < tick:
            return False
        self._fold_for_exporter()
        samples = (self._releases, self._wait_samples)
        are_samples_counted = all(of_sort is None or of_sort.has_counted(tick) for of_sort in samples)
        return are_samples_counted and self._folding.has_decided(tick)

    def _fold_for_exporter(self) -> None:
        """Fold all drained rows because the exporter asks.

        Many rows have to be folded anyway. Few rows could have been folded later, together with others, so
        the CPU time counts as the exporter's.
        """
        is_extra = self._collector.unfolded_rows <= FEW_ROWS
        with self.cpu_budget.charge_exporter() if is_extra else contextlib.nullcontext():
            self.fold()

    def _look_for_refused(self, keys: Columns) -> None:
        """Tell Deadlocks which threads were refused a lock because they would wait for ever (EDEADLK)."""
        if not self._manifest.counts_futex_calls:  # entries have results of calls only in mode `calls`
            return
        refused = self._lock_waits.find_refused(keys, errno.EDEADLK)
        self._deadlocks.note_refused(*refused, time.monotonic_ns())

    def _may_find_news(self) -> bool:
        """Whether a survey is needed before the exporter asks for one.

        It is needed if threads waited for locks at the last check for deadlocks, if threads may have begun to
        wait for locks since the last survey, or if holds of kernel locks are measured. Other waits are read
        when the exporter asks, and count in the maxima then.
        """
        return (
            self._deadlocks.has_waits
            or self.kernel_holds is not None
            or self._collector.has_wait_since(self._surveyed_window)
        )

    def _survey_for_exporter(self) -> None:
        """Read the ongoing waits because the exporter asks, unless a whole survey was made just before."""
        now = time.monotonic()
        if now >= self._surveyed + self.cpu_budget.survey_seconds:
            self._survey(now, is_whole=True)

    def _survey(self, now: float, is_whole: bool) -> None:
        """Read the ongoing waits, and look for deadlocks among those for locks.

        If `is_whole`, the numbers of ongoing futex waits and waits off the CPU are brought up to date too.
        Nobody needs these until the exporter asks.
        """
        self._surveyed_window = self._collector.control.number
        collector, clock = self._collector, time.monotonic_ns()
        threads, self._last_seen = collector.threads(None if is_whole else self._thread_states.is_in_futex)
        in_kernel = collector.kernel_waits()
        tables = threads, in_kernel, collector.kernel_holding()
        has_detail = self.cpu_budget.has_detail
        moment = Moment(self._identities, self._thread_states, *tables, clock, now, has_detail)
        for aggregates in self._aggregates.values():
            if is_whole or aggregates not in (self.futex, self.offcpu):
                aggregates.note_ongoing(moment)
        if self.futex and not is_whole:
            self.futex.look_at_locks(moment)
        if is_whole:
            self._surveyed = now
            if self._wait_samples:
                self._wait_samples.forget_ended_waits(threads)
        self._alive = np.union1d(self._alive, self._last_seen)
        self._look_for_deadlocks(threads, in_kernel)

    def _look_for_deadlocks(self, threads: Entries, in_kernel: Entries | None) -> None:
        self._deadlocks.check_waits(self._lock_waits.read_waits(threads, in_kernel), time.monotonic_ns())

    def _keep_house(self, now: float) -> None:
        """Forget processes that have ended, and share out the series anew."""
        self._next_housekeeping = now + HOUSEKEEPING_SECONDS
        # A survey can miss threads that enter or leave the table while it is read. So the processes of all
        # surveys since the last housekeeping count as alive.
        alive, self._alive = set(self._alive.tolist()), self._last_seen
        # The table lacks processes that were counted: it may have been full, and of those that wait for locks
        # of the kernel it has only some if no other program runs.
        alive |= self._processes.find_living(alive)
        self._processes.keep(alive)
        self._collector.forget_vanished(self._processes.is_gone)
        self._identities.keep(alive)
        # Series of processes that the filter now leaves out are ranked like those of ended processes.
        identified = [self._identities.identify_process(tgid, 0) for tgid in alive]
        self._presence.note({name for name, is_wanted in identified if is_wanted}, now)
        names = {tgid: name for tgid, (name, _) in zip(alive, identified, strict=True)}
        for series in self._series:
            series.rearrange(self._presence, self._limits.idle_seconds, now)
        self._units.keep({unit for unit, _ in names.values()} | units_of(self._series))
        self.contention.expire(now, names)
        if self._wait_samples:
            self._wait_samples.forget_ended(alive, now)
        if self._user_locks:
            self._user_locks.forget_ended(alive, now)
        for places in (self._hotspots, self._cpythons):
            if places:
                places.keep(alive)
        if self._user_locks and self._go_waits:
            # GoMutexWaits counts the waits from one answer about a process to the next. It keeps the last
            # answer about a process without advice too: a sampler that has just begun has no advice yet, but
            # has the answers that the sampler before it saved. Waits in a process while the filter leaves
            # the process out are not counted later.
            self._go_waits.forget_ended(
                {tgid for tgid, (_, is_wanted) in zip(alive, identified, strict=True) if is_wanted}
            )
            go = (tgid for tgid, advice in self._user_locks.advice.items() if advice == GO)
            if question := self._go_waits.question(go):
                self._go_waits.is_asked = self._resolver.ask(question)
        if self.kernel_locks and (ended := self.kernel_locks.find_ended(self._processes)) is not None:
            self._collector.forget_kernel_waits(ended)
        if self.kernel_holds and (abandoned := self.kernel_holds.find_abandoned()):
            self._collector.forget_holding(*abandoned)
            self._next_save = now  # the map has lost these holds, so that only saved counts keep them

    def metrics(self) -> bytes:
        """Return the block of which the exporter makes /metrics."""
        self._fold_for_exporter()
        with self.cpu_budget.charge_exporter():
            self._survey_for_exporter()
            # However this process ends, the next start must have no counter below what is exported here.
            self.save()
            return self._metrics()

    def _metrics(self) -> bytes:
        slots = self._manifest.constants["SLOTS"]
        block = Block(self._limits.buckets_us, slots, self.own_cost.exporters_seconds)
        now = time.monotonic()
        for aggregates in self._aggregates.values():
            aggregates.export(block, now)
        self.own_cost.undecided_calls = self._folding.undecided_calls
        if self._user_locks and self._go_waits:
            self._user_locks.export_advice(block, self._name_of)
            self._go_waits.export(block)
        self._deadlocks.export(block)
        unit_lines = self._unit_info.export(block, self._units.known, self._series)
        self.own_cost.export(block, self._series, unit_lines)
        self.cpu_budget.export(block)
        return block.pack()

    def close(self) -> None:
        """End the namer."""
        self._resolver.close()

    def details(self) -> bytes:
        """Return the block of which the exporter makes the tables of /api/v1."""
        self._fold_for_exporter()
        with self.cpu_budget.charge_exporter():
            self._survey_for_exporter()
            wall, now = time.time(), time.monotonic()
            advice = self._user_locks.advice if self._user_locks else {}
            tables, arrays = self.contention.tables(now, self._deadlocks.holders, advice)
            tables["bottlenecks"] = bottlenecks_table(self.contention.locks, arrays)
            self._deadlocks.add_table(tables, arrays, time.monotonic_ns(), wall)
            return messages.pack({"tables": tables, "time": wall, "monotonic": now}, arrays)

    def wait_stacks(self) -> bytes:
        """Return the block of which the exporter makes profiles of waits off the CPU."""
        self._fold_for_exporter()
        with self.cpu_budget.charge_exporter():
            self._survey_for_exporter()
            about = {"time": time.time(), "monotonic": time.monotonic()}
            stacks = self.offcpu.stacks if self.offcpu else WaitStacks()
            head, arrays = stacks.block(self.contention.threads)
            return messages.pack({**head, **about}, arrays)
