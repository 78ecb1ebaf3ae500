"""Ring buffers: records that BPF programs write, read from memory that the kernel shares."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

BUSY, DISCARDED = 1 << 31, 1 << 30
"""Flags in the first word of a record's header; the other bits are the record's length in bytes."""
HEADER_BYTES = 8


@dataclass(frozen=True)
class Ring:
    """A map of type BPF_MAP_TYPE_RINGBUF."""

    fd: int
    size: int
    """Bytes of the data area (max_entries of the map), a power of two."""


class RingReader:
    """The only reader of a ring. It needs no privilege. Raises OSError if the kernel refuses the mappings.

    On arm64 nothing orders the loads of the writer's position, of a record's header and of its data. A record
    that has just been written may be read with the content of an older record.
    """

    def __init__(self, ring: Ring) -> None:
        page = mmap.PAGESIZE
        self._ring = ring
        consumer = mmap.mmap(ring.fd, page)
        consumer.madvise(mmap.MADV_DONTFORK)  # a child must not move the position of the reader
        self._consumer_position = memoryview(consumer).cast("Q")
        # The kernel maps the data area twice in a row, so that no record is in two pieces.
        producer = memoryview(mmap.mmap(ring.fd, page + 2 * ring.size, prot=mmap.PROT_READ, offset=page))
        self._producer_position = producer[:page].cast("Q")
        self._data = producer[page:]
        self._data_words = self._data.cast("I")

    def fileno(self) -> int:
        """Return the ring's descriptor, for poll(): readable while there is a record. A poll() that sleeps is
        woken only if the program that writes the record asks the kernel for it."""
        return self._ring.fd

    def records(self) -> Iterator[memoryview]:
        """Yield each record that was written before the iteration begins, and was not yielded before.

        Programs may write records as fast as they are read, so the iteration leaves out those written
        meanwhile. The memory of a record is valid until the next record is asked for.
        """
        position, end = self._consumer_position[0], self._producer_position[0]
        while position != end:
            start = position % self._ring.size
            header = self._data_words[start // 4]
            if header & BUSY:
                break
            length = header & ~(BUSY | DISCARDED)
            if not header & DISCARDED:
                yield self._data[start + HEADER_BYTES : start + HEADER_BYTES + length]
            position += HEADER_BYTES + (length + 7) // 8 * 8
            self._consumer_position[0] = position
