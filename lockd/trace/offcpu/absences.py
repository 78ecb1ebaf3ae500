"""Absences: times that threads spend off the CPU, summed up by thread, stack, state and waker.

Absences that have ended are in the windows of the trace. Absences that go on at the end of the trace are read
from the programs' map of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockd.columns import structs
from lockd.columns.structs import Columns, struct_dtype
from lockd.kernel.pairs import Entries
from lockd.names.kernel.sites import is_interrupt
from lockd.names.labels.processes import text
from lockd.names.labels.reasons import Reasons
from lockd.trace.core.call_stacks import Names
from lockd.trace.core.session import Session
from lockd.trace.offcpu.older_waits import OlderWaits

MOST = 1 << 20
"""The most keys that have sums of their own. They take about 250 MB with wakers. Absences with further keys
are counted without names."""
NOBODY = "[no room]"
"""The comm of absences that were counted without names, because the map of absences with names was full, or
because there were more than MOST keys."""
UNSEEN = "[unknown]"
"""The comm of a waker that no program saw."""
INTERRUPT = "[interrupt]"
"""The comm of the waker if an interrupt ended the wait. The interrupted thread has no part in that."""
NS_PER_US = 1000


@dataclass(frozen=True)
class Waker:
    """The thread that ended a wait. Its stacks are innermost first.

    `comm` may be UNSEEN or INTERRUPT. `tid` is 0 for the idle task, and if no thread is known.
    """

    comm: str
    pid: int
    tid: int
    user: Names
    kernel: Names


@dataclass(frozen=True)
class Place:
    """A thread that was off the CPU, its stack, and the reason. Stacks are innermost first."""

    comm: str
    """Name of the thread."""
    pid: int
    tid: int
    user: Names
    kernel: Names
    state: str = ""
    """A member of the programs' enum state; `runnable` if the thread was preempted."""
    reason: str = ""
    """A reason of lockd/names/labels/reasons.py; empty if the thread was preempted."""
    is_ongoing: bool = False
    """Whether the absence had not ended at the end of the trace."""
    is_older: bool = False
    """Whether the absence began before the trace."""
    waker: Waker | None = None
    """The waker; None if wakers are not traced, if the thread was preempted, or if it still waits."""


@dataclass
class Times:
    """The sums of all absences at one Place. Times are in nanoseconds."""

    count: int = 0
    """Number of absences."""
    wait: int = 0
    """Time until the wake-up."""
    run: int = 0
    """Time on the run queue, as far as the programs saw it."""
    longest: int = 0
    """The longest absence; without --runqueue, the longest time until a wake-up."""

    def add(self, count: int, wait: int, run: int, longest: int) -> None:
        self.count += count
        self.wait += wait
        self.run += run
        self.longest = max(self.longest, longest)


class Absences:
    """The absences of a session, summed up by key (struct offcpu_key in lockd/bpf/daemon/sched.bpf.c).

    At most `most` keys have sums of their own. `with_runqueue` is whether time on the run queue is part of an
    absence. `interrupts` is what interrupt_entries() returns, for a trace with wakers; None otherwise.
    """

    def __init__(
        self,
        session: Session,
        with_runqueue: bool,
        interrupts: tuple[int, int] | None = None,
        most: int = MOST,
    ) -> None:
        manifest = session.manifest
        self._session = session
        self._stacks = session.stacks
        self._with_runqueue = with_runqueue
        self._states = manifest.enums["state"]
        self._reasons = Reasons(manifest.enums, manifest.constants)
        self._key = struct_dtype(next(info.key for info in manifest.maps if info.name == "offcpu_0"))
        self._has_wakers = "woken_by" in (self._key.names or ())
        self._rows: dict[bytes, int] = {}
        """The row in `_sums`, by the bytes of the key and of the process id.

        The key itself has only the thread id, which the kernel may later give to a thread of another process.
        """
        self._sums = np.zeros((64, 4), np.int64)
        """The four members of Times in each row."""
        self._nobody = Times()
        self.nameless = 0
        """Number of absences that were counted without names, because there were more than `most` keys."""
        self._most = most
        if interrupts:
            known = session.map("interrupts")
            entry = np.zeros(1, known.value)
            entry["start"], entry["bytes"] = interrupts
            known.update(np.zeros(1, np.uint32), entry)

    def add(self, taken: dict[str, Entries]) -> None:
        """Add the absences of a window."""
        for pair in ("offcpu", "offcpu_over"):
            if pair in taken:
                keys, values = taken[pair]
                self._session.events += int(values["count"].sum())
                self._add(keys, values) if pair == "offcpu" else self._add_nobody(values)

    def _add(self, keys: Columns, values: Columns) -> None:
        raw, size = keys.tobytes(), self._key.itemsize
        parts = (raw[start : start + size] for start in range(0, len(raw), size))
        tgids = (tgid.to_bytes(4, "little") for tgid in values["who"]["tgid"].tolist())
        rows = np.array([self._row_of(part + tgid) for part, tgid in zip(parts, tgids, strict=True)])
        if (rows < 0).any():
            fits, rest = np.flatnonzero(rows >= 0), structs.take(values, np.flatnonzero(rows < 0))
            self.nameless += int(rest["count"].sum())
            self._add_nobody(rest)
            rows, keys, values = rows[fits], structs.take(keys, fits), structs.take(values, fits)
        if len(self._rows) > len(self._sums):
            fresh = np.zeros((len(self._rows), 4), np.int64)
            self._sums = np.concatenate([self._sums, fresh])
        # A row can occur several times in a window: keys that differ only in stacks are equal once these are
        # lost (CallStacks.add()).
        for column, name in enumerate(("count", "blocked_ns", "run_ns")):
            np.add.at(self._sums[:, column], rows, values[name].astype(np.int64))
        np.maximum.at(self._sums[:, 3], rows, values["max_blocked_ns"].astype(np.int64))

    def _row_of(self, key: bytes) -> int:
        """The row for a key of `_rows`, which is added if it is new; -1 if there is no room for it."""
        row = self._rows.get(key, -1)
        if row < 0 and len(self._rows) < self._most:
            row = self._rows[key] = len(self._rows)
        return row

    def _add_nobody(self, values: Columns) -> None:
        self._nobody.add(
            int(values["count"].sum()),
            int(values["blocked_ns"].sum()),
            int(values["run_ns"].sum()),
            int(values["max_blocked_ns"].max()),
        )

    def by_place(
        self, older: OlderWaits, least_ns: int, most_ns: int, with_ongoing: bool
    ) -> dict[Place, Times]:
        """The sums of all absences by Place. `older` are the waits that began before the trace.

        With `with_ongoing`, absences that go on are included if they have lasted `least_ns` to `most_ns`.
        """
        places: dict[Place, Times] = {}
        rows = np.frombuffer(b"".join(self._rows), [("key", self._key), ("tgid", "<u4")])
        for row, (key, tgid) in enumerate(zip(rows["key"], rows["tgid"].tolist(), strict=True)):
            waker = self._waker(key["woken_by"]) if self._has_wakers else None
            place = self._place(key, tgid, int(key["tid"]), older, waker=waker)
            places.setdefault(place, Times()).add(*self._sums[row].tolist())
        for place, times in self._ongoing(older) if with_ongoing else ():
            if least_ns <= times.longest <= most_ns:
                places.setdefault(place, Times()).add(times.count, times.wait, times.run, times.longest)
                self._session.events += 1
        if self._nobody.count:
            places[Place(NOBODY, 0, 0, (), ())] = self._nobody
        return places

    def _ongoing(self, older: OlderWaits) -> Iterator[tuple[Place, Times]]:
        """The absences that go on at the end of the trace.

        Without --runqueue, a wait that a wake-up has ended counts as ended, although the thread is not yet on
        a CPU.
        """
        end = self._session.ended_ns
        for tid, thread in zip(*self._session.read_steady("threads"), strict=True):
            since, woken = int(thread["off_since"]), int(thread["woken_at"])
            if not 0 < since < end:
                continue
            is_wait = self._states[thread["state"]] != "runnable"
            is_woken = is_wait and since <= woken <= end
            ready = woken if is_woken else end if is_wait else since
            wait, run = ready - since, end - ready
            place = self._place(
                thread, int(thread["tgid"]), int(tid), older,
                is_ongoing=self._with_runqueue or not is_woken,
                waker=self._waker(thread["woken_by"]) if is_woken and self._has_wakers else None,
            )  # fmt: skip
            yield place, Times(1, wait, run, wait + run if self._with_runqueue else wait)

    def _place(
        self, entry: Any, tgid: int, tid: int, older: OlderWaits, is_ongoing: bool = False,
        waker: Waker | None = None,
    ) -> Place:  # fmt: skip
        """The place of an absence. `entry` is a key of the pair `offcpu` or a value of the map of threads."""
        state = self._states[entry["state"]]
        cause = int(entry["nr"]), int(entry["state"]), bool(entry["iowait"]), int(entry["detail"])
        user, kernel = map(int, entry["stacks"])
        return Place(
            text(bytes(entry["comm"])), tgid, tid, self._stacks.user(user), self._stacks.kernel(kernel),
            state, "" if state == "runnable" else self._reasons.reason(*cause), is_ongoing,
            older.has_stack(user or kernel), waker if state != "runnable" else None,
        )  # fmt: skip

    def _waker(self, woken_by: Any) -> Waker:
        user, kernel = map(int, woken_by["stacks"])
        frames = self._stacks.kernel(kernel)
        interrupt = next((depth for depth, name in enumerate(frames) if is_interrupt(name)), -1)
        if interrupt >= 0:
            return Waker(INTERRUPT, 0, 0, (), frames[: interrupt + 1])
        return Waker(
            text(bytes(woken_by["comm"])) or UNSEEN, int(woken_by["tgid"]), int(woken_by["tid"]),
            self._stacks.user(user), frames,
        )  # fmt: skip
