"""Ring buffers: the map is a file in memory with the positions and the data where the kernel has them."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lockd.kernel.rings import BUSY, DISCARDED, HEADER_BYTES, Ring, RingReader

PAGE = mmap.PAGESIZE
RECORD_BYTES = HEADER_BYTES + 8


@dataclass
class Writer:
    """Writes records of 8 bytes, as BPF programs do."""

    fd: int
    position: int = 0

    def write(self, number: int, flags: int = 0) -> None:
        os.pwrite(self.fd, struct.pack("=IIQ", 8 | flags, 0, number), 2 * PAGE + self.position % PAGE)
        self.position += RECORD_BYTES
        os.pwrite(self.fd, struct.pack("=Q", self.position), PAGE)


@pytest.fixture
def writer() -> Iterator[Writer]:
    fd = os.memfd_create("ring")
    os.truncate(fd, 4 * PAGE)
    yield Writer(fd)
    os.close(fd)


def numbers(reader: RingReader) -> list[int]:
    return [int.from_bytes(record, "little") for record in reader.records()]


def test_each_record_is_read_once_and_in_order(writer: Writer) -> None:
    reader = RingReader(Ring(writer.fd, PAGE))
    assert numbers(reader) == []
    for number, flags in ((1, 0), (2, DISCARDED), (3, 0), (4, BUSY), (5, 0)):
        writer.write(number, flags)
    assert numbers(reader) == [1, 3]
    os.pwrite(writer.fd, struct.pack("=I", 8), 2 * PAGE + 3 * RECORD_BYTES)  # the record 4 is complete
    assert numbers(reader) == [4, 5]


def test_reading_ends_though_a_record_is_written_for_each_that_is_read(writer: Writer) -> None:
    reader = RingReader(Ring(writer.fd, PAGE))
    writer.write(1)
    writer.write(2)
    found = []
    for record in reader.records():
        found.append(int.from_bytes(record, "little"))
        assert len(found) < 10
        writer.write(len(found) + 2)
    assert found == [1, 2]
    assert numbers(reader) == [3, 4]
