"""`lockd trace stacksnoop`: each call of a function or hit of a tracepoint with its stack, as it happens."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lockd.load.settings import LoadSettings
from lockd.names.labels.processes import text
from lockd.printable import printable
from lockd.trace.core import options, output
from lockd.trace.core.call_stacks import CallStacks
from lockd.trace.core.session import Session
from lockd.trace.probes import pattern_options
from lockd.trace.probes.events import EventReader
from lockd.trace.probes.patterns import Probes

HELP = "Print each call of a function, or each hit of a tracepoint, with its stack"
EPILOG = f"""\
{pattern_options.PATTERNS.replace("PATTERN", "FUNCTION")}
For events that happen thousands of times a second, `lockd trace stackcount` shows more at a lower cost.

examples:
  lockd trace stacksnoop t:sched:sched_process_exec    who executes programs
  lockd trace stacksnoop c:abort -p 185                 who ends process 185
  lockd trace stacksnoop -s -n 10 vfs_fsync_range       ten calls of a function of the kernel, with offsets
"""
TITLE = "lockd trace stacksnoop"
RING, RECORD = MAPS = "snooped", "snooped_record"
"""The ring buffer, and the map that describes its records (lockd/bpf/trace/stacksnoop.bpf.c)."""


@dataclass(frozen=True)
class Event:
    """A call or a hit. `user` and `kernel` are numbers of stacks in CallStacks."""

    at_ns: int
    """The time on CLOCK_MONOTONIC."""
    comm: str
    pid: int
    tid: int
    cpu: int
    user: int
    kernel: int


def add_options(parser: argparse.ArgumentParser) -> None:
    pattern_options.add_options(parser, "FUNCTION")
    options.add_duration(parser)
    parser.add_argument(
        "-n", "--count", metavar="EVENTS", type=options.positive, help="end after EVENTS events"
    )
    parser.add_argument(
        "-r",
        "--regexp",
        action="store_true",
        help="FUNCTION is a regular expression that the beginning of names must match",
    )
    options.add_output(parser, ("stacks", "json"), "stacks")


def run(args: argparse.Namespace) -> int:
    probes = pattern_options.resolve_probes(args, TITLE)
    name = probes.names[0] if len(probes.names) == 1 else args.pattern
    shown = pattern_options.shown(args)
    session = Session(TITLE, settings_of(args, probes), args.duration, args.pids, others=MAPS, shown=shown)
    with session, output.stream(args.output, session.progress.end) as write:
        pattern_options.report_attached(session, probes)
        format_event = _as_json if args.format == "json" else _as_text
        if args.format == "stacks":
            write(f"{'TIME(s)':<18} {'COMM':<16} {'PID':<7} {'CPU':<3} FUNCTION\n")
        for event in _events(session):
            if session.events == args.count:
                break
            session.events += 1
            write(format_event(event, (event.at_ns - session.began_ns) / 1e9, name, session.stacks))
            if session.events == args.count:
                session.stop()
        pattern_options.report(session, probes)
    return 0


def settings_of(args: argparse.Namespace, probes: Probes) -> LoadSettings:
    """The loader's settings for these options."""
    return pattern_options.load_settings(args, probes, "snoop_stack", "trace/stacksnoop.bpf.c", maps=MAPS)


def _events(session: Session) -> Iterator[Event]:
    """All events in the order of their times, each as soon as its stacks have been drained."""
    reader = EventReader(session, RING, RECORD)
    waiting: list[Event] = []
    previous_drain_ns = last_drain_ns = 0
    stacks = session.stacks
    for _ in session.windows():
        fresh = [
            Event(at_ns, text(comm), tgid, tid, cpu, *numbers)
            for at_ns, numbers, tgid, tid, cpu, _, comm in reader.read().tolist()
        ]
        waiting = sorted([*waiting, *fresh], key=lambda event: event.at_ns)
        # An event from after the last drain has to wait. Another CPU may still be writing an older event, and
        # the stacks of the event may be in maps that are not drained yet.
        ready = 0
        while ready < len(waiting) and _is_ready(waiting[ready], previous_drain_ns, last_drain_ns, stacks):
            ready += 1
        yield from waiting[:ready]
        waiting = waiting[ready:]
        previous_drain_ns, last_drain_ns = last_drain_ns, time.monotonic_ns()
    yield from waiting


def _is_ready(event: Event, previous_drain_ns: int, last_drain_ns: int, stacks: CallStacks) -> bool:
    """Whether an event can be printed: its stacks were drained, or are lost.

    A stack is lost if two drains after the event have not returned it. `previous_drain_ns` and
    `last_drain_ns` are the times on CLOCK_MONOTONIC of the last two drains before the present one.
    """
    return event.at_ns <= previous_drain_ns or (
        event.at_ns <= last_drain_ns and stacks.has(event.user, event.kernel)
    )


def _as_text(event: Event, seconds: float, name: str, stacks: CallStacks) -> str:
    """A line for the event and a line for each function of its stack.

    The innermost function comes first, the kernel's functions before those of user space.
    """
    frames = (*stacks.kernel(event.kernel), *stacks.user(event.user))
    head = f"{seconds:<18.9f} {event.comm:<16} {event.pid:<7} {event.cpu:<3} {printable(name)}\n"
    return head + "".join(f"\t{printable(frame)}\n" for frame in frames) + "\n"


def _as_json(event: Event, seconds: float, name: str, stacks: CallStacks) -> str:
    """A JSON object on a line of its own. The outermost frame comes first, as in all of lockd's JSON."""
    frames = [*reversed(stacks.user(event.user)), *reversed(stacks.kernel(event.kernel))]
    about = {
        "time": round(seconds, 9),
        "comm": event.comm,
        "pid": event.pid,
        "tid": event.tid,
        "cpu": event.cpu,
    }
    return json.dumps({**about, "function": name, "stack": frames}) + "\n"
