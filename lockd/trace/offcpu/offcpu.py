"""`lockd trace offcpu`: the time that threads are off the CPU, by the stack with which they left it.

The options, trace() and the helpers for samples also serve `lockd trace offwake`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

from lockd.errors import UsageError
from lockd.load.settings import LoadSettings, Trace
from lockd.names.kernel.sites import is_scheduling
from lockd.names.stacks import interrupt_entries
from lockd.trace.core import options, output
from lockd.trace.core.call_stacks import Names
from lockd.trace.core.session import Session
from lockd.trace.offcpu.absences import NS_PER_US, Absences, Place, Times
from lockd.trace.offcpu.older_waits import OlderWaits
from lockd.views.profile import Mark, Profile, Sample, Value, frame_kind

HELP = "Sum up the time that threads are off the CPU, by stack"
EPILOG = """examples:
  lockd trace offcpu 5                 all threads, for 5 seconds
  lockd trace offcpu -p 185,912        two processes, until both have ended or Ctrl-C
  lockd trace offcpu -f -p 185 30      folded, for flame graphs
  lockd trace offcpu -m 1000 10        waits of a millisecond or more
  lockd trace offcpu --state 2 10      uninterruptible waits
  lockd trace offcpu --runqueue 10     time on the run queue as well
  lockd trace offcpu --format table 5  one line for each stack, with the states and reasons
"""
MOST_STATE = 0xFFFFFFFF


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_duration(parser)
    options.add_processes(parser)
    options.add_threads(parser)
    options.add_stacks(parser)
    parser.add_argument(
        "-d", "--delimited", action="store_true",
        help="put a delimiter between the kernel part and the user part of a stack",
    )  # fmt: skip
    parser.add_argument(
        "-m", "--min-block-time", metavar="US", type=options.positive, default=0,
        help="count only waits of this many microseconds or more",
    )  # fmt: skip
    parser.add_argument(
        "-M", "--max-block-time", metavar="US", type=options.positive,
        help="count only waits of this many microseconds or less",
    )  # fmt: skip
    parser.add_argument(
        "--state", metavar="MASK", type=_mask,
        help="count only threads that leave the CPU in one of these states, a sum of the kernel's bits: "
        "1 interruptible, 2 uninterruptible, 4 stopped, and so on; 0, which needs --runqueue, counts threads "
        "that were preempted",
    )  # fmt: skip
    parser.add_argument(
        "--runqueue", action="store_true",
        help="count the time until the thread is on a CPU again, also if it was preempted (default: the time "
        "until the wake-up, of waits only)",
    )  # fmt: skip
    parser.add_argument(
        "--no-ongoing", action="store_true",
        help="leave out waits that have not ended when the trace ends, or that began before it",
    )  # fmt: skip
    options.add_output(parser, options.PROFILE_FORMATS, "stacks")
    options.add_short_format(parser, "folded", "-f", "--folded")


def _mask(text: str) -> int:
    try:
        mask = int(text, 0)
    except ValueError:
        mask = -1
    if not 0 <= mask <= MOST_STATE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mask; rule: a number of at most 32 bits, as 2 or 0x2"
        )
    return mask


def run(args: argparse.Namespace) -> int:
    with trace("lockd trace offcpu", args, {}) as (session, profile, places):
        profile.samples = [_sample(place, times, args) for place, times in places.items()]
        output.write(args, profile, {"table": output.table(profile, innermost_waiting)})
        session.report()
    return 0


def _sample(place: Place, times: Times, args: argparse.Namespace) -> Sample:
    delimiter = Mark("--" if args.format == "stacks" else "-")
    frames = join_stacks(place.user, place.kernel, delimiter, args)
    return Sample(place.comm, place.pid, place.tid, frames, values_of(times, args), labels_of(place))


@contextlib.contextmanager
def trace(
    title: str, args: argparse.Namespace, defines: dict[str, int | None], maps: tuple[str, ...] = ()
) -> Iterator[tuple[Session, Profile, dict[Place, Times]]]:
    """Trace threads off the CPU until the trace ends.

    Yields the session, a profile without samples, and the sums of absences by Place. The caller calls
    report() of the session. `defines` and `maps` are as in load.settings.Trace. Raises UsageError and
    HostError as Session does, and UsageError for options that together exclude every wait.
    """
    _check(args)
    args.min_block_ns = args.min_block_time * NS_PER_US
    args.max_block_ns = options.LONGEST_NS
    if args.max_block_time:  # in whole microseconds: a wait that is less than 1 us longer counts too
        args.max_block_ns = (args.max_block_time + 1) * NS_PER_US - 1
    session = Session(title, _settings(args, defines, maps), args.duration, args.pids, args.tids)
    # This takes too long for the time after attaching, in which no map is drained.
    interrupts = interrupt_entries() if "interrupts" in maps else None
    with session:
        absences = Absences(session, args.runqueue, interrupts)
        older = OlderWaits(session, args.state, args.user_threads_only, args.kernel_threads_only)
        if not args.no_ongoing:
            older.enter(args.pids, args.tids)
        for taken in session.windows():
            absences.add(taken)
        places = absences.by_place(older, args.min_block_ns, args.max_block_ns, not args.no_ongoing)
        yield session, Profile(title, _values(args), [], session.began_at, session.elapsed), places
        if absences.nameless:
            print(
                f"{title}: {absences.nameless:,} absences were counted without names: there were too many "
                "threads and stacks",
                file=sys.stderr,
            )


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that together exclude every wait, or that no wait can meet."""
    if max(args.min_block_time, args.max_block_time or 0) >= options.LONGEST_NS // NS_PER_US:
        raise UsageError(f"-m, -M: rule: microseconds, below {options.LONGEST_NS // NS_PER_US}")
    if args.max_block_time and args.max_block_time < args.min_block_time:
        raise UsageError(
            f"-m {args.min_block_time} -M {args.max_block_time}: no wait is as long; rule: -m is not above -M"
        )
    if args.state == 0 and not args.runqueue:
        raise UsageError("--state 0: threads that were preempted do not wait; rule: with --runqueue")
    if args.kernel_threads_only and args.user_stacks_only:
        raise UsageError("-k -U: threads of the kernel have no stacks of user space; rule: one of the two")


def _settings(
    args: argparse.Namespace, defines: dict[str, int | None], maps: tuple[str, ...]
) -> LoadSettings:
    defines = {**defines, "TRACE_OFFCPU": None}
    if args.runqueue:
        defines["WITH_RUNQUEUE"] = None
    if args.state is not None:
        defines["STATE_MASK"] = args.state
    return options.load_settings(args, Trace(defines=defines, maps=maps), programs=("offcpu",))


def _values(args: argparse.Namespace) -> tuple[Value, ...]:
    """The values of the profile. The first is the time that formats with one value show."""
    us = "microseconds"
    parts = (Value("wait_us", us), Value("runqueue_us", us)) if args.runqueue else ()
    return (
        Value("off_cpu_us" if args.runqueue else "wait_us", us),
        Value("count", "count"),
        Value("max_us", us, is_maximum=True),
        *parts,
    )


def values_of(times: Times, args: argparse.Namespace) -> tuple[int, ...]:
    """The values of a sample, in the order of Profile.values."""
    wait, run = times.wait // NS_PER_US, times.run // NS_PER_US
    parts = (wait, run) if args.runqueue else ()
    whole = (times.wait + times.run) // NS_PER_US if args.runqueue else wait
    return whole, times.count, times.longest // NS_PER_US, *parts


def labels_of(place: Place) -> dict[str, str]:
    """The labels of a sample, without empty ones."""
    labels = {"state": place.state, "reason": place.reason}
    labels |= {"ongoing": "yes"} if place.is_ongoing else {}
    labels |= {"began_before": "yes"} if place.is_older else {}
    return {name: value for name, value in labels.items() if value}


def join_stacks(user: Names, kernel: Names, delimiter: Mark, args: argparse.Namespace) -> Names:
    """Join the user part and the kernel part of a stack, innermost first, to one stack, outermost first.

    The options -U and -K leave out one of the parts; -d puts the delimiter between them.
    """
    kernel = () if args.user_stacks_only else kernel
    user = () if args.kernel_stacks_only else user  # waits from before the trace have one even with -K
    between = (delimiter,) if args.delimited and user and kernel else ()
    return (*reversed(user), *between, *reversed(kernel))


def innermost_waiting(sample: Sample) -> Sequence[str]:
    """The functions of a sample for a table, innermost first.

    They are functions of user space or, if there are none, any frames but functions of the scheduler. At most
    TABLE_FRAMES are returned.
    """
    user = [frame for frame in sample.frames if frame_kind(frame) == "user"]
    shown = user or [frame for frame in sample.frames if not is_scheduling(frame)]
    return shown[: -output.TABLE_FRAMES - 1 : -1]
