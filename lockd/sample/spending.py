"""What share of the machine lockd itself takes: its programs in the kernel, and its processes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockd.cpu_clock import cpu_seconds

NS = 1_000_000_000
TIMED_SHARE = 0.1
"""At most this share of all time is timed, as it costs something; and a window in a second is enough."""
MEAN_SECONDS = 60.0
"""Helpers count by their mean over such a time."""

CpuSeconds = Callable[[], float]
"""So far; never less than before."""


@dataclass(frozen=True)
class Spent:
    """Shares of the machine, of which 1 is all its CPUs."""

    programs: float = 0.0
    sampler: float = 0.0
    helpers: float = 0.0
    """The namer and the exporter, who work now and then: a mean."""

    @property
    def total(self) -> float:
        return self.programs + self.sampler + self.helpers


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
        self._ended = self._latest = 0.0

    def follow(self, pid: int) -> None:
        """0: there is none at the moment."""
        self._pid = pid
        self._ended += self._latest
        self._latest = 0.0

    def cpu_seconds(self) -> float:
        if self._pid:
            with contextlib.suppress(OSError):  # it has just ended
                self._latest = cpu_seconds(self._pid)
        return self._ended + self._latest


class Spending:
    """All of it. `cpus` is how many the machine has."""

    def __init__(
        self,
        programs: ProgramTimes,
        sampler: CpuSeconds,
        helpers: Sequence[CpuSeconds],
        cpus: int = os.cpu_count() or 1,
    ) -> None:
        self._programs, self._sampler, self._helpers, self._cpus = programs, sampler, helpers, cpus
        self._told = self._seconds()
        self._mean = 0.0

    def look(self, seconds: float) -> Spent:
        """What was taken since the last call, `seconds` ago."""
        told, before = self._seconds(), self._told
        self._told = told
        sampler, helpers = (
            (now - then) / seconds / self._cpus for now, then in zip(told, before, strict=True)
        )
        self._mean += (helpers - self._mean) * (1 - math.exp(-seconds / MEAN_SECONDS))
        return Spent(self._programs.cpus() / self._cpus, sampler, self._mean)

    def _seconds(self) -> tuple[float, float]:
        return self._sampler(), sum(one() for one in self._helpers)
