"""Processes of which a thread has just blocked, as the BPF programs tell them by a ring buffer."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

BUSY, DISCARDED = 1 << 31, 1 << 30
"""In the first word of a record; the other bits are its length."""
HEADER_BYTES = 8


@dataclass(frozen=True)
class Ring:
    """A map of type BPF_MAP_TYPE_RINGBUF; `size` is its max_entries, in bytes, a power of two."""

    fd: int
    size: int


class BlockedProcesses:
    """The only reader of a ring; it takes no privilege. Raises OSError if the kernel refuses it.

    Each record is a thread group id of 32 bits. Nothing orders the loads of arm64: what is read too early is
    an id of before, or none, and a process looked at in vain.
    """

    def __init__(self, ring: Ring) -> None:
        page = mmap.PAGESIZE
        self._ring = ring
        self._read_to = memoryview(mmap.mmap(ring.fd, page)).cast("Q")
        # One page, and the data twice: no record is in two pieces.
        written = memoryview(mmap.mmap(ring.fd, page + 2 * ring.size, prot=mmap.PROT_READ, offset=page))
        self._written_to = written[:page].cast("Q")
        self._words = written[page:].cast("I")

    def fileno(self) -> int:
        """Of the ring, to be polled: it can be read from while there is a record."""
        return self._ring.fd

    def read(self) -> list[int]:
        """Each thread group id that was written since the last call, once."""
        tgids: dict[int, None] = {}
        at = self._read_to[0]
        while at != self._written_to[0]:
            word = at % self._ring.size // 4
            head = self._words[word]
            if head & BUSY:
                break
            if not head & DISCARDED:
                tgids[self._words[word + HEADER_BYTES // 4]] = None
            length = head & ~(BUSY | DISCARDED)
            at += HEADER_BYTES + (length + 7) // 8 * 8
            self._read_to[0] = at
        return list(tgids)
