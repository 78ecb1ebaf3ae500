"""Reading a real map returns every entry once, and never fails for want of room."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import MapInfo
from lockd.kernel.maps import Buffers, HashMap
from lockd.sample.drain import Backlog

BPF_MAP_TYPE_HASH = 1
ENTRIES = 64
MOST_IN_A_BUCKET = 15
"""The most entries of a bucket that tests expect. A hash map of 64 entries has 64 buckets. One map in a
million millions has a bucket with more entries than this."""


@pytest.fixture
def fd() -> Iterator[int]:
    """A full hash map of the numbers below 64 and their squares."""
    create = ctypes.CDLL(libbpf()._name).bpf_map_create
    fd = create(BPF_MAP_TYPE_HASH, b"lockd_test", 4, 8, ENTRIES, None)
    assert fd >= 0
    fill(fd)
    yield fd
    os.close(fd)


def fill(fd: int, first: int = 0) -> None:
    for number in range(first, ENTRIES):
        key, value = ctypes.c_uint32(number), ctypes.c_uint64(number * number)
        assert libbpf().bpf_map_update_elem(fd, ctypes.byref(key), ctypes.byref(value), 0) == 0


def test_a_full_map_is_read_and_drained_whole(fd: int) -> None:
    table = HashMap(fd, MapInfo("test", ENTRIES, "u4", "u8"))
    buffers = Buffers([table])
    for take in (table.read, table.drain):
        keys, values = take(buffers)
        assert sorted(keys.tolist()) == list(range(ENTRIES))
        assert (values == keys.astype(int) ** 2).all()
    assert [len(columns) for columns in table.drain(buffers)] == [0, 0]


@pytest.mark.parametrize("room", range(1, ENTRIES, 7))
def test_more_entries_than_room_is_no_error(fd: int, room: int) -> None:
    """A full map that programs write to can show more entries during one reading than it can hold."""
    table = HashMap(fd, MapInfo("test", room, "u4", "u8"))
    buffers = Buffers([table])
    keys, _ = table.read(buffers)
    assert len(set(keys.tolist())) == len(keys) <= room
    seen: list[int] = []
    while len(keys):
        keys, values = table.drain(buffers)
        assert (values == keys.astype(int) ** 2).all()
        seen += keys.tolist()
    # A bucket of several entries that do not all have room stays as a whole. No entry is drained twice.
    assert len(set(seen)) == len(seen)
    if room >= MOST_IN_A_BUCKET:
        assert sorted(seen) == list(range(ENTRIES))


def test_a_backlog_hands_out_what_was_drained_in_its_order(fd: int) -> None:
    table = HashMap(fd, MapInfo("test", ENTRIES, "u4", "u8"))
    backlog, seen = Backlog(table, more=10), []
    for _ in range(7):
        while not backlog.has_room:
            keys, values = backlog.take(ENTRIES // 3)
            assert (values == keys.astype(int) ** 2).all()
            seen += keys.tolist()
        fill(fd)
        assert backlog.drain(table) == ENTRIES
        keys, _ = backlog.take(3)
        seen += keys.tolist()
    seen += backlog.all()[0].tolist()
    backlog.clear()
    assert len(backlog) == 0
    for start in range(0, 7 * ENTRIES, ENTRIES):
        assert sorted(seen[start : start + ENTRIES]) == list(range(ENTRIES))
    assert len(seen) == 7 * ENTRIES
