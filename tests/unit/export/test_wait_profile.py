"""Tests of the profile of waits off the CPU, made of blocks that the sampler's own code writes."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from lockd.export.detail import Block, ProfileQuery
from lockd.export.wait_profile import profile_of_waits
from lockd.messages import pack, unpack
from lockd.names.labels.processes import Name
from lockd.names.labels.reasons import REASONS
from lockd.sample.aggregates import wait_stacks as module
from lockd.sample.aggregates.identities import ProcessNames
from lockd.sample.aggregates.wait_stacks import NO_STACK, CallStack, WaitSample, WaitStacks
from lockd.sample.series.label_hash import hash_labels
from lockd.views.profile import Profile, Sample, frame_kind
from tests.support.waiting_threads import table_of_threads

SHOP: Name = ("shop.service", "shop")
READ = CallStack(("read", "load", "main"), ("schedule", "vfs_read"))
WRITE = CallStack(("write", "main"), ("schedule", "vfs_write"))
WAKER = CallStack(("notify", "run"), ("wake_up", "vfs_write"))
READING = ("main", "load", "read", "vfs_read", "schedule")
WRITING = ("main", "write", "vfs_write", "schedule")


class Host:
    """The waits of a host, and the blocks that the sampler writes about them."""

    def __init__(self) -> None:
        self.stacks = WaitStacks()

    def wait(self, us: int, reason: str = "disk", process: Name = SHOP, count: int = 1) -> None:
        """Add `count` waits that took `us` microseconds together."""
        names = np.empty(1, object)
        names[:] = [process]
        self.stacks.count(
            np.array([hash_labels(process)], np.uint64),
            ProcessNames(names, np.array([0])),
            np.array([list(REASONS).index(reason)]),
            np.array([us * 1000]),
            np.array([count]),
        )

    def sample(
        self, us: int, stack: CallStack = READ, reason: str = "disk", process: Name = SHOP,
        waker: str = "kswapd0", waker_stack: CallStack = WAKER,
    ) -> None:  # fmt: skip
        """Add a sample of a wait with a weight of `us` microseconds."""
        self.stacks.add([WaitSample(process, reason, us * 1000, stack, waker, waker_stack)])

    def block(self, second: float = 0.0, **waiting: list[int]) -> Block:
        """Return the block at that second.

        `waiting` has how long threads of SHOP have waited so far, in us, by reason.
        """
        head, arrays = self.stacks.block(
            table_of_threads(
                *[("offcpu", SHOP, reason, us * 1000) for reason, waits in waiting.items() for us in waits]
            )
        )
        about = {"time": 1.7e9 + second, "monotonic": second}
        return unpack(memoryview(pack({**head, **about}, arrays)))


def profile(later: Block, earlier: Block | None = None, **arguments: str) -> Profile:
    query = ProfileQuery("offcpu", {name: [value.encode()] for name, value in arguments.items()})
    return profile_of_waits(query, later, earlier)


def values(found: Profile) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return blocked us, waiting us and samples, by process and frames."""
    by_frames = {(one.comm, *one.frames): one.values for one in found.samples}
    assert len(by_frames) == len(found.samples)
    return by_frames


def sums(found: Profile) -> Counter[tuple[str, str, str]]:
    """Return the blocked time of each group, in microseconds."""
    times: Counter[tuple[str, str, str]] = Counter()
    for one in found.samples:
        times[one.labels["unit"], one.comm, one.labels["kind"]] += one.values[0]
    return times


def test_the_time_of_a_group_is_divided_as_its_samples_are() -> None:
    host = Host()
    host.wait(1000)
    host.sample(600)
    # The samples weigh 1,200 us together: weights are estimates, only their shares count.
    host.sample(150, waker="shop")
    host.sample(450, WRITE)
    host.wait(77, "poll")
    found = profile(host.block(3.0, disk=[40]))
    assert [(value.name, value.unit) for value in found.values] == [
        ("blocked", "microseconds"), ("waiting", "microseconds"), ("samples", "count")
    ]  # fmt: skip
    assert (found.title, found.began, found.seconds) == ("lockd offcpu", 1.7e9 + 3, 0.0)
    assert values(found) == {
        ("shop", *READING, "disk"): (625, 0, 2),
        ("shop", *WRITING, "disk"): (375, 0, 1),
        ("shop", "[waits now]", "disk"): (0, 40, 0),
        ("shop", "[not sampled]", "poll"): (77, 0, 0),
    }
    one = found.samples[0]
    assert one.labels == {"unit": "shop.service", "kind": "disk"}
    assert (one.pid, one.tid) == (0, 0)
    assert list(map(frame_kind, one.frames)) == ["user"] * 3 + ["kernel"] * 2 + ["mark"]
    kinds = {frame_kind(frame) for one in found.samples[2:] for frame in one.frames}
    assert kinds == {"mark"}


def by_waker(host: Host) -> dict[tuple[str, ...], Sample]:
    return {one.frames: one for one in profile(host.block(), by="waker").samples}


def test_the_stack_of_the_waker_is_upside_down() -> None:
    host = Host()
    host.wait(1000)
    host.sample(300)
    host.sample(300, waker="shop")
    host.sample(200, waker="irq", waker_stack=NO_STACK)
    host.sample(200, waker="", waker_stack=NO_STACK)
    waking = ("wake_up", "vfs_write", "notify", "run")
    found = by_waker(host)
    begin = (*READING, "disk", "--")
    assert {frames: one.values for frames, one in found.items()} == {
        (*begin, *waking, "kswapd0"): (300, 0, 1),
        (*begin, *waking, "shop"): (300, 0, 1),
        (*begin, "irq"): (200, 0, 1),
        (*begin, "[unknown]"): (200, 0, 1),
    }
    one = found[(*begin, *waking, "kswapd0")]
    assert one.labels == {"unit": "shop.service", "kind": "disk", "waker": "kswapd0"}
    assert list(map(frame_kind, one.frames)) == [
        *["user"] * 3, *["kernel"] * 2, "mark", "mark", *["kernel"] * 2, *["user"] * 2, "mark"
    ]  # fmt: skip


def test_a_thread_without_a_stack() -> None:
    host = Host()
    host.wait(10)
    host.sample(1, NO_STACK)
    assert values(profile(host.block())) == {("shop", "[no stack]", "disk"): (10, 0, 1)}


def test_stacks_for_which_there_was_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks without room share one sample, and their wakers are not known either."""
    monkeypatch.setattr(module, "MOST_SENT", 1)
    host = Host()
    host.wait(1000)
    host.sample(600)
    host.sample(250, WRITE)
    host.sample(150, NO_STACK)
    assert values(profile(host.block()))["shop", "[other stacks]", "disk"] == (400, 0, 2)
    assert by_waker(host)["[other stacks]", "disk"].values == (400, 0, 2)
    kinds = {frame_kind(frame) for frame in profile(host.block()).samples[1].frames}
    assert kinds == {"mark"}


@pytest.mark.parametrize("by", ["waiter", "waker"])
def test_the_time_of_each_group_is_exact(by: str) -> None:
    """The time is exact whatever the weights are, and however many stacks share a microsecond."""
    chance = random.Random(3)
    host, truth = Host(), Counter[tuple[str, str, str]]()
    for number in range(40):
        process = (f"unit{number}", "sh")
        us = chance.choice([0, 1, 3, 1000, 10**9])
        host.wait(us, "poll", process)
        truth[(*process, "poll")] += us
        for function in range(chance.randrange(30)):
            stack = CallStack((f"f{function % 20}",), ())
            host.sample(chance.randrange(1, 10**7), stack, "poll", process, f"waker{function % 3}")
    found = profile(host.block(), by=by)
    assert +sums(found) == +truth
    assert all(value >= 0 for one in found.samples for value in one.values)


def test_filters() -> None:
    host = Host()
    others: list[Name] = [("db.service", "db"), ("shop.service", "cron")]
    for process in (SHOP, *others):
        for reason in ("disk", "poll"):
            host.wait(10, reason, process)
    block = host.block()
    assert len(profile(block).samples) == 6
    assert len(profile(block, unit="shop.service").samples) == 4
    assert sums(profile(block, unit="shop.service", comm="cron", kind="poll")) == {(*others[1], "poll"): 10}
    assert profile(block, kind="lock").samples == []


def test_a_difference_has_only_what_came_in_between() -> None:
    host = Host()
    host.wait(1000)
    host.sample(900)
    host.sample(100, WRITE)
    host.wait(5, "poll")
    before = host.block(10.0)
    host.wait(200)
    host.sample(30)
    host.sample(90, WRITE)
    host.sample(120, NO_STACK)
    host.wait(50, "sleep")
    found = profile(host.block(12.5), before)
    assert (found.began, found.seconds) == (1.7e9 + 10, 2.5)
    assert values(found) == {
        ("shop", *READING, "disk"): (25, 0, 1),
        ("shop", *WRITING, "disk"): (75, 0, 1),
        ("shop", "[no stack]", "disk"): (100, 0, 1),
        ("shop", "[not sampled]", "sleep"): (50, 0, 0),
    }


def test_time_to_which_no_sample_came_is_not_sampled() -> None:
    """The samples of earlier waits tell nothing about the stacks of later ones."""
    host = Host()
    host.wait(1000)
    host.sample(900)
    before = host.block()
    host.wait(40)
    assert values(profile(host.block(1.0), before)) == {("shop", "[not sampled]", "disk"): (40, 0, 0)}


def test_each_thread_that_waits_now_waited_no_longer_than_the_time_between() -> None:
    """Idle and busy threads of a process may be in one group: each counts with its own time."""
    host = Host()
    host.wait(10)
    hour = 3600 * 10**6
    before = host.block(0.0, poll=[3 * hour], sleep=[hour] * 3)
    later = host.block(2.0, poll=[1000, 3 * hour, 1000], sleep=[hour] * 3, disk=[1500])
    assert values(profile(later, before)) == {
        ("shop", "[waits now]", "poll"): (0, 2_002_000, 0),
        ("shop", "[waits now]", "sleep"): (0, 6 * 10**6, 0),
        ("shop", "[waits now]", "disk"): (0, 1500, 0),
    }
    assert values(profile(later))["shop", "[waits now]", "poll"] == (0, 3 * hour + 2000, 0)


def test_a_group_that_was_forgotten_in_between_counts_from_zero() -> None:
    host = Host()
    host.wait(1000)
    host.sample(900)
    before = host.block()
    again = Host()
    again.wait(30)
    again.sample(7, WRITE)
    assert values(profile(again.block(1.0), before)) == {("shop", *WRITING, "disk"): (30, 0, 1)}


def test_what_was_added_to_others_in_between_is_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GROUPS", 8)
    monkeypatch.setattr(module, "KEPT_GROUPS", 6)
    host = Host()
    for number in range(8):
        host.wait(1000, process=(f"unit{number}", "sh"))
        host.sample(500, process=(f"unit{number}", "sh"))
    before = host.block()
    for number in range(8, 13):
        host.wait(40, process=(f"unit{number}", "sh"))
    host.wait(3, process=("unit0", "sh"))  # unit0 was added to the others, and comes back
    later = host.block(1.0)
    assert ["other", "other"] in [group[:2] for group in later[0]["groups"]]
    found = profile(later, before)
    assert sum(one.values[0] for one in found.samples) == 5 * 40 + 3
    assert sum(one.values[2] for one in found.samples) == 0
    assert sums(found)["unit0", "sh", "disk"] == 3
    assert not any("main" in one.frames for one in found.samples)


def test_stacks_that_were_merged_in_between_are_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged weights must not count as new: a wait of a second, sampled long ago, would hide the latest."""
    monkeypatch.setattr(module, "MOST_STACKS", 8)
    host = Host()
    host.wait(10**7)
    light = [CallStack((f"f{number}",), ()) for number in range(8)]
    for stack in light[:4]:
        host.sample(10**6, stack)
    for stack in light[4:]:
        host.sample(10**6 + 1, stack)
    before = host.block()
    host.wait(100)
    host.sample(24 * 10**5, WRITE)  # one stack more than there may be: light ones are merged
    host.sample(8 * 10**5, light[0])  # this stack was merged, and is not known any more
    later = host.block(1.0)
    assert "f1" not in later[0]["functions"]
    assert values(profile(later, before)) == {
        ("shop", *WRITING, "disk"): (75, 0, 1),
        ("shop", "f0", "disk"): (25, 0, 1),
    }


def test_new_samples_among_those_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SENT", 1)
    host = Host()
    host.wait(10**6)
    host.sample(900_000)
    host.sample(5000, WRITE)
    before = host.block()
    host.wait(100)
    host.sample(60)
    host.sample(40, WRITE)
    assert values(profile(host.block(1.0), before)) == {
        ("shop", *READING, "disk"): (60, 0, 1),
        ("shop", "[other stacks]", "disk"): (40, 0, 1),
    }


def test_a_stack_that_finds_room_does_not_come_with_what_it_weighed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows how much of the stack's weight was in the other stacks: all that came counts as theirs."""
    monkeypatch.setattr(module, "MOST_SENT", 1)
    host = Host()
    host.wait(10**6)
    host.sample(900_000)
    host.sample(899_000, WRITE)
    before = host.block()
    host.wait(100)
    host.sample(2500, WRITE)  # this stack is the heaviest now
    host.sample(500)
    later = host.block(1.0)
    assert {("shop", *WRITING, "disk"), ("shop", "[other stacks]", "disk")} == set(values(profile(later)))
    assert values(profile(later, before)) == {("shop", "[other stacks]", "disk"): (100, 0, 2)}


def test_what_came_is_neither_more_nor_less_than_what_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are exact whichever stacks find room, lose it, or are merged for good."""
    monkeypatch.setattr(module, "MOST_SENT", 5)
    monkeypatch.setattr(module, "MOST_STACKS", 12)
    chance, host = random.Random(5), Host()
    before = host.block()
    for second in range(1, 200):
        came = chance.randrange(8)
        for _ in range(came):
            host.wait(10)
            host.sample(chance.randrange(1, 1000), CallStack((f"f{chance.randrange(20)}",), ()))
        later = host.block(float(second))
        found = profile(later, before).samples
        assert sum(one.values[0] for one in found) == 10 * came
        assert sum(one.values[2] for one in found) == came
        assert min((value for one in found for value in one.values), default=0) >= 0
        before = later


def test_two_equal_blocks_have_no_difference() -> None:
    host = Host()
    host.wait(1000)
    host.sample(900)
    assert profile(host.block(), host.block()).samples == []
