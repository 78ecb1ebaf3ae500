"""Tables in the format of klockstat: waits for kernel locks, and holds of them, by caller or by thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockd.columns.structs import Columns
from lockd.trace.klock.rows import Count, Names, comm_of

UNITS = (
    (3_600_000_000_000, "h"),
    (60_000_000_000, "m"),
    (1_000_000_000, "s"),
    (1_000_000, "ms"),
    (1_000, "us"),
)
MARK = "*"
"""Stands after the times of a line that includes unfinished waits or holds."""


class Side(NamedTuple):
    """The table of waits or that of holds: words for its text (`title`, `participle`), and the columns of ROW
    that it is made from (`total`, `longest` and `ongoing`)."""

    title: str
    participle: str
    sort: str
    """The prefix of the values of --sort that are about this table."""
    total: str
    longest: str
    ongoing: str


WAITS = Side("Wait", "waiting", "acq", "wait_ns", "max_wait_ns", "waiting")
HOLDS = Side("Hold", "held", "hld", "hold_ns", "max_hold_ns", "holding")
FIELDS = ("max", "total", "count", "avg")
"""Names of the numbers that lines can be sorted by; the first is the default."""
SORTS = tuple(f"{side.sort}_{name}" for side in (WAITS, HOLDS) for name in FIELDS)
"""The values that --sort accepts."""


@dataclass
class Line:
    """One line of a table, with the lines below it that show further callers."""

    head: tuple[str, ...]
    """The callers, innermost first, or the id and comm of the thread."""
    type: str
    """The type of the locks, a member of enum lock_type."""
    count: Count = field(default_factory=Count)
    total: int = 0
    """Nanoseconds of all waits or holds."""
    longest: int = 0
    """Nanoseconds of the longest wait or hold."""
    ongoing: int = 0
    """Waits or holds that had not ended when the trace ended."""
    longest_thread: str = ""
    """The comm and id of the thread with the longest wait or hold."""
    locks: dict[tuple[str, int], int] = field(default_factory=dict)
    """Nanoseconds of all waits or holds, by the name and address of the lock."""

    def value(self, side: Side, name: str) -> float:
        """The number for a name of FIELDS: times are in nanoseconds."""
        count = self.count.accesses if side is WAITS else self.count.holds
        values = {"max": self.longest, "total": self.total, "count": count}
        return values[name] if name in values else self.total / max(count, 1)


@dataclass(frozen=True)
class Layout:
    """The user's options for the tables."""

    functions: int = 1
    """How many callers of a stack are shown, the innermost ones. Stacks that differ in these have separate
    lines."""
    most: int | None = None
    """The largest number of lines of a table; None: no limit."""
    sorts: tuple[str, ...] = ()
    """Members of SORTS."""
    by_thread: bool = False
    """Whether there is a line for each thread, not for each caller."""


def tables(rows: Columns, names: Names, types: list[str], layout: Layout, has_holds: bool) -> Iterator[str]:
    """Lines of the table of waits and, with `has_holds`, of that of holds. `types` is enum lock_type."""
    for side in (WAITS, HOLDS)[: 1 + has_holds]:
        lines: dict[tuple[str, ...], Line] = {}
        for row in rows:
            _add(lines, row, side, names, types, layout)
        yield from _table(side, [line for line in lines.values() if line.value(side, "count")], layout)


def _add(
    lines: dict[tuple[str, ...], Line], row: Any, side: Side, names: Names, types: list[str], layout: Layout
) -> None:
    type_, stack, address, thread = (int(row[name]) for name in ("type", "stack", "lock", "tid"))
    head = (str(thread), comm_of(row)) if layout.by_thread else names.callers(stack)[: layout.functions]
    line = lines.setdefault((*head, types[type_]), Line(head, types[type_]))
    line.count.add(row)
    line.total += int(row[side.total])
    line.ongoing += int(row[side.ongoing])
    if row[side.longest] >= line.longest:
        line.longest, line.longest_thread = int(row[side.longest]), f"{comm_of(row)} ({thread})"
    lock = names.lock(address, type_, stack, bool(row["is_mmap_lock"])), address
    line.locks[lock] = line.locks.get(lock, 0) + int(row[side.total])


def _table(side: Side, lines: list[Line], layout: Layout) -> Iterator[str]:
    by = next((sort.partition("_")[2] for sort in layout.sorts if sort.startswith(side.sort)), FIELDS[0])
    lines.sort(key=lambda line: (-line.value(side, by), line.head, line.type))
    yield "\n"
    first = f"{'Tid':>18} {'Comm':>18}" if layout.by_thread else f"{'Caller':>37}"
    yield (
        f"{first} {f'Avg {side.title}':>10} {'Count':>8} {f'Max {side.title}':>10}"
        f" {f'Total {side.title}':>12}"
        f"  {'Type':<18} Lock\n"
    )
    for line in lines[: layout.most]:
        yield from _format(line, side, layout)
    if any(line.ongoing for line in lines[: layout.most]):
        yield f"{MARK} some were still {side.participle} at the end: they count, with their time until then\n"


def _format(line: Line, side: Side, layout: Layout) -> Iterator[str]:
    first = f"{line.head[0]:>18} {line.head[1]:>18}" if layout.by_thread else f"{line.head[0]:>37}"
    (name, address), *others = sorted(line.locks, key=lambda lock: -line.locks[lock])
    yield (
        f"{first} {duration(line.value(side, 'avg')):>10} {line.value(side, 'count'):>8} "
        f"{duration(line.longest):>10} {duration(line.total):>12}{MARK if line.ongoing else ' '} "
        f"{line.type:<18} {name}{f' and {len(others)} more' if others else ''}\n"
    )
    if not layout.by_thread and layout.functions > 1:
        yield from (f"{function:>37}\n" for function in line.head[1:])
        yield f"{'longest:':>37} {line.longest_thread}, {name} ({address:#x})\n"


def duration(ns: float) -> str:
    """A time in the largest unit in which it is at least 1, such as `1.2 ms`, or in whole nanoseconds."""
    for size, unit in UNITS:
        if ns >= size:
            return f"{ns / size:.1f} {unit}"
    return f"{ns:.0f} ns"
