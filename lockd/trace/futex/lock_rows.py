"""Rows of futex calls: the result of `lockd trace futex`, its CSV and JSON files, and the reader of the CSV.

The CSV has the columns of locktrace (docs/trace/futex.md).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import UsageError
from lockd.printable import printable
from lockd.trace.core.output import csv_line

TIMES = {
    "blocked_us": "blocked_ns", "sys_us": "sys_ns", "max_blocked_us": "max_blocked_ns",
    "max_sys_us": "max_sys_ns",
}  # fmt: skip
"""Attributes of LockRow by the columns that have them in microseconds."""
COUNTS = ("wait_count", "blocked_count", "wake_count", "errors")
"""Columns that have the attributes of the same names."""
COLUMNS = ("pid", "tid", "addr", *TIMES, *COUNTS, "stack")
NAMES = ("kind", "lock", "ongoing")
"""The columns that --names adds."""
STDIN = Path("-")
MOST_NUMBER = 2**64 - 1
"""The greatest number that a column may have."""


@dataclass
class LockRow:
    """The futex calls of one thread at one address and stack; with names, of one kind too.

    A wait that was open at the end of the trace counts with the time until then.
    """

    pid: int
    tid: int
    address: int
    comm: str
    """Name of the process."""
    frames: tuple[str, ...] = ()
    """Functions, outermost first; empty if the thread did not block there, or if its stack is not known."""
    kind: str = ""
    """`lock`, `pi`, `cond` or `other`; empty if the kind is not known."""
    lock: str = ""
    """Lock name; empty if the lock has none."""
    blocked_ns: int = 0
    """Time for which the thread was switched out in a wait, until it ran again."""
    sys_ns: int = 0
    """Time in futex calls without the blocked time."""
    max_blocked_ns: int = 0
    """The longest blocked time of one call."""
    max_sys_ns: int = 0
    """The longest time of one call without its blocked time."""
    wait_count: int = 0
    """Calls that wait, whether they blocked or not."""
    blocked_count: int = 0
    """Waits that blocked."""
    wake_count: int = 0
    """Calls that wake or requeue."""
    errors: int = 0
    """Calls that failed."""
    ongoing: int = 0
    """Waits that were open at the end of the trace."""


def microseconds(ns: int) -> int:
    """Convert nanoseconds to microseconds, rounded to the nearest."""
    return (ns + 500) // 1000


def as_csv(rows: Iterable[LockRow], with_names: bool = False) -> Iterator[str]:
    """Lines of the CSV, with a head, in the order of locktrace. Stacks and names are always quoted."""
    yield ",".join((*COLUMNS, *(NAMES if with_names else ()))) + "\n"
    for row in _sorted(rows):
        numbers = ",".join(map(str, (row.pid, row.tid, f"{row.address:#x}", *_numbers(row).values())))
        stack = ";".join(printable(name).replace(";", ":") for name in (row.comm, *row.frames))
        names = (printable(row.kind), printable(row.lock), row.ongoing) if with_names else ()
        yield f"{numbers},{csv_line((stack, *names), quote_texts=True)}"


def as_json(rows: Iterable[LockRow]) -> Iterator[str]:
    """Lines of JSON, one object for each row. The stack is a list, outermost function first."""
    for row in _sorted(rows):
        about = {"pid": row.pid, "tid": row.tid, "addr": f"{row.address:#x}", "comm": row.comm}
        names = {"stack": row.frames, "kind": row.kind, "lock": row.lock, "ongoing": row.ongoing}
        yield json.dumps({**about, **_numbers(row), **names}) + "\n"


def _sorted(rows: Iterable[LockRow]) -> list[LockRow]:
    """Rows in the order of locktrace: by process, then by blocked time, both descending."""
    return sorted(rows, key=lambda row: (-row.pid, -row.blocked_ns, row.tid, row.address, row.frames))


def _numbers(row: LockRow) -> dict[str, int]:
    """The times and counts of a row, by column."""
    times = {column: microseconds(getattr(row, name)) for column, name in TIMES.items()}
    return {**times, **{name: getattr(row, name) for name in COUNTS}}


def read(path: Path) -> list[LockRow]:
    """Read a CSV file of lockd, or of locktrace, which does not quote stacks. `-` is standard input.

    Raises UsageError that names the file, the line, the column and the rule.
    """
    if path == STDIN:
        return read_lines("standard input", sys.stdin)
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            return read_lines(str(path), file)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def read_lines(name: str, lines: Iterable[str]) -> list[LockRow]:
    """Parse the lines of a CSV file with a head, as lockd or locktrace writes it.

    Raises UsageError that names the file `name`, the line, the column and the rule.
    """
    rows: list[LockRow] = []
    columns: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not columns:
            columns = text.split(",")
            _check_header(name, columns)
        elif text:
            rows.append(_row(f"{name}:{number}", columns, text))
    if not columns:
        raise UsageError(f"{name}: is empty; rule: a first line with the columns {','.join(COLUMNS)}")
    return rows


def _check_header(name: str, columns: list[str]) -> None:
    for column in COLUMNS:
        if column not in columns:
            raise UsageError(
                f"{name}:1: column {column}: is missing; rule: a first line with the columns "
                f"{','.join(COLUMNS)}, as of `lockd trace futex`"
            )


def _row(where: str, columns: list[str], text: str) -> LockRow:
    fields = _fields(where, columns, text)
    if len(fields) != len(columns):
        raise UsageError(
            f"{where}: column {columns[min(len(fields), len(columns) - 1)]}: there are {len(fields)} fields; "
            f"rule: {len(columns)}, one for each column of the first line"
        )
    values = dict(zip(columns, fields, strict=True))

    def whole(column: str) -> int:
        value = values.get(column, "0")
        if not (value.isascii() and value.isdecimal() and len(value) <= 20) or int(value) > MOST_NUMBER:
            raise UsageError(f"{where}: column {column}: {value!r}; rule: a whole number, 0 or more")
        return int(value)

    try:
        address = int(values["addr"], 0)
    except ValueError:
        raise UsageError(
            f"{where}: column addr: {values['addr']!r}; rule: an address such as 0x7f00"
        ) from None
    comm, *frames = values["stack"].split(";")
    times = {name: whole(column) * 1000 for column, name in TIMES.items()}
    counts = {name: whole(name) for name in COUNTS}
    kind, lock = values.get("kind", ""), values.get("lock", "")
    return LockRow(
        whole("pid"), whole("tid"), address, comm, tuple(frames), kind, lock, **times, **counts,
        ongoing=whole("ongoing"),
    )  # fmt: skip


def _fields(where: str, columns: list[str], text: str) -> list[str]:
    """Split a line into fields. An unquoted stack is the rest of the line, as names in C++ have commas."""
    fields = text.split(",", len(columns) - 1)
    is_quoted = columns[-1] != "stack" or fields[-1].startswith('"')
    try:
        return next(csv.reader([text])) if is_quoted else fields
    except csv.Error as error:
        raise UsageError(f"{where}: {error}; rule: a line of CSV") from None
