"""Ring buffers: records that BPF programs write, read from the kernel's own memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

BUSY, DISCARDED = 1 << 31, 1 << 30
"""In the first word of a record; the other bits are its length."""
HEADER_BYTES = 8


@dataclass(frozen=True)
class Ring:
    """A map of type BPF_MAP_TYPE_RINGBUF; `size` is its max_entries, in bytes, a power of two."""

    fd: int
    size: int


class RingReader:
    """The only reader of a ring; it takes no privilege. Raises OSError if the kernel refuses it.

    Nothing orders the loads of arm64: a record that is read at the very moment it is written may be as it
    was before.
    """

    def __init__(self, ring: Ring) -> None:
        page = mmap.PAGESIZE
        self._ring = ring
        read_to = mmap.mmap(ring.fd, page)
        read_to.madvise(mmap.MADV_DONTFORK)  # no child is to say what was read
        self._read_to = memoryview(read_to).cast("Q")
        # One page, and the data twice: no record is in two pieces.
        self._written = memoryview(mmap.mmap(ring.fd, page + 2 * ring.size, prot=mmap.PROT_READ, offset=page))
        self._written_to = self._written[:page].cast("Q")
        self._data = self._written[page:]
        self._words = self._data.cast("I")

    def fileno(self) -> int:
        """Of the ring, to be polled: it can be read from while there is a record, if the programs wake."""
        return self._ring.fd

    def records(self) -> Iterator[memoryview]:
        """Each record that was written since the last call. Its memory holds until the next."""
        at = self._read_to[0]
        while at != self._written_to[0]:
            start = at % self._ring.size
            head = self._words[start // 4]
            if head & BUSY:
                break
            length = head & ~(BUSY | DISCARDED)
            if not head & DISCARDED:
                yield self._data[start + HEADER_BYTES : start + HEADER_BYTES + length]
            at += HEADER_BYTES + (length + 7) // 8 * 8
            self._read_to[0] = at
