"""`lockd trace hist`: histograms of the values of a tracepoint's field."""

from __future__ import annotations

import argparse
import re
from typing import Any

from lockd.errors import UsageError
from lockd.kernel.pairs import Entries
from lockd.load.hooks import Candidate, Part, Way
from lockd.load.host import ensure_tracefs
from lockd.load.settings import Trace
from lockd.names.labels.system_calls import ERRORS
from lockd.trace.core import grouping, histogram, options, output
from lockd.trace.core.grouping import Groups, Row
from lockd.trace.core.session import Session
from lockd.trace.probes import tracepoints
from lockd.trace.probes.tracepoints import Field, Tracepoint

HELP = "Count the values of a tracepoint's field, in a histogram"
EPILOG = """\
examples:
  lockd trace hist syscalls:sys_exit_read ret -p 1234 10
      the return values of read() in process 1234 in ten seconds; errors are negative numbers
  lockd trace hist syscalls:sys_exit_read ret --by comm
      the return values of read() for each program on this host, until Ctrl-C
  lockd trace hist block:block_rq_issue bytes --by rwbs --filter 'nr_sector > 0'
      the sizes of requests to disks, for each kind of request
  lockd trace hist syscalls:sys_enter_write count --linear 0,4096,512 --by stack -p 1234
      how many bytes each call of write() writes, in steps of 512, for each call site
"""
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
"""The operators, in the order of enum comparison in lockd/bpf/trace/values.bpf.c."""
MOST_FILTERS = 4
TEXT_BYTES = 64
"""The most bytes of a text that is counted, or by which values are grouped. A longer text is cut off."""
MOST_ERRNO = 4095
"""The kernel's MAX_ERRNO: system calls return the negative numbers from -4095 to -1 for errors."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tracepoint", metavar="CATEGORY:EVENT", help="the tracepoint, as named in tracefs")
    parser.add_argument(
        "field", metavar="FIELD",
        help="the field to count: a number or a text; the message for an unknown field lists all fields",
    )  # fmt: skip
    options.add_duration(parser)
    grouping.add_options(parser, "comm (of the process), pid, tid, stack, or value of another field")
    parser.add_argument(
        "--filter", metavar="'FIELD OP VALUE'", dest="filters", action="append", default=[],
        help="only events whose FIELD satisfies the comparison; OP is one of "
        f"{' '.join(COMPARISONS)}, VALUE a whole number; can be given up to {MOST_FILTERS} times, and events "
        "must satisfy all",
    )  # fmt: skip
    options.add_processes(parser)
    options.add_stacks(parser)
    options.add_output(parser, tuple(histogram.FORMATS), "text")


def run(args: argparse.Namespace) -> int:
    tracepoint = tracepoints.find(ensure_tracefs(), args.tracepoint)
    value = tracepoint.field(args.field)
    by = next((tracepoint.field(name) for name in args.by if name not in grouping.OF_THREADS), None)
    if by:
        grouping.check(args, (by.name,))
    if args.linear and value.is_text:
        raise UsageError(f"--linear: {value.name} of {tracepoint} is a text; rule: only for numbers")
    settings = options.load_settings(args, _trace(args, tracepoint, value, by))
    scale = None if value.is_text else args.linear or histogram.LOG2
    with Session("lockd trace hist", settings, args.duration, args.pids) as session:
        groups = Groups(args.by, scale, session)
        for drained in session.windows():
            if "values" in drained:
                session.events += _add(groups, drained["values"], tracepoint, value, by)
        output.write_text(args.output, groups.lines(args.format))
        session.report()
    return 0


def comparison(text: str, tracepoint: Tracepoint) -> tuple[Field, int, int]:
    """Parse the value of a --filter. Returns field, position of the operator in COMPARISONS, and number.

    Raises UsageError if the text is invalid or the field cannot be compared with the number.
    """
    parts = re.fullmatch(r"\s*(\w+)\s*([=!<>]+)\s*(-?\w+)\s*", text)
    if not parts or parts[2] not in COMPARISONS:
        raise UsageError(f"--filter {text!r}: rule: FIELD OP VALUE with OP one of {' '.join(COMPARISONS)}")
    try:
        limit = int(parts[3], 0)
    except ValueError:
        raise UsageError(f"--filter {text!r}: {parts[3]} is not a whole number") from None
    field = tracepoint.field(parts[1])
    if not field.is_number:
        raise UsageError(f"--filter {text!r}: {field.name} is a text; rule: only numbers can be compared")
    least, most = field.range
    if not least <= limit <= most:
        raise UsageError(
            f"--filter {text!r}: {field.name} ({field.type}) is never {limit}; rule: {least} to {most}"
        )
    return field, COMPARISONS.index(parts[2]), limit


def _trace(args: argparse.Namespace, tracepoint: Tracepoint, value: Field, by: Field | None) -> Trace:
    defines = {**grouping.defines(args), **_field_defines("VALUE", value)}
    if by:
        defines |= _field_defines("BY", by)
    if len(args.filters) > MOST_FILTERS:
        raise UsageError(f"--filter: {len(args.filters)} are given; rule: at most {MOST_FILTERS}")
    for number, text in enumerate(args.filters):
        field, operator, limit = comparison(text, tracepoint)
        defines |= _field_defines(f"FILTER_{number}", field)
        defines |= {f"FILTER_{number}_COMPARISON": operator, f"FILTER_{number}_LIMIT": limit}
    hook = Candidate("trace", "count_value", "tracepoint", str(tracepoint))
    files = ("include/histogram.bpf.h", "include/group.bpf.h", "trace/values.bpf.c")
    part = Part("trace", "values", (Way("tracepoint", (hook,), ()),), files)
    return Trace(parts=(part,), defines=defines, pairs=("values",))


def _field_defines(name: str, field: Field) -> dict[str, int | None]:
    """Macros that describe a field to lockd/bpf/trace/values.bpf.c; their names begin with `name`."""
    defines: dict[str, int | None] = {
        f"{name}_OFFSET": field.offset, f"{name}_BYTES": field.bytes, f"{name}_SIGNED": int(field.signed),
    }  # fmt: skip
    if field.is_text:
        defines[f"{name}_TEXT"] = TEXT_BYTES
    if field.is_dynamic:
        defines[f"{name}_DYNAMIC"] = None
    return defines


def _add(groups: Groups, entries: Entries, tracepoint: Tracepoint, value: Field, by: Field | None) -> int:
    """Add drained entries to `groups`. Returns the number of events in them."""
    keys, values = entries
    columns: dict[str, Any] = grouping.columns_of(keys["group"])
    if by and by.is_text:
        columns[by.name] = [text.decode(errors="replace") for text in keys["by_text"].tolist()]
    elif by:
        column = keys["by"].astype("i8" if by.signed else "u8").tolist()
        is_result = tracepoint.category == "syscalls" and by.name == "ret"
        columns[by.name] = [result_name(result) for result in column] if is_result else column
    counts = values["count"].tolist()
    if value.is_text:
        rows: list[Row] = [
            (text.decode(errors="replace"), count, None, None)
            for text, count in zip(keys["text"].tolist(), counts, strict=True)
        ]
    else:
        halves = zip(values["high_sum"].tolist(), values["low_sum"].tolist(), strict=True)
        sums = [(high << 32) + low for high, low in halves]
        highest = values["max"].astype("i8" if value.signed else "u8").tolist()
        rows = list(zip(keys["slot"].tolist(), counts, sums, highest, strict=True))
    return groups.add(columns, rows)


def result_name(value: int) -> int | str:
    """The return value of a system call, or the name of the error if the value means an error."""
    return ERRORS.get(-value, value) if -MOST_ERRNO <= value < 0 else value
