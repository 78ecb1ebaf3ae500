"""Tests of sampled releases of locks: their number, their sum, and how many holders are told apart."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from lockd.columns import wide_sums
from lockd.kernel.manifest import Manifest, MapInfo
from lockd.names.client import Resolver
from lockd.names.labels.reasons import Reasons
from lockd.names.protocol import NO_RELEASE, HolderAnswer
from lockd.sample.aggregates.contention import PROGRAMS, ContentionTables
from lockd.sample.aggregates.kernel_locks import NAMELESS_SECONDS, KernelLockAggregates
from lockd.sample.aggregates.lock_holders import (
    HALF_LIFE,
    MOST_HOLDERS,
    MOST_REMEMBERED,
    SERIES_OF_LOCK,
    HoldersOfLock,
    LockHolders,
)
from lockd.sample.locks.releases import (
    MOST_WEIGHT_NS,
    NextLock,
    Release,
    Releases,
    SampleCounts,
    SamplePace,
    causes_of,
    processes_of,
)
from lockd.sample.series.limits import Limits, LineBudget

KINDS = ("lock", "pi", "cond")
WAITER = ("shop.service", "shop")
PER_SECOND = 20
LEAST_NS = 50_000_000
"""A second divided by PER_SECOND, in nanoseconds."""
TICK = 0.05


def sampled(pace: SamplePace, waits_ns: list[int], chance: random.Random) -> tuple[int, int]:
    """Sample these waits as the programs do. Return the number of samples and the sum of their weights."""
    taken = weights = 0
    for waited in waits_ns:
        if waited >= pace.wait_ns or chance.random() < waited / pace.wait_ns:
            taken, weights = taken + 1, weights + max(waited, pace.wait_ns)
    return taken, weights


@pytest.mark.parametrize("waits_per_tick", [1, 100])
@pytest.mark.parametrize("waited_ns", [100_000, 30_000_000, 4_000_000_000])
def test_the_pace_keeps_to_so_many_samples_and_the_sum_is_right(waited_ns: int, waits_per_tick: int) -> None:
    chance, now = random.Random(1), 0.0
    pace = SamplePace(PER_SECOND, now)
    truth = estimate = 0
    bound = 0.0
    settled = []
    for tick in range(1200):
        waits = [waited_ns] * waits_per_tick
        taken, weights = sampled(pace, waits, chance)
        truth, estimate = truth + sum(waits), estimate + weights
        bound += sum(waits) * max(pace.wait_ns - waited_ns, 0)  # the variance of the estimate
        now += TICK
        pace.note(taken, now)
        if tick >= 400:
            settled.append(taken)
    assert abs(estimate - truth) <= 4 * math.sqrt(bound)
    of_waits = waits_per_tick / TICK
    fewest = min(of_waits, waited_ns * of_waits / LEAST_NS, PER_SECOND)
    expected = fewest * len(settled) * TICK
    assert sum(settled) == pytest.approx(expected, rel=0.2, abs=4 * math.sqrt(expected))


def test_a_burst_is_over_within_a_second() -> None:
    pace, now = SamplePace(PER_SECOND, 0.0), 0.0
    for _ in range(20):  # in each tick, as many samples as the ring has room for
        now += TICK
        pace.note(28 if pace.wait_ns < 100 * LEAST_NS else 0, now)
    assert pace.wait_ns >= 64 * LEAST_NS
    for _ in range(400):
        now += TICK
        pace.note(0, now)
    assert pace.wait_ns == LEAST_NS


def release(
    holder: str, weight_ns: int = 1, address: int = 0x10, kind: int = 0, taken: float = 0.0,
    causes: dict[str, int] | None = None,
) -> Release:  # fmt: skip
    """Return a sample of a release. All of its weight is `running`, unless there are other causes."""
    causes = causes or {"running": weight_ns}
    described = {"causes": causes, "holder": holder, "stack": (holder, "main")}
    return Release(7, WAITER, address, kind, False, weight_ns, taken, 0, **described)


def test_what_waits_for_a_name_at_the_end_counts_as_refused() -> None:
    releases = Releases.__new__(Releases)
    SampleCounts.__init__(releases, cast("Any", None), SamplePace(1, 0.0))
    releases._waiting = {1: release("", 5), 2: release("h", 7)}
    releases.refuse_waiting()
    assert releases.refused_here == (2, 12)
    assert not releases.has_waiting


def test_a_release_counts_for_the_name_that_its_process_had() -> None:
    """A process calls exec between two of its waits."""
    before, after = replace(release("h"), process=("", "bash")), replace(release("h"), process=("", "make"))
    processes = processes_of([before, after])
    assert [processes[position] for position in range(2)] == [("", "bash"), ("", "make")]


def rows_of(contention: ContentionTables, named: int, nameless: int = 0) -> np.ndarray:
    """Add `named` locks with names and `nameless` locks without. Return their rows."""
    process = np.empty(1, object)
    process[0] = ("shop.service", "shop")
    keys = np.arange(1, 1 + named + nameless, dtype=np.uint64)
    return contention.locks.find_or_add(
        keys, 1.0, lambda at: {
            "program": PROGRAMS.index("futex"), "kind": "lock", "process": process[0 * at],
            "lock": [f"lock{i}" for i in at], "series_code": [int(i < named) for i in at],
        },
    )  # fmt: skip


def holders_of(top_locks: int = 50) -> tuple[ContentionTables, LockHolders]:
    contention = ContentionTables(lambda tgid, tid: "", 64)
    limits = Limits(top_locks=top_locks)
    budget = LineBudget(limits)
    return contention, LockHolders("futex_lock", KINDS, 2, limits, budget, contention, has_causes=True)


def test_holders_of_a_lock_are_told_apart_up_to_a_number() -> None:
    contention, holders = holders_of()
    (row,) = rows_of(contention, 1)
    weights = {f"site{i}": 1000 << i for i in range(30)}
    for site, weight in weights.items():
        holders.add(np.array([row, row]), [release(site, weight), release(site, weight)], 1.0)
    shown = contention.locks["holders"][row].rows()
    assert [one["site"] for one in shown[:3]] == ["site29", "site28", "site27"]
    assert len(shown) == MOST_HOLDERS + 1
    assert sum(one["seconds"] for one in shown) == pytest.approx(2 * sum(weights.values()) / 1e9)
    assert sum(one["share"] for one in shown) == pytest.approx(1.0)
    assert sum(one["samples"] for one in shown) == 60
    assert shown[0]["stack"] == ["site29", "main"]


def shown_seconds(holders: HoldersOfLock) -> dict[str, float]:
    return {one["site"]: one["seconds"] for one in holders.rows()}


def test_holders_that_come_by_turns_take_the_places_of_old_ones() -> None:
    """Such holders get the places however many others come once and never again."""
    holders = HoldersOfLock()
    for number in range(MOST_HOLDERS):
        holders.add(release(f"old{number}", 60 * 10**9))
    for turn in range(10_000):
        for site in ("new", "newer", f"once{turn}"):
            holders.add(release(site, LEAST_NS))
    shown = shown_seconds(holders)
    assert min(shown["new"], shown["newer"]) > 300
    assert len(shown) == MOST_HOLDERS + 1
    assert sum(shown.values()) == pytest.approx(MOST_HOLDERS * 60 + 30_000 * 0.05)
    assert holders._others.stack == ()
    assert len(holders._merits) == MOST_REMEMBERED


def test_a_holder_of_long_ago_makes_room_sooner() -> None:
    holders = HoldersOfLock()
    for number in range(MOST_HOLDERS):
        holders.add(release(f"old{number}", 60 * 10**9))
    late = release("late", 2 * 10**9)
    for _ in range(5):
        holders.add(late)
    assert "late" not in shown_seconds(holders)
    late.taken = 4 * HALF_LIFE
    for _ in range(5):
        holders.add(late)
    assert shown_seconds(holders)["late"] > 0


@pytest.mark.parametrize("weight_ns", [1000, MOST_WEIGHT_NS])
def test_series_of_holders_are_bounded_and_their_sum_is_whole(weight_ns: int) -> None:
    contention, holders = holders_of(top_locks=2)
    rows = rows_of(contention, 10)
    for row in rows:
        for site in range(6):
            holders.add(np.array([row]), [release(f"site{site}", weight_ns)], 1.0)
    for series in holders.series:
        live, labels = series.live()
        assert len(labels) <= SERIES_OF_LOCK * 2 + 1
        assert ("other", "other", "lock", "other", "other") in labels
        assert sum(wide_sums.to_ints(series["waited_ns"][live])) == 60 * weight_ns


ABSENCE = np.dtype([("nr", "i2"), ("state", "u1"), ("iowait", "u1"), ("detail", "u1"), ("in_kernel", "u1")])
TIMES = np.dtype([("known", "u8"), ("ready", "u8"), ("blocked", "u8"), ("absence", ABSENCE)])
SEEN = np.dtype([("waited", "u8"), ("times", TIMES)])
"""The members of struct release that tell the causes."""
STATES = ("runnable", "interruptible", "uninterruptible", "other")
REASONS = Reasons({"state": STATES}, {"NR_NONE": -1, "NR_KERNEL": -2}, "x86_64")
NANOSLEEP, FSYNC = 35, 74


@pytest.mark.parametrize(
    ("waited", "times", "absence", "causes"),
    [
        (100, (100, 0, 0), (0, 0, 0), {"running": 3000}),
        (100, (100, 20, 50), (NANOSLEEP, 1, 0), {"running": 900, "runqueue": 600, "sleep": 1500}),
        (100, (60, 0, 60), (FSYNC, 2, 1), {"disk": 1800, "unknown": 1200}),
        (100, (0, 0, 0), (0, 0, 0), {"unknown": 3000}),
        (0, (0, 0, 0), (0, 0, 0), {"unknown": 3000}),  # no thread released it
        (90, (100, 0, 100), (NANOSLEEP, 1, 0), {"sleep": 3000}),  # a timeout took a part of `waited` away
        (7, (7, 2, 3), (NANOSLEEP, 1, 0), {"running": 857, "runqueue": 857, "sleep": 1286}),
        (40, (40, 20, 40), (NANOSLEEP, 1, 0), {"runqueue": 1000, "sleep": 2000}),  # read while it was written
    ],
)
def test_a_weight_is_split_by_what_the_holder_did(
    waited: int, times: tuple[int, int, int], absence: tuple[int, int, int], causes: dict[str, int]
) -> None:
    seen = np.array([(waited, (*times, (*absence, 0, 0)))], SEEN)[0]
    assert causes_of(seen, 3000, REASONS) == causes


def test_an_absence_for_a_lock_of_the_kernel_is_a_lock() -> None:
    seen = np.array([(10, (10, 0, 10, (FSYNC, 2, 0, 0, 1)))], SEEN)[0]
    assert causes_of(seen, 10, REASONS) == {"lock": 10}


def test_causes_are_those_of_the_holder() -> None:
    contention, holders = holders_of()
    (row,) = rows_of(contention, 1)
    for site, causes in (("flush", {"disk": 80, "running": 20}), ("count", {"running": 7, "unknown": 3})):
        holders.add(np.array([row]), [release(site, sum(causes.values()), causes=causes)], 1.0)
    shown = {one["site"]: one["causes"] for one in contention.locks["holders"][row].rows()}
    assert shown == {"flush": {"disk": 80e-9, "running": 20e-9}, "count": {"running": 7e-9, "unknown": 3e-9}}
    by_cause = holders.series[1]
    live, labels = by_cause.live()
    waited_ns = wide_sums.to_ints(by_cause["waited_ns"][live])
    waited = dict(zip((one[-1] for one in labels), waited_ns, strict=True))
    assert waited["disk"] == 80
    assert waited["running"] == 27
    assert waited["unknown"] == 3


@pytest.mark.parametrize(
    ("site", "causes"), [(NO_RELEASE, {"unknown": 500}), ("vfs_read", {"lock": 400, "running": 100})]
)
def test_a_thread_that_has_released_nothing_causes_nothing(site: str, causes: dict[str, int]) -> None:
    """The programs take whoever wakes a waiter for the holder. Its stack shows that it is none."""
    one = release("", 500, causes={"lock": 400, "running": 100})
    one.next_lock = NextLock(0, 0x20)
    releases = object.__new__(Releases)
    releases._waiting = {1: one}
    releases.note_answer(HolderAnswer(1, site, (site,)))
    assert releases.take(1.0) == [one]
    assert (one.holder, one.causes) == (site, causes)
    assert bool(one.next_lock) == (site != NO_RELEASE)


def test_a_lock_without_a_name_counts_as_other() -> None:
    contention, holders = holders_of()
    rows = rows_of(contention, 0, 1)
    holders.add(rows, [release("shop:refill", 5)], 1.0)
    holders.add(np.array([-1]), [release("shop:refill", 5)], 1.0)  # this lock has no row either
    by_holder, _ = holders.series
    live, labels = by_holder.live()
    assert labels == [("other", "other", "lock", "other", "other")]
    assert wide_sums.to_ints(by_holder["waited_ns"][live]) == [10]


TYPES = ("mutex", "rwsem_read", "rwsem_write")


def kernel_row(
    contention: ContentionTables, key: int, address: int, kind: int, blocked_ns: int, lock: str,
    process: tuple[str, str] = WAITER,
) -> int:  # fmt: skip
    """Add a row of a kernel lock with waits at some site, and return its number."""
    of_row = np.empty(1, object)
    of_row[0] = process
    (row,) = contention.locks.find_or_add(
        np.array([key], np.uint64), 1.0, lambda at: {
            "program": PROGRAMS.index("kernel_locks"), "address": address, "kind_number": kind,
            "kind": TYPES[kind], "process": of_row[0 * at], "blocked_ns": blocked_ns, "count": 1,
            "lock": lock, "series_code": int(bool(lock)),
        },
    )  # fmt: skip
    return int(row)


def kernel_locks() -> tuple[ContentionTables, KernelLockAggregates]:
    contention, limits = ContentionTables(lambda tgid, tid: "", 64), Limits()
    release = {"names": ["weight"], "formats": ["<u8"], "offsets": [0], "itemsize": 8}
    sample = {"names": ["release"], "formats": [release], "offsets": [0], "itemsize": 8}
    layout = {"names": ["sample"], "formats": [sample], "offsets": [0], "itemsize": 8}
    record = MapInfo("kernel_release_record", 1, "u32", layout)
    manifest = Manifest(0, (), (), (record,), (), {"lock_type": TYPES}, {"SLOTS": 28})
    return contention, KernelLockAggregates(manifest, limits, LineBudget(limits), contention, Resolver())


def test_a_release_of_a_kernel_lock_belongs_to_the_site_with_the_longest_waits() -> None:
    contention, aggregates = kernel_locks()
    assert aggregates.holders
    kernel_row(contention, 1, 0x10, 0, 900, "rarely_asked")
    row = kernel_row(contention, 2, 0x10, 0, 1000, "often_asked")
    kernel_row(contention, 3, 0x10, 0, 9999, "of_others", ("", "other"))
    kernel_row(contention, 4, 0x20, 0, 9999, "another")
    kernel_row(contention, 5, 0x10, 2, 9999, "of_another_type")
    assert aggregates.add_releases([release("vfs_read", 500)], 1.0) == []
    (by_holder,) = aggregates.holders.series
    assert by_holder.live()[1] == [(*WAITER, "mutex", "often_asked", "vfs_read")]
    assert [one["site"] for one in contention.locks["holders"][row].rows()] == ["vfs_read"]


def test_a_release_of_a_kernel_lock_waits_for_the_name_of_the_lock() -> None:
    contention, aggregates = kernel_locks()
    assert aggregates.holders
    early = [release("vfs_read", 500, address) for address in (0x10, 0x20)]
    row = kernel_row(contention, 1, 0x10, 0, 900, "")
    assert aggregates.add_releases(early, 1.0) == early
    contention.locks["lock"][row], contention.locks["series_code"][row] = "big_mutex", 1
    assert aggregates.add_releases(early, 2.0) == early[1:]
    assert aggregates.add_releases(early[1:], NAMELESS_SECONDS) == []
    (by_holder,) = aggregates.holders.series
    live, labels = by_holder.live()
    assert set(labels) == {
        (*WAITER, "mutex", "big_mutex", "vfs_read"),
        ("other", "other", "mutex", "other", "other"),
    }
    assert wide_sums.to_ints(by_holder["waited_ns"][live]) == [500, 500]
