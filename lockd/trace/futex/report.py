"""`lockd trace report`: a summary of futex calls, from a file of `lockd trace futex` or of a live trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockd.errors import UsageError
from lockd.trace.core import options, output
from lockd.trace.futex import futex, lock_rows, summary
from lockd.trace.futex.summary import COLUMNS, DEFAULT_COLUMNS, FORMATS, KEYS

HELP = "Sum up a trace of futex calls: by lock, stack, process name or thread"
EPILOG = f"""\
FILE is CSV of `lockd trace futex`, preferably with --names, or of locktrace; `-` is standard input.

columns (`blocked` is the time of waits that blocked, `sys` the other time in calls, both in microseconds):
  {", ".join(COLUMNS)}

examples:
  lockd trace report out.csv                        the locks on which most time was lost
  lockd trace report -g stack -s blocked.max out.csv    the stacks with the longest waits
  lockd trace report -e all -g comm --format csv out.csv
  lockd trace report --live 10 -p 1234              the locks of a process in the next 10 seconds
"""
TITLE = "lockd trace report"
UNTIL_STOPPED = 0.0
"""The value of --live without a duration."""
DEFAULT_ROWS = 20


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in COLUMNS:
            raise argparse.ArgumentTypeError(f"{name!r} is no column; rule: {', '.join(COLUMNS)}")
    return names


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="the file to sum up")
    parser.add_argument(
        "--live", metavar="SECONDS", type=options.seconds, nargs="?", const=UNTIL_STOPPED,
        help="trace now instead of reading a file: for this time, or until Ctrl-C",
    )  # fmt: skip
    parser.add_argument(
        "-e", "--events", choices=("lock", "cond", "all"), default="lock",
        help="`lock`: waits for locks; `cond`: waits for condition variables, semaphores and other things on "
        "which idle threads wait; `all`: both, and waits of unknown kind (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-g", "--group", choices=tuple(KEYS), default="lock",
        help="print a line for each lock, stack, process name or thread (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-s", "--sort", metavar="COLUMN", choices=tuple(COLUMNS), default="blocked.sum",
        help="sort by this column, the largest first; this%% and cum%% are shares of its sum, or of "
        "blocked.sum if the column has no sum (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-c", "--columns", metavar="COLUMN,...", type=_columns, default=DEFAULT_COLUMNS,
        help=f"the columns to print (default: {','.join(DEFAULT_COLUMNS)})",
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
    if (args.file is None) == (args.live is None):
        raise UsageError(
            f"{TITLE}: exactly one of FILE and --live is needed; rule: FILE, - or --live SECONDS"
        )
    if args.live is None and args.pids:
        raise UsageError(f"{TITLE}: -p limits a trace, and a file is not traced; rule: -p with --live")
    if args.live is None:
        rows = lock_rows.read(args.file)
        summary.add_kinds(rows)
    else:
        rows = futex.trace_calls(TITLE, args, args.live or None, with_names=True).rows
    shown = summary.select(rows, args.events)
    result = summary.summarise(shown, args.group, args.sort, args.columns, args.rows)
    output.write_text(args.output, FORMATS[args.format](result))
    sys.stderr.writelines(summary.describe_left_out(rows, shown, "; -e all shows them"))
    return 0
