"""The drain: moves entries from the kernel's maps to rows in memory, every period.

Collector flips the pairs of maps and drains the idle maps to which something was added. Backlog keeps the
drained rows of one pair until they are folded into the aggregates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.kernel.counters import PerCpuCounters
from lockd.kernel.manifest import Layout, Manifest
from lockd.kernel.maps import HashMap
from lockd.kernel.pairs import Entries, Pairs
from lockd.kernel.rings import Ring, RingReader
from lockd.sample.budget.spending import ProgramTimes
from lockd.sample.saved_state import SavedState

CAPTURES = "captures"
"""The pair of captures. Its entries are not folded: each is a question to the namer, which has to be asked
while the captured thread's process lives."""
WAKEUPS, BLOCKED_PROCESSES = "wakeups", "blocked_processes"
RELEASES, REFUSED_RELEASES = "releases", "refused_releases"
RELEASE_RECORD, KERNEL_RELEASE_RECORD = "release_record", "kernel_release_record"
WAIT_SAMPLES, REFUSED_WAITS, WAIT_SAMPLE_RECORD = "wait_samples", "refused_waits", "wait_sample_record"
NOT_HASHES = (
    *(WAKEUPS, BLOCKED_PROCESSES, RELEASES, REFUSED_RELEASES, RELEASE_RECORD, KERNEL_RELEASE_RECORD),
    *(WAIT_SAMPLES, REFUSED_WAITS, WAIT_SAMPLE_RECORD),
)
STACKS, KERNEL_LOCKS = "stacks", "kernel_locks"
FOLDED_ROWS = 3072
"""Most rows that a tick folds, as a rule; this takes some milliseconds."""
LONGEST_WINDOW = 0.5
"""Seconds after which a window with few entries ends. A window with many ends with the next tick."""
LONGEST_OWN_WINDOW = 1.0
"""Seconds after which a window ends if all its entries are about lockd and kernel threads."""
NEARLY_OVER = 0.05
"""Seconds by which a window may end early, so that ticks for other work need no further one for it."""
LONGEST_SPIN_NS = 10_000_000_000
"""Nanoseconds after which a spin for a kernel lock counts as ended, though no program saw its end: the kernel
skipped the program, because a program was running on that CPU already (reason `recursion` of
lockd_dropped_events_total)."""
DRAIN_ALL_EVERY = 101
"""In one window of so many, all maps are drained, marked or not: a program that was held up for longer than
the grace period may have added an entry late. The number is odd, so that both maps of a pair have their
turn."""

BASE, END = 0, 1
"""Positions of the two words before the rows of a backlog: the number of the row that is stored first, and
the number that the next drained row gets."""
WORDS_BYTES = 16
MOST = 1 << 60
"""Highest number that a row can have, counted from the first row ever: more than there will ever be."""


class Backlog:
    """The rows of one pair of maps that were drained and are not folded, oldest first.

    `table` is one of the two maps. There is room for two full maps and `more` rows. Memory is allocated once,
    and resident once it was used.

    Rows are numbered from the first row ever drained. If the memory is in the file of `saved`, rows stay
    there until forget_folded(), and the next sampler finds all rows that are not in the saved counts. So that
    this holds whenever the process ends, each method takes effect by the change of one of two words in the
    file (BASE and END). Raises ValueError if these words make no sense.
    """

    def __init__(self, table: HashMap, more: int, saved: SavedState | None = None) -> None:
        self._map_entries = table.entries
        self._room = 2 * table.entries + more
        self._key_bytes, self._value_bytes = table.key.itemsize, table.value.itemsize
        values_from = WORDS_BYTES + -(-self._room * self._key_bytes // 8) * 8
        saved = saved or SavedState()
        self._is_saved = saved.has_file
        memory = saved.allocate(values_from + self._room * self._value_bytes)
        self._words = memoryview(memory)[:WORDS_BYTES].cast("q")
        self._keys = np.frombuffer(memory, table.key, self._room, WORDS_BYTES)
        self._values = np.frombuffer(memory, table.value, self._room, values_from)
        self._keys_at, self._values_at = self._keys.ctypes.data, self._values.ctypes.data
        self._base, self._end = self._words[BASE], self._words[END]
        """The number of the row that is stored first, and the number that the next drained row gets."""
        if not 0 <= self._base <= self._end <= min(self._base + self._room, MOST):
            raise ValueError(
                f"drained rows: {self._base} to {self._end}; rule: ascending, at most {self._room}"
            )
        self.first = self._needed_from = self._base
        """The number of the next row to be folded, and the number of the first row that must be kept."""

    def __len__(self) -> int:
        return self._end - self.first

    @property
    def has_room(self) -> bool:
        """Whether a full map can be drained into the backlog."""
        return self._would_have_room(self._needed_from)

    @property
    def has_room_once_saved(self) -> bool:
        """Whether a full map can be drained into the backlog after forget_folded()."""
        return self._would_have_room(self.first)

    def _would_have_room(self, needed_from: int) -> bool:
        """Whether a full map can be drained if the rows before the number `needed_from` may be
        overwritten."""
        if self._end - self._base + self._map_entries <= self._room:
            return True
        needed = self._end - needed_from
        # drain() moves the needed rows to the front. In a file it does so only if old and new place do not
        # overlap, so that the rows are complete in one of the two places at any time.
        return needed + self._map_entries <= self._room and (
            not self._is_saved or needed <= needed_from - self._base
        )

    def drain(self, table: HashMap) -> int:
        """Move all entries of `table`, one map of the pair, to the backlog, and return their number.

        There must be room for a full map (has_room).
        """
        if self._end - self._base + self._map_entries > self._room:
            self._move_to_front()
        end = self._end - self._base
        count = table.drain_into(
            self._keys_at + end * self._key_bytes, self._values_at + end * self._value_bytes, self._room - end
        )
        self._end += count
        self._words[END] = self._end
        return count

    def take(self, most: int) -> Entries:
        """Return the oldest `most` rows or fewer, to be folded. They are valid until the next drain()."""
        first, self.first = self.first, min(self.first + most, self._end)
        rows = self._rows(first, self.first)
        if not self._is_saved:
            self.forget_folded()
        return rows

    def all(self) -> Entries:
        """Return all rows that are not folded. They stay in the backlog."""
        return self.since(self.first)

    @property
    def end(self) -> int:
        """The number that the next drained row gets."""
        return self._end

    def since(self, number: int) -> Entries:
        """Return the rows from this number on that are not folded. They stay in the backlog."""
        return self._rows(max(number, self.first), self._end)

    def clear(self) -> None:
        self.take(len(self))

    def forget_folded(self) -> None:
        """Allow the rows that take() returned to be overwritten: the counts that contain them are saved."""
        self._needed_from = self.first
        if self._needed_from == self._end:
            self._set_base(self._end)

    def go_back(self, first: int) -> None:
        """Have take() begin with row number `first` again. Raises ValueError if the backlog lacks it."""
        if not self._base <= first <= self._end:
            raise ValueError(
                f"drained rows: those before {self._base} are gone; rule: all are kept from {first} on"
            )
        self.first = self._needed_from = first

    def _rows(self, first: int, end: int) -> Entries:
        first, end = first - self._base, end - self._base
        return self._keys[first:end], self._values[first:end]

    def _move_to_front(self) -> None:
        for rows in (self._keys, self._values):
            structs.move_to_front(rows, self._needed_from - self._base, self._end - self._base)
        self._set_base(self._needed_from)

    def _set_base(self, base: int) -> None:
        self._base = self._words[BASE] = base


class Collector:
    """Drains the maps of `manifest`, whose descriptors come first in `fds`, and keeps the rows in `saved`.

    Maps that programs write to must be drained before they are full. Folding has a fixed cost, much
    of it numpy's. Drained rows are therefore kept and folded together: when there are many, every few
    seconds, or when the exporter asks.

    The programs mark the pairs that they add to (Written in lockd/kernel/pairs.py). Where nothing is marked
    there is nothing to do: no window ends, no grace period begins, and drain() makes no system call.
    """

    def __init__(self, manifest: Manifest, fds: list[int], saved: SavedState | None = None) -> None:
        self._saved = saved or SavedState()
        self._maps = Pairs(manifest, fds, NOT_HASHES)
        hashes = self._maps.hashes
        self.wakeups: RingReader | None = None
        """The ring of records that wake the sampler, see sleep(); None on a kernel without rings."""
        self.blocked_processes: Ring | None = None
        """The ring of the ids of processes with a thread that blocks, which the namer reads; None on a
        kernel without rings."""
        self.releases: Ring | None = None
        """The ring of sampled releases of locks; None if their holders are not sampled."""
        self.release_record: Layout | str = ""
        self.kernel_release_record: Layout | str = ""
        """The layouts of the records of `releases`, for user-space locks and for kernel locks; empty if
        releases of such locks are not sampled."""
        self.refused_releases: PerCpuCounters | None = None
        """The number of samples for which `releases` had no room, and the waited time that they stood for in
        nanoseconds."""
        self.wait_samples: Ring | None = None
        """The ring of sampled waits off the CPU; None if they are not sampled."""
        self.wait_sample_record: Layout | str = ""
        """The layout of the records of `wait_samples`."""
        self.refused_waits: PerCpuCounters | None = None
        """The number of samples for which `wait_samples` had no room, and the waited time that they stood for
        in nanoseconds."""
        for fd, info in zip(fds, manifest.maps, strict=False):
            if info.name == WAKEUPS:
                self.wakeups = RingReader(Ring(fd, info.entries))
            elif info.name == BLOCKED_PROCESSES:
                self.blocked_processes = Ring(fd, info.entries)
            elif info.name == RELEASES:
                self.releases = Ring(fd, info.entries)
            elif info.name == RELEASE_RECORD:
                self.release_record = info.value
            elif info.name == KERNEL_RELEASE_RECORD:
                self.kernel_release_record = info.value
            elif info.name == REFUSED_RELEASES:
                self.refused_releases = PerCpuCounters(fd, info)
            elif info.name == WAIT_SAMPLES:
                self.wait_samples = Ring(fd, info.entries)
            elif info.name == WAIT_SAMPLE_RECORD:
                self.wait_sample_record = info.value
            elif info.name == REFUSED_WAITS:
                self.refused_waits = PerCpuCounters(fd, info)
        self._threads, self._kernel_waits = hashes["threads"], hashes.get("kernel_waits")
        self._kernel_holding = hashes.get("kernel_holding")
        self._on_cpu: Entries = np.empty(0, np.uint64), np.empty(0, np.uint32)
        """The threads that were on a CPU when the table of threads was last read, and their processes."""
        self._missing: set[int] = set()
        """Those processes in `_on_cpu` that had ended when forget_vanished() was last called."""
        self.abandoned = 0
        """The number of holds of kernel locks that will never end because their threads are gone."""
        self.known_locks, self.hotspots = hashes.get("known_locks"), hashes.get("hotspots")
        """The map of locks that were captured, and the map of processes with HotSpot, a Java machine; None if
        futex calls are not measured."""
        self.cpythons = hashes.get("cpythons")
        """The map of processes with CPython; None if neither releases of user-space locks nor waits are
        sampled."""
        self.backlogs = {
            name: Backlog(pair[0], FOLDED_ROWS, self._saved)
            for name, pair in self._maps.pairs.items()
            if name != CAPTURES
        }
        """The drained rows that are not folded yet, by pair."""
        self._captures: list[Entries] = []
        self._drained_windows = 0
        self.has_ended_window = True
        """Whether a window has ended that is not drained. The sampler before this one may have left one."""
        self._began = -inf
        """When the current window began, by the monotonic clock in seconds."""
        self.has_rows_of_processes = False
        """Whether a drained row may be about a process other than lockd's. Sampler.fold() resets it."""
        self.losses, self.control = self._maps.losses, self._maps.control
        self.program_times = ProgramTimes(
            lambda: int(self._maps.run_times.read()[0]), manifest.constants["TIMED_RUNS"]
        )
        """The run time of the programs; it decides which periods are timed."""
        self.capacities = {name: pair[0].entries for name, pair in self._maps.pairs.items()}
        """The most entries of a map, by the map's name. For a pair it is the most entries of each map."""
        for table in (self._threads, self._kernel_holding):
            if table:
                self.capacities[table.name] = table.entries
        self.entries = dict.fromkeys(self.capacities, 0)
        """For each name in `capacities`, the number of entries when the map was last read or drained."""

    @property
    def largest(self) -> int:
        """The most entries that one map can have, among all pairs except the captures."""
        return max(pair[0].entries for name, pair in self._maps.pairs.items() if name != CAPTURES)

    @property
    def has_room(self) -> bool:
        """Whether drain() may be called: there is room even if every map is full."""
        return all(backlog.has_room for backlog in self.backlogs.values())

    @property
    def has_room_once_saved(self) -> bool:
        """Whether drain() may be called as soon as the counts of folded rows are saved."""
        return all(backlog.has_room_once_saved for backlog in self.backlogs.values())

    @property
    def unfolded_rows(self) -> int:
        """The number of rows of all pairs that are drained and not folded."""
        return sum(map(len, self.backlogs.values()))

    def drain(self) -> bool:
        """Drain the window that has ended, if there is one, and end the current window if that is due.

        Returns False if nothing could be done, because the grace period has not passed and a program may
        still write to the idle maps. An event is drained once three later calls have returned True. It may
        take more calls if the window of the event has few entries, because such a window may last longer
        (add_entry() in lockd/bpf/include/common.bpf.h).
        """
        self.control.set_timed(self.program_times.begin_period())
        if not self._maps.is_settled:
            return False
        if self.has_ended_window:
            self.has_ended_window = False
            self._drain_window()
        if self._is_window_over():
            self._began = time.monotonic()
            self.has_ended_window = True
            self._maps.flip()
        return True

    def end_window(self) -> None:
        """Have the next drain() end the current window if it has any entry."""
        self._began = -inf

    def sleep(self) -> float:
        """Have the programs wake the sampler when they write what cannot wait.

        Returns when drain() is needed next, even if nobody wakes the sampler, by the monotonic clock in
        seconds: 0.0 if it must not sleep at all. A wake-up makes a record in `wakeups`, until awake(). A
        window that has ended may wait for that too, unless it was ended soon.
        """
        written = self._maps.written
        if self.wakeups is None or (self.has_ended_window and written.has_ended_with("soon")):
            return 0.0
        # The mark comes before the look at what was written: a program that writes later sees the mark.
        self.control.set_asleep(True)
        if written.has("soon"):
            return 0.0
        now, due = time.monotonic(), self._began + LONGEST_WINDOW
        return due if due > now else now + LONGEST_WINDOW

    def awake(self) -> None:
        """End a sleep(), and forget the wake-up that may have ended it."""
        self.control.set_asleep(False)
        if self.wakeups:
            for _ in self.wakeups.records():
                pass

    def _is_window_over(self) -> bool:
        written = self._maps.written
        # A new sampler drains both maps of each pair once, whatever marks its predecessor has left.
        if written.has("soon") or self._drained_windows < 2:
            return True
        age = time.monotonic() - self._began + NEARLY_OVER
        return (age >= LONGEST_WINDOW and written.has("processes")) or (
            age >= LONGEST_OWN_WINDOW and written.is_any
        )

    def _drain_window(self) -> None:
        """Drain the idle maps that were written in the window before the current one."""
        self._drained_windows += 1
        is_everything = self._drained_windows <= 2 or self._drained_windows % DRAIN_ALL_EVERY == 0
        written = self._maps.written
        self.has_rows_of_processes |= is_everything or written.has_ended_with("processes")
        self._saved.is_draining = True
        for name, backlog in self.backlogs.items():
            is_due = is_everything or written.has_ended_with(name)
            self.entries[name] = backlog.drain(self._maps.idle(name)) if is_due else 0
        self._saved.is_draining = False
        if CAPTURES in self._maps.pairs and (is_everything or written.has_ended_with(CAPTURES)):
            rows = self._maps.drain_pair(CAPTURES)
            self.entries[CAPTURES] = len(rows[0])
            if len(rows[0]):
                self._captures.append(rows)

    def has_wait_since(self, window: int) -> bool:
        """Whether a thread may have begun to wait for a lock in the window with this number or later."""
        return self._maps.written.has_wait_since(window)

    def forget_names(self) -> None:
        """Empty the maps of captured locks and of processes with a language runtime, so that locks are
        captured and runtimes looked up again: only the sampler before this one knew the results."""
        for table in (self.known_locks, self.hotspots, self.cpythons):
            if table:
                table.drain(self._maps.buffers)

    @property
    def has_kernel_waits(self) -> bool:
        """Whether a row that is not folded is of a wait of a process for a kernel lock."""
        if KERNEL_LOCKS not in self.backlogs:
            return False
        _, waits = self.backlogs[KERNEL_LOCKS].all()
        return bool((waits["who"]["kernel_thread"] == 0).any())

    def stacks(self) -> Entries:
        """Return the kernel stacks that belong to rows which are not folded."""
        return self.backlogs[STACKS].all()

    def forget_stacks(self) -> None:
        if STACKS in self.backlogs:
            self.backlogs[STACKS].clear()

    def captures(self) -> list[Entries]:
        """Return the captures that were drained since the last call.

        The programs capture a thread that blocks on a lock which they do not know, or captured long ago.
        """
        captures, self._captures = self._captures, []
        return captures

    def threads(
        self, are_wanted: Callable[[Columns], npt.NDArray[np.bool_]] | None = None
    ) -> tuple[Entries, Columns]:
        """Return the entries of the map `threads`, and the ids of all processes in it. The map has the living
        threads that were switched out since lockd started: their ids and their `struct thread`.

        Threads whose entry changes while the map is read are missing. So are threads for whose `struct
        thread` `are_wanted` returns false; if no thread is wanted, the map is read only once. The process ids
        are those of all threads nevertheless.
        """
        buffers = self._maps.buffers
        tids, threads = map(structs.copy, self._threads.read(buffers))
        self.entries["threads"] = len(tids)
        is_on_cpu = threads["off_since"] == 0
        self._on_cpu = tids[is_on_cpu], threads["tgid"][is_on_cpu]
        tgids = np.unique(threads["tgid"])
        if are_wanted:
            wanted = np.flatnonzero(are_wanted(threads))
            tids, threads = structs.take(tids, wanted), structs.take(threads, wanted)
        tids, threads = self._threads.only_steady(tids, threads, buffers)
        return (tids.astype(np.uint32), threads), tgids

    def forget_vanished(self, is_gone: Callable[[int], bool]) -> None:
        """Delete the entries of threads that ended under another thread id. threads() must be called before.

        A thread that calls exec gets the id of the thread-group leader. If the exec fails after that, the
        programs see the thread end under the leader's id. The entry of its first id then says for ever that
        it is on a CPU.

        `is_gone(tgid)` returns whether procfs has no such process. This must be so in two calls in a row: a
        thread that ends still runs for a short time when its process has left procfs.

        A new thread may have got the id, and with it the entry. If it leaves its CPU just while the entry is
        deleted, this absence is not counted.
        """
        tids, tgids = self._on_cpu
        missing = {tgid for tgid in set(tgids.tolist()) if is_gone(tgid)}
        for at in np.flatnonzero(np.isin(tgids, list(missing & self._missing))):
            key = tids[at : at + 1]
            thread = self._threads.lookup(key)[0]
            if thread["tgid"] == tgids[at] and not thread["off_since"] and is_gone(int(tgids[at])):
                self._threads.delete(key)
        self._missing = missing

    def kernel_waits(self) -> Entries | None:
        """Return the ongoing waits for kernel locks; None if they are not measured.

        Entries of spins whose end no program saw (LONGEST_SPIN_NS) are deleted and left out.
        """
        if not self._kernel_waits:
            return None
        now = time.monotonic_ns()
        keys, waits = self._kernel_waits.read_steady(self._maps.buffers)
        is_over = (keys["cpu"] != 0) & (waits["since"].astype(np.int64) < now - LONGEST_SPIN_NS)
        if not is_over.any():
            return keys, waits
        self._kernel_waits.delete(structs.take(keys, np.flatnonzero(is_over)))
        going_on = np.flatnonzero(~is_over)
        return structs.take(keys, going_on), structs.take(waits, going_on)

    def forget_kernel_waits(self, keys: Columns) -> None:
        """Delete waits for kernel locks that have ended without a program seeing it."""
        assert self._kernel_waits
        self._kernel_waits.delete(keys)

    def kernel_holding(self) -> Entries | None:
        """Return an entry for each kernel lock that a thread holds or tries to take; None if holds are not
        measured."""
        if not self._kernel_holding:
            return None
        keys, holding = self._kernel_holding.read_steady(self._maps.buffers)
        self.entries["kernel_holding"] = len(keys)
        return keys, holding

    def forget_holding(self, keys: Columns, holds: int) -> None:
        """Delete entries of held kernel locks whose threads are gone; count their `holds` as abandoned."""
        assert self._kernel_holding
        self._kernel_holding.delete(keys)
        self.abandoned += holds
