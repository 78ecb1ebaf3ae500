"""Holders of locks in a trace: the code that released each lock, and how long threads had waited for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries
from lockd.names.locks.locking_code import releasing_site
from lockd.names.protocol import NO_RELEASE, OWNER_ENDED, UNKNOWN_HOLDER
from lockd.printable import printable
from lockd.trace.core.output import csv_line, stack_field
from lockd.trace.futex.calls import NameOf
from lockd.trace.futex.lock_rows import CsvFormat, Line, microseconds, parse, read_file
from lockd.trace.futex.summary import KINDS, Grouping, average_us, frames_of

COLUMNS = ("pid", "addr", "waited_us", "max_waited_us", "releases", "kind", "lock", "holder", "stack")
FORMAT = CsvFormat(
    COLUMNS,
    "a file of holders, which `lockd trace futex --holders FILE` writes; one of waits, which its -o FILE "
    "writes, can be summed up by lock, stack, comm or tid",
)


@dataclass
class Held:
    """The sums over the releases of a lock at one stack, or over those waits for it that no release ended."""

    releases: int = 0
    """The number of releases that woke a thread, or of waits that no release ended."""
    waited_ns: int = 0
    """Time for which all threads together had waited since the previous release, summed over the releases.
    For waits that no release ended: their own times since the previous release, summed."""
    max_waited_ns: int = 0
    """The longest of the times that are summed up in `waited_ns`."""


@dataclass
class HolderRow(Held):
    """The sums for one lock and one stack at which a thread released it."""

    pid: int = 0
    """The process whose threads waited."""
    address: int = 0
    kind: str = ""
    lock: str = ""
    holder: str = ""
    """The innermost function of the releasing stack that does more than unlock (releasing_site()). A value in
    parentheses says why none is known."""
    frames: tuple[str, ...] = ()
    """Functions, outermost first; empty if no release was seen."""


class Holders:
    """The sums of all releases so far, from the pair `held`."""

    PAIR = "held"

    def __init__(self, manifest: Manifest) -> None:
        self._kinds, self._ends = manifest.enums["futex_kind"], manifest.enums["wait_end"]
        self._held: dict[tuple[int, int, int, int, int], Held] = {}

    def add(self, taken: dict[str, Entries]) -> None:
        """Add the releases of a window."""
        if self.PAIR not in taken:
            return
        keys, values = taken[self.PAIR]
        columns = (keys[name].tolist() for name in ("tgid", "address", "kind", "end", "stack"))
        for key, value in zip(zip(*columns, strict=True), values, strict=True):
            held = self._held.setdefault(key, Held())
            held.releases += int(value["releases"])
            held.waited_ns += int(value["waited_ns"])
            held.max_waited_ns = max(held.max_waited_ns, int(value["max_waited_ns"]))

    def rows(self, stack_of: Callable[[int], tuple[str, ...]], name_of: NameOf) -> list[HolderRow]:
        """The rows of all locks of the kinds `lock` and `pi`, the row with the most waited time first.

        `stack_of` returns the functions of a stack by its number, innermost first.
        """
        rows: dict[tuple[object, ...], HolderRow] = {}
        for (tgid, address, guess, end, number), held in self._held.items():
            kind, lock = name_of(tgid, address, self._kinds[guess])
            if kind not in KINDS["lock"]:
                continue
            frames = tuple(reversed(stack_of(number))) if number else ()
            holder = self._holder(end, frames)
            key = tgid, address, kind, holder, frames  # several numbers may stand for one stack
            row = rows.setdefault(key, HolderRow(0, 0, 0, tgid, address, kind, lock, holder, frames))
            row.releases += held.releases
            row.waited_ns += held.waited_ns
            row.max_waited_ns = max(row.max_waited_ns, held.max_waited_ns)
        return sorted(rows.values(), key=lambda row: row.waited_ns, reverse=True)

    def _holder(self, end: int, frames: tuple[str, ...]) -> str:
        match self._ends[end]:
            case "release":
                return releasing_site(frames_of(frames)) or UNKNOWN_HOLDER
            case "owner_ended":
                return OWNER_ENDED
            case _:
                return NO_RELEASE


def as_csv(rows: Iterable[HolderRow]) -> Iterator[str]:
    """Lines of the CSV, with a head. Names and stacks are always quoted."""
    yield ",".join(COLUMNS) + "\n"
    for row in rows:
        times = microseconds(row.waited_ns), microseconds(row.max_waited_ns)
        numbers = ",".join(map(str, (row.pid, f"{row.address:#x}", *times, row.releases)))
        names = map(printable, (row.kind, row.lock, row.holder))
        yield f"{numbers},{csv_line((*names, stack_field(row.frames)), quote_texts=True)}"


def read(path: Path) -> list[HolderRow]:
    """Read a CSV file of holders. `-` is standard input.

    Raises UsageError if the file cannot be read or its contents are invalid. It names the place and the rule.
    """
    return read_file(path, lambda name, lines: [_row(line) for line in parse(name, lines, FORMAT)])


def _row(line: Line) -> HolderRow:
    kind, lock, holder, stack = (line.fields[name] for name in ("kind", "lock", "holder", "stack"))
    if kind not in KINDS["lock"]:
        raise line.error("kind", " or ".join(KINDS["lock"]))
    return HolderRow(
        releases=line.number("releases"),
        waited_ns=line.number("waited_us") * 1000,
        max_waited_ns=line.number("max_waited_us") * 1000,
        pid=line.number("pid"),
        address=line.address(),
        kind=kind,
        lock=lock,
        holder=holder,
        frames=tuple(stack.split(";")) if stack else (),
    )


BY_HOLDER = Grouping[HolderRow](
    key=lambda row: (row.pid, row.address, row.kind, row.holder),
    labels=("kind", "pid", "lock", "holder", "stack"),
    weight=lambda row: (row.waited_ns, row.releases),
    columns={
        "waited.sum": lambda group: microseconds(group.sum("waited_ns")),
        "waited.max": lambda group: microseconds(group.max("max_waited_ns")),
        "waited.avg": lambda group: average_us(group.sum("waited_ns"), group.sum("releases")),
        "releases": lambda group: group.sum("releases"),
        "stacks": lambda group: len({row.frames for row in group.rows if row.frames}),
    },
    shown=("waited.sum", "releases", "waited.avg", "waited.max"),
    site=lambda frames: releasing_site(frames_of(frames)),
)
"""The grouping by lock and holder. `waited.avg` is the mean time per release."""
