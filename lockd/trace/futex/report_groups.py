"""Futex calls summed up by lock, stack, process name or thread."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lockd.names.locks.locking_code import Frame, Judgement, judge
from lockd.names.protocol import ANON
from lockd.trace.futex.rows import LockRow, microseconds

LOCKS = ("lock", "pi")
"""Kinds that are waits for another's critical section."""
DEFAULT_COLUMNS = ("blocked.sum", "blocked.count", "blocked.avg", "blocked.max", "wait.count", "threads")
DEFAULT_ROWS = 20


@dataclass
class Group:
    """Rows of one lock, stack, process name or thread."""

    rows: list[LockRow] = field(default_factory=list)

    @property
    def heaviest(self) -> LockRow:
        """The row in which most time was lost."""
        return max(self.rows, key=lambda row: (row.blocked_ns, row.wait_count))

    def sum(self, name: str) -> int:
        total: int = sum(getattr(row, name) for row in self.rows)
        return total

    def max(self, name: str) -> int:
        highest: int = max(getattr(row, name) for row in self.rows)
        return highest


def _us(ns: float) -> float:
    return round(ns / 1000, 1)


def _average(total: int, count: int) -> float:
    return _us(total / count) if count else 0.0


COLUMNS: dict[str, Callable[[Group], float]] = {
    "blocked.sum": lambda group: microseconds(group.sum("blocked_ns")),
    "blocked.count": lambda group: group.sum("blocked_count"),
    "blocked.max": lambda group: microseconds(group.max("max_blocked_ns")),
    "blocked.avg": lambda group: _average(group.sum("blocked_ns"), group.sum("blocked_count")),
    "sys.sum": lambda group: microseconds(group.sum("sys_ns")),
    "sys.count": lambda group: group.sum("wait_count") + group.sum("wake_count"),
    "sys.max": lambda group: microseconds(group.max("max_sys_ns")),
    "sys.avg": lambda group: _average(group.sum("sys_ns"), group.sum("wait_count") + group.sum("wake_count")),
    "wait.count": lambda group: group.sum("wait_count"),
    "wake.count": lambda group: group.sum("wake_count"),
    "errors": lambda group: group.sum("errors"),
    "ongoing": lambda group: group.sum("ongoing"),
    "threads": lambda group: len({(row.pid, row.tid) for row in group.rows}),
    "locks": lambda group: len({(row.pid, row.address) for row in group.rows}),
    "comms": lambda group: len({row.comm for row in group.rows}),
    "stacks": lambda group: len({row.frames for row in group.rows if row.frames}),
}
"""Times are in microseconds. Sums and maxima of times, averages of those that blocked, or of all calls."""
ADDITIVE = (
    "blocked.sum",
    "blocked.count",
    "sys.sum",
    "sys.count",
    "wait.count",
    "wake.count",
    "errors",
    "ongoing",
)
"""Columns of which every group has a share."""


def _key(row: LockRow, by: str) -> tuple[object, ...]:
    match by:
        case "lock":
            return row.pid, row.address, row.kind
        case "stack":
            return row.comm, row.frames
        case "comm":
            return (row.comm,)
    return row.pid, row.tid


def _about(group: Group, by: str) -> dict[str, object]:
    """What a group is, in words."""
    row = group.heaviest
    match by:
        case "lock":
            name = row.lock if row.lock not in ("", ANON) else f"{row.address:#x}"
            return {"kind": row.kind, "pid": row.pid, "comm": row.comm, "lock": name, "stack": row.frames}
        case "stack":
            return {"comm": row.comm, "stack": row.frames}
        case "comm":
            return {"comm": row.comm}
    return {"pid": row.pid, "tid": row.tid, "comm": row.comm}


def judged_stack(frames: Sequence[str]) -> Judgement:
    """What functions say, the outermost first. Other tools' names have versions and arguments too."""
    bare = ((name, re.sub(r"@+[\w.]+$|\(.*\)(?: const)?$", "", name)) for name in reversed(frames))
    return judge([Frame("", function, name) for name, function in bare])


def with_kinds(rows: Sequence[LockRow]) -> list[LockRow]:
    """The rows with the kind of each lock that has none, as the functions of its stacks tell it."""
    votes: dict[tuple[int, int], Counter[str]] = {}
    judged: dict[tuple[str, ...], str] = {}
    for row in rows:
        if row.kind or not row.frames:
            continue
        if row.frames not in judged:
            judged[row.frames] = judged_stack(row.frames).kind
        if judged[row.frames]:
            votes.setdefault((row.pid, row.address), Counter())[judged[row.frames]] += row.wait_count + 1
    for row in rows:
        found = votes.get((row.pid, row.address))
        if found and not row.kind:
            row.kind = found.most_common(1)[0][0]
    return list(rows)


def only(rows: Iterable[LockRow], sort: str) -> list[LockRow]:
    """`lock`, `cond`, or `all`, those of unknown kind included."""
    kinds = {"lock": LOCKS, "cond": ("cond",)}.get(sort)
    return [row for row in rows if kinds is None or row.kind in kinds]


@dataclass(frozen=True)
class Report:
    """Groups of rows, the largest first."""

    by: str
    columns: tuple[str, ...]
    lines: tuple[tuple[dict[str, object], dict[str, float]], ...]
    """What each is, and the value of each column; those of shares among them, in per cent."""
    shares_of: str
    left_out: int
    """How many groups there are besides."""


def summarise(
    rows: Iterable[LockRow], by: str = "lock", sort: str = "blocked.sum",
    columns: Sequence[str] = DEFAULT_COLUMNS, most: int | None = None,
) -> Report:  # fmt: skip
    """`this%` and `cum%` are shares of the column that is sorted by, or of the blocked time if that column
    cannot be shared.
    """
    groups: dict[tuple[object, ...], Group] = {}
    for row in rows:
        groups.setdefault(_key(row, by), Group()).rows.append(row)
    largest = sorted(groups.values(), key=lambda group: -COLUMNS[sort](group))
    shares_of = sort if sort in ADDITIVE else "blocked.sum"
    total, sum_ = sum(map(COLUMNS[shares_of], largest)), 0.0
    lines = []
    for group in largest[:most]:
        values = {column: COLUMNS[column](group) for column in columns}
        this = COLUMNS[shares_of](group)
        sum_ += this
        shares = {"this%": round(100 * this / (total or 1), 1), "cum%": round(100 * sum_ / (total or 1), 1)}
        lines.append((_about(group, by), {**shares, **values}))
    return Report(by, tuple(columns), tuple(lines), shares_of, len(largest) - len(lines))
