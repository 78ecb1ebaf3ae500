"""Times that threads took to acquire mutexes, or held them: by mutex, stack and comm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockd.kernel.pairs import Entries
from lockd.names.labels.processes import text
from lockd.names.labels.system_calls import ERRORS
from lockd.trace.core.call_stacks import CallStacks
from lockd.trace.core.histogram import Histogram
from lockd.trace.core.main_threads import is_running
from lockd.trace.core.session import Session

STILL_WAITING = "still waiting"
STILL_HELD = "still held"
HELD_BY_NONE = "still held, its thread has ended"
ABANDONED = "its thread ended as it waited"
ONGOING = (STILL_WAITING, STILL_HELD, HELD_BY_NONE, ABANDONED)
"""The values of Key.state for times that had not ended when the trace or the thread ended."""


@dataclass(frozen=True)
class Key:
    """What one measurement is about."""

    pid: int
    mutex: int
    """The address of the mutex."""
    lock: str
    """The name of the mutex, or its address in hexadecimal if it has no name."""
    comm: str
    """The comm of the threads that asked for the mutex or held it."""
    frames: tuple[str, ...]
    """The functions of the stack, innermost first."""
    state: str = ""
    """A member of ONGOING; empty for times that had ended."""


@dataclass
class Measurement:
    """The calls that asked for a mutex, or the holds of it."""

    times: Histogram = field(default_factory=Histogram)
    """Nanoseconds of each call or hold."""
    errors: dict[str, int] = field(default_factory=dict)
    """The number of calls that failed to acquire the mutex, by the name of the error."""

    @property
    def total(self) -> int:
        """Nanoseconds of all calls or holds."""
        return int(self.times.sum or 0)

    def add(self, other: Measurement) -> None:
        if other.times.counts:
            self.times.merge(other.times)
        for name, count in other.errors.items():
            self.errors[name] = self.errors.get(name, 0) + count


Times = dict[Key, Measurement]

_StackKey = tuple[int, int, int, str, str]
"""The process, the address of the mutex, the number of the stack, the comm and the state of a measurement."""


class MutexTimes:
    """Collects the entries of lockd/bpf/trace/mutex.bpf.c, and unfinished waits and holds at the end."""

    def __init__(self, stacks: CallStacks, events: tuple[str, ...]) -> None:
        """`events`: the members of enum mutex_event."""
        self._stacks = stacks
        self._events = events
        self._measurements: dict[_StackKey, Measurement] = {}
        self._names: dict[tuple[int, int], str] = {}
        """Names of mutexes by process and address; empty for those without a name."""
        self._comms: dict[int, str] = {}
        """Comms by thread id."""
        self.unseen = {"taking_unseen": 0, "release_unseen": 0}
        """The numbers of events that show that an acquisition or a release was missed."""

    def add(self, entries: Entries) -> int:
        """Add drained entries of the pair `mutexes`. Returns the number of events in them."""
        keys, values = entries
        who = values["who"]
        for mutex, stack, tid, error, slot, event, count, total, highest, tgid, comm in zip(
            *(keys[name].tolist() for name in ("mutex", "stack", "tid", "error", "slot", "event")),
            *(values[name].tolist() for name in ("count", "sum", "max")),
            who["tgid"].tolist(), who["thread_comm"].tolist(), strict=True,
        ):  # fmt: skip
            event_name = self._events[event]
            self._name(tgid, mutex)
            if event_name in self.unseen:
                self.unseen[event_name] += count
                continue
            state = ABANDONED if event_name == "abandoned" else ""
            measurement = self._measurement(tgid, mutex, stack, self._comm(tgid, tid, comm), state)
            if event_name == "failed":
                name = ERRORS.get(error, str(error))
                measurement.errors[name] = measurement.errors.get(name, 0) + count
            else:
                measurement.times.add(slot, count, total, highest)
        return int(values["count"].sum())

    def add_waits(self, session: Session) -> None:
        """Add the calls that still wait for a mutex at the end of the trace."""
        tids, values = session.read_steady("mutex_calls")
        for name in ("call", "in_handler"):
            for tid, tgid, (sp, mutex, since, stack, *_) in zip(
                tids.tolist(), values["tgid"].tolist(), values[name].tolist(), strict=True
            ):
                if sp:
                    self._add_ongoing(tgid, tid, mutex, stack, session.ended_ns - since, STILL_WAITING)

    def add_holds(self, session: Session) -> None:
        """Add the holds that are left in the map mutex_holds at the end of the trace.

        Such a hold had not ended when the trace ended, or when its process ended during the trace. The
        exception is a mutex that another thread has released and nobody has acquired since: its hold counts
        as ended by that release.
        """
        threads, values = session.read_steady("mutex_ends")
        ended = dict(zip(threads.tolist(), values["at"].tolist(), strict=True))
        last_ends: dict[int, int] = {}
        for tid, tgid, ended_at, comm in zip(
            threads.tolist(), *(values[name].tolist() for name in ("tgid", "at", "comm")), strict=True
        ):
            last_ends[tgid] = max(ended_at, last_ends.get(tgid, 0))
            self._comms[tid] = text(comm)
        keys, values = session.read_steady("mutex_holds")
        names = ("since", "stack", "freed_at", "tid")
        for mutex, tgid, since, stack, freed_at, tid in zip(
            keys["mutex"].tolist(), keys["tgid"].tolist(),
            *(values[name].tolist() for name in names), strict=True,
        ):  # fmt: skip
            if freed_at:
                self._add_ongoing(tgid, tid, mutex, stack, freed_at - since, "")
                continue
            goes_on = is_running(tgid)
            end = session.ended_ns if goes_on else last_ends.get(tgid, session.ended_ns)
            state = HELD_BY_NONE if goes_on and ended.get(tid, 0) > since else STILL_HELD
            self._add_ongoing(tgid, tid, mutex, stack, end - since, state)

    def result(self, depth: int) -> Times:
        """All measurements. Those whose stacks have the same `depth` innermost functions are added up."""
        times: Times = {}
        for (tgid, mutex, stack, comm, state), measurement in self._measurements.items():
            frames = self._stacks.user(stack)[:depth]
            key = Key(tgid, mutex, self._name(tgid, mutex) or f"{mutex:#x}", comm, frames, state)
            times.setdefault(key, Measurement()).add(measurement)
        return times

    def remarks(self) -> Iterator[str]:
        """Sentences for the user about holds that are missing in the result."""
        if count := self.unseen["taking_unseen"]:
            yield (
                f"{count:,} releases of mutexes are not counted: their acquisitions were not seen, for "
                "instance because the trace had not begun"
            )
        if count := self.unseen["release_unseen"]:
            yield f"{count:,} holds are not counted: their end was not seen"

    def _add_ongoing(self, tgid: int, tid: int, mutex: int, stack: int, ns: int, state: str) -> None:
        measurement = self._measurement(tgid, mutex, stack, self._comm(tgid, tid, b""), state)
        measurement.times.add_value(max(ns, 0))

    def _measurement(self, tgid: int, mutex: int, stack: int, comm: str, state: str) -> Measurement:
        return self._measurements.setdefault((tgid, mutex, stack, comm, state), Measurement())

    def _comm(self, tgid: int, tid: int, comm: bytes) -> str:
        """`comm` as text or, if it is empty, the thread's present or last known comm, or `?` without any."""
        if comm:
            self._comms[tid] = text(comm)
        else:
            with contextlib.suppress(OSError):
                present = Path(f"/proc/{tgid}/task/{tid}/comm").read_bytes()
                self._comms[tid] = text(present.removesuffix(b"\n"))
        return self._comms.get(tid, "?")

    def _name(self, tgid: int, mutex: int) -> str:
        """The name of a mutex, or an empty string if it has none.

        The name is looked up when the mutex is first seen, because its process may end at any time.
        """
        if (tgid, mutex) not in self._names:
            self._names[tgid, mutex] = self._stacks.names.variable(tgid, mutex)
        return self._names[tgid, mutex]
