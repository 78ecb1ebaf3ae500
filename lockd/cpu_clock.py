"""The CPU time that another process has taken."""

from __future__ import annotations

import time

CPUCLOCK_SCHED = 2
"""In a clock's number: of a process, all its threads, user and system (clock_getcpuclockid(3))."""


def cpu_seconds(pid: int) -> float:
    """So far. Raises OSError if there is no such process."""
    return time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)
