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
from typing import TypeAlias

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
Words: TypeAlias = memoryview
"""32-bit numbers in memory that programs write too. Each number is read or written as a whole."""

MEMBARRIER_CALL = {"x86_64": 324, "aarch64": 283}[os.uname().machine]
MEMBARRIER_CMD_GLOBAL = 1
NUMBERS = 1 << 32
"""How many windows have different numbers. After so many, which takes years, the numbers begin again at 0."""
WORD_BYTES, ELEMENT_WORDS = 4, 2
"""The size of a word in bytes, and the number of words to whose multiples the kernel rounds up the size of an
array's element."""
LONGEST_PROGRAM = 0.25
"""Seconds after which a run of a BPF program is believed to have ended. A run takes some microseconds, if the
kernel does not preempt the program (docs/limits.md)."""


def map_words(fd: int, info: MapInfo) -> Words:
    """Return the words of an array map that programs and this process share (BPF_F_MMAPABLE).

    They are the map's own memory: reading and writing them takes no system call. Each element begins at a
    multiple of ELEMENT_WORDS. Raises LockdError.
    """
    element = -(-structs.struct_dtype(info.value).itemsize // (WORD_BYTES * ELEMENT_WORDS)) * ELEMENT_WORDS
    try:
        memory = mmap.mmap(fd, info.entries * element * WORD_BYTES)
    except OSError as error:
        raise LockdError(f"map {info.name}: mapping it into memory: {error.strerror}") from error
    return memoryview(memory).cast("I")


class Control:
    """The map `control`, which tells the programs what to count, and in which map of each pair.

    `words` is the only element of the map, and `value` its dtype, that of struct control
    (lockd/bpf/include/common.bpf.h). The words are the map's own memory, so that programs see at once what is
    written here.
    """

    def __init__(self, words: Words, value: npt.DTypeLike) -> None:
        fields = np.dtype(value).fields
        assert fields, "struct control has members"
        self._words = words
        self._at = {name: field[1] // WORD_BYTES for name, field in fields.items()}
        self._words[self._at["sampler"]] = os.getpid()
        self.number = words[self._at["window"]]
        """The number of the current window. It goes on from where the last sampler left it."""

    @property
    def window(self) -> int:
        """Which map of every pair the programs write: 0 or 1."""
        return self.number & 1

    @property
    def restraint(self) -> int:
        """The restraint level (enum restraint)."""
        return self._words[self._at["restraint"]]

    @restraint.setter
    def restraint(self, level: int) -> None:
        self._words[self._at["restraint"]] = level

    def set_timed(self, is_timed: bool) -> None:
        """Tell the programs whether to measure their own run times."""
        self._set("is_timed", is_timed)

    def set_wait_per_sample(self, wait: int) -> None:
        """Set for how much waited time one release of a lock is sampled on average, in units of 1024 ns
        (lockd/bpf/daemon/lock_queues.bpf.c). With 0 no release is sampled."""
        self._set("wait_per_sample", wait)

    def set_wait_per_capture(self, wait: int) -> None:
        """Set the wait per capture, in units of 1024 ns (lockd/bpf/daemon/wait_samples.bpf.c).

        A thread that usually waits off the CPU for so long or longer is captured in every such wait, another
        thread with a chance that grows with its usual wait. With 0 no thread is captured.
        """
        self._set("wait_per_capture", wait)

    def _set(self, name: str, value: int) -> None:
        if value != self._words[self._at[name]]:  # a needless write empties other CPUs' caches of it
            self._words[self._at[name]] = value

    def set_asleep(self, is_asleep: bool) -> None:
        """Tell the programs whether to wake the sampler (Collector.sleep())."""
        self._set("is_asleep", is_asleep)

    def set_exporter(self, pid: int) -> None:
        """Tell the programs the process id of the exporter; 0 if none runs."""
        self._words[self._at["exporter"]] = pid

    def set_tracing(self, is_tracing: bool) -> None:
        """Tell the programs of a one-shot tool whether to trace what begins from now on."""
        self._words[self._at["is_tracing"]] = is_tracing

    def flip(self) -> None:
        """Direct the programs to the other maps."""
        self.number = (self.number + 1) % NUMBERS
        self._words[self._at["window"]] = self.number


class Written:
    """The map `written`, in which programs mark what they write. A mark is the number of the current window.

    `words` are its elements, `members` the members of enum written (lockd/bpf/include/common.bpf.h). A
    program makes a mark before it adds an entry. After the grace period, the marks of a window that has ended
    are complete. Marks of the current window may still come, and are looked at in every tick.
    """

    def __init__(self, words: Words, members: Sequence[str], control: Control) -> None:
        # A memoryview: an array of numpy is slow for single numbers when numpy's code is in no CPU cache.
        self._last, self._control = words[::ELEMENT_WORDS], control
        self._positions = {member: 2 * position for position, member in enumerate(members)}
        self._wait = self._positions["wait"]

    def has(self, what: str) -> bool:
        """Whether `what`, a pair or another member of enum written, has a mark of the current window."""
        number = self._control.number
        return self._last[self._positions[what] + (number & 1)] == number

    @property
    def is_any(self) -> bool:
        """Whether the current window has a mark other than `wait`, that is, a reason to end it."""
        number = self._control.number
        return number in self._last[number & 1 : self._wait : 2].tolist()

    def has_ended_with(self, what: str) -> bool:
        """Whether `what`, a member of enum written, has a mark of the window before the current one."""
        before = (self._control.number - 1) % NUMBERS
        return self._last[self._positions[what] + (before & 1)] == before

    def has_wait_since(self, number: int) -> bool:
        """Whether a thread may have begun to wait for a lock in window `number` or later."""
        # A mark of window `number` - 1 counts as well: it may have been made after that window had ended.
        last = self._last[self._wait : self._wait + 2].tolist()
        return any((window - number + 1) % NUMBERS < NUMBERS // 2 for window in last)

    def mark(self, what: str) -> None:
        """Mark `what` as written in the current window, as programs do. For entries that tests add."""
        number = self._control.number
        self._last[self._positions[what] + (number & 1)] = number


class GracePeriod:
    """Waits, in a thread of its own, until no program still uses a map that became idle.

    Programs run inside RCU read-side sections, and membarrier's global command waits for all of these. The
    sampler's loop of 50 ms cannot wait itself: the command takes 5 to 20 ms, and a second on a host that
    forks a lot. A program that is not preempted runs for microseconds, so that a wait of LONGEST_PROGRAM
    replaces the command where it takes longer or is missing.
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
        """Whether the grace period that began last has ended; True if none has begun."""
        return self._last_ended == self._last_begun or time.monotonic() - self._begun_at >= LONGEST_PROGRAM

    def _run(self) -> None:
        while True:
            self._request.wait()
            self._request.clear()
            begun = self._last_begun
            self._libc.syscall(MEMBARRIER_CALL, MEMBARRIER_CMD_GLOBAL, 0, 0)
            self._last_ended = begun


class Pairs:
    """The maps of `manifest`. Their descriptors are the first ones in `fds`, in the same order.

    `others` names the maps that are not hash maps, besides `control`, `written`, `losses` and `run_times`.
    Raises LockdError if a map cannot be mapped into memory.
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
        fd, info = infos["control"]
        self.control = Control(map_words(fd, info), structs.struct_dtype(info.value))
        self.written = Written(map_words(*infos["written"]), manifest.enums["written"], self.control)
        self._grace = GracePeriod()
        self._grace.begin()  # the sampler before this one may have flipped just before it ended

    @property
    def is_settled(self) -> bool:
        """Whether no program can still be writing to the idle maps."""
        return self._grace.has_ended

    def idle(self, name: str) -> HashMap:
        """Return the idle map of the pair `name`: the one that the programs do not write."""
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
