"""A real ring buffer, written to by a BPF program and read by a thread without any capability."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockd.kernel.libbpf import libbpf
from lockd.kernel.lock_owners import TestRunOpts as RunOptions
from lockd.kernel.rings import Ring
from lockd.load import programs
from lockd.load.bpf_object import create_maps
from lockd.load.compiled import MapDefinition
from lockd.names.blocked_processes import BlockedProcesses
from lockd.process import privileges

BPF_MAP_TYPE_RINGBUF = 27
RINGBUF_OUTPUT = 130
RECORD_BYTES = 16
CAPACITY = mmap.PAGESIZE // RECORD_BYTES


class Writer:
    """A BPF program that writes the low 32 bits of its argument to a new ring of one page."""

    def __init__(self) -> None:
        ring = MapDefinition("ring", BPF_MAP_TYPE_RINGBUF, 0, 0, mmap.PAGESIZE, 0, "", 0, 0, "i4", "u4")
        (self.ring,) = create_maps([ring], b"")
        instructions = [
            (0x79, 6, 1, 0, 0),  # r6 = the first argument
            (0x63, 10, 6, -4, 0),  # stored on the stack
            (0x18, 1, 1, 0, self.ring), (0, 0, 0, 0, 0),  # r1 = the map
            (0xBF, 2, 10, 0, 0), (0x07, 2, 0, 0, -4),  # r2 = the address on the stack
            (0xB7, 3, 0, 0, 4), (0xB7, 4, 0, 0, 0),  # r3 = the size, r4 = the flags
            (0x85, 0, 0, 0, RINGBUF_OUTPUT),
            (0x95, 0, 0, 0, 0),
        ]  # fmt: skip
        code = b"".join(
            bytes((operation, target | source << 4))
            + offset.to_bytes(2, "little", signed=True)
            + constant.to_bytes(4, "little", signed=True)
            for operation, target, source, offset, constant in instructions
        )
        self._program = programs.load(code, "writer", "raw_tracepoint")

    def write(self, number: int) -> bool:
        """Write a number. Returns False if the ring has no room."""
        argument = ctypes.c_uint64(number)
        run = RunOptions(sz=ctypes.sizeof(RunOptions), ctx_in=ctypes.addressof(argument), ctx_size_in=8)
        assert libbpf().bpf_prog_test_run_opts(self._program, ctypes.byref(run)) == 0
        return int(run.retval) == 0

    def close(self) -> None:
        os.close(self._program)
        os.close(self.ring)


@pytest.fixture
def writer(host: None) -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.close()


@pytest.fixture
def unprivileged() -> Iterator[ThreadPoolExecutor]:
    """A thread without capabilities. The test's own thread keeps its own: each thread has a set of them."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(privileges.drop_all).result()
        yield thread


def is_ready(reader: BlockedProcesses) -> bool:
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(0))


def test_what_is_written_is_read_once(writer: Writer, unprivileged: ThreadPoolExecutor) -> None:
    reader = unprivileged.submit(BlockedProcesses, Ring(writer.ring, mmap.PAGESIZE)).result()
    assert not is_ready(reader)
    for lap in range(5):
        written = [lap * CAPACITY + number for number in range(CAPACITY * 2 // 3)]
        assert all(writer.write(number) for number in written)
        assert unprivileged.submit(is_ready, reader).result()
        assert unprivileged.submit(reader.read).result() == written
        assert not is_ready(reader)
        assert reader.read() == []


def test_an_id_that_comes_twice_is_told_once(writer: Writer) -> None:
    reader = BlockedProcesses(Ring(writer.ring, mmap.PAGESIZE))
    for number in (7, 8, 7):
        writer.write(number)
    assert reader.read() == [7, 8]


def test_a_full_ring_refuses_and_goes_on_when_it_was_read(writer: Writer) -> None:
    reader = BlockedProcesses(Ring(writer.ring, mmap.PAGESIZE))
    taken = [number for number in range(CAPACITY + 10) if writer.write(number)]
    assert CAPACITY - 1 <= len(taken) <= CAPACITY
    assert reader.read() == taken
    assert writer.write(1)
    assert reader.read() == [1]


def test_another_reader_goes_on_where_the_last_ended(writer: Writer) -> None:
    """A restarted namer goes on behind the last record that the namer before it has read."""
    ring = Ring(writer.ring, mmap.PAGESIZE)
    writer.write(1)
    assert BlockedProcesses(ring).read() == [1]
    writer.write(2)
    assert BlockedProcesses(ring).read() == [2]


def test_what_is_no_ring_is_refused(host: None) -> None:
    (array,) = create_maps([MapDefinition("array", 2, 4, 4, 1, 0, "", 0, 0, "u4", "u4")], b"")
    with pytest.raises(OSError):
        BlockedProcesses(Ring(array, mmap.PAGESIZE))
    os.close(array)
