"""Histograms of the values of a tracepoint's field."""

from __future__ import annotations

import argparse
import errno
import re
from typing import Any

from lockd.errors import UsageError
from lockd.kernel.pairs import Entries
from lockd.load.hooks import Candidate, Part, Way
from lockd.load.host import ensure_tracefs
from lockd.load.settings import Trace
from lockd.trace.core import grouping, histogram, options, output
from lockd.trace.core.grouping import Groups, Row
from lockd.trace.core.session import Session
from lockd.trace.probes import tracepoints
from lockd.trace.probes.tracepoints import Field, Tracepoint

HELP = "Count the values of a tracepoint's field, in a histogram"
EPILOG = """\
examples:
  lockd trace hist syscalls:sys_exit_read ret -p 1234 10
      what read() returned to process 1234 in ten seconds, errors as negative numbers
  lockd trace hist syscalls:sys_exit_read ret --by comm
      the same for each program on this host, until Ctrl-C
  lockd trace hist block:block_rq_issue bytes --by rwbs --filter 'nr_sector > 0'
      sizes of requests to disks, for each kind of request
  lockd trace hist syscalls:sys_enter_write count --linear 0,4096,512 --by stack -p 1234
      how much is written at a time, in steps of 512 bytes, by each call site
"""
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
"""In the order of enum comparison in lockd/bpf/trace/values.bpf.c."""
FILTERS_MOST = 4
TEXT_BYTES = 64
"""Of a text that is counted, or by which values are grouped; what is longer is cut off."""
ERRNO_MOST = 4095


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tracepoint", metavar="CATEGORY:EVENT", help="a tracepoint, as tracefs names it")
    parser.add_argument(
        "field", metavar="FIELD", help="a number, or a text of which each value is counted; a wrong one has "
        "those listed that there are",
    )  # fmt: skip
    options.add_duration(parser)
    grouping.add_options(parser, "comm (of the process), pid, tid, stack, or value of another field")
    parser.add_argument(
        "--filter", metavar="'FIELD OP VALUE'", dest="filters", action="append", default=[],
        help=f"only events of which that holds; OP is one of {' '.join(COMPARISONS)}, VALUE a whole number; "
        f"can be given {FILTERS_MOST} times, and all must hold",
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
        raise UsageError(f"--linear: {value.name} of {tracepoint} is a text; rule: only with numbers")
    settings = options.load_settings(args, _trace(args, tracepoint, value, by))
    scale = None if value.is_text else args.linear or histogram.LOG2
    with Session("lockd trace hist", settings, args.duration, args.pids) as session:
        groups = Groups(args.by, scale, session)
        for taken in session.windows():
            if "values" in taken:
                session.events += _add(groups, taken["values"], tracepoint, value, by)
        output.write_text(args.output, histogram.FORMATS[args.format](groups.result()))
        session.report()
    return 0


def comparison(text: str, tracepoint: Tracepoint) -> tuple[Field, int, int]:
    """Field, number of the operator in COMPARISONS, and value of a --filter. Raises UsageError."""
    found = re.fullmatch(r"\s*(\w+)\s*([=!<>]+)\s*(-?\w+)\s*", text)
    if not found or found[2] not in COMPARISONS:
        raise UsageError(f"--filter {text!r}: rule: FIELD OP VALUE with OP one of {' '.join(COMPARISONS)}")
    try:
        limit = int(found[3], 0)
    except ValueError:
        raise UsageError(f"--filter {text!r}: {found[3]} is not a whole number") from None
    field = tracepoint.field(found[1])
    if not field.is_number:
        raise UsageError(f"--filter {text!r}: {field.name} is a text; rule: only numbers are compared")
    least, most = field.range
    if not least <= limit <= most:
        raise UsageError(
            f"--filter {text!r}: {field.name} ({field.type}) is never {limit}; rule: {least} to {most}"
        )
    return field, COMPARISONS.index(found[2]), limit


def _trace(args: argparse.Namespace, tracepoint: Tracepoint, value: Field, by: Field | None) -> Trace:
    defines = {**grouping.defines(args), **_place("VALUE", value)}
    if by:
        defines |= _place("BY", by)
    if len(args.filters) > FILTERS_MOST:
        raise UsageError(f"--filter: {len(args.filters)} are given; rule: {FILTERS_MOST} at most")
    for at, text in enumerate(args.filters):
        field, operator, limit = comparison(text, tracepoint)
        defines |= _place(f"FILTER_{at}", field)
        defines |= {f"FILTER_{at}_COMPARISON": operator, f"FILTER_{at}_LIMIT": limit}
    hook = Candidate("trace", "count_value", "tracepoint", str(tracepoint))
    files = ("include/histogram.bpf.h", "include/group.bpf.h", "trace/values.bpf.c")
    part = Part("trace", "values", (Way("tracepoint", (hook,), ()),), files)
    return Trace(parts=(part,), defines=defines, pairs=("values",))


def _place(name: str, field: Field) -> dict[str, int | None]:
    """Where a field is, for lockd/bpf/trace/values.bpf.c."""
    found: dict[str, int | None] = {
        f"{name}_OFFSET": field.offset, f"{name}_BYTES": field.bytes, f"{name}_SIGNED": int(field.signed),
    }  # fmt: skip
    if field.is_text:
        found[f"{name}_TEXT"] = TEXT_BYTES
    if field.is_dynamic:
        found[f"{name}_DYNAMIC"] = None
    return found


def _add(groups: Groups, taken: Entries, tracepoint: Tracepoint, value: Field, by: Field | None) -> int:
    keys, values = taken
    columns: dict[str, Any] = grouping.columns_of(keys["group"])
    if by and by.is_text:
        columns[by.name] = [text.decode(errors="replace") for text in keys["by_text"].tolist()]
    elif by:
        column = keys["by"].astype("i8" if by.signed else "u8").tolist()
        is_result = tracepoint.category == "syscalls" and by.name == "ret"
        columns[by.name] = [result_name(one) for one in column] if is_result else column
    counts = values["count"].tolist()
    if value.is_text:
        rows: list[Row] = [
            (text.decode(errors="replace"), count, None, None)
            for text, count in zip(keys["text"].tolist(), counts, strict=True)
        ]
    else:
        parts = zip(values["high_sum"].tolist(), values["low_sum"].tolist(), strict=True)
        sums = [(high << 32) + low for high, low in parts]
        highest = values["max"].astype("i8" if value.signed else "u8").tolist()
        rows = list(zip(keys["slot"].tolist(), counts, sums, highest, strict=True))
    return groups.add(columns, rows)


def result_name(value: int) -> int | str:
    """What a system call returned: an error by its name."""
    return errno.errorcode.get(-value, value) if -ERRNO_MOST <= value < 0 else value
