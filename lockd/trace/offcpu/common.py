"""What `lockd trace offcpu` and `offwake` share: their options, and the trace itself."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence

from lockd.errors import UsageError
from lockd.load.settings import LoadSettings, Trace
from lockd.names.kernel.sites import is_scheduling
from lockd.trace.core import options
from lockd.trace.core.call_stacks import Names
from lockd.trace.core.formats import TABLE_FRAMES
from lockd.trace.core.session import Session
from lockd.trace.offcpu.absences import NS_PER_US, Absences, Place, Times
from lockd.trace.offcpu.older_waits import OlderWaits
from lockd.views.profile import Mark, Profile, Sample, Value, kind_of

MOST_STATE = 0xFFFFFFFF


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_duration(parser)
    options.add_processes(parser)
    options.add_threads(parser)
    options.add_stacks(parser)
    parser.add_argument(
        "-d", "--delimited", action="store_true",
        help="put a delimiter between the kernel's and the user's part of a stack",
    )  # fmt: skip
    parser.add_argument(
        "-m", "--min-block-time", metavar="US", type=options.positive, default=0,
        help="only waits that last so many microseconds or more",
    )  # fmt: skip
    parser.add_argument(
        "-M", "--max-block-time", metavar="US", type=options.positive,
        help="only waits that last so many microseconds or less",
    )  # fmt: skip
    parser.add_argument(
        "--state", metavar="MASK", type=_mask,
        help="only threads that leave the CPU in one of these states, as bits of the kernel's: 1 "
        "interruptible, 2 uninterruptible, 4 stopped, ...; 0, with --runqueue: those that were preempted",
    )  # fmt: skip
    parser.add_argument(
        "--runqueue", action="store_true",
        help="from leaving the CPU to being on it again, for whatever reason; without it, until the wake-up "
        "only, and not if the thread was preempted",
    )  # fmt: skip
    parser.add_argument(
        "--no-ongoing", action="store_true", help="leave out what goes on when the trace ends"
    )
    options.add_output(parser, options.PROFILE_FORMATS, "stacks")
    options.add_folded(parser)


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


@contextlib.contextmanager
def traced(
    title: str, args: argparse.Namespace, defines: dict[str, int | None], maps: tuple[str, ...] = ()
) -> Iterator[tuple[Session, Profile, dict[Place, Times]]]:
    """Trace until the end: a session to report of, a profile without samples, and what was found.

    `defines` and `maps` as in load.settings.Trace.
    """
    _check(args)
    args.min_block_ns = args.min_block_time * NS_PER_US
    args.max_block_ns = options.LONGEST_NS
    if args.max_block_time:  # as long as it is so many whole microseconds
        args.max_block_ns = (args.max_block_time + 1) * NS_PER_US - 1
    began = time.time()
    with Session(title, _settings(args, defines, maps), args.duration, args.pids, args.tids) as session:
        absences = Absences(session, args.runqueue)
        older = OlderWaits(session, args.state)
        if not args.no_ongoing:
            older.enter(args.pids, args.tids)
        for taken in session.windows():
            absences.add(taken)
        found = absences.found(older, args.min_block_ns, args.max_block_ns, not args.no_ongoing)
        yield session, Profile(title, _values(args), [], began, session.elapsed), found


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for what can find nothing."""
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
    """The first is the time that was asked for."""
    us = "microseconds"
    both = (Value("wait_us", us), Value("runqueue_us", us)) if args.runqueue else ()
    return (
        Value("off_cpu_us" if args.runqueue else "wait_us", us),
        Value("count", "count"),
        Value("max_us", us),
        *both,
    )


def values_of(times: Times, args: argparse.Namespace) -> tuple[int, ...]:
    """In the order of Profile.values."""
    wait, run = times.wait // NS_PER_US, times.run // NS_PER_US
    both = (wait, run) if args.runqueue else ()
    asked = (times.wait + times.run) // NS_PER_US if args.runqueue else wait
    return asked, times.count, times.longest // NS_PER_US, *both


def labels_of(place: Place) -> dict[str, str]:
    labels = {"state": place.state, "reason": place.reason}
    labels |= {"ongoing": "yes"} if place.is_ongoing else {}
    labels |= {"began_before": "yes"} if place.is_older else {}
    return {name: value for name, value in labels.items() if value}


def joined(user: Names, kernel: Names, delimiter: Mark, args: argparse.Namespace) -> Names:
    """Outermost first."""
    kernel = () if args.user_stacks_only else kernel
    between = (delimiter,) if args.delimited and user and kernel else ()
    return (*reversed(user), *between, *reversed(kernel))


def brief(sample: Sample) -> Sequence[str]:
    """The innermost functions of user space; of a kernel thread, those that are not the scheduler's."""
    user = [frame for frame in sample.frames if kind_of(frame) == "user"]
    shown = user or [frame for frame in sample.frames if not is_scheduling(frame)]
    return shown[: -TABLE_FRAMES - 1 : -1]
