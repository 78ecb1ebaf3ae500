"""The sampler on real maps of mode `all`, which this test fills in place of the programs.

Programs that see every acquisition of a lock need fentry or kprobes. Not every host that runs these tests has
them; the kernels of tests/vm do.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import Manifest, MapInfo
from lockd.load.source import assemble
from lockd.messages import unpack
from lockd.process.clock import NS
from lockd.sample.aggregates.kernel_holds import ABANDONED_NS
from lockd.sample.sampler import HOUSEKEEPING_SECONDS, Sampler, SamplerSettings

HASH, ARRAY, PERCPU_ARRAY = 1, 2, 6
MMAPABLE = 0x400
ENTRIES = 256
LOCK = 0xFFFF_8880_0000_0000
PROGRAMS = ("include/common.bpf.h", "daemon/kernel_locks.bpf.c", "daemon/kernel_holds.bpf.c")

WHO = np.dtype(
    [("cgroup", "u8"), ("comm", "S16"), ("thread_comm", "S16"), ("tgid", "u4"), ("kernel_thread", "u4")]
)
AGGREGATE_KEY = [("lock", "u8"), ("tid", "u4"), ("type", "u1"), ("slot", "u1"), ("pad", "u2")]
WAITED = [("waits", "u8"), ("wait_ns", "u8"), ("max_wait_ns", "u8"), ("is_mmap_lock", "u8"), ("who", WHO)]
HELD = [("acquisitions", "u8"), ("holds", "u8"), ("hold_ns", "u8"), ("max_hold_ns", "u8"),
        ("is_mmap_lock", "u8"), ("who", WHO)]  # fmt: skip
NOW_KEY = [("lock", "u8"), ("tid", "u4"), ("cpu", "u4")]
WAITING = [("since", "u8"), ("tgid", "u4"), ("type", "u4")]
HOLDING = [("since", "u8", 4), ("tgid", "u4"), ("depth", "u1"), ("type", "u1"), ("asked", "u1"),
           ("untimed", "u1")]  # fmt: skip
CONTROL = [(name, "u4") for name in ("window", "restraint", "is_timed", "sampler", "exporter")]
THREAD = [("off_since", "u8"), ("tgid", "u4"), ("state", "u4")]


class CreateOptions(ctypes.Structure):
    """struct bpf_map_create_opts of libbpf, as far as it is used."""

    _fields_ = (
        ("sz", ctypes.c_size_t), ("btf_fd", ctypes.c_uint32), ("btf_key_type_id", ctypes.c_uint32),
        ("btf_value_type_id", ctypes.c_uint32), ("btf_vmlinux_value_type_id", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32), ("map_flags", ctypes.c_uint32),
    )  # fmt: skip


class Maps:
    """Real maps by name, with the layouts of the programs' maps, and their manifest."""

    def __init__(self) -> None:
        cpus = os.sysconf("SC_NPROCESSORS_CONF")
        source = assemble(PROGRAMS, {})
        self.types = source.enums["lock_type"]
        losses = len(source.enums["loss"]) - 1
        self.fds: dict[str, int] = {}
        self._infos: list[MapInfo] = []
        self._make("control", ARRAY, 1, "u4", CONTROL, flags=MMAPABLE)
        self._make("written", ARRAY, 2 * (len(source.enums["written"]) - 1), "u4", "u4", flags=MMAPABLE)
        self._make("losses", PERCPU_ARRAY, losses, "u4", f"({cpus},)u8", value_bytes=8)
        self._make("run_times", PERCPU_ARRAY, 1, "u4", f"({cpus},)u8", value_bytes=8)
        self._make("threads", HASH, ENTRIES, "u4", THREAD)
        self._make("kernel_waits", HASH, ENTRIES, NOW_KEY, WAITING)
        self._make("kernel_holding", HASH, ENTRIES, NOW_KEY, HOLDING)
        for half in (0, 1):
            for over in ("", "_over"):
                self._make(f"kernel_locks{over}_{half}", HASH, ENTRIES, AGGREGATE_KEY, WAITED)
                self._make(f"kernel_holds{over}_{half}", HASH, ENTRIES, AGGREGATE_KEY, HELD)
        self.manifest = Manifest(
            attached_ns=time.monotonic_ns(), chosen=(), hooks=(), maps=tuple(self._infos),
            functions=(), enums=source.enums, constants=source.constants,
        )  # fmt: skip

    def _make(
        self, name: str, kind: int, entries: int, key: Any, value: Any, value_bytes: int = 0, flags: int = 0
    ) -> None:
        create = ctypes.CDLL(libbpf()._name).bpf_map_create
        sizes = np.dtype(key).itemsize, value_bytes or np.dtype(value).itemsize
        options = CreateOptions(ctypes.sizeof(CreateOptions), map_flags=flags)
        self.fds[name] = create(kind, name[:15].encode(), *sizes, entries, ctypes.byref(options))
        assert self.fds[name] >= 0, name
        self._infos.append(MapInfo(name, entries, key, value))

    def put(self, name: str, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Write one entry, as a program would."""
        info = next(info for info in self._infos if info.name == name)
        one = np.array([key], info.key)
        other = np.array([value], info.value)
        assert not libbpf().bpf_map_update_elem(self.fds[name], one.ctypes.data, other.ctypes.data, 0)

    def delete(self, name: str, key: tuple[Any, ...]) -> None:
        info = next(info for info in self._infos if info.name == name)
        one = np.array([key], info.key)
        assert not libbpf().bpf_map_delete_elem(self.fds[name], one.ctypes.data)


class Watched:
    """A sampler that reads these maps."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps
        self._sampler = Sampler(maps.manifest, list(maps.fds.values()), SamplerSettings())

    def tick(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._sampler.tick()
            time.sleep(0.02)

    def put(self, pair: str, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Write one entry of a pair in the current window, as a program would."""
        pairs = self._sampler._collector._maps
        for what in (pair, "soon"):
            pairs.written.mark(what)
        self._maps.put(f"{pair}_{pairs.control.window}", key, value)

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Return the counters and gauges by name and label values."""
        head, arrays = unpack(memoryview(self._sampler.metrics()))
        return {
            (each["name"], *labels): value
            for each in head["metrics"]
            if each["name"] in arrays
            for labels, value in zip(each["labels"], arrays[each["name"]], strict=True)
        }

    def locks(self) -> list[dict[str, Any]]:
        head, arrays = unpack(memoryview(self._sampler.details()))
        table = head["tables"]["locks"]
        columns = {**table["text"], **{name: arrays[f"locks.{name}"].tolist() for name in table["numbers"]}}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.fixture
def maps() -> Iterator[Maps]:
    maps = Maps()
    yield maps
    for fd in maps.fds.values():
        os.close(fd)


ACQUIRED = "lockd_kernel_lock_acquisitions_total"


def test_from_the_maps_to_the_metrics(maps: Maps) -> None:
    mutex, semaphore = maps.types.index("mutex"), maps.types.index("semaphore")
    slot_none = maps.manifest.constants["SLOT_NONE"]
    me, comm = os.getpid(), Path("/proc/self/comm").read_text().strip()
    who = (1, b"shop", b"worker", 7, 0)
    watched = Watched(maps)
    watched.put("kernel_holds", (LOCK, 7, mutex, 2, 0), (0, 5, 15_000, 4_000, 0, who))
    watched.put("kernel_holds", (LOCK, 7, mutex, slot_none, 0), (6, 0, 0, 0, 0, who))
    # Another thread released the semaphore: of the holder, the program knows only the ids.
    watched.put("kernel_holds", (LOCK, me, semaphore, 2, 0), (0, 1, 3_000, 3_000, 0, (0, b"", b"", me, 0)))
    watched.put("kernel_holds_over", (0, 0, mutex, 2, 0), (3, 3, 9_000, 3_000, 0, (0, b"", b"", 0, 0)))
    since = time.monotonic_ns() - 10 * NS
    maps.put("kernel_holding", (LOCK, me, 0), ((since, 0, 0, 0), me, 0, mutex, 1, 0))
    maps.put("kernel_waits", (LOCK, me, 0), (since, me, mutex))
    watched.tick(2.5)
    metrics = watched.metrics()
    mine = next(labels for name, *labels in metrics if name == ACQUIRED and labels[1] == comm)
    assert metrics[ACQUIRED, "", "shop", "mutex"] == 6
    assert metrics[ACQUIRED, "other", "other", "mutex"] == 3
    assert metrics[ACQUIRED, mine[0], comm, "semaphore"] == 0
    assert (ACQUIRED, mine[0], comm, "mutex") not in metrics  # the thread still waits for it
    assert metrics["lockd_map_capacity", "kernel_holds"] == ENTRIES
    assert metrics["lockd_map_capacity", "kernel_holds_over"] == ENTRIES
    assert metrics["lockd_map_capacity", "kernel_holding"] == ENTRIES
    assert metrics["lockd_map_entries", "kernel_holding"] == 1
    assert metrics["lockd_dropped_events_total", "kernel_holds", "holder_gone"] == 0
    assert metrics["lockd_series", "kernel_hold"] > 0

    maps.delete("kernel_waits", (LOCK, me, 0))  # the thread has the lock, and no program has counted that yet
    watched.tick(1.5)
    assert watched.metrics()[ACQUIRED, mine[0], comm, "mutex"] == 1
    (row,) = (row for row in watched.locks() if row["comm"] == comm and row["kind"] == "mutex")
    assert (row["acquisitions"], row["holds"], row["holding_tid"]) == (1, 0, me)
    assert row["holding_us"] / 1e6 == pytest.approx(14, abs=5)

    maps.delete("kernel_holding", (LOCK, me, 0))
    for _ in range(2):  # as if the thread had taken and released the lock twice
        key, value = (LOCK, me, mutex, 24, 0), (1, 1, 12 * NS, 12 * NS, 0, (1, comm.encode(), b"x", me, 0))
        watched.put("kernel_holds", key, value)
        watched.tick(0.5)
    watched.tick(2.5)
    assert watched.metrics()[ACQUIRED, mine[0], comm, "mutex"] == 2
    (row,) = (row for row in watched.locks() if row["comm"] == comm and row["kind"] == "mutex")
    assert (row["acquisitions"], row["holds"], row["holding_us"]) == (2, 2, 0)


@pytest.mark.thorough("twelve seconds of nothing else")
def test_the_lock_of_a_thread_that_is_gone(maps: Maps) -> None:
    mutex, semaphore = maps.types.index("mutex"), maps.types.index("semaphore")
    child = subprocess.Popen(["true"])
    child.wait()
    now = time.monotonic_ns()
    for lock, tid, kind, since in (
        (LOCK, child.pid, mutex, now - ABANDONED_NS),
        (LOCK + 1, child.pid, semaphore, now - ABANDONED_NS),  # any thread may still release it
        (LOCK + 2, os.getpid(), mutex, now),
    ):
        maps.put("kernel_holding", (lock, tid, 0), ((since, since, 0, 0), tid, 1, kind, 0, 0))
    watched = Watched(maps)
    watched.tick(HOUSEKEEPING_SECONDS + 2.5)
    metrics = watched.metrics()
    assert metrics["lockd_dropped_events_total", "kernel_holds", "holder_gone"] == 1
    assert metrics["lockd_map_entries", "kernel_holding"] == 2
    assert {row["address"] for row in watched.locks() if row["holding_us"]} == {hex(LOCK + 1), hex(LOCK + 2)}
