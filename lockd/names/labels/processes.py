"""Names of processes by thread-group id: the labels `unit` and `comm`."""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path

from lockd.names.labels.units import Units, flags_of
from lockd.printable import masked
from lockd.process.clock import NS, TICKS, start_ns, suspended_ns

KERNEL = "kernel"
"""The unit of kernel threads."""

POOLED = re.compile(r"^(kworker)/.*|/\d+$")
"""The part of a comm that differs among the kernel threads of one pool, or among those of which each CPU has
one. Without this part they share one name."""

Name = tuple[str, str]
"""The unit and the comm of a process."""
NO_NAME: Name = ("", "")
"""Stands for the name of a process that is gone and has had no event so far."""

EVENT_DELAY_NS = 3 * NS
"""The longest time from when a BPF program reads the comm for an event to when lockd reads the event."""
COMM_BYTES = 15
"""Bytes of the longest comm in the kernel's task_struct. Since d6986ce24fc0 (5.17) procfs has longer comms
for kernel threads."""
PF_KTHREAD = 1 << 21
"""The flag of kernel threads in /proc/PID/stat."""
COMMS = 10_000
"""Names that are kept so that equal ones share one object: tens of thousands of processes have few names.
Interned strings would do the same, but Python 3.12.0 to 3.12.6 (Ubuntu 24.04) never frees them."""
ASKS_PER_SECOND = 200
"""How often per second procfs is asked again for known names, at most. Each time takes some 20 us."""


@functools.lru_cache(COMMS)
def text(comm: bytes) -> str:
    """A comm of the kernel, which is any bytes up to the first NUL, as printable text."""
    return masked(comm.split(b"\0", 1)[0].decode("utf-8", "replace"))


class Processes:
    """Names of processes, learnt from the events that BPF programs count, else from procfs.

    `procfs` is the root of a proc file system.
    """

    def __init__(self, units: Units, procfs: Path = Path("/proc")) -> None:
        self._units = units
        self._procfs = procfs
        self._known: dict[int, Name] = {}
        self._learnt: dict[int, int] = {}
        """By process, the time at which it certainly had its known name (monotonic clock in ns)."""
        self._second = self._asks = 0

    def learn(self, tgid: int, cgroup: int, comm: bytes, kernel_thread: bool) -> Name:
        """Return the name of a thread group by the cgroup and the comm of one of its events.

        Events under an old and a new name come in any order. The returned name is remembered, unless procfs
        shows that the comm remembered before is the newer one.
        """
        name = self._kernel(text(comm)) if kernel_thread else (self._unit(cgroup, tgid), text(comm))
        known = self._known.get(tgid, name)
        if kernel_thread or known[1] in (name[1], "") or self._comm_now(tgid) != known[1]:
            self._remember(tgid, name, time.monotonic_ns() - EVENT_DELAY_NS)
        return name

    def name(self, tgid: int, since: int = 0) -> Name:
        """The name of a process, read from procfs if no event told it; NO_NAME if the process is gone.

        A name learnt before `since` (monotonic clock in ns) is read again: a process changes its name by
        exec, for instance, and has no new event while it waits. The name of a kernel thread is not read
        again: a kernel thread has no exec, and procfs may not know the name that the thread gave itself.
        """
        known = self._known.get(tgid)
        if known and known[0] == KERNEL:
            return known
        if known is None or (self._learnt[tgid] < since and self._may_ask_again()):
            now = time.monotonic_ns()
            asked = self._ask(tgid)
            known = known if known and not asked[1] else asked
            self._remember(tgid, known, now)
        return known

    def _remember(self, tgid: int, name: Name, since: int) -> None:
        self._known[tgid], self._learnt[tgid] = name, since

    def _may_ask_again(self) -> bool:
        second = time.monotonic_ns() // NS
        if second != self._second:
            self._second, self._asks = second, 0
        self._asks += 1
        return self._asks <= ASKS_PER_SECOND

    def comm(self, tgid: int) -> str:
        """The comm of a process, see name()."""
        return self.name(tgid)[1]

    def thread_comm(self, tgid: int, tid: int) -> str:
        """The comm of a thread; empty if the thread is gone."""
        return self._read_comm(f"{tgid}/task/{tid}/comm")

    def has_thread(self, tgid: int, tid: int, since: int) -> bool:
        """Whether a thread that lived at `since` (monotonic clock in ns) still lives.

        If its id belongs to a new thread by now, that thread started after `since`.
        """
        stat = self._read_stat(f"{tgid}/task/{tid}")
        if not stat:
            return stat is not None
        return start_ns(stat) - suspended_ns() < since + NS // TICKS

    def is_gone(self, tgid: int) -> bool:
        """Whether no process has this id. An ended process keeps its id until its parent waits for it."""
        return not os.path.exists(f"{self._procfs}/{tgid}")

    def find_living(self, seen: set[int]) -> set[int]:
        """The ids of the known processes that live, besides those in `seen`.

        To ask procfs takes some 12 us for each process that lives.
        """
        suspended, unseen = suspended_ns(), self._known.keys() - seen
        if unseen:
            unseen &= {0, *(int(name) for name in os.listdir(self._procfs) if name.isdecimal())}
        return {tgid for tgid in unseen if self._lives(tgid, suspended)}

    def _lives(self, tgid: int, suspended: int) -> bool:
        """Whether a known process has not ended. `suspended` is what suspended_ns() returns."""
        if tgid == 0:  # the idle threads of all CPUs, which are not in procfs
            return True
        stat = self._read_stat(str(tgid))
        if not stat:
            return stat is not None
        fields = stat.rpartition(b")")[2].split()
        # A process whose first thread has ended lives on if it has other threads. If another process or
        # thread has got the id, that one started after the name was learnt.
        has_threads = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
        return has_threads and start_ns(stat) - suspended < self._learnt[tgid] + EVENT_DELAY_NS + NS // TICKS

    def _read_stat(self, task: str) -> bytes | None:
        """The file `stat` of a process or thread; None if it is gone, empty if procfs refuses to show it."""
        try:
            return self._read(f"{task}/stat")
        except (FileNotFoundError, ProcessLookupError):
            return None
        except OSError:
            return b""

    def keep(self, alive: set[int]) -> None:
        """Forget all processes but those in `alive`: ids are used again."""
        for tgid in self._known.keys() - alive:
            del self._known[tgid], self._learnt[tgid]

    def _comm_now(self, tgid: int) -> str:
        """The comm of a process at this moment; empty if the process is gone."""
        return self._read_comm(f"{tgid}/comm")

    def _read_comm(self, path: str) -> str:
        try:
            return text(self._read(path).rstrip(b"\n"))
        except OSError:
            return ""

    def _read(self, path: str) -> bytes:
        # Not by a Path: Python 3.12.0 to 3.12.6 never frees the parts of one, such as the ids of processes.
        with open(f"{self._procfs}/{path}", "rb", buffering=0) as file:
            return file.readall()

    def _unit(self, cgroup: int, tgid: int) -> str:
        """The unit of a process; of one that has ended, mostly the unit that it was last known in."""
        last = self._known.get(tgid, NO_NAME)[0]
        return self._units.unit(cgroup, tgid, "" if last == KERNEL else last)

    def _ask(self, tgid: int) -> Name:
        """The name of a process by procfs; NO_NAME if the process is gone."""
        comm = self._comm_now(tgid)
        try:
            is_kernel = self._is_kthread(tgid)
        except OSError:
            return NO_NAME
        return self._kernel(comm[:COMM_BYTES]) if is_kernel else (self._unit(0, tgid), comm)

    def _is_kthread(self, tgid: int) -> bool:
        """Whether a process is a kernel thread. Raises OSError if the process is gone.

        The flags decide, and not an empty command line: that lies in the process's memory, and reading it may
        wait for a page of a file for ever.
        """
        return bool(flags_of(self._read(f"{tgid}/stat")) & PF_KTHREAD)

    @staticmethod
    def _kernel(comm: str) -> Name:
        return (KERNEL, POOLED.sub(lambda m: m[1] or "", comm))
