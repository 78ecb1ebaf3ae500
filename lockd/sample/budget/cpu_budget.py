"""Keeps lockd within its budget of CPU time: measures every second and applies the restraint level."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from math import inf

from lockd.kernel.pairs import Control
from lockd.names.client import Resolver
from lockd.sample.budget.restraint import DETAIL, PROCESSES, STACKS, STEPS, Restraint
from lockd.sample.budget.spending import ProgramTimes, RestartedProcess, Spending
from lockd.sample.series.block import Block

JUDGE_SECONDS = 1.0
"""Seconds between two measurements of what lockd takes."""
RARE_SURVEY_SECONDS = 5.0
"""Seconds between two surveys of ongoing waits at the last restraint level, instead of 1."""
RARE_TICK_PERIODS = 4
"""Periods from one tick to the next at the last restraint level, instead of 1: hardly any entries come in one
period then."""


class CpuBudget:
    """Decides what the programs, the sampler and the namer leave out.

    `budget` is a share of a machine with `cpus` processors; with None nothing is ever left out. `control`
    passes the restraint level to the programs, whose run time comes from `program_times`.
    """

    def __init__(
        self, budget: float | None, control: Control, program_times: ProgramTimes, resolver: Resolver,
        cpus: int,
    ) -> None:  # fmt: skip
        self.restraint = Restraint(budget, cpus)
        self.exporter = RestartedProcess()
        """The exporter's CPU time. The daemon says by follow() which process the exporter is."""
        self._answering = 0.0
        """CPU seconds of this process that count as the exporter's."""
        self._control, self._resolver = control, resolver
        self._spending = Spending(
            program_times,
            lambda: time.process_time() - self._answering,
            resolver.cpu_seconds,
            lambda: self.exporter.cpu_seconds() + self._answering,
            cpus,
        )
        self._judged_at = time.monotonic()
        # The map `control` outlives a sampler: it may still have the level of the sampler before this one.
        self._apply_level()

    def judge_costs(self, now: float) -> None:
        """Once a second, compare what lockd takes with its budget. `now` is the monotonic clock in
        seconds."""
        seconds = now - self._judged_at
        if seconds < JUDGE_SECONDS:
            return
        self._judged_at = now
        if self.restraint.judge(self._spending.measure(seconds), seconds):
            self._apply_level()

    def set_budget(self, budget: float | None, cpus: int) -> None:
        """Judge by another `budget` from now on: a share of a machine with `cpus` processors, or None."""
        self.restraint.set_budget(budget, cpus)
        self._spending.cpus = cpus
        self._apply_level()

    @property
    def cpus(self) -> int:
        """The number of processors of the machine that the budget is a share of."""
        return self._spending.cpus

    def _apply_level(self) -> None:
        level = self.restraint.level
        self._control.restraint = level  # the programs see it at once
        self._resolver.is_paused = level >= STACKS

    @contextlib.contextmanager
    def charge_exporter(self) -> Iterator[None]:
        """Count the CPU time that this process takes inside the `with` block as the exporter's.

        No restraint level makes an answer to the exporter cheaper, so answers must not raise the level.
        """
        began = time.process_time()
        try:
            yield
        finally:
            self._answering += time.process_time() - began

    @property
    def has_detail(self) -> bool:
        """Whether waits are counted by thread and by lock."""
        return self.restraint.level < DETAIL

    @property
    def survey_seconds(self) -> float:
        """Seconds between two readings of ongoing waits."""
        return RARE_SURVEY_SECONDS if self.restraint.level >= PROCESSES else 1.0

    @property
    def tick_periods(self) -> int:
        """Periods from one tick to the next."""
        return RARE_TICK_PERIODS if self.restraint.level >= PROCESSES else 1

    @property
    def description(self) -> str:
        """What lockd leaves out at present, as a text for people; empty at level 0."""
        level = self.restraint.level
        return f"restraint level {level} of {len(STEPS) - 1}: {STEPS[level]}" if level else ""

    def export(self, block: Block) -> None:
        """Add the metrics about budget and restraint to a block."""
        restraint = self.restraint
        block.add("lockd_restraint_level", [()], [restraint.level])
        levels = [(str(level),) for level in range(len(STEPS))]
        block.add("lockd_restraint_seconds_total", levels, restraint.seconds)
        parts = asdict(self._spending.mean)
        block.add("lockd_cpu_ratio", [(part,) for part in parts], list(parts.values()))
        block.add("lockd_cpu_budget_ratio", [()], [inf if restraint.budget is None else restraint.budget])
