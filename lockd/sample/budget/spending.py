"""What share of the machine lockd itself takes: its BPF programs in the kernel, and its processes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lockd.process.clock import NS, cpu_seconds

TIMED_SHARE = 0.1
"""The largest share of all periods that are timed: timing costs something, and one period a second is
enough."""
MEAN_SECONDS = 60.0
"""The time constant, in seconds, of the exported means of processes that work now and then."""

CpuSeconds = Callable[[], float]
"""Returns the CPU time of a process so far, in seconds. It never falls."""


@dataclass(frozen=True)
class Spent:
    """Shares of the machine that each part of lockd takes; 1.0 stands for all CPUs."""

    programs: float = 0.0
    sampler: float = 0.0
    namer: float = 0.0
    exporter: float = 0.0

    @property
    def by_events(self) -> float:
        """The share that grows with every event: programs and sampler."""
        return self.programs + self.sampler

    @property
    def total(self) -> float:
        return self.by_events + self.namer + self.exporter


class ProgramTimes:
    """The CPU time of the programs, from the periods in which they are told to time themselves.

    In such a period the programs time one in `timed_runs` of their runs; `read_ns()` returns the nanoseconds
    of all timed runs so far. They include what a program does, and not what the kernel does to call it.
    """

    def __init__(
        self, read_ns: Callable[[], int], timed_runs: int, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._read_ns, self._timed_runs, self._clock = read_ns, timed_runs, clock
        self._began_ns = 0
        """When the current period began (monotonic clock in ns), if it is timed; else 0."""
        self._next_ns = 0
        """From when on a period may be timed again (monotonic clock in ns)."""
        self._untimed_left = 0
        """Periods that must pass before one may be timed. Their number counts, not their length: else a
        stall of the host in a timed period would keep programs from being timed for many times as long."""
        self._span_ns = 0
        """The length in ns of all periods that were timed since the last call of busy_cpus()."""
        self._last_ns = read_ns()
        self._cpus = 0.0

    def begin_period(self) -> bool:
        """End a period and begin the next. Returns whether the programs are to measure their own run times
        in the next."""
        now = self._clock()
        if self._began_ns:
            self._span_ns += now - self._began_ns
            self._next_ns = self._began_ns + NS
            self._untimed_left = round(1 / TIMED_SHARE) - 1
        elif self._untimed_left:
            self._untimed_left -= 1
        self._began_ns = now if now >= self._next_ns and not self._untimed_left else 0
        return self._began_ns > 0

    def busy_cpus(self) -> float:
        """How many CPUs the programs kept busy on average in the periods that were timed since the last call.

        If no period was timed since the last call, the result is the same as then.
        """
        if self._span_ns:
            ns = self._read_ns()
            self._cpus = max(ns - self._last_ns, 0) * self._timed_runs / self._span_ns
            self._last_ns, self._span_ns = ns, 0
        return self._cpus


class RestartedProcess:
    """CPU time of a process that is started anew when it ends, the ended processes included. The process has
    no children."""

    def __init__(self) -> None:
        self._pid = 0
        self.ended_seconds = 0.0
        """CPU seconds of the processes that have been replaced, as last read before they ended."""
        self._running_seconds = 0.0
        """CPU seconds of the process that runs, when they were last read."""

    def follow(self, pid: int) -> None:
        """Read the CPU time of the process `pid` from now on; 0 if no process runs at the moment."""
        self._pid = pid
        self.ended_seconds += self._running_seconds
        self._running_seconds = 0.0

    def cpu_seconds(self) -> float:
        if self._pid:
            with contextlib.suppress(OSError):  # the process has just ended
                self._running_seconds = cpu_seconds(self._pid)
        return self.ended_seconds + self._running_seconds


class Spending:
    """What all parts of lockd take of a machine with `cpus` CPUs."""

    def __init__(
        self,
        programs: ProgramTimes,
        sampler: CpuSeconds,
        namer: CpuSeconds,
        exporter: CpuSeconds,
        cpus: int,
    ) -> None:
        self._programs, self._processes, self.cpus = programs, (sampler, namer, exporter), cpus
        self._last = self._seconds()
        self.mean = Spent()
        """The result of the last measure(). For namer and exporter, which work now and then, it is an
        exponential mean over MEAN_SECONDS."""

    def measure(self, seconds: float) -> Spent:
        """Return what was taken on average since the last call, which was `seconds` ago."""
        before, self._last = self._last, self._seconds()
        spent = Spent(
            self._programs.busy_cpus() / self.cpus,
            *((now - then) / seconds / self.cpus for now, then in zip(self._last, before, strict=True)),
        )
        fresh = 1 - math.exp(-seconds / MEAN_SECONDS)
        self.mean = replace(
            spent,
            namer=self.mean.namer + (spent.namer - self.mean.namer) * fresh,
            exporter=self.mean.exporter + (spent.exporter - self.mean.exporter) * fresh,
        )
        return spent

    def _seconds(self) -> list[float]:
        return [cpu_seconds() for cpu_seconds in self._processes]
