"""Tests of stacks of waits off the CPU: exact times by process and reason, samples in bounded memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lockd.columns.table import Table
from lockd.names.labels.processes import Name
from lockd.names.labels.reasons import REASONS
from lockd.sample.aggregates import wait_stacks as module
from lockd.sample.aggregates.identities import ProcessNames
from lockd.sample.aggregates.wait_stacks import (
    NO_STACK,
    OTHER_STACKS,
    CallStack,
    WaitSample,
    WaitStacks,
)
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.series import OTHER
from tests.support.busy_host import NR_READ, NR_SLEEP, NR_WAIT, BusyHost, Process
from tests.support.waiting_threads import table_of_threads

SHOP: Name = ("shop.service", "shop")
NUMBERS = {reason: number for number, reason in enumerate(REASONS)}
READ = CallStack(("read", "load", "main"), ("schedule", "vfs_read"))
WRITE = CallStack(("write", "save", "main"), ("schedule", "vfs_write"))
WAKER = CallStack(("notify", "run"), ("try_to_wake_up",))

Group = tuple[str, str, str]


class Seen(NamedTuple):
    """A sample of a block, with names in place of numbers."""

    group: Group
    stack: CallStack
    waker: str
    waker_stack: CallStack
    weight_ns: int
    samples: int


def count(stacks: WaitStacks, waits: Iterable[tuple[Name, str, int, int]]) -> None:
    """Count one window, whose rows are process, reason, blocked time in ns, and number of waits."""
    names, reasons, blocked_ns, counts = zip(*waits, strict=True)
    distinct = list(dict.fromkeys(names))
    table = np.empty(len(distinct), object)
    table[:] = distinct
    stacks.count(
        np.array([hash_labels(name) for name in names], np.uint64),
        ProcessNames(table, np.array([distinct.index(name) for name in names])),
        np.array([NUMBERS[reason] for reason in reasons]),
        np.array(blocked_ns, np.uint64),
        np.array(counts, np.uint64),
    )


def sample(
    stack: CallStack,
    weight_ns: int = 1000,
    process: Name = SHOP,
    reason: str = "disk",
    waker: str = "kswapd0",
) -> WaitSample:
    return WaitSample(process, reason, weight_ns, stack, waker, WAKER)


def block(stacks: WaitStacks, threads: Table | None = None) -> dict[str, Any]:
    head, arrays = stacks.block(threads or table_of_threads())
    read: dict[str, Any] = json.loads(json.dumps(head))
    assert len(arrays["waiting_ns"]) == sum(waiting for *_, waiting in read["groups"])
    return read


def groups(head: dict[str, Any]) -> dict[Group, list[int]]:
    """Blocked ns, count and number of waiting threads of each group."""
    found = {(unit, comm, reason): numbers for unit, comm, reason, *numbers in head["groups"]}
    assert len(found) == len(head["groups"])
    return found


def samples(head: dict[str, Any]) -> list[Seen]:
    stacks = [
        CallStack(*(tuple(head["functions"][number] for number in names) for names in stack))
        for stack in head["stacks"]
    ]
    assert len(set(stacks)) == len(stacks)
    assert len(set(head["functions"])) == len(head["functions"])
    return [
        Seen(tuple(head["groups"][group][:3]), stacks[stack], waker, stacks[waker_stack], *weight)
        for group, stack, waker, waker_stack, *weight in head["samples"]
    ]


def weights(head: dict[str, Any]) -> Counter[Group]:
    sums: Counter[Group] = Counter()
    for one in samples(head):
        sums[one.group] += one.weight_ns
    return sums


def test_times_and_counts_are_exact() -> None:
    chance = random.Random(1)
    stacks, truth = WaitStacks(), dict[Group, list[int]]()
    names = [(f"unit{number % 7}", f"comm{number}") for number in range(30)]
    for _ in range(20):
        rows = [
            (
                chance.choice(names),
                chance.choice(list(REASONS)),
                chance.randrange(10**12),
                chance.randrange(9),
            )
            for _ in range(chance.randrange(1, 400))
        ]
        count(stacks, rows)
        for name, reason, blocked_ns, waits in rows:
            group = truth.setdefault((*name, reason), [0, 0, 0])
            group[0] += blocked_ns
            group[1] += waits
    assert groups(block(stacks)) == truth
    assert stacks.waits == sum(waits for _, waits, _ in truth.values())


def test_every_wait_of_the_program_is_counted(tmp_path: Path) -> None:
    host = BusyHost(tmp_path)
    processes = [
        Process(7, *SHOP, calls=(NR_READ, NR_SLEEP)),
        Process(8, "db.service", "db", calls=(NR_SLEEP,)),
        Process(9, "db.service", "db", calls=(NR_SLEEP, NR_WAIT)),
    ]
    for _ in range(3):
        host.step(processes[:2], processes[2:])
    found = groups(block(host.offcpu.stacks))
    assert sum(blocked_ns for blocked_ns, *_ in found.values()) == host.truth["offcpu_ns"] > 0
    assert sum(waits for _, waits, *_ in found.values()) == host.truth["offcpu"]
    assert {(group[:2], waits) for group, (_, waits, *_) in found.items() if group[2] == "sleep"} == {
        (SHOP, 3 * 4), (("db.service", "db"), 2 * 3 * 4)
    }  # fmt: skip


def test_nothing_at_all() -> None:
    stacks = WaitStacks()
    stacks.add([])
    assert block(stacks) == {"functions": [], "stacks": [], "groups": [], "samples": []}


def test_samples_of_one_stack_and_waker_are_one() -> None:
    stacks = WaitStacks()
    count(stacks, [(SHOP, "disk", 5000, 9)])
    stacks.add([sample(READ, 1000), sample(WRITE, 4000), sample(READ, 2000)])
    stacks.add([sample(READ, 500, waker="rcu_preempt"), sample(READ, 10, reason="pipe")])
    head = block(stacks)
    disk, pipe = (*SHOP, "disk"), (*SHOP, "pipe")
    assert samples(head) == [
        Seen(disk, WRITE, "kswapd0", WAKER, 4000, 1),
        Seen(disk, READ, "kswapd0", WAKER, 3000, 2),
        Seen(disk, READ, "rcu_preempt", WAKER, 500, 1),
        Seen(pipe, READ, "kswapd0", WAKER, 10, 1),
    ]
    assert groups(head) == {disk: [5000, 9, 0], pipe: [0, 0, 0]}


def test_the_waits_that_go_on_are_those_of_the_threads() -> None:
    stacks = WaitStacks()
    count(stacks, [(SHOP, "disk", 1, 1), (SHOP, "sleep", 5000, 9)])
    init = ("init.scope", "systemd")
    threads = table_of_threads(
        ("offcpu", init, "poll", 10**15), ("offcpu", SHOP, "sleep", 700), ("offcpu", SHOP, "sleep", 30),
        ("offcpu", SHOP, "sleep", 0), ("futex", SHOP, "lock", 900), ("offcpu", init, "child", 0),
    )  # fmt: skip
    assert groups(block(stacks, threads)) == {
        (*SHOP, "disk"): [1, 1, 0],
        (*SHOP, "sleep"): [5000, 9, 2],
        (*init, "poll"): [0, 0, 1],
    }
    assert stacks.block(threads)[1]["waiting_ns"].tolist() == [700, 30, 10**15]


def test_each_of_many_waits_that_go_on_takes_few_bytes() -> None:
    """A host may have 100,000 waiting threads: most of them idle, and all in few groups."""
    threads = table_of_threads(*[("offcpu", SHOP, "poll", 10**12 + number) for number in range(20_000)])
    head, arrays = WaitStacks().block(threads)
    assert head["groups"] == [[*SHOP, "poll", 0, 0, 20_000]]
    assert len(json.dumps(head)) < 200
    assert len(arrays["waiting_ns"].tobytes()) == 8 * 20_000


def test_groups_that_had_no_waits_for_longest_count_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GROUPS", 8)
    monkeypatch.setattr(module, "KEPT_GROUPS", 6)
    stacks = WaitStacks()
    count(stacks, [((OTHER, OTHER), "disk", 7, 1)])  # from an overflow map
    truth: Counter[str] = Counter(disk=7)
    for number in range(100):
        reason = ("disk", "sleep")[number % 2]
        of_one = (f"run-{number}.scope", "sh")
        count(stacks, [(of_one, reason, 10 + number, 2), (SHOP, "disk", 1000, 1)])
        stacks.add([sample(READ, 10 + number, of_one, reason)])
        truth[reason] += 10 + number
        truth["disk"] += 1000
    head = block(stacks)
    found = groups(head)
    assert found[(*SHOP, "disk")] == [100_000, 100, 0]
    assert found["run-99.scope", "sh", "sleep"] == [109, 2, 0]
    assert {(OTHER, OTHER, "disk"), (OTHER, OTHER, "sleep")} < found.keys()
    assert len(found) <= 8 + 2
    sums: Counter[str] = Counter()
    for (_, _, reason), (blocked_ns, *_) in found.items():
        sums[reason] += blocked_ns
    assert sums == truth
    assert sum(waits for _, waits, *_ in found.values()) == 301
    # The samples have been added to `other` with their groups.
    assert {one.stack for one in samples(head)} == {READ}
    for group, weight_ns in weights(head).items():
        assert weight_ns == found[group][0] - (7 if group == (OTHER, OTHER, "disk") else 0)


def test_more_groups_at_a_time_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups that waited longest stay."""
    monkeypatch.setattr(module, "MOST_GROUPS", 8)
    monkeypatch.setattr(module, "KEPT_GROUPS", 6)
    stacks = WaitStacks()
    count(stacks, [((f"unit{number}", "sh"), "poll", number, 1) for number in range(1000)])
    found = groups(block(stacks))
    assert found.pop((OTHER, OTHER, "poll")) == [sum(range(994)), 994, 0]
    assert {unit for unit, _, _ in found} == {f"unit{number}" for number in range(994, 1000)}


def test_memory_is_bounded_and_weights_are_kept() -> None:
    """Many stacks occur once each, and one occurs now and then."""
    chance = random.Random(2)
    truth: Counter[Group] = Counter()
    wanted: Counter[Group] = Counter()
    stacks = WaitStacks()

    def next_sample(number: int) -> WaitSample:
        process = (f"unit{number % 50}", "sh")
        is_known = number % 500 == 0
        names = tuple(f"function_{chance.randrange(10**5)}" for _ in range(8))
        stack = READ if is_known else CallStack((*names, f"once_{number}"), READ.kernel)
        weight_ns = chance.randrange(1, 10**6)
        truth[(*process, "disk")] += weight_ns
        if is_known:
            wanted[(*process, "disk")] += weight_ns
        return sample(stack, weight_ns, process)

    tracemalloc.start()
    try:
        for first in range(0, 100_000, 1000):
            stacks.add([next_sample(number) for number in range(first, first + 1000)])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The memory is for 20,000 stacks of 9 functions, and for the functions, most of which are still used.
    assert held < 25e6
    head = block(stacks)
    assert len(samples(head)) <= module.MOST_SENT + 50
    assert weights(head) == truth
    assert sum(one.samples for one in samples(head)) == 100_000
    assert {one.group: one.weight_ns for one in samples(head) if one.stack == READ} == wanted
    others = [one for one in samples(head) if one.stack == OTHER_STACKS]
    assert {one.group for one in others} == truth.keys()
    assert {(one.waker, one.waker_stack) for one in others} == {("", NO_STACK)}


def test_equal_stacks_share_memory() -> None:
    """Equal stacks come as different objects, because messages are decoded one by one."""
    stacks = WaitStacks()

    def stack(name: str) -> CallStack:
        return CallStack(tuple(f"{name}_{number}" for number in range(100)), ())

    tracemalloc.start()
    try:
        for number in range(5000):
            one = sample(stack("wait"), waker=f"waker{number}")
            stacks.add([one._replace(waker_stack=stack("wake"))])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(block(stacks)["samples"]) == 5000
    # Without that, the pointers of each sample to its functions would take 2 * 100 * 8 bytes, 8 MB in all.
    assert held < 5e6


def test_the_lightest_stacks_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SENT", 3)
    stacks = WaitStacks()
    other: Name = ("db.service", "db")
    light = [CallStack((f"f{number}",), ()) for number in range(6)]
    stacks.add([sample(READ, 100), sample(WRITE, 90), sample(READ, 80, other)])
    stacks.add([sample(stack, number + 1) for number, stack in enumerate(light[:4])])
    stacks.add([sample(light[4], 60, other)])
    head = block(stacks)
    disk, of_other = (*SHOP, "disk"), (*other, "disk")
    assert samples(head) == [
        Seen(disk, READ, "kswapd0", WAKER, 100, 1),
        Seen(disk, WRITE, "kswapd0", WAKER, 90, 1),
        Seen(of_other, READ, "kswapd0", WAKER, 80, 1),
        Seen(of_other, OTHER_STACKS, "", NO_STACK, 60, 1),
        Seen(disk, OTHER_STACKS, "", NO_STACK, 1 + 2 + 3 + 4, 4),
    ]
    assert "f0" not in head["functions"]


def test_what_is_merged_and_what_is_not_sent_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STACKS", 10)
    monkeypatch.setattr(module, "MOST_SENT", 2)
    stacks = WaitStacks()
    stacks.add([sample(CallStack((f"f{number}",), ()), 100 + number) for number in range(15)])
    found = samples(block(stacks))
    assert [(one.stack.user, one.weight_ns) for one in found] == [
        (OTHER_STACKS.user, sum(range(100, 114))), (("f14",), 114)
    ]  # fmt: skip
