"""The profile of waits off the CPU: the exact times of each process and reason, divided among sampled stacks.

The sampler's snapshot has the head {"functions": [name, ...], "stacks": [[user, kernel], ...], "groups":
[[unit, comm, reason, blocked_ns, count, waiting], ...], "samples": [[group, stack, waker, stack of the waker,
weight_ns, samples], ...], "time": ..., "monotonic": ...}. `user` and `kernel` are lists of positions in
`functions`, innermost first. The groups and stacks in `samples` are positions in `groups` and `stacks`. The
array `waiting_ns` has how long each ongoing wait has lasted, in ns: `waiting` numbers for each group, one
group after the other (lockd/sample/aggregates/wait_stacks.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple

from lockd.export.detail import NO_STACK, Block, ProfileQuery
from lockd.process.clock import NS
from lockd.views.profile import KernelFrame, Mark, Profile, Sample, Value

VALUES = (Value("blocked", "microseconds"), Value("waiting", "microseconds"), Value("samples", "count"))
NS_PER_US = 1000
NOT_SAMPLED = Mark("[not sampled]")
"""The frame in place of the stack for the time of a group of which no wait was sampled."""
WAITS_NOW = Mark("[waits now]")
"""The frame in place of the stack for the time of waits that go on."""
BETWEEN = Mark("--")
"""The frame between the stack that waited and the stack of the waker, as in `lockd trace offwake`."""
UNSEEN = Mark("[unknown]")
"""The frame for a waker whose wake-up was not seen, or that had ended before its name was read."""
OTHER = "other"
"""The unit and the comm of groups in which the sampler adds up the groups for which it has no room."""


class Stack(NamedTuple):
    """The functions of a thread, innermost first."""

    user: tuple[str, ...]
    kernel: tuple[str, ...]


EMPTY = Stack((), ())
OTHER_STACKS = Stack(("[other stacks]",), ())
"""Stands for those stacks of a group for which the sampler has no room."""


class Place(NamedTuple):
    """The stack in which threads waited, and the name and stack of their waker."""

    stack: Stack
    waker: str = ""
    waker_stack: Stack = EMPTY


REST = Place(OTHER_STACKS)


class Weight(NamedTuple):
    """Sums over samples: the nanoseconds that they stand for, and how many they are."""

    ns: int = 0
    samples: int = 0


class GroupName(NamedTuple):
    unit: str
    comm: str
    kind: str
    """The reason of the waits."""


@dataclass(frozen=True)
class Group:
    """The waits of one unit, comm and reason."""

    blocked_ns: int = 0
    """The time of the waits that have ended."""
    count: int = 0
    """The number of the waits that have ended."""
    waiting_ns: int = 0
    """The time so far of the waits that go on. In a profile of N seconds, each of them counts with at most
    N seconds."""
    weights: dict[Place, Weight] = field(default_factory=dict)
    """The samples of the waits that have ended."""


Groups = dict[GroupName, Group]


def profile_of_waits(query: ProfileQuery, later: Block, earlier: Block | None = None) -> Profile:
    """The profile of waits off the CPU up to the snapshot `later`, or of those added since `earlier`.

    A sample has three values: the blocked time of ended waits and the time so far of ongoing ones, both in
    microseconds, and how many waits were sampled at its stack.
    """
    head, _ = later
    profile = Profile("lockd wakers" if query.is_by_waker else "lockd offcpu", VALUES, began=head["time"])
    if earlier is None:
        groups = _read_groups(later)
    else:
        before, _ = earlier
        profile.began, profile.seconds = before["time"], head["monotonic"] - before["monotonic"]
        groups = _between(_read_groups(earlier), _read_groups(later, round(profile.seconds * NS)))
    for name, group in groups.items():
        if query.matches(name._asdict()):
            samples = _samples(name, group, query.is_by_waker)
            profile.samples += [sample for sample in samples if any(sample.values)]
    return profile


def _read_groups(block: Block, longest_ns: int = sys.maxsize) -> Groups:
    """The groups of a snapshot. Each ongoing wait counts with `longest_ns` nanoseconds at most."""
    head, arrays = block
    functions, waiting_ns = head["functions"], arrays["waiting_ns"]

    def names(numbers: list[int]) -> tuple[str, ...]:
        return tuple(functions[number] for number in numbers)

    stacks = [Stack(names(user), names(kernel)) for user, kernel in head["stacks"]]
    groups, at = [], 0
    for unit, comm, reason, blocked_ns, count, waiting in head["groups"]:
        waited_ns = sum(map(min, waiting_ns[at : at + waiting], repeat(longest_ns)))
        groups.append((GroupName(unit, comm, reason), Group(blocked_ns, count, waited_ns)))
        at += waiting
    for number, stack, waker, waker_stack, *weight in head["samples"]:
        _, group = groups[number]
        group.weights[Place(stacks[stack], waker, stacks[waker_stack])] = Weight(*weight)
    return dict(groups)


def _between(earlier: Groups, later: Groups) -> Groups:
    """The waits that were added to each group from `earlier` to `later`, and those that go on."""
    before = dict(earlier)
    for name, old in earlier.items():
        new, other = later.get(name, Group()), GroupName(OTHER, OTHER, name.kind)
        # If a group is gone, or has less than before, the sampler has added it to `other` in between.
        if name != other and (new.blocked_ns < old.blocked_ns or new.count < old.count):
            before[other] = _sum(before.get(other, Group()), before.pop(name))
    return {name: _difference(before.get(name, Group()), new) for name, new in later.items()}


def _sum(group: Group, more: Group) -> Group:
    """The sum of two groups, except that the ongoing waits are those of `group` alone."""
    return replace(
        group,
        blocked_ns=group.blocked_ns + more.blocked_ns,
        count=group.count + more.count,
        weights=_merged((*group.weights.items(), *more.weights.items())),
    )


def _difference(old: Group, new: Group) -> Group:
    """The waits that were added to a group from `old` to `new`, and those that go on."""
    # If the sums have fallen, the sampler had forgotten the group, and counts from zero.
    if new.blocked_ns < old.blocked_ns or new.count < old.count:
        old = Group()
    return Group(
        new.blocked_ns - old.blocked_ns,
        new.count - old.count,
        new.waiting_ns,
        _weights_between(old.weights, new.weights),
    )


def _weights_between(old: dict[Place, Weight], new: dict[Place, Weight]) -> dict[Place, Weight]:
    """The weights that were added to a group.

    The sampler may have merged places into one, REST, in between, but the sum of all weights never falls.
    REST gets the part of the growth of this sum that no other place has. If `old` has REST, each place that
    `old` lacks may have been merged into it, with any part of its weight. As the growth of such a place is
    unknown, it counts in REST.
    """
    came = {}
    for place, (ns, samples) in new.items():
        if place not in old and REST in old:
            continue
        before = old.get(place, Weight())
        if ns < before.ns or samples < before.samples:  # merged into REST since, and counted from zero
            before = Weight()
        came[place] = Weight(ns - before.ns, samples - before.samples)
    came.pop(REST, None)
    then, now, known = _total(old), _total(new), _total(came)
    left = Weight(max(now.ns - then.ns - known.ns, 0), max(now.samples - then.samples - known.samples, 0))
    return {**came, REST: left} if left.ns else came


def _total(weights: dict[Place, Weight]) -> Weight:
    return Weight(
        sum(weight.ns for weight in weights.values()), sum(weight.samples for weight in weights.values())
    )


def _merged(weights: Iterable[tuple[Place, Weight]]) -> dict[Place, Weight]:
    """The sum of the weights of each place."""
    sums: dict[Place, Weight] = {}
    for place, (ns, samples) in weights:
        so_far = sums.get(place, Weight())
        sums[place] = Weight(so_far.ns + ns, so_far.samples + samples)
    return sums


def _samples(name: GroupName, group: Group, is_by_waker: bool) -> Iterator[Sample]:
    """The samples of a profile for one group: its blocked time, divided among stacks in proportion to their
    weights, and the time so far of its ongoing waits.

    The sum of the weights is not the blocked time, because only few waits are sampled. The weights give the
    shares of the stacks in the blocked time, which is known exactly.
    """
    labels = {"unit": name.unit, "kind": name.kind}
    reason = Mark(name.kind)

    def sample(frames: tuple[str, ...], *values: int, **more: str) -> Sample:
        return Sample(name.comm, 0, 0, frames, values, {**labels, **more})

    weights = group.weights
    if not is_by_waker:
        weights = _merged((Place(place.stack), weight) for place, weight in weights.items())
    blocked_us = group.blocked_ns // NS_PER_US
    shares = list(_shares(blocked_us, [weight.ns for weight in weights.values()]))
    for (place, weight), share_us in zip(weights.items(), shares, strict=True):
        frames: tuple[str, ...] = (*_frames(place.stack), reason)
        if is_by_waker and place.stack != OTHER_STACKS:
            woken_by = Mark(place.waker) if place.waker else UNSEEN
            frames = (*frames, BETWEEN, *reversed(_functions(place.waker_stack)), woken_by)
            yield sample(frames, share_us, 0, weight.samples, waker=place.waker)
        else:
            yield sample(frames, share_us, 0, weight.samples)
    yield sample((NOT_SAMPLED, reason), blocked_us - sum(shares), 0, 0)
    yield sample((WAITS_NOW, reason), 0, group.waiting_ns // NS_PER_US, 0)


def _shares(total: int, weights: list[int]) -> Iterator[int]:
    """Whole numbers in proportion to the weights, with the sum `total`; zeros if there is no weight."""
    whole, passed, given = max(sum(weights), 1), 0, 0
    for weight in weights:
        passed += weight
        share = total * passed // whole - given
        given += share
        yield share


def _frames(stack: Stack) -> tuple[str, ...]:
    """The frames of a thread that waits, outermost first."""
    if stack == OTHER_STACKS:
        return tuple(map(Mark, stack.user))
    return _functions(stack) or (NO_STACK,)


def _functions(stack: Stack) -> tuple[str, ...]:
    """The functions of a stack as frames, outermost first."""
    return (*reversed(stack.user), *map(KernelFrame, reversed(stack.kernel)))
