"""Tests of chains of locks: each ends at the code that causes the waits, and no time is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest

from lockd.columns.table import Table
from lockd.sample.aggregates import bottlenecks
from lockd.sample.aggregates.bottlenecks import (
    LEAST_SHARE,
    MOST_LOCKS,
    Bottleneck,
    bottlenecks_table,
    find_bottlenecks,
)
from lockd.sample.aggregates.contention import PROGRAMS, ContentionTables
from lockd.sample.aggregates.lock_holders import MOST_NEXT, HoldersOfLock
from lockd.sample.locks.releases import LOCK, NextLock, Release

SHOP = ("shop.service", "shop")
TGID = 7
Did = dict[str | int, int]
"""What a holder did: nanoseconds by cause. A number stands for the lock for which the holder waited."""


def locks_of(*held: dict[str, Did]) -> Table:
    """Return a table of locks, each with what its holders did, by site. The address of lock i is i + 1."""
    locks = ContentionTables(lambda tgid, tid: "", 64).locks
    process = np.empty(1, object)
    process[0] = SHOP
    rows = locks.find_or_add(
        np.arange(1, 1 + len(held), dtype=np.uint64), 1.0, lambda at: {
            "program": PROGRAMS.index("futex"), "kind": "lock", "process": process[0 * at], "tgid": TGID,
            "address": at.astype(np.uint64) + 1, "lock": [f"lock{i}" for i in at],
        },
    )  # fmt: skip
    for row, sites in zip(rows.tolist(), held, strict=True):
        locks["holders"][row] = holders = HoldersOfLock()
        for site, did in sites.items():
            for cause, ns in did.items():
                release = Release(TGID, SHOP, 0, 0, False, ns, 0.0, 0, {str(cause): ns}, holder=site)
                if isinstance(cause, int):
                    release.causes, release.next_lock = {LOCK: ns}, NextLock(TGID, cause + 1)
                holders.add(release)
    return locks


def ends_of(locks: Table) -> dict[tuple[str, str], float]:
    """Return the nanoseconds by cause and by the code at which chains end."""
    found: dict[tuple[str, str], float] = {}
    for one in find_bottlenecks(locks):
        found[one.end.site, one.cause] = found.get((one.end.site, one.cause), 0.0) + one.waited_ns
    return found


def test_what_a_holder_waits_for_another_lock_goes_to_the_holders_of_that() -> None:
    locks = locks_of(
        {"buy": {1: 800, "running": 200}}, {"flush": {"disk": 300, "running": 100}, "count": {"running": 100}}
    )
    assert ends_of(locks) == pytest.approx(
        {
            ("buy", "running"): 200,
            ("flush", "disk"): 300 + 800 * 3 / 5,
            ("flush", "running"): 100 + 800 / 5,
            ("count", "running"): 100 + 800 / 5,
        }
    )
    first: Bottleneck = find_bottlenecks(locks)[0]
    assert {tuple(link.site for link in chain) for chain in first.chains} == {("buy", "flush"), ("flush",)}


def test_a_ring_of_locks_and_a_lock_that_is_not_known_end_a_chain() -> None:
    locks = locks_of({"a": {1: 100}}, {"b": {0: 60, 99: 40}})
    assert ends_of(locks) == pytest.approx({("b", LOCK): 100 + 40, ("a", LOCK): 60})


def test_a_chain_has_a_bound() -> None:
    depth = MOST_LOCKS + 3
    locks = locks_of(*({f"f{i}": {i + 1: 100}} for i in range(depth - 1)), {"end": {"sleep": 100}})
    longest = max(len(chain) for one in find_bottlenecks(locks) for chain in one.chains)
    assert longest == MOST_LOCKS
    assert sum(ends_of(locks).values()) == pytest.approx(100 * depth)


def test_locks_that_all_wait_for_each_other_are_followed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    count = MOST_NEXT + 1
    locks = locks_of(*({f"f{i}": {j: 100 for j in range(count) if j != i}} for i in range(count)))
    assert LEAST_SHARE < 1 / MOST_NEXT**2, "the chains are of three locks"
    for most in (20, 20_000):
        monkeypatch.setattr(bottlenecks, "MOST_STEPS", most)
        graph = bottlenecks.LockGraph(locks)
        ends = [end for row in graph.rows for end in graph.ends(row)]
        assert sum(share for _, _, share in ends) == pytest.approx(count)
        assert min(most, count * MOST_NEXT * MOST_NEXT) <= graph.steps <= most


@pytest.mark.parametrize("waited_ns", [1, 10_000])
def test_locks_that_need_all_steps_leave_some_to_other_processes(
    waited_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = MOST_NEXT + 1
    tangled = [{f"f{i}": {j: 100 for j in range(count) if j != i}} for i in range(count)]
    locks = locks_of(*tangled, {"few": {count + 1: waited_ns}}, {"end": {"disk": 5}})
    monkeypatch.setattr(bottlenecks, "MOST_STEPS", 3 * count)
    assert ends_of(locks)["end", "disk"] == waited_ns + 5
    assert sum(ends_of(locks).values()) == pytest.approx(100 * count * MOST_NEXT + waited_ns + 5)


def test_a_unit_with_few_waits_is_shown_beside_one_with_many_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chain leads to a lock that is not among those with the longest waits."""
    locks = locks_of(*({"all": {"running": 100}} for _ in range(20)), {"few": {21: 10}}, {"end": {"disk": 5}})
    small = np.empty(2, object)
    small[:] = [("small.service", "small")] * 2
    locks["process"][np.array([20, 21])] = small
    monkeypatch.setattr(bottlenecks, "MOST_FOLLOWED", 10)
    monkeypatch.setattr(bottlenecks, "SHOWN", 10)
    table = bottlenecks_table(locks, {})
    assert table["text"]["unit"] == ["shop.service"] * 8 + ["small.service"]
    assert (table["text"]["holder"][-1], table["text"]["cause"][-1]) == ("end", "disk")


def test_a_holder_that_waits_for_many_locks_knows_some_of_them() -> None:
    many = 3 * MOST_NEXT
    locks = locks_of({"all": {99 + i: 10 for i in range(many)}})
    (held,) = locks["holders"][0]._by_site.values()
    assert len(held.next_locks) == MOST_NEXT
    assert ends_of(locks) == {("all", LOCK): 10 * many}


def test_the_table_has_the_share_of_the_unit() -> None:
    arrays: dict[str, np.ndarray] = {}
    table = bottlenecks_table(locks_of({"buy": {1: 100}}, {"flush": {"disk": 300}}), arrays)
    assert table["text"] == {
        "unit": ["shop.service"], "comm": ["shop"], "lock": ["lock1"], "kind": ["lock"], "holder": ["flush"],
        "cause": ["disk"],
    }  # fmt: skip
    assert arrays["bottlenecks.share"].tolist() == [1.0]
    assert arrays["bottlenecks.seconds"].tolist() == pytest.approx([400e-9])
    (chains,) = table["lists"]["chains"]
    assert [[link["lock"] for link in chain["locks"]] for chain in chains] == [["lock1"], ["lock0", "lock1"]]
