"""Pairs of maps: the programs write one map of each pair while the sampler drains the other.

One round is flip, wait, drain. A flip (Control) directs the programs to the other maps. A grace period then
has to pass, because a program that began before the flip may still hold an entry of the map that has become
idle. After that the idle maps are drained. The programs note which pairs they have added to (Written), so
that there need be no round if there is nothing to drain.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.errors import LockdError
from lockd.kernel.counters import PerCpuCounters
from lockd.kernel.manifest import Manifest, MapInfo
from lockd.kernel.maps import Buffers, HashMap

Entries = tuple[Columns, Columns]
"""The keys and the values of entries, in the same order."""

MEMBARRIER_CALL = {"x86_64": 324, "aarch64": 283}[os.uname().machine]
MEMBARRIER_CMD_GLOBAL = 1
NUMBERS = 1 << 32
"""Windows until their numbers begin again, years later."""
ELEMENT_BYTES = 8
"""The elements of an array map begin at multiples of this."""
LONGEST_PROGRAM = 0.25
"""Seconds in which every run of a BPF program ends. A run takes some microseconds, with preemption
disabled."""


def map_array(fd: int, info: MapInfo) -> npt.NDArray[Any]:
    """Return the elements of an array map that programs and this process share (BPF_F_MMAPABLE).

    They are the map's own memory: reading and writing them takes no system call. Raises LockdError.
    """
    value = structs.struct_dtype(info.value)
    element = -(-value.itemsize // ELEMENT_BYTES) * ELEMENT_BYTES
    try:
        memory = mmap.mmap(fd, info.entries * element)
    except OSError as error:
        raise LockdError(f"map {info.name}: mapping it into memory: {error.strerror}") from error
    return np.ndarray(info.entries, value, memory, strides=(element,))


class Control:
    """The map `control`, by which the programs know what to write and where.

    `value` is its element, a struct control (lockd/bpf/include/common.bpf.h). It is the map's own memory, so
    that programs see at once what is written here.
    """

    def __init__(self, value: npt.NDArray[Any]) -> None:
        self._window, self._restraint = value["window"], value["restraint"]
        self._is_timed = value["is_timed"]
        value["sampler"] = os.getpid()
        self.number = int(self._window[0])
        """The number of the current window. It goes on from where the last sampler left it."""

    @property
    def window(self) -> int:
        """The map of every pair that the programs write, 0 or 1."""
        return self.number & 1

    @property
    def restraint(self) -> int:
        """The restraint level (enum restraint)."""
        return int(self._restraint[0])

    @restraint.setter
    def restraint(self, level: int) -> None:
        self._restraint[0] = level  # programs read it once for each event: no window has to begin

    @property
    def is_timed(self) -> bool:
        """Whether the programs measure their own run times."""
        return bool(self._is_timed[0])

    @is_timed.setter
    def is_timed(self, is_timed: bool) -> None:
        if is_timed != self.is_timed:
            self._is_timed[0] = is_timed

    def flip(self) -> None:
        """Direct the programs to the other maps."""
        self.number = (self.number + 1) % NUMBERS
        self._window[0] = self.number


class Written:
    """The map `written`, in which programs note what they write, by the number of the window.

    `last` are its elements, `members` the members of enum written (lockd/bpf/include/common.bpf.h). A program
    makes a mark before it adds an entry. After the grace period, the marks of a window that has ended are
    complete. Those of the current window may still come, and are looked at with every tick.
    """

    def __init__(self, last: npt.NDArray[Any], members: Sequence[str], control: Control) -> None:
        self._last, self._control = last, control
        self._positions = {member: 2 * position for position, member in enumerate(members)}
        self._soon, self._wait = self._positions["soon"], self._positions["wait"]

    @property
    def is_soon(self) -> bool:
        """Whether the current window has something that is to be drained soon."""
        number = self._control.number
        return bool(self._last[self._soon + (number & 1)] == number)

    @property
    def is_any(self) -> bool:
        """Whether the current window has anything to be drained."""
        number = self._control.number
        return bool((self._last[number & 1 : self._wait : 2] == number).any())

    def has_ended_with(self, pair: str) -> bool:
        """Whether an entry was added to this pair in the window before the current one."""
        before = (self._control.number - 1) % NUMBERS
        return bool(self._last[self._positions[pair] + (before & 1)] == before)

    def has_wait_since(self, number: int) -> bool:
        """Whether a thread may have begun to wait for a lock since some moment of window `number`."""
        # A program that began in the window before may have made its mark late.
        since = self._last[self._wait : self._wait + 2] - np.uint32((number - 1) % NUMBERS)
        return bool((since < NUMBERS // 2).any())

    def mark(self, what: str) -> None:
        """Do what a program does that writes in the current window; for entries that no program has made."""
        number = self._control.number
        self._last[self._positions[what] + (number & 1)] = number


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
            if name not in ("control", "written", "losses", "run_times", *others)
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
        self.control = Control(map_array(*infos["control"]))
        self.written = Written(map_array(*infos["written"]), manifest.enums["written"], self.control)
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

    def flip(self) -> None:
        """Direct the programs to the other maps and begin a grace period."""
        self.control.flip()
        self._grace.begin()
