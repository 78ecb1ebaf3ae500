"""Pairs of maps: the programs write one map of each pair while the sampler drains the other.

One round is flip, wait, drain. A flip (Control) directs the programs to the other maps. A grace period then
has to pass, because a program that began before the flip may still hold an entry of the map that has become
idle. After that the idle maps are drained.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.errors import LockdError
from lockd.kernel.counters import PerCpuCounters
from lockd.kernel.libbpf import last_error, libbpf
from lockd.kernel.manifest import Manifest
from lockd.kernel.maps import Buffers, HashMap

Entries = tuple[Columns, Columns]
"""The keys and the values of entries, in the same order."""

MEMBARRIER_CALL = {"x86_64": 324, "aarch64": 283}[os.uname().machine]
MEMBARRIER_CMD_GLOBAL = 1
LONGEST_PROGRAM = 0.25
"""Seconds in which every run of a BPF program ends. A run takes some microseconds, with preemption
disabled."""


class Control:
    """The map `control`, by which the programs know what to write and where.

    `value` is the dtype of struct control (lockd/bpf/include/common.bpf.h).
    """

    def __init__(self, fd: int, value: npt.DTypeLike) -> None:
        self._fd = fd
        self._value = np.zeros(1, value)
        self._key = ctypes.c_uint32(0)
        self._entry = ctypes.byref(self._key), self._value.ctypes.data
        self._lib = libbpf()
        if self._lib.bpf_map_lookup_elem(fd, *self._entry):
            raise LockdError(f"map control: reading the window: {os.strerror(last_error())}")
        self.window = int(self._value["window"][0]) & 1
        """The map of every pair that the programs write, 0 or 1; at first as the last sampler left it."""
        self.restraint = 0
        """The restraint level (enum restraint) that applies from the next flip on."""

    def flip(self, is_timed: bool = False) -> None:
        """Direct the programs to the other maps; they measure their own run times if `is_timed`.

        Raises LockdError.
        """
        self._value["window"] = 1 - self.window
        self._value["restraint"] = self.restraint
        self._value["is_timed"] = is_timed
        if self._lib.bpf_map_update_elem(self._fd, *self._entry, 0):
            raise LockdError(f"map control: flipping the window: {os.strerror(last_error())}")
        self.window = 1 - self.window


class GracePeriod:
    """Waits, in a thread of its own, until no program still uses a map that became idle.

    Programs run inside RCU read-side sections, and membarrier's global command waits for all of these. The
    sampler's loop of 50 ms cannot wait itself: the command takes 5 to 20 ms, and a second on a host that
    forks a lot. No program runs for more than microseconds, so that LONGEST_PROGRAM is enough without it.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        commands = self._libc.syscall(MEMBARRIER_CALL, 0, 0, 0)
        self._last_begun = self._last_ended = 0
        self._begun_at = 0.0
        self._request = threading.Event()
        if commands > 0 and commands & MEMBARRIER_CMD_GLOBAL:  # kernels with nohz_full CPUs do not offer it
            threading.Thread(target=self._run, name="lockd-grace", daemon=True).start()

    def begin(self) -> None:
        self._last_begun += 1
        self._begun_at = time.monotonic()
        self._request.set()

    @property
    def has_ended(self) -> bool:
        """Whether the period that was begun last has ended; True if none was begun."""
        return self._last_ended == self._last_begun or time.monotonic() - self._begun_at >= LONGEST_PROGRAM

    def _run(self) -> None:
        while True:
            self._request.wait()
            self._request.clear()
            begun = self._last_begun
            self._libc.syscall(MEMBARRIER_CALL, MEMBARRIER_CMD_GLOBAL, 0, 0)
            self._last_ended = begun


class Pairs:
    """The maps of `manifest`, whose descriptors come first in `fds`.

    `others` names maps that are not hash maps, besides those that all programs share. Raises LockdError.
    """

    def __init__(self, manifest: Manifest, fds: list[int], others: tuple[str, ...] = ()) -> None:
        infos = {info.name: (fd, info) for fd, info in zip(fds, manifest.maps, strict=False)}
        self.hashes = {
            name: HashMap(fd, info)
            for name, (fd, info) in infos.items()
            if name not in ("control", "losses", "run_times", *others)
        }
        """Every hash map by name; the two maps of a pair are NAME_0 and NAME_1."""
        self.pairs = {
            name.removesuffix("_0"): (first, self.hashes[name.removesuffix("_0") + "_1"])
            for name, first in self.hashes.items()
            if name.endswith("_0")
        }
        """The two maps of every pair by the pair's name."""
        self.losses = PerCpuCounters(*infos["losses"])
        self.run_times = PerCpuCounters(*infos["run_times"])
        self.buffers = Buffers(list(self.hashes.values()))
        fd, info = infos["control"]
        self.control = Control(fd, structs.struct_dtype(info.value))
        self._grace = GracePeriod()
        self._grace.begin()  # a sampler that ended may have flipped a moment ago

    @property
    def is_settled(self) -> bool:
        """Whether no program can still be writing to the idle maps."""
        return self._grace.has_ended

    def idle(self, name: str) -> HashMap:
        """Return the map of a pair that the programs do not write to."""
        return self.pairs[name][1 - self.control.window]

    def drain(self) -> Iterator[tuple[str, Entries]]:
        """Drain the idle map of each pair; yield the pair's name and its entries, even if there are none."""
        for name in self.pairs:
            yield name, self.drain_pair(name)

    def drain_pair(self, name: str) -> Entries:
        """Drain the idle map of one pair and return copies of its entries."""
        keys, values = self.idle(name).drain(self.buffers)
        return (structs.copy(keys), structs.copy(values)) if len(keys) else (keys, values)

    def flip(self, is_timed: bool = False) -> None:
        """Direct the programs to the other maps and begin a grace period; `is_timed` as in Control.flip()."""
        self.control.flip(is_timed)
        self._grace.begin()
