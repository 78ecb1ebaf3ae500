"""Waits for locks in user space, thread by thread and stack by stack."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from lockd.trace.core import options, output
from lockd.trace.futex import lock_histograms, trace
from lockd.trace.futex.lock_rows import as_csv, as_json
from lockd.trace.futex.report_groups import only, summarise
from lockd.trace.futex.report_table import as_table, left_out
from lockd.trace.futex.rows import LockRow, microseconds
from lockd.trace.futex.trace import FutexTrace
from lockd.views.profile import Profile, Sample, Value

HELP = "Trace futex calls: who waits for which lock in user space, where and for how long"
EPILOG = """\
Prints the CSV of locktrace: a line for each thread, address and stack. `blocked` is time that a thread was
switched out in a wait until it ran again, `sys` the rest of its calls. Waits that have not ended count with
the time until the end of the trace.

examples:
  lockd trace futex 10                          all processes, for 10 seconds
  lockd trace futex -p 1234,1235                two processes, until Ctrl-C or until both have ended
  lockd trace futex -p 1234 --names -o out.csv  with kind and name of each lock, and how many waits are open
  lockd trace futex --format table 5            the locks on which most time was lost
  lockd trace futex --hist hists.txt 10         with a histogram of blocked times for each lock
"""
VALUES = (
    Value("blocked", "microseconds"),
    Value("blocked_count", "count"),
    Value("waits", "count"),
    Value("sys", "microseconds"),
)
"""Of a Profile."""
TITLE = "lockd trace futex"
TABLE_ROWS = 40


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_duration(parser)
    trace.add_options(parser)
    parser.add_argument(
        "-d", "--debug", action="store_true",
        help="say on standard error how many calls were seen in each of their steps",
    )  # fmt: skip
    parser.add_argument(
        "--hist", metavar="FILE", type=Path, help="write a histogram of the blocked times of each lock there"
    )
    parser.add_argument(
        "--names", action="store_true",
        help="add columns: kind (lock, pi, cond or other) and name of the lock, and how many of the waits "
        "were still open at the end",
    )  # fmt: skip
    options.add_output(parser, ("csv", "json", "table", "folded", "pprof"), "csv")


def run(args: argparse.Namespace) -> int:
    output.check(args.hist)
    found = trace.trace(TITLE, args, args.duration, args.names or args.format in ("json", "table"))
    if args.hist:
        output.write_text(args.hist, lock_histograms.as_text(found.histograms, found.names))
    own = {"csv": as_csv(found.rows, args.names), "json": as_json(found.rows), "table": _as_table(found.rows)}
    output.write(args, _profile(found), own)
    return 0


def _as_table(rows: list[LockRow]) -> Iterator[str]:
    """The locks, by blocked time, and what there is besides."""
    locks = only(rows, "lock")
    yield from as_table(summarise(locks, most=TABLE_ROWS))
    yield from left_out(rows, locks, "; --format csv has them")


def _profile(found: FutexTrace) -> Profile:
    """Of the rows that have blocked."""
    samples = [
        Sample(
            row.comm, row.pid, row.tid, row.frames,
            (microseconds(row.blocked_ns), row.blocked_count, row.wait_count, microseconds(row.sys_ns)),
            {"lock": row.lock or f"{row.address:#x}", **({"kind": row.kind} if row.kind else {})},
        )
        for row in found.rows if row.blocked_count
    ]  # fmt: skip
    return Profile(TITLE, VALUES, samples, found.began, found.seconds)
