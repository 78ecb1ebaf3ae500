"""Clocks: the unit of times, and the start and CPU time of other processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

NS = 1_000_000_000
"""Nanoseconds in a second. BPF programs count nanoseconds, and so does everything that is read from them."""
TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks in a second, the unit of times in /proc/PID/stat."""
CPUCLOCK_SCHED = 2
"""Bits of a clock id: the CPU time of all threads of a process, user and system (clock_getcpuclockid(3))."""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, in seconds. Raises OSError if there is no such process."""
    return time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)


def cpu_seconds_with_children(pid: int) -> float:
    """CPU time of a process so far, in seconds, with that of its children that it has waited for.

    Raises OSError if there is no such process.
    """
    user, system = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[13:15]
    return cpu_seconds(pid) + (int(user) + int(system)) / TICKS


def suspended_ns() -> int:
    """Nanoseconds for which the host has been suspended since it booted. CLOCK_MONOTONIC leaves them out."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()


def start_ns(stat: bytes) -> int:
    """When a process or thread started, by its /proc/PID/stat: nanoseconds of CLOCK_BOOTTIME.

    The kernel gives the start in clock ticks, and rounds it down.
    """
    return int(stat.rpartition(b")")[2].split()[19]) * (NS // TICKS)
