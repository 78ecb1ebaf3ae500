"""Processes by thread-group id: the unit and comm that label what their threads do."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from lockd.names.labels.units import Units
from lockd.printable import masked
from lockd.process.clock import NS

KERNEL = "kernel"
"""The unit of kernel threads."""

POOLED = re.compile(r"^(kworker)/.*|/\d+$")
"""Kernel threads come in pools and one per CPU; they are one process to the reader."""

Name = tuple[str, str]
"""(unit, comm)"""

TOLD_LATE_NS = 3 * NS
"""An event tells a name at most so long after it was read."""
COMM_BYTES = 15
"""Of a name in a task. procfs has had those of kernel threads in full since d6986ce24fc0 (5.17)."""
PF_KTHREAD = 1 << 21
"""Of the flags in a process's stat."""
ASKS_PER_SECOND = 200
"""How often procfs is asked again what a process is called: each takes some 20 us."""


def text(comm: bytes) -> str:
    """A comm as the kernel keeps it: up to the first NUL, any bytes, made printable.

    Equal ones are one object: tens of thousands of processes have few names.
    """
    name = comm.split(b"\0", 1)[0].decode("utf-8", "replace")
    return sys.intern(masked(name))


class Processes:
    """Names of processes, told by the kernel as events happen, else by procfs."""

    def __init__(self, units: Units, procfs: Path = Path("/proc")) -> None:
        self._units = units
        self._procfs = procfs
        self._known: dict[int, Name] = {}
        self._learnt: dict[int, int] = {}
        self._second = self._asks = 0

    def tell(self, tgid: int, cgroup: int, comm: bytes, kernel_thread: bool) -> Name:
        """What the kernel said of a thread group when one of its events was first counted.

        Events under an old and a new name come in any order: which is the new one, procfs knows.
        """
        name = self._kernel(text(comm)) if kernel_thread else (self._unit(cgroup, tgid), text(comm))
        known = self._known.get(tgid, name)
        if kernel_thread or known[1] == name[1] or self._comm_now(tgid) != known[1]:
            self._know(tgid, name, time.monotonic_ns() - TOLD_LATE_NS)
        return name

    def name(self, tgid: int, since: int = 0) -> Name:
        """The name of a process, asked of procfs if none of its events was seen; ("", "") if it is gone.

        A name learnt before `since` (monotonic clock in ns) is asked for again: processes
        rename themselves, by exec for one, and one that waits ever since has no event to tell it.
        A kernel thread has no exec, and procfs may not know what it called itself.
        """
        known = self._known.get(tgid)
        if known and known[0] == KERNEL:
            return known
        if known is None or (self._learnt[tgid] < since and self._may_ask_again()):
            now = time.monotonic_ns()
            asked = self._ask(tgid)
            known = known if known and not asked[1] else asked
            self._know(tgid, known, now)
        return known

    def _know(self, tgid: int, name: Name, since: int) -> None:
        self._known[tgid], self._learnt[tgid] = name, since

    def _may_ask_again(self) -> bool:
        second = time.monotonic_ns() // NS
        if second != self._second:
            self._second, self._asks = second, 0
        self._asks += 1
        return self._asks <= ASKS_PER_SECOND

    def comm(self, tgid: int) -> str:
        return self.name(tgid)[1]

    def thread_comm(self, tgid: int, tid: int) -> str:
        """The name of one live thread; empty if it is gone."""
        try:
            return text((self._procfs / str(tgid) / "task" / str(tid) / "comm").read_bytes().rstrip(b"\n"))
        except OSError:
            return ""

    def has_thread(self, tgid: int, tid: int, since: int) -> bool:
        """Whether a thread that was there at `since` (monotonic clock in ns) has not ended.

        Its id may have been given to another since then, which then started later.
        """
        try:
            stat = (self._procfs / str(tgid) / "task" / str(tid) / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:
            return True
        tick = NS // os.sysconf("SC_CLK_TCK")
        started = int(stat.rpartition(b")")[2].split()[19]) * tick  # counts while the host is suspended
        suspended = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        return started - suspended < since + tick

    def keep(self, alive: set[int]) -> None:
        """Forget all others: their ids will be used again."""
        for tgid in self._known.keys() - alive:
            del self._known[tgid], self._learnt[tgid]

    def _comm_now(self, tgid: int) -> str:
        """Empty if the process is gone."""
        try:
            return text((self._procfs / str(tgid) / "comm").read_bytes().rstrip(b"\n"))
        except OSError:
            return ""

    def _unit(self, cgroup: int, tgid: int) -> str:
        """Of a process that is gone, the unit that it had when it was there."""
        unit, known = self._units.unit(cgroup, tgid), self._known.get(tgid, ("", ""))[0]
        if unit or not known or known == KERNEL or self._comm_now(tgid):
            return unit
        return known

    def _ask(self, tgid: int) -> Name:
        comm = self._comm_now(tgid)
        try:
            is_kernel = self._is_kthread(tgid)
        except OSError:
            return ("", "")
        return self._kernel(comm[:COMM_BYTES]) if is_kernel else (self._unit(0, tgid), comm)

    def _is_kthread(self, tgid: int) -> bool:
        """By its flags: its command line is in memory, which may be a page of a file that is never read."""
        stat = (self._procfs / str(tgid) / "stat").read_bytes()
        return bool(int(stat.rpartition(b")")[2].split()[6]) & PF_KTHREAD)

    @staticmethod
    def _kernel(comm: str) -> Name:
        return (KERNEL, POOLED.sub(lambda m: m[1] or "", comm))
