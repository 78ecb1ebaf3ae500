"""`lockd trace mutex`: how long threads take to acquire mutexes, or hold them, by mutex, stack and comm."""

from __future__ import annotations

import argparse
import sys

from lockd.load.settings import Trace
from lockd.trace.core import options, output
from lockd.trace.core.main_threads import ended_main_threads
from lockd.trace.core.session import Session
from lockd.trace.mutex import formats, probes
from lockd.trace.mutex.times import ONGOING, MutexTimes

HELP = "Measure how long threads of processes take to acquire mutexes, or how long they hold them"
EPILOG = """\
examples:
  lockd trace mutex -p 4321 10               how long calls take to acquire a mutex, for 10 seconds
  lockd trace mutex -p 4321 --held           how long mutexes are held, until Ctrl-C
  lockd trace mutex -p 4321 --format table   one line for each mutex and stack, the worst first
  lockd trace mutex -p 4321,4322 --held --flamegraph held.svg 30
"""

DEPTH = 5
"""How many innermost functions of each stack are shown if --depth is not given."""
WHOLE_STACK = 1 << 16
"""A depth that no stack exceeds."""
FORMATS = ("hist", "table", "json", "csv", "folded", "pprof")
HOLDS = 65536
"""The largest number of mutexes, held at the same time, whose holds can be measured."""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_duration(parser)
    options.add_processes(parser, required=True)
    parser.add_argument(
        "--held", action="store_true",
        help="measure how long mutexes are held, from acquisition to release, instead of how long acquiring "
        "them takes",
    )  # fmt: skip
    parser.add_argument(
        "--no-ongoing",
        action="store_true",
        help="leave out waits and holds that had not ended when the trace ended",
    )
    parser.add_argument(
        "--depth", metavar="N", type=options.positive,
        help="show the N innermost functions of each stack, and count stacks that differ in them separately "
        f"(default: {DEPTH}; all functions with --format folded or pprof and in flame graphs)",
    )  # fmt: skip
    options.add_user_stacks(parser)
    parser.add_argument(
        "--no-stacks",
        dest="kernel_stacks_only",
        action="store_true",
        help="capture no stacks, which costs less",
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
    with Session(title, options.load_settings(args, trace), args.duration, args.pids) as session:
        session.stacks.names.read_mappings(args.pids)
        times = MutexTimes(session.stacks, session.manifest.enums["mutex_event"])
        for drained in session.windows():
            if "mutexes" in drained:
                session.events += times.add(drained["mutexes"])
        if args.held:
            times.add_holds(session)
        else:
            times.add_waits(session)
        _write(args, times, title, session.began_at, session.elapsed)
        session.report()
        for remark in (*times.remarks(), *ended_main_threads(args.pids)):
            print(f"{title}: {remark}", file=sys.stderr)
    return 0


def _write(args: argparse.Namespace, times: MutexTimes, title: str, began: float, seconds: float) -> None:
    is_profile = args.format in ("folded", "pprof") or (args.flamegraph and not args.format_given)
    shown = times.result(args.depth or DEPTH)
    whole = times.result(args.depth or WHOLE_STACK) if is_profile or args.flamegraph else {}
    if args.no_ongoing:
        shown, whole = (
            {key: measurement for key, measurement in result.items() if key.state not in ONGOING}
            for result in (shown, whole)
        )
    output.write(
        args,
        formats.as_profile(whole, title, "held" if args.held else "wait", began, seconds),
        {
            "hist": formats.as_histograms(shown, "held_time_ns" if args.held else "lock_latency_ns"),
            "table": formats.as_table(shown),
            "csv": formats.as_csv(shown),
            "json": formats.as_json(shown),
        },
    )
