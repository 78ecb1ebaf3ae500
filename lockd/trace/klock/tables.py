"""Tables of who waits for kernel locks, and holds them, as klockstat prints: by caller or by thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockd.columns.structs import Columns
from lockd.trace.klock.places import Places
from lockd.trace.klock.rows import Count, comm_of

UNITS = (
    (3_600_000_000_000, "h"),
    (60_000_000_000, "m"),
    (1_000_000_000, "s"),
    (1_000_000, "ms"),
    (1_000, "us"),
)
MARK = "*"


class Side(NamedTuple):
    """Waits or holds: what the table is called, and the columns of a row that it is made of."""

    word: str
    going_on: str
    sort: str
    """So begin the fields of --sort."""
    total: str
    longest: str
    ongoing: str


WAITS = Side("Wait", "waiting", "acq", "wait_ns", "max_wait_ns", "waiting")
HOLDS = Side("Hold", "held", "hld", "hold_ns", "max_hold_ns", "holding")
FIELDS = ("max", "total", "count", "avg")
SORTS = tuple(f"{side.sort}_{name}" for side in (WAITS, HOLDS) for name in FIELDS)
"""What --sort knows."""


@dataclass
class Line:
    """One line of a table, with the lines of callers below it."""

    head: tuple[str, ...]
    """Callers, innermost first; or the thread."""
    type: str
    count: Count = field(default_factory=Count)
    total: int = 0
    longest: int = 0
    ongoing: int = 0
    who: str = ""
    """Whose was the longest."""
    locks: dict[tuple[str, int], int] = field(default_factory=dict)
    """Time by name and address."""

    def value(self, side: Side, name: str) -> float:
        """One of FIELDS."""
        count = self.count.accesses if side is WAITS else self.count.holds
        values = {"max": self.longest, "total": self.total, "count": count}
        return values[name] if name in values else self.total / max(count, 1)


@dataclass(frozen=True)
class Layout:
    """What the user asked for."""

    functions: int = 1
    """Of a stack: so many tell two lines apart, and are shown."""
    most: int | None = None
    """Lines."""
    sorts: tuple[str, ...] = ()
    """Of SORTS."""
    by_thread: bool = False


def tables(
    rows: Columns, places: Places, types: tuple[str, ...], layout: Layout, has_holds: bool
) -> Iterator[str]:
    """The table of waits and, with `has_holds`, that of holds."""
    for side in (WAITS, HOLDS)[: 1 + has_holds]:
        lines: dict[tuple[str, ...], Line] = {}
        for row in rows:
            _add(lines, row, side, places, types, layout)
        yield from _table(side, [line for line in lines.values() if line.value(side, "count")], layout)


def _add(
    lines: dict[tuple[str, ...], Line],
    row: Any,
    side: Side,
    places: Places,
    types: tuple[str, ...],
    layout: Layout,
) -> None:
    type_, stack, address, thread = (int(row[name]) for name in ("type", "stack", "lock", "tid"))
    head = (str(thread), comm_of(row)) if layout.by_thread else places.callers(stack)[: layout.functions]
    line = lines.setdefault((*head, types[type_]), Line(head, types[type_]))
    line.count.add(row)
    line.total += int(row[side.total])
    line.ongoing += int(row[side.ongoing])
    if row[side.longest] >= line.longest:
        line.longest, line.who = int(row[side.longest]), f"{comm_of(row)} ({thread})"
    lock = places.lock(address, type_, stack, bool(row["is_mmap_lock"])), address
    line.locks[lock] = line.locks.get(lock, 0) + int(row[side.total])


def _table(side: Side, lines: list[Line], layout: Layout) -> Iterator[str]:
    by = next((sort.partition("_")[2] for sort in layout.sorts if sort.startswith(side.sort)), FIELDS[0])
    lines.sort(key=lambda line: (-line.value(side, by), line.head, line.type))
    yield "\n"
    first = f"{'Tid':>18} {'Comm':>18}" if layout.by_thread else f"{'Caller':>37}"
    yield (
        f"{first} {f'Avg {side.word}':>10} {'Count':>8} {f'Max {side.word}':>10} {f'Total {side.word}':>12}"
        f"  {'Type':<18} Lock\n"
    )
    for line in lines[: layout.most]:
        yield from _shown(line, side, layout)
    if any(line.ongoing for line in lines[: layout.most]):
        yield f"{MARK} some were still {side.going_on} at the end: they count, with their time until then\n"


def _shown(line: Line, side: Side, layout: Layout) -> Iterator[str]:
    first = f"{line.head[0]:>18} {line.head[1]:>18}" if layout.by_thread else f"{line.head[0]:>37}"
    (name, address), *others = sorted(line.locks, key=lambda lock: -line.locks[lock])
    yield (
        f"{first} {duration(line.value(side, 'avg')):>10} {line.value(side, 'count'):>8} "
        f"{duration(line.longest):>10} {duration(line.total):>12}{MARK if line.ongoing else ' '} "
        f"{line.type:<18} {name}{f' and {len(others)} more' if others else ''}\n"
    )
    if not layout.by_thread and layout.functions > 1:
        yield from (f"{function:>37}\n" for function in line.head[1:])
        yield f"{'longest:':>37} {line.who}, {name} ({address:#x})\n"


def duration(ns: float) -> str:
    """In the largest unit of which there is one at least, as `1.2 ms`."""
    for size, unit in UNITS:
        if ns >= size:
            return f"{ns / size:.1f} {unit}"
    return f"{ns:.0f} ns"
