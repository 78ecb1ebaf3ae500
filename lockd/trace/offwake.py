"""How long threads wait, by the stack that they wait with and the stack of the thread that ends it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lockd.profile import Mark, Profile, Sample
from lockd.trace import offcpu_tools, output
from lockd.trace.absences import NOBODY, Place, Times
from lockd.trace.offcpu_tools import joined, labels_of, traced, values_of

HELP = "Sum up the time that threads wait, by their stack and the stack of who wakes them"
EPILOG = """examples:
  lockd trace offwake 5                 all threads, for 5 seconds
  lockd trace offwake -p 185,912        waits of two processes, whoever ends them
  lockd trace offwake -f -p 185 30      folded, for flame graphs
  lockd trace offwake -m 1000 10        waits of a millisecond or more
  lockd trace offwake --format table 5  one line for each pair of stacks
"""
BETWEEN = Mark("--")
NOT_WOKEN, PREEMPTED = Mark("[not woken]"), Mark("[preempted]")
"""In place of the waker: the wait goes on; it was no wait."""


def add_options(parser: argparse.ArgumentParser) -> None:
    offcpu_tools.add_options(parser)


def run(args: argparse.Namespace) -> int:
    with traced("lockd trace offwake", args, {"WITH_WAKERS": None}) as (session, profile, found):
        profile.samples = [sample(place, times, args) for place, times in found.items()]
        if args.format == "stacks":
            output.write_text(args.output, blocks(profile))
        else:
            output.write(args, profile)
        session.report()
    return 0


def sample(place: Place, times: Times, args: argparse.Namespace) -> Sample:
    """The waker's stack is upside down: what waits and what ends it meet in the middle."""
    labels, waker = labels_of(place), place.waker
    target = joined(place.user, place.kernel, Mark("-"), args)
    if waker:
        woken = (*reversed(joined(waker.user, waker.kernel, Mark("-"), args)), Mark(waker.comm))
        labels |= {"waker": waker.comm, "waker_pid": str(waker.pid), "waker_tid": str(waker.tid)}
    else:
        woken = (
            Mark(NOBODY) if place.comm == NOBODY else PREEMPTED if place.state == "runnable" else NOT_WOKEN,
        )
    frames = (*target, BETWEEN, *woken)
    return Sample(place.comm, place.pid, place.tid, frames, values_of(times, args), labels)


def blocks(profile: Profile) -> Iterator[str]:
    """The waker, its stack, the stack of the target, the target, and the time: from the cause down."""
    for one in profile.sorted():
        frames = list(one.frames)
        middle = next(at for at, frame in enumerate(frames) if frame == BETWEEN and isinstance(frame, Mark))
        yield f"    {'waker:':<16} {frames[-1]} {one.labels.get('waker_tid', '')}".rstrip() + "\n"
        yield from (f"    {name}\n" for name in reversed(frames[middle + 1 : -1]))
        yield f"    {'--':<16} --\n"
        yield from (f"    {name}\n" for name in reversed(frames[:middle]))
        yield f"    {'target:':<16} {one.comm} {one.tid}\n"
        yield f"        {one.values[0]}\n\n"
