"""`lockd analyze`: read records, choose among them, and print or draw what they say."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from lockd.analyze import pictures, tables, text
from lockd.analyze.page import page
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

FILE is what `lockd trace klock` or milli-klockstat has printed, or CSV of `lockd trace futex`, which does not
tell when; `-` is standard input. Of several files the records are put together.
"""
ROWS = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="records to read")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw a picture there, instead of printing")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with picture and tables, instead of printing"
    )
    parser.add_argument(
        "--lock", metavar="LOCK", default="",
        help="the lock to show in detail, by 0xADDRESS or name (default: the one waited for longest)",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--rows", metavar="N", type=positive, default=ROWS, help="of each table (default: %(default)s)"
    )
    parser.add_argument(
        "--min-threads", metavar="N", type=positive, default=1, help="leave out locks of fewer threads"
    )
    parser.add_argument(
        "--exclude", metavar="COMM", action="append", default=[],
        help="leave out threads of that name; can be given more than once",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="since", metavar="SECONDS", type=_seconds, help="only periods from then on"
    )
    parser.add_argument("--to", dest="until", metavar="SECONDS", type=_seconds, help="only periods before")
    parser.add_argument(
        "--period", metavar="MS", type=positive,
        help="length of the periods in the records, in milliseconds (default: as they begin at multiples of)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises UsageError for files that are not what they should be, HostError if matplotlib is
    needed and is not there."""
    for path in (args.png, args.html):
        output.check(path)
    records = chosen(read(args.files, (args.period or 0) * 1_000_000), args)
    lock = records.find(args.lock) if args.lock else tables.totals(records, "lock")[0].subject
    if not (args.png or args.html):
        output.write_text(None, text.lines(records, lock, args.rows))
        return 0
    has_times = len(tables.periods(records)) > 0
    if args.png and not has_times:
        raise UsageError(f"--png {args.png}: these records do not tell when; rule: of `lockd trace klock`")
    drawn = pictures.figure(records, lock) if has_times else None
    if drawn and args.png:
        pictures.write_png(drawn, args.png)
    if args.html:
        title = f"Locks: {', '.join(path.name for path in args.files)}"
        picture = pictures.as_svg(drawn) if drawn else ""
        found = text.all_tables(records, lock, args.rows)
        output.write_text(args.html, page(title, text.summary(records), picture, found))
    return 0


def chosen(records: Records, args: argparse.Namespace) -> Records:
    """What the options leave of the records. Raises UsageError if that is nothing."""
    rows = records.rows
    mask = np.ones(len(rows), np.bool_)
    if args.exclude:
        left_out = [thread for thread, comm in records.comms.items() if comm in args.exclude]
        mask &= ~np.isin(rows["thread"], left_out)
    starts = tables.periods(records)
    if len(starts) and (args.since is not None or args.until is not None):
        seconds = (rows["start_ns"] - starts[0]) / 1e9
        mask &= (seconds >= (args.since or 0)) & (seconds < (np.inf if args.until is None else args.until))
    if args.min_threads > 1:
        many = [one.subject for one in tables.totals(records, "lock") if one.threads >= args.min_threads]
        mask &= np.isin(rows["lock"], many)
    if not mask.any():
        raise UsageError("no records are left; rule: --exclude, --from, --to and --min-threads leave some")
    return records.where(mask)


def _seconds(words: str) -> float:
    try:
        value = float(words)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{words!r} is not a number of seconds, 0 or more")
    return value
