"""Python reads the structures in maps by the layouts that the compiler gave them.

The kernel knows what the compiler did: the size of every map's keys and values, and each map's BTF, with the
offset of every member. The layouts that Python uses are those of the manifest that the loader sends.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockd.kernel import counters
from lockd.kernel.btf import KernelTypes
from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import Layout, Manifest, MapInfo
from lockd.load.child import run_loader
from lockd.load.settings import LoadSettings
from tests.needs import need
from tests.support.lockd_process import ROOT

pytestmark = pytest.mark.untimed

BPF_MAP_TYPE_PERCPU_ARRAY, BPF_MAP_TYPE_RINGBUF = 6, 27
BTF_IDS_AT = 64
"""The offset in bytes of btf_id, btf_key_type_id and btf_value_type_id in struct bpf_map_info
(include/uapi/linux/bpf.h)."""

SETTINGS = LoadSettings(
    programs=("futex", "offcpu", "kernel_locks"),
    entries=1024, threads=1024, stacks=64, min_block_ns=0, max_block_ns=2**63 - 1,
    lock_mode="contention", futex_mode="blocked",
    mechanisms=(("futex", "auto"), ("offcpu", "auto"), ("kernel_locks", "auto")), has_holders=True,
)  # fmt: skip


class KernelMap:
    """What the kernel knows of a map."""

    def __init__(self, fd: int) -> None:
        words = np.zeros(32, np.uint32)
        size = ctypes.c_uint32(words.nbytes)
        assert libbpf().bpf_obj_get_info_by_fd(fd, words.ctypes.data, ctypes.byref(size)) == 0
        self.type, _, self.key_size, self.value_size, self.entries = (int(word) for word in words[:5])
        if self.type == BPF_MAP_TYPE_RINGBUF:
            return  # it holds records, which have no types
        btf, *self.types = (int(word) for word in words[BTF_IDS_AT // 4 :][:3])
        assert btf, "the kernel has no BTF of the map"
        dump = subprocess.run(
            ["bpftool", "-j", "btf", "dump", "id", str(btf)], check=True, capture_output=True
        )
        self._by_id = {one["id"]: one for one in json.loads(dump.stdout)["types"]}

    def layouts(self) -> tuple[Layout | str, Layout | str]:
        """Return the layouts of the key and of the value, written as in a manifest."""
        key, value = (self._layout(number) for number in self.types)
        return key, value

    def _layout(self, number: int) -> Layout | str:
        found = self._by_id[number]
        match found["kind"]:
            case "TYPEDEF" | "CONST" | "VOLATILE":
                return self._layout(found["type_id"])
            case "INT":
                return f"{'i' if found['encoding'] == 'SIGNED' else 'u'}{found['size']}"
            case "ARRAY":
                inner = self._by_id[found["type_id"]]
                count = found["nr_elems"]
                return (
                    f"S{count}" if inner["name"] == "char" else f"({count},){self._layout(found['type_id'])}"
                )
            case "STRUCT":
                assert not any(member["bits_offset"] % 8 for member in found["members"])
                return {
                    "names": [member["name"] for member in found["members"]],
                    "formats": [self._layout(member["type_id"]) for member in found["members"]],
                    "offsets": [member["bits_offset"] // 8 for member in found["members"]],
                    "itemsize": found["size"],
                }
        raise AssertionError(f"unforeseen: {found}")


@pytest.fixture(scope="module")
def loaded(host: None) -> Iterator[tuple[Manifest, dict[str, KernelMap]]]:
    """The manifest that the real loader sends, and by name the maps that it made."""
    need("bpftool")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where the loader finds its package
        manifest, fds = run_loader(SETTINGS)
    yield manifest, {info.name: KernelMap(fd) for info, fd in zip(manifest.maps, fds, strict=False)}
    for fd in fds:
        os.close(fd)


def differences(info: MapInfo, kernel: KernelMap) -> list[str]:
    """Return words for each difference between the layout that Python uses for a map and the compiler's."""
    found = []
    key, value = np.dtype(info.key), np.dtype(info.value)  # type: ignore[arg-type]
    values = possible_cpus() if kernel.type == BPF_MAP_TYPE_PERCPU_ARRAY else 1
    if key.itemsize != kernel.key_size:
        found.append(f"key: {key.itemsize} bytes, not {kernel.key_size}")
    if value.itemsize != kernel.value_size * values:
        found.append(f"value: {value.itemsize} bytes, not {kernel.value_size * values}")
    if info.entries != kernel.entries:
        found.append(f"entries: {info.entries}, not {kernel.entries}")
    key_layout, value_layout = kernel.layouts()
    if kernel.type == BPF_MAP_TYPE_PERCPU_ARRAY:
        value_layout = f"({values},){value_layout}"
    found += _differences("key", info.key, key_layout)
    found += _differences("value", info.value, value_layout)
    return found


def _differences(path: str, ours: Layout | str, theirs: Layout | str) -> Iterator[str]:
    if isinstance(ours, str) or isinstance(theirs, str):
        if ours != theirs:
            yield f"{path}: {ours}, not {theirs}"
        return
    one, two = _members(ours), _members(theirs)
    for name in sorted(one.keys() ^ two.keys()):
        yield f"{path}.{name}: only in {'Python' if name in one else 'C'}"
    for name in one.keys() & two.keys():
        if one[name][0] != two[name][0]:
            yield f"{path}.{name}: at {one[name][0]}, not {two[name][0]}"
        yield from _differences(f"{path}.{name}", one[name][1], two[name][1])
    if ours["itemsize"] != theirs["itemsize"]:
        yield f"{path}: {ours['itemsize']} bytes, not {theirs['itemsize']}"


def _members(layout: Layout) -> dict[str, tuple[int, Layout | str]]:
    return {
        name: (offset, form)
        for name, offset, form in zip(layout["names"], layout["offsets"], layout["formats"], strict=True)
    }


def possible_cpus() -> int:
    with open("/sys/devices/system/cpu/possible") as file:
        return int(file.read().strip().split("-")[-1]) + 1


def test_every_map_is_laid_out_as_the_compiler_did(loaded: tuple[Manifest, dict[str, KernelMap]]) -> None:
    manifest, kernel = loaded
    assert {info.name for info in manifest.maps} >= {"threads", "futex_0", "offcpu_over_1", "kernel_waits"}
    for info in manifest.maps:
        if kernel[info.name].type == BPF_MAP_TYPE_RINGBUF:
            assert info.entries == kernel[info.name].entries
        else:
            assert list(differences(info, kernel[info.name])) == [], info.name


def test_an_element_of_threads_is_two_lines_of_the_cache(
    loaded: tuple[Manifest, dict[str, KernelMap]],
) -> None:
    """The kernel puts 56 bytes before a value, which include its key; see struct thread."""
    manifest, kernel = loaded
    assert kernel["threads"].value_size + 56 == 128
    threads = next(info for info in manifest.maps if info.name == "threads")
    assert (np.dtype(threads.value).fields or {})["off_since"][1] + 56 == 64  # type: ignore[arg-type]


def _swap(layout: Layout) -> None:
    layout["offsets"][0], layout["offsets"][1] = layout["offsets"][1], layout["offsets"][0]


def _shift(layout: Layout) -> None:
    layout["offsets"][1] += 4


def _shorten(layout: Layout) -> None:
    for column in ("names", "formats", "offsets"):
        layout[column].pop(1)


def _rename(layout: Layout) -> None:
    layout["names"][0] = "another"


def _grow(layout: Layout) -> None:
    layout["itemsize"] += 8


def _resign(layout: Layout) -> None:
    layout["formats"][0] = layout["formats"][0].replace("u", "i")


def _alter_inner(layout: Layout) -> None:
    _swap(layout["formats"][layout["names"].index("who")])


@pytest.mark.parametrize("alter", [_swap, _shift, _shorten, _rename, _grow, _resign, _alter_inner])
def test_an_altered_layout_is_noticed(
    loaded: tuple[Manifest, dict[str, KernelMap]], alter: Callable[[Layout], None]
) -> None:
    manifest, kernel = loaded
    info = next(info for info in manifest.maps if info.name == "futex_0")
    wrong: Any = copy.deepcopy(info.value)
    alter(wrong)
    assert list(differences(replace(info, value=wrong), kernel[info.name]))


def test_the_lock_of_a_ring_buffer_has_the_name_by_which_it_is_looked_up() -> None:
    """Its type says whether programs may write to ring buffers (Host.has_sleeping_rings)."""
    assert KernelTypes().has_member("bpf_ringbuf", "spinlock")


def test_facts_about_programs_are_where_the_kernel_puts_them() -> None:
    """lockd reads three members of struct bpf_prog_info by their offsets."""
    types = KernelTypes()
    for member, offset in {
        "run_time_ns": counters.RUN_TIME_NS,
        "run_cnt": counters.RUN_COUNT,
        "recursion_misses": counters.RECURSION_MISSES,
    }.items():
        if types.has_member("bpf_prog_info", member):  # recursion_misses: since 5.12
            assert types.offset("bpf_prog_info", member) == offset, member
