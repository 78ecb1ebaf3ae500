"""How long threads wait, by the stack that they wait with and the stack of the thread that ends it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lockd.trace.core import output
from lockd.trace.core.formats import table
from lockd.trace.offcpu import common
from lockd.trace.offcpu.absences import INTERRUPT, NOBODY, UNSEEN, Place, Times
from lockd.trace.offcpu.common import brief, joined, labels_of, traced, values_of
from lockd.views.profile import Mark, Profile, Sample

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
    common.add_options(parser)


def run(args: argparse.Namespace) -> int:
    # That it was an interrupt is told by the kernel's stack.
    defines: dict[str, int | None] = {"WITH_WAKERS": None, "WITH_KERNEL_STACKS": None}
    with traced("lockd trace offwake", args, defines, ("interrupts",)) as (session, profile, found):
        profile.samples = [sample(place, times, args) for place, times in found.items()]
        output.write(args, profile, {"stacks": blocks(profile), "table": table(profile, brief_pair)})
        session.report()
    return 0


def sample(place: Place, times: Times, args: argparse.Namespace) -> Sample:
    """The waker's stack is upside down: what waits and what ends it meet in the middle."""
    labels, waker = labels_of(place), place.waker
    target = joined(place.user, place.kernel, Mark("-"), args)
    if waker:
        woken = (*reversed(joined(waker.user, waker.kernel, Mark("-"), args)), Mark(waker.comm))
        labels |= {"waker": waker.comm}
        if waker.comm not in (UNSEEN, INTERRUPT):
            labels |= {"waker_pid": str(waker.pid), "waker_tid": str(waker.tid)}
    else:
        woken = (
            Mark(NOBODY) if place.comm == NOBODY else PREEMPTED if place.state == "runnable" else NOT_WOKEN,
        )
    frames = (*target, BETWEEN, *woken)
    return Sample(place.comm, place.pid, place.tid, frames, values_of(times, args), labels)


def halves(one: Sample) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The target's frames and the waker's, both outermost first, without the waker's name."""
    middle = next(at for at, frame in enumerate(one.frames) if frame == BETWEEN and isinstance(frame, Mark))
    return one.frames[:middle], one.frames[-2:middle:-1]


def brief_pair(one: Sample) -> list[str]:
    """The target's functions, then `<- ` and those of the waker."""
    target, waker = (brief(Sample(one.comm, one.pid, one.tid, frames, ())) for frames in halves(one))
    return [" < ".join(target) + " <- " + (" < ".join(waker) or one.frames[-1])]


def blocks(profile: Profile) -> Iterator[str]:
    """The waker, its stack, the stack of the target, the target, and the time: from the cause down."""
    for one in profile.sorted():
        target, waker = halves(one)
        yield f"    {'waker:':<16} {one.frames[-1]} {one.labels.get('waker_tid', '')}".rstrip() + "\n"
        yield from (f"    {name}\n" for name in waker)
        yield f"    {'--':<16} --\n"
        yield from (f"    {name}\n" for name in reversed(target))
        yield f"    {'target:':<16} {one.comm} {one.tid}\n"
        yield f"        {one.values[0]}\n\n"
