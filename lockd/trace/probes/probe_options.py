"""The options of the tools that put a probe where the user says and show the stacks that reach it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from lockd.kernel.manifest import Hook
from lockd.load.settings import LoadSettings, Trace
from lockd.names.stacks import FrameFormat
from lockd.trace.core import options
from lockd.trace.probes.patterns import parse
from lockd.trace.probes.probes import PROGRAM, Probes, resolve

SHOWN = 3
"""Functions that could not be attached, by name."""
PATTERNS = """\
PATTERN is one of
  FUNCTION              of the kernel: vfs_read, 'vfs_*'
  OBJECT:FUNCTION       of programs and libraries: c:malloc (libc), /usr/sbin/mysqld:main, 'mysqld:*::lock_*';
                        with -p, of what the processes have mapped, also by a pattern: '*:malloc'
  t:CATEGORY:EVENT      a tracepoint: t:sched:sched_switch, 't:syscalls:sys_enter_*'
`*` stands for anything; at most 1,000 functions or tracepoints may match.
"""


def add_options(parser: argparse.ArgumentParser, argument: str) -> None:
    """The pattern itself, called `argument`, and what is seen and shown of its stacks."""
    parser.add_argument("pattern", metavar=argument, help="what is to be traced, see below")
    options.add_processes(parser)
    parser.add_argument(
        "-c", "--cpu", metavar="CPU", type=_cpu, help="only what happens on this CPU (counted from 0)"
    )
    parser.add_argument(
        "-s", "--offset", action="store_true",
        help="show where in its function each frame is, and of which module, program or library that is",
    )  # fmt: skip
    parser.add_argument(
        "--mechanism", choices=("auto", "kprobe", "fentry"), default="auto",
        help="how functions of the kernel are traced (default: kprobe if there are any, else fentry)",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="show the address of each frame")
    options.add_stacks(parser)


def shown(args: argparse.Namespace) -> FrameFormat:
    """What the options say of frames."""
    return FrameFormat(offsets=args.offset, addresses=args.verbose)


def probes(args: argparse.Namespace, title: str) -> Probes:
    """Where probes are to be put; what cannot be probed is told on standard error."""
    found = resolve(parse(args.pattern, getattr(args, "regexp", False)), args.pids)
    for remark in found.remarks():
        print(f"{title}: {remark}", file=sys.stderr)
    return found


def load_settings(
    args: argparse.Namespace, found: Probes, function: str, file: str, pairs: tuple[str, ...] = (),
    maps: tuple[str, ...] = (),
) -> LoadSettings:  # fmt: skip
    """What is to be loaded, to have `function` of `file` called from the probes."""
    trace = Trace(
        parts=(found.part(function, (file,)),),
        defines={} if args.cpu is None else {"ONLY_CPU": args.cpu},
        pairs=pairs,
        maps=maps,
    )
    settings = options.load_settings(args, trace)
    return replace(settings, mechanisms=((PROGRAM, args.mechanism),))


def tell_attached(title: str, found: Probes, hooks: tuple[Hook, ...]) -> None:
    """Say on standard error what is being traced."""
    attached = {hook.hook for hook in hooks if hook.attached}
    traced = sorted({place.name for place in found.places if place.hook in attached})
    what = traced[0] if len(traced) == 1 else f"{len(traced):,} {found.pattern.kind}s"
    missing = sorted({place.name for place in found.places if place.hook not in attached})
    without = f", without {', '.join(missing[:SHOWN])}{', ...' * (len(missing) > SHOWN)}" if missing else ""
    print(f"{title}: tracing {what}{without}; Ctrl-C ends", file=sys.stderr)


def _cpu(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a CPU")
    return int(text)
