"""Holders of locks in user space, by the thread ids that the memory of the locks has."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_TID = 1 << 22
"""PID_MAX_LIMIT of the kernel: a larger number is not the id of a thread."""
MOST_THREADS = 10_000
"""If a process in a pid namespace of its own has more threads than this, their ids are not translated."""
MOST_REMEMBERED = 100_000
"""The most threads that are remembered, of all processes in pid namespaces of their own together."""
READING_SHARE = 20
"""After the ids of a process's threads were read, they are not read again for this many times the duration
of the reading."""
BELIEVED_SECONDS = 0.5
"""Seconds for which it is believed that a process has a pid namespace of its own, or none.

Afterwards its id may be that of another process.
"""

TID = 0x3FFF_FFFF
"""FUTEX_TID_MASK: the bits of a futex word that are the owner's id; the higher bits are flags."""
WAITERS = 0x8000_0000
"""FUTEX_WAITERS: the flag of a futex word that is set while threads wait for it."""
MUSL_NORMAL = 16
"""EBUSY: the word of a locked mutex of musl that does not store its owner."""
DETACH_STATES = 3
"""The largest detach state of musl. A join of musl waits for a word that has such a state, not a thread's id.
"""

GLIBC_MUTEX = struct.Struct("=iIiIi")
"""The members lock, count, owner, nusers and kind of a mutex of glibc: the same on x86-64 and arm64, from
glibc 2.31 to 2.42."""
GLIBC_KINDS = 0x3F3
"""The bits of `kind`: type (2 bits), robust, PI, priority ceiling, process-shared, elision forced on, off."""
GLIBC_SHARED = 0x80
GLIBC_RECURSIVE = 1
GLIBC_TYPE = 3

GLIBC_RWLOCK = struct.Struct("=I12xqii")
"""An rwlock of glibc since 2.25: readers, unused, the writer, whether the lock is process-shared."""
PHASE_AT, WRITERS_AT = 8, 12
"""Offsets in an rwlock of glibc of two words: threads wait on the first one for the phase to change, and
writers wait on the second one for another writer.

The lock is aligned to 8 bytes, so that the address of a word tells which of the two it is.
"""
WRITE_LOCKED = 3
"""The bits of `readers` that are both set while a writer has the lock."""

NOT_OWNED = {
    "cond", "sem", "barrier", "latch", "park", "once", "gil", "thread_lock", "monitor", "runtime", "lwlock",
    "internal", "synchronizer", "innodb",
}  # fmt: skip
"""Families of locks that do not store their owner."""

_File = tuple[bytes, bytes]
"""Device and inode of what is mapped: a file, or memory that a process shares with its children."""


@dataclass
class _Threads:
    """What is remembered of the threads of a process."""

    is_inside: bool
    """Whether the process has a pid namespace of its own."""
    checked_at: float
    """The time when `is_inside` was last checked: seconds of the clock of UserOwners."""
    tids: dict[int, int] = field(default_factory=dict)
    """Ids of threads as lockd sees them, by their ids in the process's own pid namespace.

    Empty if the process has none of its own. The threads may also be those of other processes that share
    memory with this one.
    """
    read_at: float = 0.0
    """The time from which `tids` may be read again: seconds of the clock of UserOwners."""


class UserOwners:
    """Finds the holders of locks.

    A process in a pid namespace of its own knows its threads by other ids than lockd. The translation
    is remembered, as there can be thousands of threads, and the same locks are asked for every second.

    `procfs` is the root of a proc file system, and `clock` returns seconds.
    """

    def __init__(self, procfs: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._procfs, self._clock = procfs, clock
        self._threads: dict[int, _Threads] = {}
        """What is remembered of the threads of each process, by thread-group id."""

    def keep(self, alive: set[int]) -> None:
        """Forget all processes but those in `alive`."""
        for tgid in self._threads.keys() - alive:
            del self._threads[tgid]

    def owner(self, tgid: int, address: int, kind: str, family: str) -> int:
        """The live thread that holds the lock at `address` now, or for whose end a join waits; 0 if unknown.

        `kind` and `family` are those of the LockAnswer. Never raises, whatever is in the memory. The readers
        of an rwlock are unknown, as no lock stores them.
        """
        if family in NOT_OWNED:
            return 0
        try:
            memory = os.open(self._procfs / str(tgid) / "mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            owner, is_shared = _stored_owner(memory, address, kind, family)
        except (OSError, OverflowError, struct.error):  # no memory, or not enough, is mapped there
            return 0
        finally:
            os.close(memory)
        return self._thread(tgid, owner, address if is_shared else 0) if 0 < owner <= MOST_TID else 0

    def _thread(self, tgid: int, stored: int, shared: int) -> int:
        """The live thread whose id, as a process sees it, is `stored`; 0 if there is none.

        The thread may belong to another process that shares the memory at the address `shared`. If `shared`
        is 0, the memory is not shared.
        """
        task = self._procfs / str(tgid) / "task"
        threads, now = self._threads.get(tgid), self._clock()
        if not threads or now >= threads.checked_at + BELIEVED_SECONDS:
            try:
                is_inside = len(_ids(task / str(tgid) / "status")) > 1
            except OSError:
                return 0
            threads = self._threads.setdefault(tgid, _Threads(is_inside, now))
            threads.is_inside, threads.checked_at = is_inside, now
        tid = self._translated(threads, tgid, stored, shared) if threads.is_inside else stored
        if not tid:
            return 0
        is_alive = (task / str(tid)).exists() or (shared and self._has_mapped_too(tid, tgid, shared))
        return tid if is_alive else 0

    def _has_mapped_too(self, other: int, tgid: int, address: int) -> bool:
        """Whether the process of the thread `other` has also mapped the shared memory at `address` of `tgid`.

        Otherwise the thread has nothing to do with the lock: any number can be in the memory of a lock.
        """
        try:
            file = self._shared_file(tgid, address)
            return file is not None and self._has_mapped(other, file)
        except OSError:
            return False

    def _shared_file(self, tgid: int, address: int) -> _File | None:
        """What a process has mapped at `address` to share it; None if nothing. Raises OSError if it ended."""
        mapped = _shared_mappings(self._procfs / str(tgid) / "maps")
        return next((file for addresses, file in mapped if address in addresses), None)

    def _has_mapped(self, tgid: int, file: _File) -> bool:
        """Whether a process has mapped `file` to share it. Raises OSError if the process has ended."""
        return any(one == file for _, one in _shared_mappings(self._procfs / str(tgid) / "maps"))

    def _translated(self, threads: _Threads, tgid: int, stored: int, shared: int) -> int:
        """The live thread that a process in a pid namespace of its own knows as `stored`; 0 if none is known.

        If the memory at the address `shared` is shared, the thread may be one of another process in the
        namespace. If the remembered thread is not the right one, the ids of all threads are read again, but
        not too often: any number can be in the memory of a lock.
        """
        tid = threads.tids.get(stored, 0)
        if tid and _own_id(self._procfs / str(tid)) == stored:
            return tid
        began = self._clock()
        if began < threads.read_at:
            return 0
        threads.tids = _threads_by_own_id(self._procfs / str(tgid) / "task")
        if shared and stored not in threads.tids:
            threads.tids = self._sharing_threads(tgid, shared) | threads.tids
        done = self._clock()
        threads.read_at = done + READING_SHARE * (done - began)
        if sum(len(known.tids) for known in self._threads.values()) > MOST_REMEMBERED:
            for known in self._threads.values():
                known.tids = known.tids if known is threads else {}
        return threads.tids.get(stored, 0)

    def _sharing_threads(self, tgid: int, address: int) -> dict[int, int]:
        """The threads of other processes that share the memory at `address` of process `tgid`.

        Only processes in the pid namespace of `tgid` are searched. Keys are the threads' ids in it, values
        their ids as lockd sees them.
        """
        found: dict[int, int] = {}
        with contextlib.suppress(OSError):
            namespace = os.stat(self._procfs / str(tgid) / "ns/pid")
            file = self._shared_file(tgid, address)
            others = {int(name) for name in os.listdir(self._procfs) if name.isdigit()} if file else set()
            for other in others - {tgid}:
                with contextlib.suppress(OSError):  # the other process has ended
                    is_near = os.path.samestat(namespace, os.stat(self._procfs / str(other) / "ns/pid"))
                    if file and is_near and self._has_mapped(other, file):
                        found |= _threads_by_own_id(self._procfs / str(other) / "task")
                if len(found) > MOST_THREADS:
                    break
        return found


def _threads_by_own_id(task: Path) -> dict[int, int]:
    """The threads of a process by their ids in its own pid namespace; none if it has too many.

    `task` is the directory of its threads in procfs.
    """
    try:
        tids = os.listdir(task)
    except OSError:
        return {}
    if len(tids) > MOST_THREADS:
        return {}
    return {own: int(tid) for tid in tids if (own := _own_id(task / tid))}


def _own_id(thread: Path) -> int:
    """The id of a thread in its own pid namespace, given its directory in procfs; 0 if it has ended."""
    try:
        return _ids(thread / "status")[-1]
    except (OSError, IndexError):
        return 0


def _stored_owner(memory: int, address: int, kind: str, family: str) -> tuple[int, bool]:
    """The owner's id in a lock, 0 if there is none, and whether it may be a thread of another process.

    `memory` is a descriptor of /proc/PID/mem. Raises OSError, OverflowError or struct.error if the lock
    cannot be read.
    """
    if family == "rwlock":
        base = address - (WRITERS_AT if address % 8 else PHASE_AT)
        return _writer_of_glibc_rwlock(*GLIBC_RWLOCK.unpack(os.pread(memory, GLIBC_RWLOCK.size, base)))
    mutex = os.pread(memory, GLIBC_MUTEX.size, address)
    (word,) = struct.unpack_from("=I", mutex)
    if kind == "pi":
        return word & TID, True
    if family == "join":
        return (word if word > DETACH_STATES else 0), False
    if word in (1, 2):
        return _owner_of_glibc_mutex(*GLIBC_MUTEX.unpack(mutex))
    owner = word & TID if word & WAITERS else 0
    return (0 if owner == MUSL_NORMAL else owner), True


def _writer_of_glibc_rwlock(readers: int, unused: int, writer: int, shared: int) -> tuple[int, bool]:
    """Return the writer (0 unless this is a write-locked rwlock of glibc) and whether the lock is shared."""
    is_rwlock = readers & WRITE_LOCKED == WRITE_LOCKED and unused == 0 and shared in (0, 1)
    return (writer if is_rwlock else 0), shared == 1


def _owner_of_glibc_mutex(lock: int, count: int, owner: int, users: int, kind: int) -> tuple[int, bool]:
    """Return the owner (0 if the memory is not a mutex of glibc) and whether the mutex is shared.

    The words of other libraries' mutexes can be 1 or 2 too, and are followed by the data that they protect.
    """
    is_recursive = kind & GLIBC_TYPE == GLIBC_RECURSIVE
    is_mutex = kind & ~GLIBC_KINDS == 0 and users > 0 and (count > 0) == is_recursive
    return (owner if is_mutex else 0), bool(kind & GLIBC_SHARED)


def _shared_mappings(maps: Path) -> Iterator[tuple[range, _File]]:
    """The addresses of all shared mappings of a process, each with what is mapped."""
    with maps.open("rb") as file:
        for line in file:
            addresses, permissions, _, device, inode = line.split(maxsplit=5)[:5]
            if permissions.endswith(b"s"):
                start, end = addresses.split(b"-")
                yield range(int(start, 16), int(end, 16)), (device, inode)


def _ids(status: Path) -> list[int]:
    """A thread's id in each of its pid namespaces, outermost first; empty if the kernel has no NSpid."""
    for line in status.read_bytes().splitlines():
        if line.startswith(b"NSpid:"):
            return [int(number) for number in line.split()[1:]]
    return []
