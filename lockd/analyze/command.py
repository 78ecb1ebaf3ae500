"""`lockd analyze`: reads records, selects some of them, and prints tables or draws pictures."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from lockd.analyze import pictures, report, statistics
from lockd.analyze.records import Records, read
from lockd.errors import UsageError
from lockd.trace.core import output
from lockd.trace.core.options import positive

EPILOG = """\
examples:
  lockd trace klock >records; lockd analyze records
  lockd analyze --html locks.html --png locks.png records
  lockd analyze --lock 'pipe->mutex' --from 2 --to 4.5 records
  lockd trace futex --names -o calls.csv 10; lockd analyze calls.csv

FILE is output of `lockd trace klock` or milli-klockstat, or CSV of `lockd trace futex`, whose records have
no start times; `-` is standard input. The records of several files are analyzed together.
"""
ROWS = 10
LONGEST_PERIOD_MS = 86_400_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="records to read")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw a picture to FILE instead of printing")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write a page with a picture and tables to FILE instead of printing",
    )
    parser.add_argument(
        "--lock", metavar="LOCK", default="",
        help="the lock to show in detail, by name or 0xADDRESS (default: the lock with the longest waits)",
    )  # fmt: skip
    parser.add_argument(
        "-n",
        "--rows",
        metavar="N",
        type=positive,
        default=ROWS,
        help="print N rows of each table (default: %(default)s)",
    )
    parser.add_argument(
        "--min-threads",
        metavar="N",
        type=positive,
        default=1,
        help="leave out locks for which fewer than N threads have waited in the records that the other"
        " options keep",
    )
    parser.add_argument(
        "--exclude", metavar="COMM", action="append", default=[],
        help="leave out threads of this name; can be given more than once",
    )  # fmt: skip
    parser.add_argument(
        "--from",
        dest="since",
        metavar="SECONDS",
        type=_seconds,
        help="only periods that begin at SECONDS or later, counted from the first period of all records",
    )
    parser.add_argument(
        "--to", dest="until", metavar="SECONDS", type=_seconds, help="only periods that begin before SECONDS"
    )
    parser.add_argument(
        "--period", metavar="MS", type=_period,
        help="length of the periods in the records, in milliseconds (default: found from their start times)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code.

    Raises UsageError for invalid files or options, HostError if a picture is to be drawn without matplotlib,
    and LockdError if the output cannot be written.
    """
    for path in (args.png, args.html):
        output.check(path)
    records = select(read(args.files, (args.period or 0) * 1_000_000), args)
    lock = records.find(args.lock) if args.lock else statistics.totals(records, "lock")[0].subject
    if not (args.png or args.html):
        output.write_text(None, report.lines(records, lock, args.rows))
        return 0
    has_times = len(statistics.period_starts(records)) > 0
    if args.png and not has_times:
        raise _no_times(f"--png {args.png}")
    drawn = pictures.figure(records, lock) if has_times else None
    if drawn and args.png:
        pictures.write_png(drawn, args.png)
    if args.html:
        title = f"Locks: {', '.join(path.name for path in args.files)}"
        picture = pictures.as_svg(drawn) if drawn else ""
        tables = report.all_tables(records, lock, args.rows)
        output.write_text(args.html, report.page(title, report.summary(records), picture, tables))
    return 0


def select(records: Records, args: argparse.Namespace) -> Records:
    """The records that the options select.

    Raises UsageError if there are none, or for --from and --to if the records have no start times.
    """
    rows = records.rows
    mask = np.ones(len(rows), np.bool_)
    if args.exclude:
        left_out = [thread for thread, comm in records.comms.items() if comm in args.exclude]
        mask &= ~np.isin(rows["thread"], left_out)
    starts = statistics.period_starts(records)
    began = int(starts[0]) if len(starts) else None
    for option, value in (("--from", args.since), ("--to", args.until)):
        if value is not None and began is None:
            raise _no_times(f"{option} {value:g}")
    if began is not None and (args.since is not None or args.until is not None):
        seconds = (rows["start_ns"] - began) / 1e9
        mask &= (seconds >= (args.since or 0)) & (seconds < (np.inf if args.until is None else args.until))
    if args.min_threads > 1 and mask.any():
        locks = statistics.totals(records.where(mask), "lock")
        many = [total.subject for total in locks if total.threads >= args.min_threads]
        mask &= np.isin(rows["lock"], many)
    if not mask.any():
        raise UsageError(
            "no records are left; rule: --exclude, --from, --to and --min-threads must leave some"
        )
    return dataclasses.replace(records.where(mask), began_ns=began)


def _no_times(option: str) -> UsageError:
    return UsageError(
        f"{option}: these records have no start times; rule: only records of `lockd trace klock`"
    )


def _period(text: str) -> int:
    value = positive(text)
    if value > LONGEST_PERIOD_MS:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to {LONGEST_PERIOD_MS}, a day in ms")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value
