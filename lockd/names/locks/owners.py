"""Who holds a lock in user space, as the lock itself says: read from the memory of its process."""

from __future__ import annotations

import os
import struct
from pathlib import Path

MOST_TID = 1 << 22
"""PID_MAX_LIMIT of the kernel: a larger number is no thread."""
MOST_THREADS = 10_000
"""Of a process in a pid namespace of its own: where there are more, nobody's id is translated."""

TID = 0x3FFF_FFFF
"""FUTEX_TID_MASK: the bits of a word that are the owner's id; those above are flags."""
WAITERS = 0x8000_0000
"""FUTEX_WAITERS: set in such a word while threads wait for it."""
MUSL_NORMAL = 16
"""EBUSY: a mutex of musl that does not note its owner has this in its word."""
DETACH_STATES = 3
"""musl's joins wait for a word that is a state, up to this, and not for a thread's id."""

GLIBC_MUTEX = struct.Struct("=iIiIi")
"""lock, count, owner, nusers, kind: the same on x86-64 and arm64, in 2.31 as in 2.42."""
GLIBC_KINDS = 0x3F3
"""Type (2 bits), robust, PI, priority ceiling, process-shared, elision forced on and off."""
GLIBC_SHARED = 0x80
GLIBC_RECURSIVE = 1
GLIBC_TYPE = 3

GLIBC_RWLOCK = struct.Struct("=I12xqii")
"""readers, unused, the writer, whether it is process-shared: since 2.25."""
PHASE_AT, WRITERS_AT = 8, 12
"""Where in it threads wait: for the phase to change, and writers for another writer. It is on 8 bytes."""
WRITE_LOCKED = 3
"""The bits of `readers` while a writer has it."""

NOT_OWNED = {
    "cond", "sem", "barrier", "latch", "park", "once", "gil", "thread_lock", "monitor", "runtime", "lwlock",
    "internal", "synchronizer", "innodb",
}  # fmt: skip
"""Families whose words name nobody."""


def owner_of_user_lock(procfs: Path, tgid: int, address: int, kind: str, family: str) -> int:
    """The thread that holds the lock at `address` now, or is joined there; 0 if that is not known.

    Never raises, whatever is in the memory; what is told is a thread that lives. Readers of an rwlock
    are not noted by anybody.
    """
    return UserOwners(procfs).owner(tgid, address, kind, family)


class UserOwners:
    """Owners of several locks at one moment: what is found out of a process serves all of its locks."""

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._procfs = procfs
        self._in_namespace: dict[int, dict[int, int] | None] = {}

    def owner(self, tgid: int, address: int, kind: str, family: str) -> int:
        """See owner_of_user_lock()."""
        if family in NOT_OWNED:
            return 0
        try:
            memory = os.open(self._procfs / str(tgid) / "mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            owner, is_shared = _noted_owner(memory, address, kind, family)
        except (OSError, OverflowError, struct.error):  # nothing, or not enough, is mapped there
            return 0
        finally:
            os.close(memory)
        return self._thread(tgid, owner, is_shared) if 0 < owner <= MOST_TID else 0

    def _thread(self, tgid: int, noted: int, is_shared: bool) -> int:
        """The live thread that a process knows by the id `noted`."""
        if tgid not in self._in_namespace:
            self._in_namespace[tgid] = self._namespace(tgid)
        translated = self._in_namespace[tgid]
        if translated is not None:
            return translated.get(noted, 0)
        of_process = self._procfs / str(tgid) / "task" / str(noted)
        found = of_process.exists() or (is_shared and (self._procfs / str(noted)).exists())
        return noted if found else 0

    def _namespace(self, tgid: int) -> dict[int, int] | None:
        """Threads by their ids in a pid namespace of their own; None if the process has none."""
        task = self._procfs / str(tgid) / "task"
        try:
            if len(_ids(task / str(tgid) / "status")) < 2:
                return None
            tids = os.listdir(task)
        except OSError:
            return None
        if len(tids) > MOST_THREADS:
            return {}
        found = {}
        for tid in tids:
            try:
                found[_ids(task / tid / "status")[-1]] = int(tid)
            except (OSError, IndexError):  # it has just ended
                continue
        return found


def _noted_owner(memory: int, address: int, kind: str, family: str) -> tuple[int, bool]:
    """The id in the lock, and whether that may be a thread of another process."""
    if family == "rwlock":
        base = address - (WRITERS_AT if address % 8 else PHASE_AT)
        return _writer_of_glibc_rwlock(*GLIBC_RWLOCK.unpack(os.pread(memory, GLIBC_RWLOCK.size, base)))
    read = os.pread(memory, GLIBC_MUTEX.size, address)
    (word,) = struct.unpack_from("=I", read)
    if kind == "pi":
        return word & TID, True
    if family == "join":
        return (word if word > DETACH_STATES else 0), False
    if word in (1, 2):
        return _owner_of_glibc_mutex(*GLIBC_MUTEX.unpack(read))
    owner = word & TID if word & WAITERS else 0
    return (0 if owner == MUSL_NORMAL else owner), True


def _writer_of_glibc_rwlock(readers: int, unused: int, writer: int, shared: int) -> tuple[int, bool]:
    """Those of other libraries have other things there."""
    is_one = readers & WRITE_LOCKED == WRITE_LOCKED and unused == 0 and shared in (0, 1)
    return (writer if is_one else 0), shared == 1


def _owner_of_glibc_mutex(lock: int, count: int, owner: int, users: int, kind: int) -> tuple[int, bool]:
    """Other mutexes have 1 and 2 in their word as well, and behind it whatever they protect."""
    is_recursive = kind & GLIBC_TYPE == GLIBC_RECURSIVE
    is_one = kind & ~GLIBC_KINDS == 0 and users > 0 and (count > 0) == is_recursive
    return (owner if is_one else 0), bool(kind & GLIBC_SHARED)


def _ids(status: Path) -> list[int]:
    """A thread's id in each of its pid namespaces, outermost first; empty if the kernel does not tell."""
    for line in status.read_bytes().splitlines():
        if line.startswith(b"NSpid:"):
            return [int(number) for number in line.split()[1:]]
    return []
