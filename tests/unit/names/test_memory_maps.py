"""Memory maps and files as a process can make them to mislead whoever names its locks."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lockd.names.locks import user_locks
from lockd.names.locks.user_locks import UserNames
from lockd.names.objects import address_space
from lockd.names.objects.address_space import AddressSpace
from lockd.names.objects.mappings import MOST_PARTS, Mapping, Mappings
from lockd.names.objects.object_cache import Key, ObjectCache
from lockd.names.objects.object_file import ObjectFile, open_object
from lockd.names.objects.process_files import UNKNOWN_ROOT, Root, opened_root

SELF = Path("/proc/self")
PT_LOAD = 1


def libc() -> Mapping:
    """Return the first mapping of the C library in this process."""
    found = Mappings((SELF / "maps").read_bytes())
    return next(
        image.first for image in found.images_with_code() if image.name.startswith(("libc.so", "libc-"))
    )


def opened(path: bytes) -> ObjectFile:
    return open_object(os.open(path, os.O_RDONLY), (Path("/"),), path)


def test_many_mappings_side_by_side_belong_to_no_file_far_before_them() -> None:
    """A process can have a million mappings, and each question about one would go through all of them."""
    page = 0x1000
    lines = [f"{page:x}-{2 * page:x} rw-p 00000000 08:01 7 /usr/lib/libx.so"]
    for n in range(2, 5000):
        lines.append(f"{n * page:x}-{(n + 1) * page:x} {('rw-p', 'r-xp')[n % 2]} 00000000 00:00 0 ")
    found = Mappings("\n".join(lines).encode())
    near, far = found.image(10 * page), found.image(4000 * page)
    assert near
    assert near.name == "libx.so"
    assert far is None
    assert found.image((MOST_PARTS + 10) * page) is None


def test_a_file_is_told_from_another_that_has_its_inode() -> None:
    """A deleted file cannot be opened any more, and its inode's number is soon that of another file."""
    mapping = libc()
    memory = os.open(SELF / "mem", os.O_RDONLY)
    try:
        library, other = opened(mapping.path), opened(os.fsencode(os.readlink(SELF / "exe")))
        assert library.may_be_mapped(mapping, memory)
        assert not other.may_be_mapped(mapping, memory)
        assert other.may_be_mapped(mapping, -1)
        cache = ObjectCache()
        gone = Mapping(mapping.start, mapping.end, "r--p", 0, mapping.device, mapping.inode, b"/nowhere.so")
        key = cache.load_mapped(SELF, mapping, memory)
        assert key
        cache._by_inode[gone.device, gone.inode] = cache.load_mapped(SELF, program(), memory) or key
        assert cache._by_inode[gone.device, gone.inode] != key
        assert cache.load_mapped(Path("/proc/0"), gone, memory) is None
        cache._by_inode[gone.device, gone.inode] = key
        assert cache.load_mapped(Path("/proc/0"), gone, memory) == key
    finally:
        os.close(memory)


def test_a_file_of_another_device_is_remembered_for_its_own_mounts_alone(tmp_path: Path) -> None:
    """A FUSE server can give its files the number and the beginning of any file, and a user can mount one
    wherever they like, in a mount namespace of their own."""
    mapping = program()
    elsewhere = Mapping(
        mapping.start, mapping.end, "r--p", 0, mapping.device + 1, mapping.inode, mapping.path
    )
    gone = Mapping(mapping.start, mapping.end, "r--p", 0, mapping.device + 1, mapping.inode, b"/nowhere")
    memory = os.open(SELF / "mem", os.O_RDONLY)
    try:
        with opened_root(SELF) as root:
            assert root.is_shared
            theirs = replace(root, identity=(root.identity[0] + 1, *root.identity[1:]))
            cache = ObjectCache()
            key = cache.load_mapped(SELF, elsewhere, memory, theirs)
            assert key
            assert cache.load_mapped(Path("/proc/0"), gone, memory, theirs) == key
            assert cache.load_mapped(Path("/proc/0"), gone, memory, root) is None
            assert cache.load_mapped(Path("/proc/0"), gone, memory) is None
            assert cache.load_mapped(SELF, mapping, memory, theirs) == key
            gone = replace(gone, device=mapping.device)
            assert cache.load_mapped(Path("/proc/0"), gone, memory, root) == key
    finally:
        os.close(memory)


def program() -> Mapping:
    """Return the first mapping of the program in this process."""
    path = os.fsencode(os.readlink(SELF / "exe"))
    found = Mappings((SELF / "maps").read_bytes())
    return next(image.first for image in found.images_with_code() if image.first.path == path)


@pytest.mark.parametrize("address", [0, 2**64 - 1])
def test_no_address_in_a_file_that_says_it_is_at_none_leaves_64_bits(address: int, tmp_path: Path) -> None:
    """Some addresses would be below zero or too large; there the file is not taken for mapped."""
    content = bytearray(libc().path and Path(os.fsdecode(libc().path)).read_bytes())
    headers, size, count = struct.unpack_from("<Q14xHH", content, 32)
    for at in range(headers, headers + size * count, size):
        if struct.unpack_from("<I", content, at)[0] == PT_LOAD:
            struct.pack_into("<Q", content, at + 8, 0xFFF)
            struct.pack_into("<Q", content, at + 16, address)
    crafted = tmp_path / "crafted.so"
    crafted.write_bytes(content)
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    with crafted.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, everything)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        space = AddressSpace(SELF, ObjectCache())
        space.refresh()
        found = []
        for place in (start, start + 0x100, start + 0x1000):
            image = space.image(place)
            if located := space.locate(place):
                assert image
                found.append(located)
            assert space.function_start(place) >= -1
            space.rule(place)
        assert found
        for file, inside in found:
            assert 0 <= inside < 2**64
            assert (file.function(inside), file.variable(inside)) == (None, None)


def test_a_process_that_grows_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only a new process makes room: a perf map of 16 MB may come when the process is known already."""
    monkeypatch.setattr(user_locks, "MAX_PROCESS_BYTES", 1)
    names = UserNames()
    first, second = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        names.read_mappings(first.pid)
        names.read_mappings(second.pid)
        assert set(names._processes) == {first.pid, second.pid}
        names._processes[second.pid].weighed = -user_locks.GROWN_BYTES - 1
        names.read_mappings(second.pid)
        assert set(names._processes) == {second.pid}
    finally:
        for one in (first, second):
            one.kill()
            one.wait()


class Opened(ObjectCache):
    """Counts how often a mapped file is opened."""

    times = 0

    def load_mapped(
        self, process: Path, mapping: Mapping, memory: int, root: Root = UNKNOWN_ROOT
    ) -> Key | None:
        self.times += 1
        return super().load_mapped(process, mapping, memory, root)


def test_another_mapping_does_not_have_the_files_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory map changes with each growth of the heap."""
    monkeypatch.setattr(address_space, "READING_SHARE", 0)
    objects, address = Opened(), libc().start
    space = AddressSpace(SELF, objects)
    space.refresh()
    assert space.locate(address)
    with mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ):
        assert space.refresh()
        assert space.locate(address)
    assert objects.times == 1


def test_another_file_is_opened_also_at_the_same_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(address_space, "READING_SHARE", 0)
    objects, places, files = Opened(), [], []
    space = AddressSpace(SELF, objects)
    for name in ("first", "second"):
        shutil.copy("/usr/bin/true", tmp_path / name)
        with (tmp_path / name).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        places.append(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        space.refresh()
        located = space.locate(places[-1])
        assert located
        files.append(located[0])
        mapped.close()
    assert places[0] == places[1]
    assert files[0] is not files[1]
    assert objects.times == 2
