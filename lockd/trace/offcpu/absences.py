"""Threads off the CPU, by stack: collected from a trace's windows, those that go on at its end included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockd.columns.structs import Columns
from lockd.kernel.pairs import Entries
from lockd.names.kernel.kernel_sites import is_interrupt
from lockd.names.labels.processes import text
from lockd.names.labels.reasons import Reasons
from lockd.trace.core.call_stacks import Names
from lockd.trace.core.session import Session
from lockd.trace.offcpu.older_waits import OlderWaits

NOBODY = "[no room]"
"""Whose absences were counted without names, as the table of those with names was full."""
UNSEEN = "[unknown]"
INTERRUPT = "[interrupt]"
"""The thread that an interrupt came upon did not mean to wake anybody."""
NS_PER_US = 1000


@dataclass(frozen=True)
class Waker:
    """The thread that ended a wait; `comm` may be UNSEEN or INTERRUPT. `tid` 0 is the idle task, or none."""

    comm: str
    pid: int
    tid: int
    user: Names
    kernel: Names


@dataclass(frozen=True)
class Place:
    """Who was off the CPU, where and why. Stacks are innermost first."""

    comm: str
    """Of the thread."""
    pid: int
    tid: int
    user: Names
    kernel: Names
    state: str = ""
    """`runnable`: was preempted."""
    reason: str = ""
    is_ongoing: bool = False
    """It had not ended when the trace did."""
    is_older: bool = False
    """It began before the trace."""
    waker: Waker | None = None
    """None: not asked for, or nobody has woken it: it was preempted, or waits still."""


@dataclass
class Times:
    """Of all absences at one place, in nanoseconds."""

    count: int = 0
    wait: int = 0
    run: int = 0
    """On the run queue, as far as it was seen."""
    longest: int = 0

    def add(self, count: int, wait: int, run: int, longest: int) -> None:
        self.count += count
        self.wait += wait
        self.run += run
        self.longest = max(self.longest, longest)


class Absences:
    """What was counted so far, by the keys of lockd/bpf/daemon/sched.bpf.c."""

    def __init__(self, session: Session, with_runqueue: bool) -> None:
        manifest = session.manifest
        self._session = session
        self._stacks = session.stacks
        self._with_runqueue = with_runqueue
        self._states = manifest.enums["state"]
        self._reasons = Reasons(manifest.enums, manifest.constants)
        self._key = np.dtype(next(info.key for info in manifest.maps if info.name == "offcpu_0"))  # type: ignore[arg-type]
        self._has_wakers = "woken_by" in (self._key.names or ())
        self._rows: dict[bytes, int] = {}
        self._tgids: dict[int, int] = {}
        self._sums = np.zeros((64, 4), np.int64)
        """By row: as in Times."""
        self._nobody = Times()
        if self._has_wakers:
            interrupts = session.map("interrupts")
            entry = np.zeros(1, interrupts.value)
            entry["start"], entry["bytes"] = self._stacks.names.interrupts()
            interrupts.update(np.zeros(1, np.uint32), entry)

    def add(self, taken: dict[str, Entries]) -> None:
        """Count what was drained."""
        for pair in ("offcpu", "offcpu_over"):
            if pair in taken:
                keys, values = taken[pair]
                self._session.events += int(values["count"].sum())
                self._add(keys, values) if pair == "offcpu" else self._add_nobody(values)

    def _add(self, keys: Columns, values: Columns) -> None:
        raw, size = keys.tobytes(), self._key.itemsize
        rows = np.array(
            [self._rows.setdefault(raw[at : at + size], len(self._rows)) for at in range(0, len(raw), size)]
        )
        if len(self._rows) > len(self._sums):
            fresh = np.zeros((len(self._rows), 4), np.int64)
            self._sums = np.concatenate([self._sums, fresh])
        for column, name in enumerate(("count", "blocked_ns", "run_ns")):
            self._sums[rows, column] += values[name].astype(np.int64)  # no row occurs twice in a window
        self._sums[rows, 3] = np.maximum(self._sums[rows, 3], values["max_blocked_ns"].astype(np.int64))
        self._tgids.update(zip(keys["tid"].tolist(), values["who"]["tgid"].tolist(), strict=True))

    def _add_nobody(self, values: Columns) -> None:
        self._nobody.add(
            int(values["count"].sum()),
            int(values["blocked_ns"].sum()),
            int(values["run_ns"].sum()),
            int(values["max_blocked_ns"].max()),
        )

    def found(self, older: OlderWaits, least_ns: int, most_ns: int, with_ongoing: bool) -> dict[Place, Times]:
        """All of it, with names. `least_ns` and `most_ns` bound what is still going on as well."""
        found: dict[Place, Times] = {}
        keys = np.frombuffer(b"".join(self._rows), self._key)
        for row, key in enumerate(keys):
            waker = self._waker(key["woken_by"]) if self._has_wakers else None
            place = self._place(key, self._tgids[int(key["tid"])], int(key["tid"]), older, waker=waker)
            found.setdefault(place, Times()).add(*self._sums[row].tolist())
        for place, times in self._in_flight(older) if with_ongoing else ():
            if least_ns <= times.longest <= most_ns:
                found.setdefault(place, Times()).add(times.count, times.wait, times.run, times.longest)
                self._session.events += 1
        if self._nobody.count:
            found[Place(NOBODY, 0, 0, (), ())] = self._nobody
        return found

    def _in_flight(self, older: OlderWaits) -> Iterator[tuple[Place, Times]]:
        """Threads that are off the CPU at the end of the trace. Waits that have ended by a wake-up are over,
        if it is only waits that are asked for."""
        end = self._session.ended_ns
        for tid, thread in zip(*self._session.steady("threads"), strict=True):
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
        self, noted: Any, tgid: int, tid: int, older: OlderWaits, is_ongoing: bool = False,
        waker: Waker | None = None,
    ) -> Place:  # fmt: skip
        state = self._states[noted["state"]]
        told = int(noted["nr"]), int(noted["state"]), bool(noted["iowait"]), int(noted["detail"])
        user, kernel = map(int, noted["stacks"])
        return Place(
            text(bytes(noted["comm"])), tgid, tid, self._stacks.user(user), self._stacks.kernel(kernel),
            state, "" if state == "runnable" else self._reasons.reason(*told), is_ongoing,
            older.has_stack(user or kernel), waker if state != "runnable" else None,
        )  # fmt: skip

    def _waker(self, noted: Any) -> Waker:
        user, kernel = map(int, noted["stacks"])
        frames = self._stacks.kernel(kernel)
        entry = next((at for at, name in enumerate(frames) if is_interrupt(name)), -1)
        if entry >= 0:
            return Waker(INTERRUPT, 0, 0, (), frames[: entry + 1])
        return Waker(
            text(bytes(noted["comm"])) or UNSEEN, int(noted["tgid"]), int(noted["tid"]),
            self._stacks.user(user), frames,
        )  # fmt: skip
