"""Has lockd keep to its budget of CPU time: looks once a second, and everybody does as the step says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from math import inf

from lockd.kernel.manifest import Manifest
from lockd.names.client import Resolver
from lockd.sample.budget.restraint import DETAIL, PROCESSES, STACKS, STEPS, Restraint
from lockd.sample.budget.spending import ProgramTimes, Spending, Successors
from lockd.sample.drain import Collector
from lockd.sample.series.block import Block

LOOK_SECONDS = 1.0
RARELY = 5
"""At the last step: seconds between two looks at waits that go on, instead of one."""
PERIODS = 4
"""The same of sampling periods between two ticks: hardly anything comes with one."""


class CpuBudget:
    """What the sampler, the programs and the namer are to leave out.

    `budget` is a share of the machine; None: nothing is ever left out.
    """

    def __init__(
        self, budget: float | None, manifest: Manifest, collector: Collector, resolver: Resolver
    ) -> None:
        self.restraint = Restraint(budget)
        self.exporter = Successors()
        """To be told which process that is."""
        self._answering = 0.0
        self._control, self._resolver = collector.control, resolver
        counter, timed_runs = collector.run_times, manifest.constants["TIMED_RUNS"]
        collector.program_times = ProgramTimes(lambda: int(counter.read()[0]), timed_runs)
        self._spending = Spending(
            collector.program_times,
            lambda: time.process_time() - self._answering,
            resolver.cpu_seconds,
            lambda: self.exporter.cpu_seconds() + self._answering,
        )
        self._looked = time.monotonic()

    def look(self, now: float) -> None:
        """To be called at every tick; `now` is the monotonic clock in seconds."""
        seconds = now - self._looked
        if seconds < LOOK_SECONDS:
            return
        self._looked = now
        if self.restraint.judge(self._spending.look(seconds), seconds):
            self._do_as_told()

    def change(self, budget: float | None) -> None:
        """Judge by another budget from now on."""
        self.restraint.change(budget)
        self._do_as_told()

    def _do_as_told(self) -> None:
        level = self.restraint.level
        self._control.restraint = level  # the programs learn of it with the next window
        self._resolver.is_paused = level >= STACKS

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """What this process does meanwhile counts as the exporter's, for whom it is done: no step makes that
        cheaper, and nobody who asks is to have less told."""
        began = time.process_time()
        try:
            yield
        finally:
            self._answering += time.process_time() - began

    @property
    def has_detail(self) -> bool:
        """Whether waits are told by thread and by lock."""
        return self.restraint.level < DETAIL

    @property
    def look_around_seconds(self) -> float:
        """Between two looks at waits that go on."""
        return RARELY if self.restraint.level >= PROCESSES else 1.0

    @property
    def periods(self) -> int:
        """Between two ticks."""
        return PERIODS if self.restraint.level >= PROCESSES else 1

    @property
    def words(self) -> str:
        """What is left out, for people; empty if nothing is."""
        level = self.restraint.level
        return f"restraint, step {level} of {len(STEPS) - 1}: {STEPS[level]}" if level else ""

    def export(self, block: Block) -> None:
        """Write the metrics to a block."""
        restraint = self.restraint
        block.add("lockd_restraint_level", [()], [restraint.level])
        levels = [(str(level),) for level in range(len(STEPS))]
        block.add("lockd_restraint_seconds_total", levels, restraint.seconds)
        parts = asdict(self._spending.mean)
        block.add("lockd_cpu_ratio", [(part,) for part in parts], list(parts.values()))
        block.add("lockd_cpu_budget_ratio", [()], [inf if restraint.budget is None else restraint.budget])
