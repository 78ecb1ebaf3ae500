"""What is known of mutexes: by mutex, stack and thread name, how often and for how long."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockd.kernel.pairs import Entries
from lockd.trace.core.call_stacks import CallStacks
from lockd.trace.core.histogram import Histogram
from lockd.trace.core.session import Session
from lockd.views.profile import Mark, Profile, Sample, Value

STILL_WAITING = "still waiting"
STILL_HELD = "still held"
HELD_BY_NONE = "still held, its thread has ended"
ABANDONED = "its thread ended as it waited"
ONGOING = (STILL_WAITING, STILL_HELD, HELD_BY_NONE, ABANDONED)
"""What may be said of times that were not over."""


@dataclass(frozen=True)
class Place:
    """What the times of one row have in common."""

    pid: int
    mutex: int
    """Its address."""
    lock: str
    """Its name, else the address in hexadecimal."""
    comm: str
    """Of the threads."""
    frames: tuple[str, ...]
    """Innermost first."""
    state: str = ""
    """One of ONGOING; empty for what was over."""


@dataclass
class Measured:
    """Nanoseconds of taking a mutex, or of holding it."""

    times: Histogram = field(default_factory=Histogram)
    errors: dict[str, int] = field(default_factory=dict)
    """How many calls did not take it, by the name of the error."""

    @property
    def total(self) -> int:
        return int(self.times.sum or 0)

    def add(self, other: Measured) -> None:
        if other.times.counts:
            self.times.merge(other.times)
        for name, count in other.errors.items():
            self.errors[name] = self.errors.get(name, 0) + count


Found = dict[Place, Measured]

ERRORS = {**errno.errorcode, errno.EDEADLK: "EDEADLK"}
"""Names by number: one has two."""

_Key = tuple[int, int, int, str, str]
"""Process, mutex, stack, thread name, state."""


class Mutexes:
    """Rows of lockd/bpf/trace/mutex.bpf.c as they are drained, and what goes on at the end."""

    def __init__(self, stacks: CallStacks, events: tuple[str, ...], procfs: Path = Path("/proc")) -> None:
        """`events`: the members of enum mutex_event."""
        self._stacks = stacks
        self._events = events
        self._procfs = procfs
        self._found: dict[_Key, Measured] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._comms: dict[int, str] = {}
        """By thread."""
        self.unseen = {"taking_unseen": 0, "release_unseen": 0}

    def add(self, rows: Entries) -> int:
        """How many calls they tell of."""
        keys, values = rows
        who = values["who"]
        for mutex, stack, tid, error, slot, event, count, total, highest, tgid, comm in zip(
            *(keys[name].tolist() for name in ("mutex", "stack", "tid", "error", "slot", "event")),
            *(values[name].tolist() for name in ("count", "sum", "max")),
            who["tgid"].tolist(), who["thread_comm"].tolist(), strict=True,
        ):  # fmt: skip
            what = self._events[event]
            self._name(tgid, mutex)
            if what in self.unseen:
                self.unseen[what] += count
                continue
            state = ABANDONED if what == "abandoned" else ""
            measured = self._measured(tgid, mutex, stack, self._comm(tgid, tid, comm), state)
            if what == "failed":
                name = ERRORS.get(error, str(error))
                measured.errors[name] = measured.errors.get(name, 0) + count
            else:
                measured.times.add(slot, count, total, highest)
        return int(values["count"].sum())

    def add_waits(self, session: Session) -> None:
        """Those that go on."""
        tids, values = session.read_steady("mutex_calls")
        for name in ("call", "in_handler"):
            for tid, tgid, (sp, mutex, since, stack, *_) in zip(
                tids.tolist(), values["tgid"].tolist(), values[name].tolist(), strict=True
            ):
                if sp:
                    self._add_ongoing(tgid, tid, mutex, stack, session.ended_ns - since, STILL_WAITING)

    def add_holds(self, session: Session) -> None:
        """Mutexes that are still held, or were when their process ended."""
        threads, values = session.read_steady("mutex_ends")
        ended = dict(zip(threads.tolist(), values["at"].tolist(), strict=True))
        last: dict[int, int] = {}
        for tid, tgid, at, comm in zip(
            threads.tolist(), *(values[name].tolist() for name in ("tgid", "at", "comm")), strict=True
        ):
            last[tgid] = max(at, last.get(tgid, 0))
            self._comms[tid] = comm.decode(errors="replace")
        keys, values = session.read_steady("mutex_holds")
        names = ("since", "stack", "freed_at", "tid")
        for mutex, tgid, since, stack, freed_at, tid in zip(
            keys["mutex"].tolist(), keys["tgid"].tolist(),
            *(values[name].tolist() for name in names), strict=True,
        ):  # fmt: skip
            if freed_at:
                self._add_ongoing(tgid, tid, mutex, stack, freed_at - since, "")
                continue
            is_there = (self._procfs / str(tgid)).exists()
            end = session.ended_ns if is_there else last.get(tgid, session.ended_ns)
            state = HELD_BY_NONE if is_there and ended.get(tid, 0) > since else STILL_HELD
            self._add_ongoing(tgid, tid, mutex, stack, end - since, state)

    def found(self, depth: int) -> Found:
        """Everything, with the innermost `depth` functions of each stack."""
        result: Found = {}
        for (tgid, mutex, stack, comm, state), measured in self._found.items():
            frames = self._stacks.user(stack)[:depth]
            place = Place(tgid, mutex, self._name(tgid, mutex) or f"{mutex:#x}", comm, frames, state)
            result.setdefault(place, Measured()).add(measured)
        return result

    def remarks(self) -> Iterator[str]:
        """About what the times do not tell."""
        if count := self.unseen["taking_unseen"]:
            yield f"{count:,} releases of mutexes that were not seen to be taken, as before the trace began"
        if count := self.unseen["release_unseen"]:
            yield f"{count:,} holds whose end was not seen: they are not counted"

    def _add_ongoing(self, tgid: int, tid: int, mutex: int, stack: int, ns: int, state: str) -> None:
        measured = self._measured(tgid, mutex, stack, self._comm(tgid, tid, b""), state)
        measured.times.add_value(max(ns, 0))

    def _measured(self, tgid: int, mutex: int, stack: int, comm: str, state: str) -> Measured:
        return self._found.setdefault((tgid, mutex, stack, comm, state), Measured())

    def _comm(self, tgid: int, tid: int, comm: bytes) -> str:
        """The name of a thread; if it is not given, the one that it has or last had."""
        if comm:
            self._comms[tid] = comm.decode(errors="replace")
        else:
            with contextlib.suppress(OSError):
                text = (self._procfs / f"{tgid}/task/{tid}/comm").read_text(errors="replace")
                self._comms[tid] = text.removesuffix("\n")
        return self._comms.get(tid, "?")

    def _name(self, tgid: int, mutex: int) -> str:
        """Looked for when it is first seen: the process may end at any time."""
        if (tgid, mutex) not in self._names:
            self._names[tgid, mutex] = self._stacks.names.variable(tgid, mutex)
        return self._names[tgid, mutex]


def as_profile(found: Found, title: str, what: str, began: float, seconds: float) -> Profile:
    """`what` is `wait` or `held`. The mutex is above the innermost function."""
    profile = Profile(title, (Value(what, "nanoseconds"), Value("calls", "count")), [], began, seconds)
    for place, measured in found.items():
        if measured.times.counts:
            marks = [Mark(f"[{text}]") for text in (place.lock, place.state) if text]
            labels = {"lock": place.lock} | ({"state": place.state} if place.state else {})
            profile.samples.append(
                Sample(
                    place.comm, place.pid, place.pid, (*reversed(place.frames), *marks),
                    (measured.total, measured.times.count), labels,
                )
            )  # fmt: skip
    return profile
