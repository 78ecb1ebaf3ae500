"""What share of the machine lockd itself takes: its programs in the kernel, and its processes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lockd.process.clock import NS, cpu_seconds

TIMED_SHARE = 0.1
"""At most this share of all time is timed, as it costs something; and a window in a second is enough."""
MEAN_SECONDS = 60.0
"""Of processes that work now and then, the mean over such a time is told."""

CpuSeconds = Callable[[], float]
"""So far; never less than before."""


@dataclass(frozen=True)
class Spent:
    """Shares of the machine, of which 1 is all its CPUs."""

    programs: float = 0.0
    sampler: float = 0.0
    namer: float = 0.0
    exporter: float = 0.0

    @property
    def by_events(self) -> float:
        """What comes with every event."""
        return self.programs + self.sampler

    @property
    def total(self) -> float:
        return self.by_events + self.namer + self.exporter


class ProgramTimes:
    """What the programs take, by the windows that they are told to time.

    `read_ns()` is what the runs timed so far took, all together; one in `timed_runs` is, of those in such a
    window. In it is what a program does, and not what the kernel does to call it.
    """

    def __init__(
        self, read_ns: Callable[[], int], timed_runs: int, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._read_ns, self._timed_runs, self._clock = read_ns, timed_runs, clock
        self._began_ns = 0
        """When the window began that is timed; 0: this one is not."""
        self._next_ns = 0
        self._span_ns = 0
        """Of windows that were timed, since they were last looked at."""
        self._told_ns = read_ns()
        self._cpus = 0.0

    def next_window(self) -> bool:
        """A window ends and another begins; whether that is one to be timed."""
        now = self._clock()
        if self._began_ns:
            span = now - self._began_ns
            self._span_ns += span
            self._next_ns = self._began_ns + max(NS, int(span / TIMED_SHARE))
        self._began_ns = now if now >= self._next_ns else 0
        return self._began_ns > 0

    def cpus(self) -> float:
        """How many CPUs they kept busy in the windows that were timed since the last call; if there were
        none, what it said then."""
        if self._span_ns:
            ns = self._read_ns()
            self._cpus = max(ns - self._told_ns, 0) * self._timed_runs / self._span_ns
            self._told_ns, self._span_ns = ns, 0
        return self._cpus


class Successors:
    """CPU seconds of a process, of whoever has taken its place, and so on."""

    def __init__(self) -> None:
        self._pid = 0
        self.ended = self._latest = 0.0
        """Of those that are no more; of the one there is, when that was last asked."""

    def follow(self, pid: int) -> None:
        """0: there is none at the moment."""
        self._pid = pid
        self.ended += self._latest
        self._latest = 0.0

    def cpu_seconds(self) -> float:
        if self._pid:
            with contextlib.suppress(OSError):  # it has just ended
                self._latest = cpu_seconds(self._pid)
        return self.ended + self._latest


class Spending:
    """All of it. `cpus` is how many the machine has."""

    def __init__(
        self,
        programs: ProgramTimes,
        sampler: CpuSeconds,
        namer: CpuSeconds,
        exporter: CpuSeconds,
        cpus: int = os.cpu_count() or 1,
    ) -> None:
        self._programs, self._processes, self._cpus = programs, (sampler, namer, exporter), cpus
        self._told = self._seconds()
        self.mean = Spent()
        """As was last told, but of namer and exporter, who work now and then, the mean over a minute."""

    def look(self, seconds: float) -> Spent:
        """What was taken since the last call, `seconds` ago."""
        before, self._told = self._told, self._seconds()
        spent = Spent(
            self._programs.cpus() / self._cpus,
            *((now - then) / seconds / self._cpus for now, then in zip(self._told, before, strict=True)),
        )
        fresh = 1 - math.exp(-seconds / MEAN_SECONDS)
        self.mean = replace(
            spent,
            namer=self.mean.namer + (spent.namer - self.mean.namer) * fresh,
            exporter=self.mean.exporter + (spent.exporter - self.mean.exporter) * fresh,
        )
        return spent

    def _seconds(self) -> list[float]:
        return [so_far() for so_far in self._processes]
