"""What is known of the futex calls of one thread at one address and stack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class LockRow:
    """Waits, and wakes; a wait that was still open at the end counts with the time until then."""

    pid: int
    tid: int
    address: int
    comm: str
    """Of the process."""
    frames: tuple[str, ...] = ()
    """Outermost first; empty if no thread blocked there, or no stack is known."""
    kind: str = ""
    """`lock`, `pi`, `cond` or `other`; empty if that is not known."""
    lock: str = ""
    """A name; empty if there is none."""
    blocked_ns: int = 0
    sys_ns: int = 0
    max_blocked_ns: int = 0
    max_sys_ns: int = 0
    wait_count: int = 0
    blocked_count: int = 0
    wake_count: int = 0
    errors: int = 0
    ongoing: int = 0
    """How many of the waits were open at the end."""


def microseconds(ns: int) -> int:
    """To the nearest."""
    return (ns + 500) // 1000


def sorted_rows(rows: Iterable[LockRow]) -> list[LockRow]:
    """As locktrace prints them: by process, then by blocked time, both descending."""
    return sorted(rows, key=lambda row: (-row.pid, -row.blocked_ns, row.tid, row.address, row.frames))
