"""One trace of futex calls: what lockd trace futex and a live lockd trace report have in common."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockd.kernel.counters import PerCpuCounters
from lockd.load.settings import LoadSettings, Trace
from lockd.trace.core import options
from lockd.trace.core.call_stacks import NO_STACK
from lockd.trace.core.histogram import Histogram
from lockd.trace.core.session import PERIOD, Session
from lockd.trace.futex.asleep import Asleep, capture_of
from lockd.trace.futex.calls import FutexCalls
from lockd.trace.futex.lock_names import LockNames
from lockd.trace.futex.open_waits import PROCFS, OpenWaits
from lockd.trace.futex.rows import LockRow

ENTRIES = 16384
OTHER_MAPS = ("steps",)
"""What is no hash map."""


@dataclass
class FutexTrace:
    """What came of it."""

    rows: list[LockRow]
    histograms: dict[tuple[int, int], Histogram]
    """By process and address: see FutexCalls."""
    began: float
    """Seconds since 1970."""
    seconds: float
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    """Of locks by process and address, as `NAME (KIND)`, if names were asked for."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What says how to trace."""
    options.add_processes(parser)
    options.add_user_stacks(parser)
    parser.add_argument(
        "--all-stacks", action="store_true",
        help="take the stack at every call and every wake, not only where a thread blocks: costs more",
    )  # fmt: skip
    parser.add_argument(
        "--entries", metavar="N", type=options.positive, default=ENTRIES,
        help="how many sums can be kept within 50 ms, one for each thread, address, stack and outcome; what "
        "finds no room is counted without names (default: %(default)s)",
    )  # fmt: skip


def trace(title: str, args: argparse.Namespace, duration: float | None, with_names: bool) -> FutexTrace:
    """Trace as the options of add_options() say; what was lost is said on standard error.

    `args.debug`: with what was seen of calls, step by step.
    """
    debug = getattr(args, "debug", False)
    settings = _settings(args, with_names, debug)
    began = time.time()
    with Session(title, settings, duration, args.pids, others=OTHER_MAPS) as session:
        session.stacks.names.look(args.pids)
        calls, waits = FutexCalls(session.manifest), OpenWaits(session.manifest)
        names = LockNames(session.stacks.names, calls.kinds)
        entered = waits.enter(session.map("threads"), args.pids or _all_processes(), time.monotonic_ns())
        for taken in session.windows():
            names.add(taken)
            calls.add(taken)
            session.events = calls.total
            names.work(time.monotonic() + PERIOD / 4)

        def stack_of(one: Asleep) -> int:
            capture = capture_of(PROCFS, one)
            if with_names and capture:
                names.learn((one.tgid, one.address, one.kind), one.tid, capture)
            return session.stacks.unwound(one.tgid, capture) if capture else NO_STACK

        still_open = waits.add_to(calls, session.steady("threads"), session.ended_ns, stack_of)
        session.events = calls.total
        session.progress.say(f"{title}: naming what was found")
        names.work(float("inf"))
        rows = calls.rows(session.stacks.user, names.name if with_names else None)
        session.report()
        if calls.nameless:
            print(f"{title}: {calls.nameless:,} calls counted without names: too many sorts", file=sys.stderr)
        if debug:
            _say_steps(session, entered, still_open)
    found = FutexTrace(rows, calls.histograms(), began, session.elapsed)
    if with_names:
        found.names = {
            (row.pid, row.address): f"{row.lock} ({row.kind})"
            for row in rows
            if row.lock and row.blocked_count
        }
    return found


def _settings(args: argparse.Namespace, with_names: bool, debug: bool) -> LoadSettings:
    defines: dict[str, int | None] = {"ONLY_FUTEX_CALLS": None}
    if not with_names:
        defines["WITHOUT_LOCK_NAMES"] = None
    if args.all_stacks:
        defines["ALL_STACKS"] = None
    trace = Trace(
        files=("trace/futex_steps.bpf.h",) if debug else (), maps=("steps",) if debug else (), defines=defines
    )
    return options.load_settings(args, trace, ("futex",), args.entries)


def _all_processes() -> Iterable[int]:
    return (int(path.name) for path in PROCFS.iterdir() if path.name.isdecimal())


def _say_steps(session: Session, entered: int, still_open: int) -> None:
    """What was seen of the calls on standard error, and whether that is all of each."""
    info = next(info for info in session.manifest.maps if info.name == "steps")
    counts = PerCpuCounters(session.fds["steps"], info).read().tolist()
    steps = dict(zip(session.manifest.enums["step"], counts, strict=False))
    lost = session.losses().get("futex: threads full", 0)
    said = {
        "calls that had begun before the trace": entered,
        "calls that began": steps["began"],
        "calls restarted after a stop": steps["restarted"],
        "calls that ended": steps["ended"],
        "calls whose threads were killed": steps["killed"],
        "calls still open": still_open,
        "calls lost, as too many threads wait": lost,
        "calls in which the thread was switched out": steps["switched_out"],
        "times that a thread blocked": steps["blocked"],
        "times that it ran again": steps["ran_again"],
    }
    said["calls of which the end was not seen"] = (
        entered + steps["began"] + steps["restarted"] - steps["ended"] - steps["killed"] - still_open - lost
    )
    for what, count in said.items():
        print(f"{what:<45} {count:>12,}", file=sys.stderr)
