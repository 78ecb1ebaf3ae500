"""The detail tables as profiles: where threads wait, by stack, for /debug/pprof and /flamegraph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockd.export.tables import QueryError, rows_of, single_values
from lockd.views.profile import KernelFrame, Mark, Profile, Sample, Value

PROGRAMS = {"futex": "locks", "kernel_locks": "locks", "offcpu": "threads"}
"""And the table that each is in."""
VALUES = (Value("blocked", "microseconds"), Value("waiting", "microseconds"), Value("waits", "count"))
CONTENTION = ("lock", "pi")
"""Kinds of futex waits that are shown unless others are asked for."""
MOST_SECONDS = 60
FILTERS = ("unit", "comm", "kind")
NO_STACK = Mark("[no stack]")

Head = Mapping[str, Any]
Arrays = Mapping[str, memoryview]


class ProfileQuery:
    """The parameters `unit`, `comm`, `kind` and `seconds` (0 if not given); others are ignored."""

    def __init__(self, program: str, arguments: Mapping[str, list[bytes]]) -> None:
        if program not in PROGRAMS:
            known = ", ".join(PROGRAMS)
            raise QueryError(f'parameter program: "{program[:40]}"; rule: one of {known}')
        self.program = program
        self.filters = single_values(arguments, (*FILTERS, "seconds"))
        seconds = self.filters.pop("seconds", "0")
        if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 9) or (
            int(seconds) > MOST_SECONDS or ("seconds" in arguments and not int(seconds))
        ):
            rule = f"a whole number from 1 to {MOST_SECONDS}"
            raise QueryError(f'parameter seconds: "{seconds[:40]}"; rule: {rule}')
        self.seconds = int(seconds)

    def wants(self, row: Mapping[str, Any]) -> bool:
        if row["program"] != self.program:
            return False
        if self.program == "futex" and "kind" not in self.filters and row["kind"] not in CONTENTION:
            return False
        return all(row[name] == value for name, value in self.filters.items())


def program_of(arguments: Mapping[str, list[bytes]]) -> str:
    """The parameter `program`, "" if it is not given."""
    return single_values(arguments, ("program",)).get("program", "")


def profile_of(query: ProfileQuery, head: Head, arrays: Arrays) -> Profile:
    """Since the daemon started, or each row was first seen: blocked time of waits that have ended, how long
    those have lasted that go on (on a lock the longest), and how many have ended.
    """
    samples = [_sample(row) for row in rows_of(PROGRAMS[query.program], head, arrays) if query.wants(row)]
    return Profile(f"lockd {query.program}", VALUES, samples, head["time"])


def between(earlier: Profile, later: Profile, seconds: float) -> Profile:
    """What came to it from one moment to the other, `seconds` later; the wall clock may have been set."""
    before = {_key(sample): sample for sample in earlier.samples}
    samples = []
    for sample in later.samples:
        old = before.get(_key(sample))
        blocked, waiting, waits = sample.values
        if old and old.values[0] <= blocked and old.values[2] <= waits:  # else it was forgotten meanwhile
            blocked, waits = blocked - old.values[0], waits - old.values[2]
        samples.append(replace(sample, values=(blocked, min(waiting, round(seconds * 1e6)), waits)))
    return replace(later, samples=samples, began=earlier.began, seconds=seconds)


def with_waiting(profile: Profile) -> Profile:
    """For what shows one value only: a wait that goes on counts for as long as it has lasted."""
    samples = [replace(sample, values=(sample.values[0] + sample.values[1],)) for sample in profile.samples]
    value = Value("blocked, waits that go on included", "microseconds")
    return replace(profile, values=(value,), samples=samples)


def _sample(row: Mapping[str, Any]) -> Sample:
    """Frames: the stack, then the lock; off the CPU, of which no stacks are kept, the reason."""
    program = row["program"]
    if program == "offcpu":
        frames: tuple[str, ...] = (Mark(row["thread_comm"]), Mark(row["kind"]))
    else:
        kind = KernelFrame if program == "kernel_locks" else str
        stack = tuple(kind(name) for name in reversed(row["stack"]))
        frames = (*(stack or (row["site"] or NO_STACK,)), Mark(row["lock"] or row["address"]))
    values = round(row["blocked_us"]), round(row["waiting_us"]), row["blocked_count"]
    labels = {"unit": row["unit"], "kind": row["kind"], "lock": row["lock"]}
    return Sample(row["comm"], row["tgid"], row.get("tid", 0), frames, values, labels)


def _key(sample: Sample) -> tuple[object, ...]:
    return sample.comm, sample.pid, sample.tid, sample.frames, tuple(sample.labels.items())
