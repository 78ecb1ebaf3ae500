"""Summaries of a trace as a table, CSV or JSON: of futex calls by lock, stack, process name or thread.

holders.py adds a grouping for the holders of locks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from lockd.names.locks.locking_code import Frame, Judgement, judge
from lockd.names.protocol import ANON
from lockd.printable import printable
from lockd.trace.core.output import aligned, csv_line, stack_field
from lockd.trace.futex.lock_rows import LockRow, microseconds

KINDS = {"lock": ("lock", "pi"), "cond": ("cond",)}
"""Kinds of waits by the value of --events. `lock`: for a lock that another thread holds. `cond`: for work or
an event."""
DEFAULT_COLUMNS = ("blocked.sum", "blocked.count", "blocked.avg", "blocked.max", "wait.count", "threads")
NAMELESS = re.compile(r"(.+)\+0x[0-9a-f]+")
"""What a stack shows for a function without a name: the object file, and the offset in it."""
SHOWN_FRAMES = 4
"""The most functions of each stack that are shown in a table."""


class Row(Protocol):
    """What rows of futex calls and of holders have in common."""

    address: int
    lock: str
    frames: tuple[str, ...]
    """Functions, outermost first."""


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass
class Group(Generic[AnyRow]):
    """The rows of a trace with the same key."""

    rows: list[AnyRow] = field(default_factory=list)

    def sum(self, name: str) -> int:
        total: int = sum(getattr(row, name) for row in self.rows)
        return total

    def max(self, name: str) -> int:
        highest: int = max(getattr(row, name) for row in self.rows)
        return highest


def average_us(total_ns: int, count: int) -> float:
    """The average time in microseconds, with one decimal; 0 if there is nothing to average."""
    return round(total_ns / count / 1000, 1) if count else 0.0


Columns = Mapping[str, Callable[[Group[AnyRow]], float]]
"""Functions that return the value of a group, by the name of the column. Times are in microseconds."""
COLUMNS: Columns[LockRow] = {
    "blocked.sum": lambda group: microseconds(group.sum("blocked_ns")),
    "blocked.count": lambda group: group.sum("blocked_count"),
    "blocked.max": lambda group: microseconds(group.max("max_blocked_ns")),
    "blocked.avg": lambda group: average_us(group.sum("blocked_ns"), group.sum("blocked_count")),
    "sys.sum": lambda group: microseconds(group.sum("sys_ns")),
    "sys.count": lambda group: group.sum("wait_count") + group.sum("wake_count"),
    "sys.max": lambda group: microseconds(group.max("max_sys_ns")),
    "sys.avg": lambda group: average_us(
        group.sum("sys_ns"), group.sum("wait_count") + group.sum("wake_count")
    ),
    "wait.count": lambda group: group.sum("wait_count"),
    "wake.count": lambda group: group.sum("wake_count"),
    "errors": lambda group: group.sum("errors"),
    "ongoing": lambda group: group.sum("ongoing"),
    "threads": lambda group: len({(row.pid, row.tid) for row in group.rows}),
    "locks": lambda group: len({(row.pid, row.address) for row in group.rows}),
    "comms": lambda group: len({row.comm for row in group.rows}),
    "stacks": lambda group: len({row.frames for row in group.rows if row.frames}),
}
"""The columns of futex calls. `blocked.avg` is the average of waits that blocked, `sys.avg` that of all
calls."""
KEYS: dict[str, Callable[[LockRow], tuple[object, ...]]] = {
    "lock": lambda row: (row.pid, row.address, row.kind),
    "stack": lambda row: (row.comm, row.frames),
    "comm": lambda row: (row.comm,),
    "tid": lambda row: (row.pid, row.tid),
}
"""Functions that return the key of a row's group, by the value of --group."""
LABELS = {
    "lock": ("kind", "pid", "comm", "lock", "stack"),
    "stack": ("comm", "stack"),
    "comm": ("comm",),
    "tid": ("pid", "tid", "comm"),
}
"""The columns that show what a group is, by the value of --group."""


@dataclass(frozen=True)
class Grouping(Generic[AnyRow]):
    """A way to divide rows into groups, and the columns of these groups."""

    key: Callable[[AnyRow], tuple[object, ...]]
    """Returns the key of a row's group."""
    labels: tuple[str, ...]
    """The columns that show what a group is: `lock`, `stack`, and attributes of rows."""
    weight: Callable[[AnyRow], tuple[int, ...]]
    """Returns the weight of a row. The labels of a group are those of its row with the greatest weight."""
    columns: Columns[AnyRow]
    """The columns of values that a summary may have."""
    shown: tuple[str, ...]
    """The columns of values that a summary has by default. It is sorted by the first one by default."""
    site: Callable[[Sequence[str]], str]
    """Returns the function at which a stack in a table begins; empty if it has none. The functions of the
    stack are given outermost first."""


GROUPINGS = {
    by: Grouping(
        key, LABELS[by], lambda row: (row.blocked_ns, row.wait_count), COLUMNS, DEFAULT_COLUMNS,
        site=lambda frames: judge_stack(frames).site,
    )
    for by, key in KEYS.items()
}  # fmt: skip
"""The groupings of futex calls, by the value of --group."""


def _label_of(row: Row, label: str) -> object:
    match label:
        case "lock":
            return row.lock if row.lock not in ("", ANON) else f"{row.address:#x}"
        case "stack":
            return row.frames
        case _:
            return getattr(row, label)


def _is_additive(column: str) -> bool:
    """Whether the values of a column add up over the groups, so that each group has a share."""
    return column in ("errors", "ongoing", "releases") or column.endswith((".sum", ".count"))


def judge_stack(frames: Sequence[str]) -> Judgement:
    """Kind and site of a lock, as the stack of a thread that waits for it shows them.

    `frames` are those of frames_of().
    """
    return judge(frames_of(frames))


def frames_of(frames: Sequence[str]) -> list[Frame]:
    """A stack, innermost first. `frames` are its functions as rows have them, outermost first.

    The names may come from another tool: versions (`@@GLIBC_2.3.2`) and arguments are ignored. A function
    without a name is `object+0xoffset`.
    """
    return [_frame(text) for text in reversed(frames)]


def _frame(text: str) -> Frame:
    """The frame that a stack in a file shows as this text."""
    if place := NAMELESS.fullmatch(text):
        return Frame(place[1], "", text)
    return Frame("", re.sub(r"@+[\w.]+$|\(.*\)(?: const)?$", "", text), text)


def add_kinds(rows: Sequence[LockRow]) -> None:
    """Set the kind of each row without one: the kind that stacks show for most waits for the same lock."""
    votes: dict[tuple[int, int], Counter[str]] = {}
    judged: dict[tuple[str, ...], str] = {}
    for row in rows:
        if row.kind or not row.frames:
            continue
        if row.frames not in judged:
            judged[row.frames] = judge_stack(row.frames).kind
        if judged[row.frames]:
            votes.setdefault((row.pid, row.address), Counter())[judged[row.frames]] += row.wait_count + 1
    for row in rows:
        counter = votes.get((row.pid, row.address))
        if counter and not row.kind:
            row.kind = counter.most_common(1)[0][0]


def select(rows: Iterable[LockRow], events: str) -> list[LockRow]:
    """The rows whose kind belongs to `events`: `lock`, `cond`, or `all`, which includes unknown kinds."""
    kinds = KINDS.get(events)
    return [row for row in rows if kinds is None or row.kind in kinds]


@dataclass(frozen=True)
class Summary:
    """Groups of rows, the largest first."""

    labels: tuple[str, ...]
    columns: tuple[str, ...]
    lines: tuple[tuple[dict[str, object], dict[str, float]], ...]
    """For each group its labels, and the values of `this%` and `cum%` (in per cent) and of the columns."""
    left_out: int
    """Number of smaller groups that are not in `lines`."""
    site: Callable[[Sequence[str]], str]
    """Grouping.site."""


def summarise(
    rows: Iterable[AnyRow], grouping: Grouping[AnyRow], sort: str | None = None,
    columns: Sequence[str] | None = None, most: int | None = None,
) -> Summary:  # fmt: skip
    """Sum up rows by group. Only the `most` groups (None: all) with the largest values of `sort` are shown.

    `sort` is a column, and `columns` are those of the result. With None they are the grouping's default.
    `this%` is the group's share of the column `sort`, or of the first column that the grouping shows by
    default if `sort` is not additive. `cum%` is the share of this group and all before it.
    """
    sort, columns = sort or grouping.shown[0], columns or grouping.shown
    groups: dict[tuple[object, ...], Group[AnyRow]] = {}
    for row in rows:
        groups.setdefault(grouping.key(row), Group()).rows.append(row)
    largest = sorted(groups.values(), key=lambda group: -grouping.columns[sort](group))
    shared = grouping.columns[sort if _is_additive(sort) else grouping.shown[0]]
    total, sum_ = sum(map(shared, largest)), 0.0
    lines = []
    for group in largest[:most]:
        this = shared(group)
        sum_ += this
        shares = {"this%": round(100 * this / (total or 1), 1), "cum%": round(100 * sum_ / (total or 1), 1)}
        heaviest = max(group.rows, key=grouping.weight)
        labels = {label: _label_of(heaviest, label) for label in grouping.labels}
        lines.append((labels, {**shares, **{name: grouping.columns[name](group) for name in columns}}))
    left_out = len(largest) - len(lines)
    return Summary(grouping.labels, tuple(columns), tuple(lines), left_out, grouping.site)


def as_table(summary: Summary) -> Iterator[str]:
    """Lines of a table for people: times have units, and stacks begin after the locking code."""
    rows = [
        [
            *(_value(name, value) for name, value in values.items()),
            *(printable(_label(x, summary.site)) for x in labels.values()),
        ]
        for labels, values in summary.lines
    ]
    yield from aligned(
        [["this%", "cum%", *summary.columns, *summary.labels], *rows], 2 + len(summary.columns)
    )
    if summary.left_out:
        yield f"and {summary.left_out:,} more\n"


def as_csv(summary: Summary) -> Iterator[str]:
    """Lines of CSV with a head. Times are in microseconds.

    Stacks are as stack_field() returns them.
    """
    yield csv_line([*summary.labels, "this%", "cum%", *summary.columns])
    for labels, values in summary.lines:
        yield csv_line([*map(_field, labels.values()), *values.values()])


def as_json(summary: Summary) -> Iterator[str]:
    """Lines of JSON, one object for each group. Times are in microseconds."""
    for labels, values in summary.lines:
        yield json.dumps({**labels, **values}) + "\n"


def describe_left_out(rows: Sequence[LockRow], shown: Sequence[LockRow], hint: str) -> Iterator[str]:
    """A line about the waits in `rows` that are not in `shown`, if there are any. It ends with `hint`."""
    waits, blocked = (
        sum(getattr(row, name) for row in rows) - sum(getattr(row, name) for row in shown)
        for name in ("wait_count", "blocked_ns")
    )
    if waits:
        yield f"left out: {waits:,} waits of other kinds, {_value('blocked', blocked / 1000)}{hint}\n"


FORMATS = {"table": as_table, "csv": as_csv, "json": as_json}
"""Functions that return the lines of a summary, by the name of the format."""


def _field(label: object) -> str:
    return stack_field(label) if isinstance(label, tuple) else printable(str(label))


def _label(label: object, site_of: Callable[[Sequence[str]], str]) -> str:
    """A label for a table. A stack is shown by its innermost functions, from its site (Grouping.site) on."""
    if not isinstance(label, tuple):
        return str(label)
    names = callers(label, site_of(label))
    return " < ".join([*names[:SHOWN_FRAMES], *(["..."] if len(names) > SHOWN_FRAMES else [])])


def callers(frames: Sequence[str], site: str) -> list[str]:
    """The functions of a stack from its site on, innermost first; all of them if the site is not among them.

    `frames` are all functions of the stack, outermost first.
    """
    names = list(reversed(frames))
    return names[names.index(site) :] if site in names else names


def _value(name: str, value: float) -> str:
    """The value of a column for a table: a time with its unit, a share, or a count."""
    if name.endswith("%"):
        return f"{value:.1f}"
    if name.partition(".")[0] not in ("blocked", "sys", "waited") or name.endswith(".count"):
        return f"{value:,.0f}"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} us"
