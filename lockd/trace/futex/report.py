"""What a trace of futex calls says, summed up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockd.errors import UsageError
from lockd.trace.core import options, output
from lockd.trace.futex import lock_rows, trace
from lockd.trace.futex.report_groups import COLUMNS, DEFAULT_COLUMNS, only, summarise, with_kinds
from lockd.trace.futex.report_table import FORMATS, left_out

HELP = "Sum up a trace of futex calls: by lock, stack, process name or thread"
EPILOG = f"""\
FILE is CSV of `lockd trace futex`, best with --names, or of locktrace; `-` is standard input.

columns (times in microseconds; of blocked waits, and of the time in calls when not blocked):
  {", ".join(COLUMNS)}

examples:
  lockd trace report out.csv                        the locks on which most time was lost
  lockd trace report -g stack -s blocked.max out.csv    the stacks with the longest waits
  lockd trace report -e all -g comm --format csv out.csv
  lockd trace report --live 10 -p 1234              of what happens in the next 10 seconds
"""
TITLE = "lockd trace report"
UNTIL_STOPPED = 0.0
DEFAULT_ROWS = 20


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in COLUMNS:
            raise argparse.ArgumentTypeError(f"{name!r} is no column; there are {', '.join(COLUMNS)}")
    return names


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="what to sum up")
    parser.add_argument(
        "--live", metavar="SECONDS", type=options.seconds, nargs="?", const=UNTIL_STOPPED,
        help="instead of a file, trace now: so long, or until Ctrl-C",
    )  # fmt: skip
    parser.add_argument(
        "-e", "--events", choices=("lock", "cond", "all"), default="lock",
        help="waits for locks; for condition variables, semaphores and other things that threads wait for "
        "when they have nothing to do; or all (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-g", "--group", choices=("lock", "stack", "comm", "tid"), default="lock",
        help="what to sum up by (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-s", "--sort", metavar="COLUMN", choices=tuple(COLUMNS), default="blocked.sum",
        help="the largest first; this%% and cum%% are shares of it, if it can be shared "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-c", "--columns", metavar="COLUMN,...", type=_columns, default=DEFAULT_COLUMNS,
        help=f"what to show (default: {','.join(DEFAULT_COLUMNS)})",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--rows", metavar="N", type=options.positive, default=DEFAULT_ROWS,
        help="how many (default: %(default)s)",
    )  # fmt: skip
    trace.add_options(parser)
    options.add_output(parser, tuple(FORMATS), "table")


def is_offline(args: argparse.Namespace) -> bool:
    return args.live is None


def run(args: argparse.Namespace) -> int:
    if (args.file is None) == (args.live is None):
        raise UsageError(f"{TITLE}: one of FILE and --live is needed; rule: FILE, - or --live SECONDS")
    if args.live is None and args.pids:
        raise UsageError(f"{TITLE}: -p is about what is traced; rule: with --live")
    if args.live is None:
        rows = with_kinds(lock_rows.read(args.file))
    else:
        rows = trace.trace(TITLE, args, args.live or None, with_names=True).rows
    shown = only(rows, args.events)
    report = summarise(shown, args.group, args.sort, args.columns, args.rows)
    output.write_text(args.output, FORMATS[args.format](report))
    sys.stderr.writelines(left_out(rows, shown, "; -e all shows them"))
    return 0
