"""From the kernel's maps to rows in memory, every period: flip, drain, keep until they are folded."""

from __future__ import annotations

from lockd.columns.structs import Columns
from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries, Pairs
from lockd.kernel.rings import Ring
from lockd.sample.backlog import Backlog
from lockd.sample.budget.spending import ProgramTimes
from lockd.sample.saved_state import Saved

CAPTURES = "captures"
"""The pair that is not folded: each entry is a question to the namer, to be asked while the process lives."""
BLOCKED_PROCESSES = "blocked_processes"
STACKS = "stacks"
FOLDED_ROWS = 3072
"""So many rows are folded in one go, which takes some milliseconds."""
LOOK_EVERYWHERE = 5
"""Every so many periods all maps are looked at. An odd number: both maps of a pair have their turn."""


class Collector:
    """The maps of `manifest`, whose descriptors come first in `fds`.

    Draining must happen every period, or maps fill up. Folding has a fixed cost, much of it
    numpy's, so drained rows are kept and folded together: after a second, or when there are
    many, or when somebody asks.

    But under restraint, overflow maps and stacks are written to only in windows in which the pair that they
    belong to got an entry. Where it got none they are left alone, but for now and then, to be sure.

    What is drained is in `saved`.
    """

    def __init__(self, manifest: Manifest, fds: list[int], saved: Saved | None = None) -> None:
        self._saved = saved or Saved()
        self._maps = Pairs(manifest, fds, (BLOCKED_PROCESSES,))
        hashes = self._maps.hashes
        self.blocked_processes: Ring | None = None
        """For the namer; None if the kernel has no ring buffers."""
        for fd, info in zip(fds, manifest.maps, strict=False):
            if info.name == BLOCKED_PROCESSES:
                self.blocked_processes = Ring(fd, info.entries)
        self._threads, self._kernel_waits = hashes["threads"], hashes.get("kernel_waits")
        self._kernel_holding = hashes.get("kernel_holding")
        self.abandoned = 0
        """Holds of kernel locks that will never end: their threads are gone."""
        self.known_locks, self.hotspots = hashes.get("known_locks"), hashes.get("hotspots")
        """Locks that were captured, and Java machines; None if futex calls are not measured."""
        self.backlogs = {
            name: Backlog(pair[0], FOLDED_ROWS, self._saved)
            for name, pair in self._maps.pairs.items()
            if name != CAPTURES
        }
        """Drained and not folded yet, by pair."""
        followers = {"kernel_locks": (STACKS,)}
        self._followers = {
            name: tuple(each for each in (f"{name}_over", *followers.get(name, ())) if each in self.backlogs)
            for name in self.backlogs
            if name != STACKS and not name.endswith("_over")
        }
        """The pairs that need only be looked at when there was something in this one."""
        self._captures: list[Entries] = []
        self._periods = 0
        self.losses, self.run_times = self._maps.losses, self._maps.run_times
        self.control = self._maps.control
        self.program_times: ProgramTimes | None = None
        """Is asked which windows are to be timed."""
        self.capacities = {name: pair[0].entries for name, pair in self._maps.pairs.items()}
        for table in (self._threads, self._kernel_holding):
            if table:
                self.capacities[table.name] = table.entries
        self.entries = dict.fromkeys(self.capacities, 0)
        """Of each map, when it was last read."""

    @property
    def largest(self) -> int:
        """Entries of the largest pair."""
        return max(pair[0].entries for name, pair in self._maps.pairs.items() if name != CAPTURES)

    @property
    def has_room(self) -> bool:
        """Whether collect() may be called, however much it will find."""
        return all(backlog.has_room for backlog in self.backlogs.values())

    @property
    def has_room_once_saved(self) -> bool:
        """The same once what was folded is written as counted."""
        return all(backlog.has_room_once_saved for backlog in self.backlogs.values())

    @property
    def kept_rows(self) -> int:
        """Drained and not yet folded."""
        return sum(map(len, self.backlogs.values()))

    def collect(self) -> bool:
        """Drain the window that ended one period ago, and end the current one; whether it did.

        If a program may still be writing to it (no grace period has passed), it waits for
        the next time, and the current window goes on.
        """
        if not self._maps.is_settled:
            return False
        self._periods += 1
        everywhere = self._periods % LOOK_EVERYWHERE == 0 or self.control.restraint > 0
        self._saved.is_draining = True
        for name, followers in self._followers.items():
            count = self._drain(name)
            for follower in followers:
                if count or everywhere:
                    self._drain(follower)
                else:
                    self.entries[follower] = 0
        self._saved.is_draining = False
        if CAPTURES in self._maps.pairs:
            rows = self._maps.drain_pair(CAPTURES)
            self.entries[CAPTURES] = len(rows[0])
            if len(rows[0]):
                self._captures.append(rows)
        self._maps.flip(is_timed=bool(self.program_times and self.program_times.next_window()))
        return True

    def _drain(self, name: str) -> int:
        count = self.entries[name] = self.backlogs[name].drain(self._maps.idle(name))
        return count

    def forget_names(self) -> None:
        """Have all locks captured again, and Java machines looked for: another sampler knew what they are."""
        for table in (self.known_locks, self.hotspots):
            if table:
                table.drain(self._maps.buffers)

    def stacks(self) -> Entries:
        """The stacks in the kernel of what has not been folded."""
        return self.backlogs[STACKS].all()

    def forget_stacks(self) -> None:
        if STACKS in self.backlogs:
            self.backlogs[STACKS].clear()

    def captures(self) -> list[Entries]:
        """Threads that blocked on a lock for the first time, since this was last asked."""
        captures, self._captures = self._captures, []
        return captures

    def threads(self) -> Entries:
        """Every thread that was switched out since lockd started and lives."""
        tids, threads = self._threads.read_steady(self._maps.buffers)
        self.entries["threads"] = len(tids)
        return tids, threads

    def kernel_waits(self) -> Entries | None:
        """Waits for kernel locks that go on; None if they are not measured."""
        return self._kernel_waits.read_steady(self._maps.buffers) if self._kernel_waits else None

    def kernel_holding(self) -> Entries | None:
        """Kernel locks that are held or asked for; None if holds are not measured."""
        if not self._kernel_holding:
            return None
        keys, holding = self._kernel_holding.read_steady(self._maps.buffers)
        self.entries["kernel_holding"] = len(keys)
        return keys, holding

    def forget_holding(self, keys: Columns, holds: int) -> None:
        """Delete what is held by threads that are gone; `holds` says how many holds that are."""
        assert self._kernel_holding
        self._kernel_holding.delete(keys)
        self.abandoned += holds
