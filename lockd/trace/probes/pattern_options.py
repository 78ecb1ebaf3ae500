"""The options of the tools that probe what a pattern matches, and show the stacks at which probes are hit."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace

from lockd.load.settings import LoadSettings, Trace
from lockd.names.stacks import FrameFormat
from lockd.printable import printable
from lockd.trace.core import options
from lockd.trace.core.main_threads import ended_main_threads
from lockd.trace.core.session import Session
from lockd.trace.probes.patterns import PROGRAM, Probes, parse, resolve

MOST_MISSING = 3
"""Of the functions to which no probe could be attached, the most that a message names."""
PATTERNS = """\
PATTERN is one of
  FUNCTION              a function of the kernel: vfs_read, 'vfs_*'
  OBJECT:FUNCTION       a function of a program or library: c:malloc (libc), /usr/sbin/mysqld:main,
                        'mysqld:*::lock_*'; with -p, of the files that the processes have mapped, whose names
                        can then be matched too: '*:malloc'
  t:CATEGORY:EVENT      a tracepoint: t:sched:sched_switch, 't:syscalls:sys_enter_*'
`*` matches anything. A pattern may match at most 1,000 functions or tracepoints.
"""


def add_options(parser: argparse.ArgumentParser, argument: str) -> None:
    """Add the argument for the pattern, called `argument` in the help, and options for events and stacks."""
    parser.add_argument("pattern", metavar=argument, help="what to trace, see below")
    options.add_processes(parser)
    parser.add_argument(
        "-c", "--cpu", metavar="CPU", type=_cpu, help="only events on this CPU (counted from 0)"
    )
    parser.add_argument(
        "-s", "--offset", action="store_true",
        help="show for each frame the offset in its function, and the module, program or library",
    )  # fmt: skip
    parser.add_argument(
        "--mechanism", choices=("auto", "kprobe", "fentry"), default="auto",
        help="how to hook kernel functions (default: by kprobes if the kernel has them, else by fentry)",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="show the address of each frame")
    options.add_stacks(parser)


def shown(args: argparse.Namespace) -> FrameFormat:
    """What is shown of each frame, according to the options."""
    return FrameFormat(offsets=args.offset, addresses=args.verbose)


def resolve_probes(args: argparse.Namespace, title: str) -> Probes:
    """The places that the pattern matches. Functions that cannot be probed are named on standard error."""
    probes = resolve(parse(args.pattern, getattr(args, "regexp", False)), args.pids)
    for remark in probes.remarks():
        print(f"{title}: {printable(remark)}", file=sys.stderr)
    return probes


def load_settings(
    args: argparse.Namespace, probes: Probes, function: str, file: str, pairs: tuple[str, ...] = (),
    maps: tuple[str, ...] = (),
) -> LoadSettings:  # fmt: skip
    """The loader's settings with which all probes run the BPF function `function` of the source `file`."""
    trace = Trace(
        parts=(probes.part(function, (file,)),),
        defines={} if args.cpu is None else {"ONLY_CPU": args.cpu},
        pairs=pairs,
        maps=maps,
    )
    settings = options.load_settings(args, trace)
    return replace(settings, mechanisms=((PROGRAM, args.mechanism),))


def report_attached(session: Session, probes: Probes) -> None:
    """Print on standard error what is traced, and what could not be attached."""
    attached = {hook.hook for hook in session.manifest.hooks if hook.attached}
    traced = sorted({place.name for place in probes.places if place.hook in attached})
    subject = traced[0] if len(traced) == 1 else f"{len(traced):,} {probes.pattern.kind}s"
    missing = sorted({place.name for place in probes.places if place.hook not in attached})
    more = ", ..." if len(missing) > MOST_MISSING else ""
    without = f", without {', '.join(missing[:MOST_MISSING])}{more}" if missing else ""
    session.progress.end()
    print(printable(f"{session.title}: tracing {subject}{without}; Ctrl-C ends"), file=sys.stderr)


def report(session: Session, probes: Probes) -> None:
    """Print the session's report on standard error, and which processes were not probed until the end."""
    session.report()
    places = Counter(place.pid for place in probes.places if place.pid)
    for pid, count in sorted(places.items()):
        for remark in ended_main_threads([pid], are_linked=count > 1):
            print(f"{session.title}: {remark}", file=sys.stderr)


def _cpu(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a CPU")
    return int(text)
