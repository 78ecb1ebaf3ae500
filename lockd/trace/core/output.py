"""The result of a trace as text, pprof or a flame graph, written to standard output or to a file."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, cast

from lockd.errors import LockdError, UsageError
from lockd.printable import printable
from lockd.views import flamegraph, pprof
from lockd.views.profile import Profile, Sample

GRAPHS = {".svg": flamegraph.svg, ".html": flamegraph.page}
"""The functions that draw a flame graph, by the suffix of the file's name."""
TABLE_FRAMES = 3
"""The most functions of each stack that are shown in a table."""


def check(path: Path | None) -> None:
    """Raise UsageError if the file `path` cannot be written, so that a trace fails at its start.

    None stands for standard output, which is not checked.
    """
    if path is None:
        return
    try:
        mode = _mode(path)
        # Pipes and devices are not checked: opening a pipe could block for ever.
        if mode and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return
        with path.open("ab"):
            pass
        if not mode:
            path.resolve().unlink()  # the file that open() has made; a symbolic link to it was there before
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _mode(path: Path) -> int:
    """The `st_mode` of the file, or 0 if there is no file. Raises OSError if the mode cannot be read."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0


def check_options(args: argparse.Namespace) -> None:
    """Check all options of options.add_output(), as far as the tool has them.

    Raises UsageError if a file cannot be written, or if options contradict each other.
    """
    graph, output = getattr(args, "flamegraph", None), getattr(args, "output", None)
    check(output)
    check(graph)
    if graph and graph.suffix not in GRAPHS:
        raise UsageError(f"--flamegraph {graph}: rule: a name that ends in {' or '.join(GRAPHS)}")
    if graph and output and graph.absolute() == output.absolute():
        raise UsageError(f"--flamegraph {graph}: --output is the same file")
    if getattr(args, "format", "") == "pprof" and output is None and sys.stdout.isatty():
        raise UsageError("--format pprof: it is not for a terminal; rule: with -o FILE, or into a pipe")


def folded(profile: Profile) -> Iterator[str]:
    """Lines of the format `folded`, one for each comm and stack: `comm;outermost;...;innermost value`.

    `value` is the first value of the profile. A semicolon in a name becomes a colon.
    """
    sums: dict[tuple[str, ...], int] = {}
    for sample in profile.sorted():
        names = tuple(name.replace(";", ":").replace("\n", " ") for name in (sample.comm, *sample.frames))
        sums[names] = sums.get(names, 0) + sample.values[0]
    for names, value in sums.items():
        yield f"{';'.join(names)} {value}\n"


def multiline(profile: Profile) -> Iterator[str]:
    """Lines of the format `stacks`, for each thread and stack: its functions, innermost first, thread, value.

    The value is the first one of the profile. The stack with the largest value comes last.
    """
    sums: dict[tuple[str, int, tuple[str, ...]], int] = {}
    for sample in profile.sorted():
        key = sample.comm, sample.tid, sample.frames
        sums[key] = sums.get(key, 0) + sample.values[0]
    for (comm, tid, frames), value in sorted(sums.items(), key=lambda item: (item[1], item[0])):
        yield from (f"    {name}\n" for name in reversed(frames))
        yield f"    {'-':<16} {comm} ({tid})\n"
        yield f"        {value}\n\n"


def as_json(profile: Profile) -> Iterator[str]:
    """Lines of the format `json`, one object for each sample."""
    for sample in profile.sorted():
        values = {value.name: number for value, number in zip(profile.values, sample.values, strict=True)}
        about = {"comm": sample.comm, "pid": sample.pid, "tid": sample.tid, "stack": sample.frames}
        yield json.dumps({**about, **sample.labels, **values}) + "\n"


def innermost(sample: Sample) -> Sequence[str]:
    """The innermost TABLE_FRAMES functions of a sample, innermost first."""
    return sample.frames[: -TABLE_FRAMES - 1 : -1]


def table(profile: Profile, brief: Callable[[Sample], Sequence[str]] = innermost) -> Iterator[str]:
    """Lines of the format `table`: a head, then the samples, sorted by their first value, the largest on top.

    `brief` picks the functions of a sample that are shown, innermost first.
    """
    labels = list(dict.fromkeys(name for sample in profile.samples for name in sample.labels))
    numbers = [value.name.upper() for value in profile.values] + ["PID", "TID"]
    head = [*numbers, "COMM", *(name.upper() for name in labels), "STACK"]
    rows = [
        [*map(str, sample.values), str(sample.pid), str(sample.tid), sample.comm,
         *(sample.labels.get(name, "") for name in labels), " < ".join(brief(sample))]
        for sample in reversed(profile.sorted())
    ]  # fmt: skip
    yield from aligned([head, *rows], len(numbers))


def aligned(rows: Sequence[Sequence[str]], numbers: int) -> Iterator[str]:
    """Lines of a table whose first `numbers` columns are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column < numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip() + "\n"


def stack_field(functions: Iterable[str]) -> str:
    """A stack as a field of CSV: its functions, given outermost first, with semicolons between them.

    A semicolon in a name becomes a colon, as it would divide the name.
    """
    return ";".join(printable(name).replace(";", ":") for name in functions)


def csv_line(fields: Iterable[object], quote_texts: bool = False) -> str:
    """A line of CSV; with `quote_texts`, all fields that are not numbers are quoted."""
    line = io.StringIO()
    csv.writer(
        line, quoting=csv.QUOTE_NONNUMERIC if quote_texts else csv.QUOTE_MINIMAL, lineterminator="\n"
    ).writerow(fields)
    return line.getvalue()


FORMATS = {"folded": folded, "stacks": multiline, "json": as_json, "table": table}
"""Functions that return the lines of a profile, by the name of the format."""


def write(
    args: argparse.Namespace,
    profile: Profile,
    others: Mapping[str, Iterable[str]] = MappingProxyType({}),
    is_more: bool = False,
    drawn: Profile | None = None,
) -> None:
    """Write a profile as the options of options.add_output() say.

    `others` has the lines of the tool's own formats, by format. With `is_more` the text is appended to the
    file. `drawn` is the profile that the flame graph shows, if it is not `profile`. If the options ask for a
    flame graph, and neither for an output file nor for a format, only the flame graph is written. Raises
    LockdError if a file cannot be written.
    """
    profile = replace(profile, title=args.command_line)

    def write_format() -> None:
        if args.format in others:
            write_text(args.output, others[args.format], is_more)
        elif args.format == "pprof":
            with _opened(args.output) as file, _explained(args.output):
                file.write(pprof.encode(profile))
        else:
            write_text(args.output, FORMATS[args.format](profile), is_more)

    graph = partial(write_graph, args, drawn or profile)
    write_each([graph] if is_only_graph(args) else [graph, write_format])


def write_each(writes: Iterable[Callable[[], None]]) -> None:
    """Call functions that write one result each: all of them, as no result should be lost with another.

    Raises the first of their errors at the end.
    """
    errors: list[LockdError | BrokenPipeError] = []
    for write_one in writes:
        try:
            write_one()
        except (LockdError, BrokenPipeError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def write_graph(args: argparse.Namespace, profile: Profile) -> None:
    """Write the flame graph, if `args` ask for one. Raises LockdError if it cannot be written."""
    if args.flamegraph:
        titled = replace(profile, title=args.command_line)
        write_text(args.flamegraph, [GRAPHS[args.flamegraph.suffix](titled)])


def is_only_graph(args: argparse.Namespace) -> bool:
    """Whether `args` ask for a flame graph and for nothing else."""
    return bool(args.flamegraph and not args.output and not args.format_given)


@contextlib.contextmanager
def stream(path: Path | None, end_progress: Callable[[], None]) -> Iterator[Callable[[str], None]]:
    """Open a file, or standard output without a path, for a tool that prints while it traces.

    Yields a function that writes a text in UTF-8 and flushes it. `end_progress` (Progress.end) is called
    before each text that is written to a terminal. Raises LockdError that names the file if it cannot be
    opened or written.
    """
    with _opened(path) as file:
        is_terminal = not path and sys.stdout.isatty()

        def write(text: str) -> None:
            if text and is_terminal:
                end_progress()
            with _explained(path):
                file.write(text.encode(errors="backslashreplace"))
                file.flush()

        yield write


def write_text(path: Path | None, lines: Iterable[str], is_more: bool = False) -> None:
    """Write lines to a file, or to standard output without a path; with `is_more`, append them to the file.

    The encoding is UTF-8 whatever the locale, because names of functions and processes usually are UTF-8.
    Raises LockdError that names the file if it cannot be written.
    """
    with _opened(path, "ab" if is_more else "wb") as file, _explained(path):
        file.writelines(line.encode("utf-8", "backslashreplace") for line in lines)


@contextlib.contextmanager
def _opened(path: Path | None, mode: str = "wb") -> Iterator[BinaryIO]:
    """Open a file, or standard output without a path, and close or flush it at the end.

    Raises LockdError that names the file if this fails.
    """
    with _explained(path):
        if path:
            file = cast("BinaryIO", path.open(mode))
        else:
            sys.stdout.flush()
            file = sys.stdout.buffer
    if not path:
        yield file
        with _explained(path):
            file.flush()  # not reached after Ctrl-C: flushing could again wait for the reader of a pipe
        return
    try:
        yield file
    finally:
        with _explained(path):
            file.close()


@contextlib.contextmanager
def _explained(path: Path | None) -> Iterator[None]:
    """Turn OSError into a LockdError that names the file."""
    try:
        yield
    except BrokenPipeError:  # the reader of a pipe has ended, which is no error of the trace
        raise
    except OSError as error:
        raise LockdError(f"{path or 'standard output'}: cannot be written: {error.strerror}") from error


class Intervals:
    """The intervals of the option --interval, at whose ends results are printed.

    The first interval begins when this object is made. Each has the length `seconds`. With None there is a
    single interval, which never ends. If this process was kept from running for several intervals, they count
    as one.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds or float("inf")
        self._due = time.monotonic() + self._seconds

    def has_ended(self) -> bool:
        """Whether an interval has ended since this method last returned True."""
        late = time.monotonic() - self._due
        if late < 0:
            return False
        self._due += self._seconds * (late // self._seconds + 1)
        return True
