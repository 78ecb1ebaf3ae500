"""Rows of futex calls: the result of `lockd trace futex`, its CSV and JSON files, and the reader of the CSV.

The CSV has the columns of the tool locktrace (docs/trace/futex.md). read_file() and parse() also serve for
the CSV of holders (holders.py).
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from lockd.errors import UsageError
from lockd.printable import printable
from lockd.trace.core.output import csv_line, stack_field

TIMES = {
    "blocked_us": "blocked_ns", "sys_us": "sys_ns", "max_blocked_us": "max_blocked_ns",
    "max_sys_us": "max_sys_ns",
}  # fmt: skip
"""Attributes of LockRow in nanoseconds, by the column that has them in microseconds."""
COUNTS = ("wait_count", "blocked_count", "wake_count", "errors")
"""Columns with counts. The attributes of LockRow that they show have the same names."""
COLUMNS = ("pid", "tid", "addr", *TIMES, *COUNTS, "stack")
NAMES = ("kind", "lock", "ongoing")
"""The columns that --names adds."""
STDIN = Path("-")
MOST_NUMBER = 2**64 - 1
"""The greatest number that a field of the CSV may contain."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class CsvFormat:
    """The format of a CSV file whose first line names the columns."""

    columns: tuple[str, ...]
    """The columns that the file must have."""
    source: str
    """Text for messages: what such a file contains, which command writes it, and what to do with a file of
    the other format."""
    has_bare_stacks: bool = False
    """Whether a stack in the last column may have no quotes, as locktrace writes it."""


FORMAT = CsvFormat(
    COLUMNS,
    "a file of waits, which `lockd trace futex -o FILE` writes; one of holders, which its --holders FILE "
    "writes, needs `lockd trace report --by holder`",
    has_bare_stacks=True,
)


@dataclass
class LockRow:
    """The futex calls of one thread at one address and stack. With names, they are of one kind as well.

    A wait that was open at the end of the trace counts with the time until then.
    """

    pid: int
    tid: int
    address: int
    comm: str
    """Name of the process."""
    frames: tuple[str, ...] = ()
    """Functions, outermost first; empty if no stack was taken, as usual for calls that did not block, or if
    the stack is not known."""
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
    """Calls that asked to wait, whether the thread blocked or not."""
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
        stack = stack_field((row.comm, *row.frames))
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

    Raises UsageError if the file cannot be read or its contents are invalid. It names the place and the rule.
    """
    return read_file(path, read_lines)


def read_lines(name: str, lines: Iterable[str]) -> list[LockRow]:
    """Parse the lines of a CSV file with a head, as lockd or locktrace writes it.

    Raises UsageError for invalid contents. It names the file `name`, the place in it and the rule.
    """
    return [_row(line) for line in parse(name, lines, FORMAT)]


def read_file(path: Path, result_of: Callable[[str, Iterable[str]], Result]) -> Result:
    """Return what `result_of` makes of the name and the lines of a file. `-` is standard input.

    Raises UsageError that names the file if it cannot be read.
    """
    if path == STDIN:
        return result_of("standard input", _standard_input())
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            return result_of(str(path), file)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def _standard_input() -> TextIO:
    """Standard input, decoded as files are, whatever the locale is."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    return sys.stdin


@dataclass(frozen=True)
class Line:
    """A line of a CSV file. number() and address() raise UsageError for an invalid field. It names the file,
    the line, the column and the rule."""

    where: str
    """The file and the number of the line, as messages name it."""
    fields: dict[str, str]
    """The fields by column."""

    def number(self, column: str) -> int:
        """The whole number in a column; 0 if the file does not have the column."""
        value = self.fields.get(column, "0")
        if not (value.isascii() and value.isdecimal() and len(value) <= 20) or int(value) > MOST_NUMBER:
            raise self.error(column, "a whole number, 0 or more")
        return int(value)

    def address(self) -> int:
        """The address in the column `addr`."""
        try:
            return int(self.fields["addr"], 0)
        except ValueError:
            raise self.error("addr", "an address such as 0x7f00") from None

    def error(self, column: str, rule: str) -> UsageError:
        """The error that says that the field of a column breaks a rule."""
        return UsageError(f"{self.where}: column {column}: {self.fields[column]!r}; rule: {rule}")


def parse(name: str, lines: Iterable[str], form: CsvFormat) -> Iterator[Line]:
    """Split the lines of a CSV file with a head into fields.

    Raises UsageError if the file is empty or lacks a column, or if a line is not CSV or has too few or too
    many fields. It names the file `name` and the rule.
    """
    columns: list[str] = []
    rule = f"rule: a first line with the columns {','.join(form.columns)}, as in {form.source}"
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not columns:
            columns = text.split(",")
            for column in form.columns:
                if column not in columns:
                    raise UsageError(f"{name}:1: column {column}: is missing; {rule}")
        elif text:
            where = f"{name}:{number}"
            yield Line(where, _fields(where, columns, text, form.has_bare_stacks))
    if not columns:
        raise UsageError(f"{name}: is empty; {rule}")


def _row(line: Line) -> LockRow:
    comm, *frames = line.fields["stack"].split(";")
    times = {name: line.number(column) * 1000 for column, name in TIMES.items()}
    counts = {name: line.number(name) for name in COUNTS}
    kind, lock = line.fields.get("kind", ""), line.fields.get("lock", "")
    return LockRow(
        line.number("pid"), line.number("tid"), line.address(), comm, tuple(frames), kind, lock,
        **times, **counts, ongoing=line.number("ongoing"),
    )  # fmt: skip


def _fields(where: str, columns: list[str], text: str, has_bare_stacks: bool) -> dict[str, str]:
    """The fields of a line by column. A stack without quotes is the rest of the line, because names of C++
    functions can contain commas."""
    fields = text.split(",", len(columns) - 1)
    if not has_bare_stacks or columns[-1] != "stack" or fields[-1].startswith('"'):
        try:
            fields = next(csv.reader([text], strict=True))  # else the end of a cut line would be no error
        except csv.Error as error:
            raise UsageError(f"{where}: {error}; rule: a line of CSV") from None
    if len(fields) != len(columns):
        column = printable(columns[min(len(fields), len(columns) - 1)])
        raise UsageError(
            f"{where}: column {column}: there are {len(fields)} fields; "
            f"rule: {len(columns)}, one for each column of the first line"
        )
    return dict(zip(columns, fields, strict=True))
