"""Clocks: their unit, and the CPU time that another process has taken."""

from __future__ import annotations

import os
import time
from pathlib import Path

NS = 1_000_000_000
"""Nanoseconds in a second: BPF programs, and all that is read from them, count nanoseconds."""
TICKS = os.sysconf("SC_CLK_TCK")
"""In a second."""
CPUCLOCK_SCHED = 2
"""In a clock's number: of a process, all its threads, user and system (clock_getcpuclockid(3))."""


def cpu_seconds(pid: int) -> float:
    """So far, with what its children took that have ended. Raises OSError if there is no such process."""
    user, system = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[13:15]
    return time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED) + (int(user) + int(system)) / TICKS
