"""How long mutexes of processes take to be taken, or how long they are held, by mutex, stack and thread."""

from __future__ import annotations

import argparse
import sys
import time

from lockd.load.settings import Trace
from lockd.trace.core import options, output
from lockd.trace.core.session import Session
from lockd.trace.mutex import formats, probes
from lockd.trace.mutex.rows import ONGOING, Mutexes, as_profile

HELP = "Measure how long mutexes of processes take to be taken, or how long they are held"
EPILOG = """\
examples:
  lockd trace mutex -p 4321 10               how long calls take a mutex, for 10 seconds
  lockd trace mutex -p 4321 --held           how long mutexes are held, until Ctrl-C
  lockd trace mutex -p 4321 --format table   the worst first, a line each
  lockd trace mutex -p 4321,4322 --held --flamegraph held.svg 30
"""

DEPTH = 5
ALL = 1 << 16
FORMATS = ("hist", "table", "json", "csv", "folded", "pprof")
HOLDS = 65536
"""Mutexes that are held at one moment."""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_duration(parser)
    options.add_processes(parser, required=True)
    parser.add_argument(
        "--held", action="store_true",
        help="how long mutexes are held, from being taken to their release, not how long taking them takes",
    )  # fmt: skip
    parser.add_argument(
        "--no-ongoing", action="store_true", help="leave out waits and holds that are not over at the end"
    )
    parser.add_argument(
        "--depth", metavar="N", type=options.positive,
        help=f"innermost functions that are told apart and shown (default: {DEPTH}; all with --format folded "
        "or pprof and in flame graphs)",
    )  # fmt: skip
    options.add_user_stacks(parser)
    parser.add_argument(
        "--no-stacks", dest="kernel_stacks_only", action="store_true", help="take no stacks, which is cheaper"
    )
    options.add_output(parser, FORMATS, "hist")


def run(args: argparse.Namespace) -> int:
    title = "lockd trace mutex"
    trace = Trace(
        parts=(probes.part(args.pids, args.held),),
        defines={"MUTEX_HOLDS": None, "HOLDS_ENTRIES": HOLDS} if args.held else {},
        pairs=("mutexes",),
        maps=("mutex_calls", *(("mutex_holds", "mutex_ends") if args.held else ())),
    )
    began = time.time()
    with Session(title, options.load_settings(args, trace), args.duration, args.pids) as session:
        session.stacks.names.read_mappings(args.pids)
        mutexes = Mutexes(session.stacks, session.manifest.enums["mutex_event"])
        for taken in session.windows():
            if "mutexes" in taken:
                session.events += mutexes.add(taken["mutexes"])
        if args.held:
            mutexes.add_holds(session)
        else:
            mutexes.add_waits(session)
        _write(args, mutexes, title, began, session.elapsed)
        session.report()
        for remark in (*mutexes.remarks(), *_ended_main_threads(args.pids)):
            print(f"{title}: {remark}", file=sys.stderr)
    return 0


def _write(args: argparse.Namespace, mutexes: Mutexes, title: str, began: float, seconds: float) -> None:
    is_profile = args.format in ("folded", "pprof") or (args.flamegraph and not args.format_given)
    shown = mutexes.found(args.depth or DEPTH)
    whole = mutexes.found(args.depth or ALL) if is_profile or args.flamegraph else {}
    if args.no_ongoing:
        shown, whole = (
            {place: measured for place, measured in found.items() if place.state not in ONGOING}
            for found in (shown, whole)
        )
    output.write(
        args,
        as_profile(whole, title, "held" if args.held else "wait", began, seconds),
        {
            "hist": formats.as_histograms(shown, "held_time_ns" if args.held else "lock_latency_ns"),
            "table": formats.as_table(shown),
            "csv": formats.as_csv(shown),
            "json": formats.as_json(shown),
        },
    )


def _ended_main_threads(pids: tuple[int, ...]) -> list[str]:
    """A probe of one process is one of its main thread's."""
    return [
        f"process {pid}: its main thread has ended, after which nothing was seen, though others go on"
        for pid in pids
        if probes.is_without_main_thread(pid)
    ]
