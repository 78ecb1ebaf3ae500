"""`lockd trace offwake`: the time that threads wait, by their stack and the stack of the waker."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lockd.trace.core import output
from lockd.trace.offcpu import offcpu
from lockd.trace.offcpu.absences import INTERRUPT, NOBODY, UNSEEN, Place, Times
from lockd.trace.offcpu.offcpu import innermost_waiting, join_stacks, labels_of, values_of
from lockd.views.profile import Mark, Profile, Sample

HELP = "Sum up the time that threads wait, by their stack and the stack of the waker"
EPILOG = """examples:
  lockd trace offwake 5                 all threads, for 5 seconds
  lockd trace offwake -p 185,912        waits of two processes, whoever ends them
  lockd trace offwake -f -p 185 30      folded, for flame graphs
  lockd trace offwake -m 1000 10        waits of a millisecond or more
  lockd trace offwake --format table 5  one line for each pair of stacks
"""
BETWEEN = Mark("--")
"""The frame between the stack of the thread that waits and the stack of the waker."""
NOT_WOKEN, PREEMPTED = Mark("[not woken]"), Mark("[preempted]")
"""Frames in place of the waker. NOT_WOKEN: the wait had not ended when the trace ended. PREEMPTED: the thread
did not wait."""

add_options = offcpu.add_options


def run(args: argparse.Namespace) -> int:
    # Kernel stacks are always taken: they show whether an interrupt ended a wait.
    defines: dict[str, int | None] = {"WITH_WAKERS": None, "WITH_KERNEL_STACKS": None}
    with offcpu.trace("lockd trace offwake", args, defines, ("interrupts",)) as (session, profile, places):
        profile.samples = [_sample(place, times, args) for place, times in places.items()]
        output.write(
            args, profile, {"stacks": _blocks(profile), "table": output.table(profile, _both_stacks)}
        )
        session.report()
    return 0


def _sample(place: Place, times: Times, args: argparse.Namespace) -> Sample:
    """A sample whose frames are the stack of the thread that waits, BETWEEN, the waker's stack and its name.

    The waker's stack is reversed. So the functions in which one thread waits and the other wakes it are next
    to BETWEEN. Without a waker, one frame says why there is none.
    """
    labels, waker = labels_of(place), place.waker
    target = join_stacks(place.user, place.kernel, Mark("-"), args)
    if waker:
        woken = (*reversed(join_stacks(waker.user, waker.kernel, Mark("-"), args)), Mark(waker.comm))
        labels |= {"waker": waker.comm}
        if waker.comm not in (UNSEEN, INTERRUPT):
            labels |= {"waker_pid": str(waker.pid), "waker_tid": str(waker.tid)}
    else:
        woken = (
            Mark(NOBODY) if place.comm == NOBODY else PREEMPTED if place.state == "runnable" else NOT_WOKEN,
        )
    frames = (*target, BETWEEN, *woken)
    return Sample(place.comm, place.pid, place.tid, frames, values_of(times, args), labels)


def _split(sample: Sample) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stacks of the thread that waits and of the waker, outermost first, without the waker's name."""
    middle = next(
        depth for depth, frame in enumerate(sample.frames) if frame == BETWEEN and isinstance(frame, Mark)
    )
    return sample.frames[:middle], sample.frames[-2:middle:-1]


def _both_stacks(sample: Sample) -> list[str]:
    """The text `WAITING <- WAKING` for both stacks of a sample, as the only element of a list.

    WAKING is the waker's name if no stack of the waker is known.
    """
    target, waker = (
        innermost_waiting(Sample(sample.comm, sample.pid, sample.tid, frames, ()))
        for frames in _split(sample)
    )
    return [" < ".join(target) + " <- " + (" < ".join(waker) or sample.frames[-1])]


def _blocks(profile: Profile) -> Iterator[str]:
    """Lines of the format `stacks`: the waker, its stack, the stack of the thread that waits, that thread,
    and the time in microseconds."""
    for sample in profile.sorted():
        target, waker = _split(sample)
        waker_tid = sample.labels.get("waker_tid", "")
        yield f"    {'waker:':<16} {sample.frames[-1]} {waker_tid}".rstrip() + "\n"
        yield from (f"    {name}\n" for name in waker)
        yield f"    {'--':<16} --\n"
        yield from (f"    {name}\n" for name in reversed(target))
        yield f"    {'target:':<16} {sample.comm} {sample.tid}\n"
        yield f"        {sample.values[0]}\n\n"
