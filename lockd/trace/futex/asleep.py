"""Threads that wait in a futex call at this moment, as /proc tells: for waits that no program saw begin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.names.unwind.capture import Capture, read_capture

FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
FUTEX_WAITV, FUTEX_WAIT = 449, 455
"""Numbers of system calls."""
PRIVATE, REALTIME = 128, 256
"""FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME of an operation."""


@dataclass(frozen=True)
class Asleep:
    """Equal to what is seen later if the thread has slept all the time between."""

    tgid: int
    tid: int
    number: int
    """Of the system call."""
    address: int
    kind: str
    switches: int
    """Voluntary ones of the thread so far."""
    stack_pointer: int
    program_counter: int


def all_asleep(procfs: Path, tgids: Iterable[int]) -> Iterator[Asleep]:
    """Of these processes; threads that cannot be looked at are left out."""
    for tgid in tgids:
        tids: list[str] = []
        with contextlib.suppress(OSError):
            tids = os.listdir(procfs / str(tgid) / "task")
        for tid in tids:
            found = asleep(procfs, tgid, int(tid))
            if found:
                yield found


def asleep(procfs: Path, tgid: int, tid: int) -> Asleep | None:
    """None if that thread does not wait in a futex call, or has ended."""
    task = procfs / str(tgid) / "task" / str(tid)
    try:
        # In this order: if the thread sleeps now, and is later seen to have made no other switch, it is in
        # the very same sleep.
        status = (task / "status").read_bytes()
        switches = int(status.rpartition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
        words = (task / "syscall").read_text().split()
        if len(words) != 9 or int(words[0]) not in (
            FUTEX,
            FUTEX_WAITV,
            FUTEX_WAIT,
        ):  # it runs, or another call
            return None
        number, (first, second, third, fourth, _, _, sp, pc) = int(words[0]), (int(w, 16) for w in words[1:])
        address, kind = first, kind_of_wait(second, third, fourth)
        if number == FUTEX_WAIT:
            kind = kind_of_value(second)
        elif number == FUTEX_WAITV:
            address, kind = int.from_bytes(_read(procfs, tgid, first + 8, 8), "little"), "other"
    except (OSError, ValueError, IndexError):  # it is ending
        return None
    return Asleep(tgid, tid, number, address, kind, switches, sp, pc) if kind else None


def kind_of_value(value: int) -> str:
    """As in lockd/bpf/daemon/futex.bpf.c."""
    value &= 0xFFFFFFFF
    return "lock" if value == 2 or (value >> 31 and value != 0xFFFFFFFF) else "cond"


def kind_of_wait(operation: int, value: int, timeout: int) -> str:
    """As in lockd/bpf/daemon/futex.bpf.c; empty if it is no wait."""
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


def capture_of(procfs: Path, one: Asleep) -> Capture | None:
    """What its stack can be unwound from; None if it is gone, or has been awake meanwhile."""
    found = read_capture(procfs, one.tgid, one.stack_pointer, one.program_counter)
    return found if asleep(procfs, one.tgid, one.tid) == one else None


def _read(procfs: Path, tgid: int, address: int, size: int) -> bytes:
    with (procfs / str(tgid) / "mem").open("rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, address)
