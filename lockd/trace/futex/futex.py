"""`lockd trace futex`: waits for locks in user space, by thread, address and stack.

trace_calls() is also the trace of a live `lockd trace report`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lockd.errors import UsageError
from lockd.kernel.counters import PerCpuCounters
from lockd.load.settings import LoadSettings, Trace
from lockd.printable import printable
from lockd.trace.core import options, output
from lockd.trace.core.call_stacks import NO_STACK
from lockd.trace.core.histogram import Histogram, as_bcc
from lockd.trace.core.session import OLDER_WAITS_LOST, OLDER_WAITS_UNREADABLE, PERIOD, Session
from lockd.trace.futex.calls import FutexCalls
from lockd.trace.futex.holders import HolderRow, Holders
from lockd.trace.futex.holders import as_csv as holders_as_csv
from lockd.trace.futex.lock_names import LockNames
from lockd.trace.futex.lock_rows import LockRow, as_csv, as_json, microseconds
from lockd.trace.futex.open_waits import PROCFS, OpenWait, OpenWaits, capture_wait
from lockd.trace.futex.summary import GROUPINGS, as_table, describe_left_out, select, summarise
from lockd.views.profile import Profile, Sample, Value

HELP = "Trace futex calls: who waits for which lock in user space, where and for how long"
EPILOG = """\
The output is CSV with the columns of locktrace: a line for each thread, address and stack. `blocked` is the
time for which a thread was switched out in a wait, until it ran again; `sys` is the rest of the time in its
calls. A wait that has not ended counts with the time until the end of the trace.

examples:
  lockd trace futex 10                          all processes, for 10 seconds
  lockd trace futex -p 1234,1235                two processes, until Ctrl-C or until both have ended
  lockd trace futex -p 1234 --names -o out.csv  with kind and name of each lock, and the number of open waits
  lockd trace futex --format table 5            the locks on which most time was lost
  lockd trace futex --hist hists.txt 10         with a histogram of blocked times for each lock
  lockd trace futex --holders held.csv 10       with the code that held the locks meanwhile
"""
VALUES = (
    Value("blocked", "microseconds"),
    Value("blocked_count", "count"),
    Value("waits", "count"),
    Value("sys", "microseconds"),
)
"""The values of the profile."""
TITLE = "lockd trace futex"
TABLE_ROWS = 40
ENTRIES = 16384
OTHER_MAPS = ("steps",)
"""The maps of this tool that are not hash maps."""


@dataclass
class FutexTrace:
    """The result of a trace."""

    rows: list[LockRow]
    holders: list[HolderRow]
    """The code that held locks; empty if it was not asked for."""
    histograms: dict[tuple[int, int], Histogram]
    """Histograms of blocked times in microseconds, by process and address of the lock."""
    began: float
    """Start of the trace, in seconds since 1970."""
    seconds: float
    """Duration of the trace."""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_duration(parser)
    add_trace_options(parser)
    parser.add_argument(
        "-d", "--debug", action="store_true",
        help="print to standard error how many calls began, blocked, ended and so on",
    )  # fmt: skip
    parser.add_argument(
        "--hist", metavar="FILE", type=Path, help="write a histogram of blocked times for each lock to FILE"
    )
    parser.add_argument(
        "--holders", metavar="FILE", type=Path,
        help="write to FILE for how long the code that held each lock made threads wait, by its stack",
    )  # fmt: skip
    parser.add_argument(
        "--names", action="store_true",
        help="add three columns: kind of the lock (lock, pi, cond or other), name of the lock, and number of "
        "waits that were open at the end",
    )  # fmt: skip
    options.add_output(parser, ("csv", "json", "table", "folded", "pprof"), "csv")


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that trace_calls() reads."""
    options.add_processes(parser)
    options.add_user_stacks(parser)
    parser.add_argument(
        "--all-stacks", action="store_true",
        help="take the stack of every call and every wake, not only where a thread blocks; this costs more",
    )  # fmt: skip
    parser.add_argument(
        "--entries", metavar="N", type=options.positive, default=ENTRIES,
        help="the number of sums that can be stored within 50 ms, one for each thread, address, stack and "
        "outcome; further calls are counted without names (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    output.check(args.hist)
    output.check(args.holders)
    files = [path.absolute() for path in (args.output, args.hist, args.holders, args.flamegraph) if path]
    if len(set(files)) < len(files):
        raise UsageError("-o, --hist, --holders, --flamegraph: two are the same file; rule: a file for each")
    with_names = args.names or args.format in ("json", "table")
    trace = trace_calls(TITLE, args, args.duration, with_names, bool(args.holders))
    own = {"csv": as_csv(trace.rows, args.names), "json": as_json(trace.rows), "table": _table(trace.rows)}
    writes = []
    if args.holders:
        writes.append(partial(output.write_text, args.holders, holders_as_csv(trace.holders)))
    if args.hist:
        writes.append(partial(output.write_text, args.hist, _histogram_lines(trace)))
    output.write_each([*writes, partial(output.write, args, _profile(trace), own)])
    return 0


def _histogram_lines(trace: FutexTrace) -> Iterator[str]:
    """Lines of --hist in the format of the tool locktrace. The lock with the most blocked waits is first."""
    names = {
        (row.pid, row.address): f"{row.lock} ({row.kind})"
        for row in trace.rows if row.lock and row.blocked_count
    }  # fmt: skip
    for lock, histogram in sorted(trace.histograms.items(), key=lambda item: (-item[1].count, item[0])):
        name = printable(names.get(lock, ""))
        yield f"PID {lock[0]}, LOCK {lock[1]:#x}{name and ' '}{name}\n"
        yield from as_bcc(histogram)
        yield "\n"


def _table(rows: list[LockRow]) -> Iterator[str]:
    """The locks by blocked time, and a line about waits of other kinds."""
    locks = select(rows, "lock")
    yield from as_table(summarise(locks, GROUPINGS["lock"], most=TABLE_ROWS))
    yield from describe_left_out(rows, locks, "; --format csv has them")


def _profile(trace: FutexTrace) -> Profile:
    """A profile of the rows that have waits in which the thread blocked."""
    samples = [
        Sample(
            row.comm, row.pid, row.tid, row.frames,
            (microseconds(row.blocked_ns), row.blocked_count, row.wait_count, microseconds(row.sys_ns)),
            {"lock": row.lock or f"{row.address:#x}", **({"kind": row.kind} if row.kind else {})},
        )
        for row in trace.rows if row.blocked_count
    ]  # fmt: skip
    return Profile(TITLE, VALUES, samples, trace.began, trace.seconds)


def trace_calls(
    title: str, args: argparse.Namespace, duration: float | None, with_names: bool, with_holders: bool
) -> FutexTrace:
    """Trace futex calls for `duration` seconds (None: no limit) with the options of add_trace_options().

    `with_names` is whether to find kinds and names of locks, `with_holders` whether to find their holders.
    Losses are printed to standard error; with `args.debug` also how many calls reached each step
    (_print_steps()). Raises HostError or UsageError as Session does.
    """
    debug = getattr(args, "debug", False)
    settings = _settings(args, with_names or with_holders, with_holders, debug)
    with Session(title, settings, duration, args.pids, others=OTHER_MAPS) as session:
        session.stacks.names.read_mappings(args.pids)
        calls, waits = FutexCalls(session.manifest), OpenWaits(session.manifest)
        holders = Holders(session.manifest) if with_holders else None
        names = LockNames(session.stacks.names, calls.kinds)
        older = waits.enter_older(session.map("threads"), args.pids or _all_processes(), time.monotonic_ns())
        session.own_losses[OLDER_WAITS_LOST] = waits.without_room
        session.own_losses[OLDER_WAITS_UNREADABLE] = waits.unreadable
        for taken in session.windows():
            names.add(taken)
            calls.add(taken)
            if holders:
                holders.add(taken)
            session.events = calls.total
            names.examine_captures(time.monotonic() + PERIOD / 4)

        def number_stack(wait: OpenWait) -> int:
            capture = capture_wait(PROCFS, wait)
            if with_names and capture:
                names.learn((wait.tgid, wait.address, wait.kind), wait.tid, capture)
            return session.stacks.add_unwound(wait.tgid, capture) if capture else NO_STACK

        still_open = waits.count_unfinished(
            calls, session.read_steady("threads"), session.ended_ns, number_stack
        )
        session.events = calls.total
        session.progress.show_text(f"{title}: naming locks and stacks")
        names.examine_captures(float("inf"))
        rows = calls.rows(session.stacks.user, names.name if with_names else None)
        held = holders.rows(session.stacks.user, names.name) if holders else []
        session.report()
        if calls.nameless:
            print(
                f"{title}: {calls.nameless:,} calls were counted without names: there were too many threads, "
                "addresses and stacks",
                file=sys.stderr,
            )
        if debug:
            _print_steps(session, older, still_open)
    return FutexTrace(rows, held, calls.histograms(), session.began_at, session.elapsed)


def _settings(args: argparse.Namespace, with_names: bool, with_holders: bool, debug: bool) -> LoadSettings:
    defines: dict[str, int | None] = {"ONLY_FUTEX_CALLS": None}
    if not with_names:
        defines["WITHOUT_LOCK_NAMES"] = None
    if args.all_stacks:
        defines["ALL_STACKS"] = None
    trace = Trace(
        files=("trace/futex_steps.bpf.h",) if debug else (),
        maps=("steps",) if debug else (),
        pairs=(Holders.PAIR,) if with_holders else (),
        defines=defines,
    )
    settings = options.load_settings(args, trace, ("futex",), args.entries)
    return replace(settings, has_holders=with_holders)


def _all_processes() -> Iterable[int]:
    return (int(path.name) for path in PROCFS.iterdir() if path.name.isdecimal())


def _print_steps(session: Session, older: int, still_open: int) -> None:
    """Print on standard error how many calls reached each step, and of how many the end was not seen.

    `older` calls had begun before the trace, and `still_open` calls had not ended at its end.
    """
    info = next(info for info in session.manifest.maps if info.name == "steps")
    counts = PerCpuCounters(session.fds["steps"], info).read().tolist()
    steps = dict(zip(session.manifest.enums["step"], counts, strict=False))
    lost = session.losses().get("futex: threads full", 0)
    unseen = (
        older + steps["began"] + steps["restarted"] - steps["ended"] - steps["killed"] - still_open - lost
    )
    lines = {
        "calls that had begun before the trace": older,
        "calls that began": steps["began"],
        "calls restarted after a stop": steps["restarted"],
        "calls that ended": steps["ended"],
        "calls counted without their exit": steps["killed"],
        "calls still open": still_open,
        "calls lost, as too many threads wait": lost,
        "calls in which the thread was switched out": steps["switched_out"],
        "times that a thread blocked": steps["blocked"],
        "times that it ran again": steps["ran_again"],
        "calls of which the end was not seen": unseen,
    }
    for description, count in lines.items():
        print(f"{description:<45} {count:>12,}", file=sys.stderr)
