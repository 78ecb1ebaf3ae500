"""Each call of a function, or each time at a tracepoint, with its stack, as it happens."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockd.kernel.rings import Ring, RingReader
from lockd.load.settings import LoadSettings
from lockd.names.labels.processes import text
from lockd.printable import printable
from lockd.trace.core import options, output
from lockd.trace.core.call_stacks import CallStacks
from lockd.trace.core.session import Session
from lockd.trace.probes import probe_options
from lockd.trace.probes.probes import Probes

HELP = "Print each call of a function, or each time at a tracepoint, with its stack"
EPILOG = f"""\
{probe_options.PATTERNS.replace("PATTERN", "FUNCTION")}
For what happens thousands of times a second, `lockd trace stackcount` tells more at less cost.

examples:
  lockd trace stacksnoop t:sched:sched_process_exec    who executes programs
  lockd trace stacksnoop c:abort -p 185                 who ends process 185
  lockd trace stacksnoop -s -n 10 vfs_fsync_range       ten calls of a function of the kernel, with offsets
"""
TITLE = "lockd trace stacksnoop"
RING, RECORD = MAPS = "snooped", "snooped_record"
"""See lockd/bpf/trace/stacksnoop.bpf.c."""


@dataclass(frozen=True)
class Event:
    """`at` is in ns of the monotonic clock; `user` and `kernel` are numbers of CallStacks."""

    at: int
    comm: str
    pid: int
    tid: int
    cpu: int
    user: int
    kernel: int


def add_options(parser: argparse.ArgumentParser) -> None:
    probe_options.add_options(parser, "FUNCTION")
    options.add_duration(parser)
    parser.add_argument("-n", "--count", metavar="EVENTS", type=options.positive, help="end after so many")
    parser.add_argument(
        "-r", "--regexp", action="store_true", help="FUNCTION is a regular expression that names begin with"
    )
    options.add_output(parser, ("stacks", "json"), "stacks")


def run(args: argparse.Namespace) -> int:
    found = probe_options.probes(args, TITLE)
    name = found.places[0].name if len(found.places) == 1 else args.pattern
    shown = probe_options.shown(args)
    session = Session(TITLE, settings_of(args, found), args.duration, args.pids, others=MAPS, shown=shown)
    with output.stream(args.output) as write, session:
        probe_options.tell_attached(TITLE, found, session.manifest.hooks)
        show = _as_json if args.format == "json" else _as_text
        if args.format == "stacks":
            write(f"{'TIME(s)':<18} {'COMM':<16} {'PID':<7} {'CPU':<3} FUNCTION\n")
        for event in _events(session):
            if session.events == args.count:
                break
            session.events += 1
            write(show(event, (event.at - session.began_ns) / 1e9, name, session.stacks))
            if session.events == args.count:
                session.stop()
        session.report()
    return 0


def settings_of(args: argparse.Namespace, found: Probes) -> LoadSettings:
    """What is loaded."""
    return probe_options.load_settings(args, found, "snoop_stack", "trace/stacksnoop.bpf.c", maps=MAPS)


def _events(session: Session) -> Iterator[Event]:
    """All in the order of their times, each as soon as its stacks are there."""
    reader = _Reader(session)
    waiting: list[Event] = []
    before_last = last = 0
    stacks = session.stacks
    for _ in session.windows():
        waiting = sorted([*waiting, *reader.read()], key=lambda event: event.at)
        # What came after the last look may be older than what another CPU is just writing, and its stacks
        # may still be in the maps that the programs write to.
        ready = 0
        while ready < len(waiting) and _is_ready(waiting[ready], before_last, last, stacks):
            ready += 1
        yield from waiting[:ready]
        waiting = waiting[ready:]
        before_last, last = last, time.monotonic_ns()
    yield from waiting


def _is_ready(event: Event, before_last: int, last: int, stacks: CallStacks) -> bool:
    """`last`: when maps were drained the last time but one; a stack that has not come two times is lost."""
    return event.at <= before_last or (event.at <= last and stacks.has(event.user, event.kernel))


class _Reader:
    """Of the ring of events."""

    def __init__(self, session: Session) -> None:
        infos = {info.name: info for info in session.manifest.maps}
        self._ring = RingReader(Ring(session.fds[RING], infos[RING].entries))
        self._record = np.dtype(infos[RECORD].value)  # type: ignore[arg-type]

    def read(self) -> list[Event]:
        """What was written since the last time."""
        data = b"".join(self._ring.records())
        return [
            Event(at, text(comm), tgid, tid, cpu, *numbers)
            for at, numbers, tgid, tid, cpu, _, comm in np.frombuffer(data, self._record).tolist()
        ]


def _as_text(event: Event, seconds: float, name: str, stacks: CallStacks) -> str:
    """A line, and its stack below, innermost first, the kernel's before that of user space."""
    frames = (*stacks.kernel(event.kernel), *stacks.user(event.user))
    head = f"{seconds:<18.9f} {event.comm:<16} {event.pid:<7} {event.cpu:<3} {name}\n"
    return head + "".join(f"\t{printable(frame)}\n" for frame in frames) + "\n"


def _as_json(event: Event, seconds: float, name: str, stacks: CallStacks) -> str:
    """An object on a line of its own; its stack with the outermost frame first, as in all of lockd's JSON."""
    frames = [*reversed(stacks.user(event.user)), *reversed(stacks.kernel(event.kernel))]
    about = {
        "time": round(seconds, 9),
        "comm": event.comm,
        "pid": event.pid,
        "tid": event.tid,
        "cpu": event.cpu,
    }
    return json.dumps({**about, "function": name, "stack": frames}) + "\n"
