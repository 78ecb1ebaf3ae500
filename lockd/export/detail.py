"""The detail tables of a snapshot as JSON and as profiles, filtered by the parameters of a request."""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockd.errors import LockdError
from lockd.views.holders import growth
from lockd.views.profile import KernelFrame, Mark, Profile, Sample, Value

Head = Mapping[str, Any]
Arrays = Mapping[str, memoryview]
Block = tuple[Head, Arrays]
"""The head and the arrays of a snapshot, as lockd.messages.unpack() returns them."""

FILTERS = ("unit", "comm", "kind")
"""Parameters of a request; each has the value that rows must have in the column of the same name."""
MOST_ROWS = 1000
"""The most rows of an answer, and of the sampler's tables of threads and of locks."""
DEFAULT_ROWS = 100
OF_LOCKS = ("futex", "kernel_locks")
"""The programs whose waits are for locks. Only a profile of these can show holders."""
OFFCPU = "offcpu"
"""The program whose waits have wakers (lockd/export/wait_profile.py)."""
PROGRAMS = (*OF_LOCKS, OFFCPU)
WAITER, HOLDER, WAKER = "waiter", "holder", "waker"
"""Values of the parameter `by`: whose stacks a profile shows."""
SIDES = {**dict.fromkeys(OF_LOCKS, (WAITER, HOLDER)), OFFCPU: (WAITER, WAKER)}
"""The values of `by` for each program."""
VALUES = (Value("blocked", "microseconds"), Value("waiting", "microseconds"), Value("waits", "count"))
HOLDER_VALUES = (Value("waited", "microseconds"), Value("samples", "count"))
"""The values of a sample of a holder: an estimate of how long others waited for it, and the number of sampled
releases."""
CONTENTION = ("lock", "pi")
"""Kinds of futex waits that a profile shows if the request has no parameter `kind`."""
MOST_SECONDS = 60
NO_STACK = Mark("[no stack]")


class QueryError(LockdError):
    """A parameter of the request has a value that breaks its rule."""


@dataclass(frozen=True)
class Query:
    """The parameters of a request for a table."""

    limit: int
    """The largest number of rows of the answer."""
    filters: Mapping[str, str]
    """The value that a column must have, by the name of the column."""


def parse_query(arguments: Mapping[str, list[bytes]]) -> Query:
    """The parameters `limit` and FILTERS; others are ignored. Raises QueryError."""
    values = single_values(arguments, ("limit", *FILTERS))
    limit = values.pop("limit", str(DEFAULT_ROWS))
    return Query(_whole_number("limit", limit, MOST_ROWS), values)


def _whole_number(name: str, text: str, most: int) -> int:
    """The value of the parameter `name`, a number from 1 to `most`. Raises QueryError."""
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise QueryError(f'parameter {name}: "{text[:40]}"; rule: a whole number from 1 to {most}')
    return int(text)


def single_values(arguments: Mapping[str, list[bytes]], names: tuple[str, ...]) -> dict[str, str]:
    """The values of the parameters `names` that are given. Raises QueryError if one is given twice
    or is not UTF-8."""
    values: dict[str, str] = {}
    for name in names:
        given = arguments.get(name, [])
        if not given:
            continue
        if len(given) > 1:
            raise QueryError(f"parameter {name}: given {len(given)} times; rule: once")
        try:
            values[name] = given[0].decode()
        except UnicodeDecodeError:
            raise QueryError(f"parameter {name}: {given[0]!r}; rule: UTF-8") from None
    return values


def table_rows(name: str, head: Head, arrays: Arrays) -> Iterator[dict[str, Any]]:
    """The rows of a table of the block: values by column.

    The head is {"time": seconds since 1970, "monotonic": seconds, "tables": {NAME: {"text": {column: [value,
    ...]}, "numbers": [column, ...], "lists": {column: [[value, ...], ...]}}}}. The numbers of a column are in
    the array NAME.COLUMN. The table of locks also has "is_cut": whether rows were left out.
    """
    table = head["tables"][name]
    columns: dict[str, Any] = {
        **table["text"],
        **{column: arrays[f"{name}.{column}"] for column in table["numbers"]},
        **table["lists"],
    }
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def render_table(name: str, head: Head, arrays: Arrays, query: Query) -> bytes:
    """A table of the block, and when it was measured, as JSON: {"time": seconds since 1970, "monotonic":
    seconds, NAME: [{column: value, ...}, ...]}.

    Raises QueryError if the table has no column for one of the filters.
    """
    for column in query.filters:
        if column not in head["tables"][name]["text"]:
            raise QueryError(f"parameter {column}: {name} have no such column; rule: leave it out")
    wanted = query.filters.items()
    rows = (row for row in table_rows(name, head, arrays) if all(row[key] == value for key, value in wanted))
    clocks = {clock: head[clock] for clock in ("time", "monotonic")}
    answer = {**clocks, name: list(itertools.islice(rows, query.limit))}
    return json.dumps(answer, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class ProfileQuery:
    """The parameters of a request for a profile: FILTERS, `seconds` (0 if not given) and `by`.

    Other parameters are ignored. A profile of holders may be of all locks: `program` is then empty. Raises
    QueryError.
    """

    def __init__(self, program: str, arguments: Mapping[str, list[bytes]]) -> None:
        self.program = program
        self.filters = single_values(arguments, (*FILTERS, "seconds", "by"))
        side = self.filters.pop("by", WAITER)
        self.is_by_holder, self.is_by_waker = side == HOLDER, side == WAKER
        if program not in PROGRAMS and (program or not self.is_by_holder):
            known = ", ".join(PROGRAMS)
            raise QueryError(f'parameter program: "{program[:40]}"; rule: one of {known}')
        if program and side not in SIDES[program]:
            known = ", ".join(SIDES[program])
            raise QueryError(f'parameter by: "{side[:40]}"; rule: one of {known} for program={program}')
        self._programs = (program,) if program else OF_LOCKS
        seconds = self.filters.pop("seconds", None)
        self.seconds = 0 if seconds is None else _whole_number("seconds", seconds, MOST_SECONDS)

    def has_lock(self, row: Mapping[str, Any]) -> bool:
        """Whether the profile includes this row of the table of locks."""
        if row["program"] not in self._programs:
            return False
        if row["program"] == "futex" and "kind" not in self.filters and row["kind"] not in CONTENTION:
            return False
        return self.matches(row)

    def matches(self, values: Mapping[str, str]) -> bool:
        """Whether `values`, with a value for each name in FILTERS, has the values that were asked for."""
        return all(values[name] == value for name, value in self.filters.items())


def program_of(arguments: Mapping[str, list[bytes]]) -> str:
    """The parameter `program`; empty if it is not given."""
    return single_values(arguments, ("program",)).get("program", "")


def profile_of(query: ProfileQuery, head: Head, arrays: Arrays) -> Profile:
    """A profile of the waits for locks since the daemon started, or for each lock since the sampler
    has a row for it.

    The values of a sample are the blocked time of waits that have ended and the time of the longest wait that
    goes on, both in microseconds, and the number of waits that have ended. The values of a sample of a holder
    are HOLDER_VALUES.
    """
    keyed = zip(arrays["locks.key"], table_rows("locks", head, arrays), strict=True)
    rows = ((key, row) for key, row in keyed if query.has_lock(row))
    if query.is_by_holder:
        held = [_holder_sample(key, row, holder) for key, row in rows for holder in row["holders"]]
        return Profile("lockd holders", HOLDER_VALUES, held, head["time"])
    return Profile(f"lockd {query.program}", VALUES, list(itertools.starmap(_sample, rows)), head["time"])


@dataclass(frozen=True)
class LockSample(Sample):
    """A sample that is made from a row of the table of locks."""

    key: int = 0
    """The number by which the sampler identifies the row. Names do not suffice: the mutexes of many objects
    have one name, and two places in a function may have the same callers."""


def locks_left_out(earlier: Block, later: Block) -> frozenset[int]:
    """The keys of the locks in `later` that may have had no place in the table of locks of `earlier`.

    If rows were left out of that table, a row that only `later` has may be an old one, unless it was made
    after the earlier snapshot.
    """
    (head, arrays), (_, now) = earlier, later
    if not head["tables"]["locks"]["is_cut"]:
        return frozenset()
    shown, taken = frozenset(arrays["locks.key"]), head["monotonic"]
    keys = zip(now["locks.key"], now["locks.since"], strict=True)
    return frozenset(key for key, since in keys if since <= taken and key not in shown)


def between(earlier: Profile, later: Profile, seconds: float, left_out: Container[int] = ()) -> Profile:
    """The difference of two profiles of profile_of(), of which `later` was taken `seconds` after `earlier`.

    Samples to which nothing was added are left out. The seconds are given because the wall clock may have
    been set in between. The locks with the keys `left_out`, from locks_left_out(), have no samples either:
    how much was added to them is unknown.
    """
    known = replace(later, samples=[one for one in later.samples if _key_of(one) not in left_out])
    if later.values == HOLDER_VALUES:
        samples = list(_held_between(earlier, known))
    else:
        samples = list(_waited_between(earlier, known, seconds))
    return replace(later, samples=samples, began=earlier.began, seconds=seconds)


def _waited_between(earlier: Profile, later: Profile, seconds: float) -> Iterator[Sample]:
    """The samples of between() for profiles of waiters."""
    before = {_key_of(sample): sample for sample in earlier.samples}
    goes_on = [value.name == "waiting" for value in later.values]
    for sample in later.samples:
        old = before.get(_key_of(sample))
        counted = old.values if old else (0,) * len(sample.values)
        # If a value has fallen, the sampler has forgotten the row in between, and counts from zero.
        if any(
            now < then
            for now, then, is_now in zip(sample.values, counted, goes_on, strict=True)
            if not is_now
        ):
            counted = (0,) * len(sample.values)
        values = tuple(
            min(now, round(seconds * 1e6)) if is_now else now - then
            for now, then, is_now in zip(sample.values, counted, goes_on, strict=True)
        )
        if any(values):
            yield replace(sample, values=values)


def _held_between(earlier: Profile, later: Profile) -> Iterator[Sample]:
    """The samples of between() for profiles of holders."""
    before = _holders_by_lock(earlier)
    for lock, holders in _holders_by_lock(later).items():
        then, now = (
            {site: sample.values for site, sample in one.items()} for one in (before.get(lock, {}), holders)
        )
        for site, values in growth(then, now).items():
            if any(values):
                yield replace(holders[site], values=values)


def _holders_by_lock(profile: Profile) -> dict[int, dict[str, Sample]]:
    """The samples by the key of their row in the table of locks, and then by the site of the holder."""
    locks: dict[int, dict[str, Sample]] = {}
    for sample in profile.samples:
        locks.setdefault(_key_of(sample), {})[sample.labels["holder"]] = sample
    return locks


def with_waiting(profile: Profile) -> Profile:
    """The profile for formats with one value: the sum of the first two, `blocked` and `waiting`.

    A profile of holders already has such a value, and is returned as it is.
    """
    if profile.values == HOLDER_VALUES:
        return profile
    samples = [replace(sample, values=(sample.values[0] + sample.values[1],)) for sample in profile.samples]
    value = Value("blocked, waits that go on included", "microseconds")
    return replace(profile, values=(value,), samples=samples)


def _sample(key: int, row: Mapping[str, Any]) -> Sample:
    """A row of the table of locks as a sample. Its frames are the stack and then the lock."""
    stack = _frames(row, row["stack"])
    frames = (*(stack or (row["site"] or NO_STACK,)), Mark(row["lock"] or row["address"]))
    values = round(row["blocked_us"]), round(row["waiting_us"]), row["blocked_count"]
    labels = {"unit": row["unit"], "kind": row["kind"], "lock": row["lock"]}
    return LockSample(row["comm"], row["tgid"], 0, frames, values, labels, key)


def _holder_sample(key: int, row: Mapping[str, Any], holder: Mapping[str, Any]) -> Sample:
    """A holder of the lock in a row as a sample. Its frames are the stack and then the lock."""
    stack = _frames(row, holder["stack"]) or (Mark(holder["site"]),)
    frames = (*stack, Mark(row["lock"] or row["address"]))
    labels = {"unit": row["unit"], "kind": row["kind"], "lock": row["lock"], "holder": holder["site"]}
    values = round(holder["seconds"] * 1e6), holder["samples"]
    return LockSample(row["comm"], row["tgid"], 0, frames, values, labels, key)


def _frames(row: Mapping[str, Any], stack: Sequence[str]) -> tuple[str, ...]:
    """The functions of a stack, outermost first, in which the lock of a row was waited for or held."""
    kind = KernelFrame if row["program"] == "kernel_locks" else str
    return tuple(kind(name) for name in reversed(stack))


def _key_of(sample: Sample) -> int:
    assert isinstance(sample, LockSample)
    return sample.key
