"""Futex waits that are open when a trace begins or ends. BPF programs miss their beginning or their end.

Waits that began before the trace are found in procfs, and entered into the programs' map of threads. Waits
that are open at the end of the trace are read from that map.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockd.columns.structs import Columns
from lockd.kernel.manifest import Manifest
from lockd.kernel.maps import HashMap
from lockd.kernel.pairs import Entries
from lockd.names.labels.processes import text
from lockd.names.unwind.capture import Capture, read_capture, read_memory
from lockd.trace.futex.calls import CALLS, FutexCalls

PROCFS = Path("/proc")
FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
FUTEX_WAITV, FUTEX_WAIT = 449, 455
"""Numbers of system calls that wait, besides FUTEX."""
PRIVATE, REALTIME = 128, 256
"""FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME, flags of a futex operation."""


@dataclass(frozen=True)
class OpenWait:
    """A futex wait that goes on, as procfs shows it.

    If two values of this class that were read at different times are equal, the thread has slept all the time
    between.
    """

    tgid: int
    tid: int
    nr: int
    """Number of the system call."""
    address: int
    """Address of the futex."""
    kind: str
    """`lock`, `pi`, `cond` or `other`, by the arguments of the call."""
    switches: int
    """Voluntary context switches of the thread so far."""
    stack_pointer: int
    program_counter: int


class OpenWaits:
    """The open waits of the processes under `procfs`. `manifest` describes the programs' maps."""

    def __init__(self, manifest: Manifest, procfs: Path = PROCFS) -> None:
        self._procfs = procfs
        self._kinds = manifest.enums["futex_kind"]
        self._runnable = manifest.enums["state"].index("runnable")
        self._interruptible = manifest.enums["state"].index("interruptible")
        self.without_room = 0
        """Number of waits that enter_older() could not enter, because the map was full."""
        self.unreadable = 0
        """Number of threads that slept in enter_older(), and whose calls the kernel refuses to show."""

    def enter_older(self, threads: HashMap, tgids: Iterable[int], now_ns: int) -> int:
        """Enter the open waits of the processes into the map `threads`, as if they began at `now_ns`.

        The programs then see these waits end, and count them. `now_ns` is a time on CLOCK_MONOTONIC. Returns
        the number of waits that were entered.
        """
        entered = 0
        for wait in self._find(tgids):
            key, entry = np.array([wait.tid], threads.key), np.zeros(1, threads.value)
            call = entry["call"]
            call["since"], call["uaddr"], call["tid"] = now_ns, wait.address, wait.tid
            call["kind"] = call["guess"] = self._kinds.index(wait.kind)
            entry["tgid"], entry["nr"] = wait.tgid, wait.nr
            entry["off_since"], entry["state"] = now_ns, self._interruptible
            if not threads.insert(key, entry):
                # Every entry has a process id. lookup() returns zeros if there is no entry: then the map is
                # full. Otherwise a program has entered the thread already.
                self.without_room += not threads.lookup(key)["tgid"]
                continue
            if find_wait(self._procfs, wait.tgid, wait.tid) == wait:
                entered += 1
            elif threads.lookup(key)["call"]["since"] == now_ns:  # otherwise a program has noted a newer call
                threads.delete(key)
        return entered

    def _find(self, tgids: Iterable[int]) -> Iterator[OpenWait]:
        """The open waits of all threads of the processes, without threads that procfs does not show."""
        for tgid in tgids:
            tids: list[str] = []
            with contextlib.suppress(OSError):
                tids = os.listdir(self._procfs / str(tgid) / "task")
            for tid in tids:
                try:
                    wait = _read_wait(self._procfs, tgid, int(tid))
                except PermissionError:
                    self.unreadable += _is_sleeper(self._procfs / str(tgid) / "task" / tid)
                    continue
                if wait:
                    yield wait

    def count_unfinished(
        self, calls: FutexCalls, threads: Entries, ended_ns: int, number_stack: Callable[[OpenWait], int]
    ) -> int:
        """Add the waits that are open at the end of the trace to `calls`, with the time until `ended_ns`.

        `threads` are the entries of the programs' map of threads. `number_stack` is called for a thread whose
        stack no program has taken; it returns a number of CallStacks. Returns the number of all open calls,
        wakes included.
        """
        keys, values = threads
        since = values["call"]["since"].astype(np.int64)
        is_open = (since > 0) & (since < ended_ns) & (values["call"]["restart"] == 0)
        is_wait = is_open & (values["call"]["kind"] < calls.wake)
        tids, values, call = keys[is_wait], values[is_wait], values["call"][is_wait]
        off_since = values["off_since"].astype(np.int64)
        is_blocked = (off_since > 0) & (off_since < ended_ns) & (values["state"] != self._runnable)
        blocked = values["call_blocked"].astype(np.int64) + np.where(is_blocked, ended_ns - off_since, 0)
        part = np.zeros(len(tids), CALLS)
        part["tgid"], part["tid"] = values["tgid"], tids
        part["uaddr"], part["kind"] = call["uaddr"], call["kind"]
        part["stack"], part["calls"], part["is_open"] = call["stacks"]["user"], 1, 1
        part["blocked_ns"] = part["max_blocked_ns"] = np.maximum(blocked, 0)
        sys_ns = ended_ns - since[is_wait] - blocked
        part["sys_ns"] = part["max_sys_ns"] = np.maximum(sys_ns, 0)
        part["slot"] = np.where(blocked > 0, slots_of(blocked), calls.no_slot)
        for row in np.flatnonzero((part["stack"] == 0) & is_blocked):
            wait = find_wait(self._procfs, int(part["tgid"][row]), int(part["tid"][row]))
            if wait and wait.address == part["uaddr"][row]:
                part["stack"][row] = number_stack(wait)
        for tgid in np.unique(part["tgid"]).tolist():
            with contextlib.suppress(OSError):
                comm = (self._procfs / str(tgid) / "comm").read_bytes()
                calls.name_process(tgid, text(comm.removesuffix(b"\n")))
        calls.add_rows(part)
        return int(is_open.sum())


def slots_of(ns: Columns) -> Columns:
    """The histogram slots of times in nanoseconds, as slot_of() of lockd/bpf/include/common.bpf.h."""
    return np.array([((time - 1) // 1000).bit_length() for time in np.maximum(ns, 1).tolist()], np.int64)


def _is_sleeper(task: Path) -> bool:
    """Whether a thread of a program sleeps. Threads of the kernel, which have no memory, make no calls."""
    with contextlib.suppress(OSError):
        status = (task / "status").read_bytes()
        return b"\nState:\tS" in status and b"\nVmSize:" in status
    return False


def find_wait(procfs: Path, tgid: int, tid: int) -> OpenWait | None:
    """The open wait of a thread; None if the thread does not wait in a futex call, if it has ended, or if the
    kernel refuses to show its call."""
    with contextlib.suppress(PermissionError):
        return _read_wait(procfs, tgid, tid)
    return None


def _read_wait(procfs: Path, tgid: int, tid: int) -> OpenWait | None:
    """As find_wait(). Raises PermissionError if the kernel refuses to show the call of the thread.

    The kernel asks for the right to attach to the process by ptrace(). Root has no such right without
    CAP_SYS_PTRACE, and nobody has it if kernel.yama.ptrace_scope is 3.
    """
    task = procfs / str(tgid) / "task" / str(tid)
    try:
        # The switches are read before the call. If the thread is asleep in the call, and is seen later with
        # the same number of switches, it is in the same sleep.
        status = (task / "status").read_bytes()
        switches = int(status.rpartition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
        fields = (task / "syscall").read_text().split()
        if len(fields) != 9:  # the thread is running, or blocked outside of a system call
            return None
        nr, (first, second, third, fourth, _, _, sp, pc) = int(fields[0]), (int(f, 16) for f in fields[1:])
        address = first
        if nr == FUTEX:
            kind = kind_of_wait(second, third, fourth)
        elif nr == FUTEX_WAIT:
            kind = kind_of_value(second)
        elif nr == FUTEX_WAITV:
            address, kind = int.from_bytes(read_memory(procfs, tgid, first + 8, 8), "little"), "other"
        else:
            return None
    except PermissionError:
        raise
    except (OSError, ValueError, IndexError):  # the thread is ending
        return None
    return OpenWait(tgid, tid, nr, address, kind, switches, sp, pc) if kind else None


def kind_of_value(value: int) -> str:
    """The kind of a wait by the value that the futex word should have, as in lockd/bpf/daemon/futex.bpf.c."""
    value &= 0xFFFFFFFF
    return "lock" if value == 2 or (value >> 31 and value != 0xFFFFFFFF) else "cond"


def kind_of_wait(operation: int, value: int, timeout: int) -> str:
    """The kind of a wait by the arguments of futex(2), as in lockd/bpf/daemon/futex.bpf.c.

    Empty if the operation does not wait.
    """
    match operation & 0xFFFFFFFF & ~(PRIVATE | REALTIME):
        case 0:  # FUTEX_WAIT
            return kind_of_value(value)
        case 9:  # FUTEX_WAIT_BITSET
            is_lock = value & 0xFFFFFFFF == 2 and not timeout and not operation & REALTIME
            return "lock" if is_lock else "cond"
        case 11:  # FUTEX_WAIT_REQUEUE_PI
            return "cond"
        case 6 | 13:  # FUTEX_LOCK_PI, FUTEX_LOCK_PI2
            return "pi"
    return ""


def capture_wait(procfs: Path, wait: OpenWait) -> Capture | None:
    """A capture of a waiting thread; None if the thread has ended or was awake while its stack was read."""
    capture = read_capture(procfs, wait.tgid, wait.stack_pointer, wait.program_counter)
    return capture if find_wait(procfs, wait.tgid, wait.tid) == wait else None
