"""`lockd trace report`: a summary of futex calls, or of the holders of locks.

The data is read from a file of `lockd trace futex`, or comes from a live trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockd.errors import UsageError
from lockd.trace.core import options, output
from lockd.trace.futex import futex, holders, lock_rows, summary
from lockd.trace.futex.holders import HolderRow
from lockd.trace.futex.lock_rows import LockRow
from lockd.trace.futex.summary import FORMATS, Grouping

HOLDER = "holder"
"""The value of --group for a summary of holders."""
GROUPINGS: dict[str, Grouping[Any]] = {**summary.GROUPINGS, HOLDER: holders.BY_HOLDER}
"""All groupings, by the value of --group."""
HELP = "Sum up a trace of futex calls: by lock, stack, process name, thread or holder"
EPILOG = f"""\
FILE is CSV of `lockd trace futex`, preferably with --names, or of locktrace; with --by holder it is CSV of
`lockd trace futex --holders FILE`. `-` is standard input.

columns (`blocked` is the time of waits that blocked, `sys` the other time in calls, both in microseconds):
  {", ".join(summary.COLUMNS)}
columns with --by holder (`waited` is the time for which the holder made threads wait, in microseconds):
  {", ".join(holders.BY_HOLDER.columns)}

examples:
  lockd trace report out.csv                        the locks on which most time was lost
  lockd trace report -g stack -s blocked.max out.csv    the stacks with the longest waits
  lockd trace report -e all -g comm --format csv out.csv
  lockd trace report --live 10 -p 1234              the locks of a process in the next 10 seconds
  lockd trace report --by holder held.csv           the code that made threads wait longest
  lockd trace report --by holder --live 10 -p 1234  the same of a process in the next 10 seconds
"""
TITLE = "lockd trace report"
UNTIL_STOPPED = 0.0
"""The value of --live without a duration."""
DEFAULT_ROWS = 20


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="the file to sum up")
    parser.add_argument(
        "--live", metavar="SECONDS", type=options.seconds, nargs="?", const=UNTIL_STOPPED,
        help="trace now instead of reading a file: for this time, or until Ctrl-C",
    )  # fmt: skip
    parser.add_argument(
        "-e", "--events", choices=("lock", "cond", "all"), default="lock",
        help="`lock`: waits for locks; `cond`: waits for condition variables, semaphores and other things on "
        "which idle threads wait; `all`: both, and waits of unknown kind; only locks have holders "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-g", "--group", "--by", choices=tuple(GROUPINGS), default="lock",
        help="print a line for each lock, stack, process name or thread; or, with `holder`, for each lock "
        "and each function that held it while threads waited (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-s", "--sort", metavar="COLUMN",
        help="sort by this column, the largest first; this%% and cum%% are shares of its sum, or of that of "
        "the default column if it has none (default: blocked.sum; with --by holder: waited.sum)",
    )  # fmt: skip
    parser.add_argument(
        "-c", "--columns", metavar="COLUMN,...", type=_names,
        help=f"the columns to print (default: {','.join(summary.DEFAULT_COLUMNS)}; with --by holder: "
        f"{','.join(holders.BY_HOLDER.shown)})",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--rows", metavar="N", type=options.positive, default=DEFAULT_ROWS,
        help="the number of lines to print (default: %(default)s)",
    )  # fmt: skip
    futex.add_trace_options(parser)
    options.add_output(parser, tuple(FORMATS), "table")


def is_offline(args: argparse.Namespace) -> bool:
    """Whether a file is read, for which no privileges are needed."""
    return args.live is None


def run(args: argparse.Namespace) -> int:
    grouping = _check(args)
    shown: list[Any]
    left_out: Iterable[str] = ()
    if args.group == HOLDER:
        shown = _holders(args)
    else:
        waits = _waits(args)
        shown = summary.select(waits, args.events)
        left_out = summary.describe_left_out(waits, shown, "; -e all shows them")
    result = summary.summarise(shown, grouping, args.sort, args.columns, args.rows)
    output.write_text(args.output, FORMATS[args.format](result))
    sys.stderr.writelines(left_out)
    return 0


def _check(args: argparse.Namespace) -> Grouping[Any]:
    """The grouping that --group names.

    Raises UsageError if options contradict each other, or if the grouping does not have a column that they
    name.
    """
    if (args.file is None) == (args.live is None):
        raise UsageError(
            f"{TITLE}: exactly one of FILE and --live is needed; rule: FILE, - or --live SECONDS"
        )
    if args.live is None and args.pids:
        raise UsageError(f"{TITLE}: -p limits a trace, and a file is not traced; rule: -p with --live")
    if args.group == HOLDER and args.events != "lock":
        raise UsageError(
            f"{TITLE}: -e {args.events}: only locks have holders; rule: -e lock with --by holder"
        )
    grouping = GROUPINGS[args.group]
    for option, name in (("-s", args.sort), *(("-c", name) for name in args.columns or ())):
        if name is not None and name not in grouping.columns:
            raise UsageError(
                f"{TITLE}: {option}: {name!r} is no column with --by {args.group}; "
                f"rule: {', '.join(grouping.columns)}"
            )
    return grouping


def _waits(args: argparse.Namespace) -> list[LockRow]:
    """The futex calls that FILE lists, or those of a trace that is made now."""
    if args.live is not None:
        return futex.trace_calls(TITLE, args, args.live or None, with_names=True, with_holders=False).rows
    rows = lock_rows.read(args.file)
    summary.add_kinds(rows)
    return rows


def _holders(args: argparse.Namespace) -> list[HolderRow]:
    """The holders of locks that FILE lists, or those of a trace that is made now."""
    if args.live is not None:
        return futex.trace_calls(TITLE, args, args.live or None, with_names=True, with_holders=True).holders
    return holders.read(args.file)
