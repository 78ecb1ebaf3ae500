"""Counters: the per-CPU arrays that BPF programs count in, and the kernel's own counters of a program."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockd.columns.structs import struct_dtype
from lockd.errors import LockdError
from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import Manifest, MapInfo

PROG_INFO_BYTES = 232
RUN_TIME_NS, RUN_COUNT, RECURSION_MISSES = 192, 200, 208
"""Offsets in bytes in struct bpf_prog_info (include/uapi/linux/bpf.h), which only grows at its end."""

MOST = (1 << 63) - 1
"""The largest total, as it has to fit an int64: 292 years in nanoseconds.

No count of events gets there. The time of refused samples may, because it is the sum over many threads:
100,000 threads wait for 292 years together in 26 hours. The total then stays at this value.
"""


class PerCpuCounters:
    """A per-CPU array of u64 counters that only grow."""

    def __init__(self, fd: int, info: MapInfo) -> None:
        self._fd, self._name, self._entries = fd, info.name, info.entries
        cpus = struct_dtype(info.value).itemsize // 8
        self._values = np.zeros(cpus, np.uint64)
        self._lib = libbpf()

    def read(self) -> npt.NDArray[np.int64]:
        """Return the total of each counter over all CPUs, at most MOST. Raises LockdError."""
        totals = np.zeros(self._entries, np.int64)
        for index in range(self._entries):
            key = ctypes.c_uint32(index)
            if self._lib.bpf_map_lookup_elem(self._fd, ctypes.byref(key), self._values.ctypes.data):
                raise LockdError(f"map {self._name}: reading: {os.strerror(ctypes.get_errno())}")
            totals[index] = min(sum(self._values.tolist()), MOST)  # a sum of numpy would wrap at 2^64
        return totals


class Lost(NamedTuple):
    """Totals of events that the programs could not count in full."""

    dropped: dict[tuple[str, str], int]
    """Events that were not counted, by (map, reason)."""
    overflowed: dict[str, int]
    """Events that were counted without names, as `other`, by map."""
    stacks: dict[str, int]
    """Kernel stacks and captures that are missing, by reason."""
    unseen_switches: int
    """Switch-ins for which no program was called."""


class Losses:
    """The map `losses`, in which the programs count events that they could not count in full."""

    def __init__(self, manifest: Manifest, counters: PerCpuCounters) -> None:
        self._members = manifest.enums["loss"][:-1]  # the last member is the number of the others
        self._counters = counters

    def read(self) -> Lost:
        """Read the counters. The names come from `enum loss` (lockd/bpf/include/common.bpf.h)."""
        dropped: dict[tuple[str, str], int] = {}
        overflowed: dict[str, int] = {}
        stacks: dict[str, int] = {}
        unseen_switches = 0
        for member, count in zip(self._members, self._counters.read().tolist(), strict=True):
            kind, _, name = member.partition("_")
            if kind == "unseen":
                unseen_switches = count
            elif kind == "over":
                overflowed[name] = count
            else:
                map_, _, reason = name.partition("__")
                if map_ == "stacks":
                    stacks[reason] = count
                else:
                    dropped[map_, reason] = count
        return Lost(dropped, overflowed, stacks, unseen_switches)


def program_info(fd: int) -> npt.NDArray[np.int64]:
    """Return three numbers of a program since it was loaded: its run time in ns, its runs and skipped runs.

    A number that the kernel does not count is 0. All three are 0 if the kernel refuses to tell them.
    """
    numbers = np.zeros(PROG_INFO_BYTES // 8, np.int64)
    size = ctypes.c_uint32(PROG_INFO_BYTES)
    if libbpf().bpf_obj_get_info_by_fd(fd, numbers.ctypes.data, ctypes.byref(size)):
        return np.zeros(3, np.int64)
    return np.array([numbers[offset // 8] for offset in (RUN_TIME_NS, RUN_COUNT, RECURSION_MISSES)])
