"""Tests of holds of kernel locks, from what programs count to what is exported: totals, names, series."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from lockd.process.clock import NS
from lockd.sample.aggregates.identities import Filter
from lockd.sample.series.limits import Limits
from lockd.sample.series.ranking import Presence
from tests.support.kernel_hold_host import LOCK, NAMES, READ, SEMAPHORE, SHOP, US, Entry, Host, entry
from tests.support.small_procfs import Procfs


def test_acquisitions_and_holds_by_process_and_type(host: Host) -> None:
    host.fold(
        entry(7, acquired=3, held=3_000),
        entry(7, acquired=5),
        entry(8, tgid=7, lock=LOCK + 64, acquired=0, held=4 * US),
        entry(7, lock_type=READ, held=1_500_000_000),
        entry(9, comm=b"other one", held=1),
    )
    host.fold(entry(7, held=3_000))
    values, buckets = host.exported()
    assert values["acquired"] == {SHOP: 9, ("", "shop", "rwsem_read"): 1, ("", "other one", "mutex"): 1}
    assert values["holds"] == {SHOP: 3, ("", "shop", "rwsem_read"): 1, ("", "other one", "mutex"): 1}
    assert values["held"][SHOP] == pytest.approx(10e-6)
    assert values["held"]["", "shop", "rwsem_read"] == pytest.approx(1.5)
    edges = [*host.limits.buckets_us, float("inf")]
    assert buckets[SHOP][edges.index(4)] == 3
    assert buckets["", "shop", "rwsem_read"][edges.index(4**11)] == 1
    assert buckets["", "other one", "mutex"][edges.index(1)] == 1


def test_what_a_full_map_lost_the_names_of_is_other(host: Host) -> None:
    host.fold(entry(0, lock=0, acquired=10, held=5, comm=b"", cgroup=0), overflowed=True)
    values, _ = host.exported()
    assert values["acquired"] == {("other", "other", "mutex"): 10}
    assert values["holds"] == {("other", "other", "mutex"): 1}
    assert host.api() == []


def test_processes_that_are_not_wanted(procfs: Procfs) -> None:
    procfs.add(9, b"shop")
    host = Host(procfs.root, wanted=Filter(comms=["shop"]))
    host.fold(entry(7), entry(8, comm=b"other one"))
    host.look(host.held(9, 5.0, asked=True), host.held(8, 5.0, asked=True, lock=LOCK + 64))
    assert host.acquired() == {SHOP: 2}
    assert [(row["comm"], row["holding_tid"]) for row in host.api()] == [("shop", 9)]


# --- Released by another thread -------------------------------------------------------------------


def released_by_another(tid: int, tgid: int, **about: Any) -> Entry:
    """Return an entry of a hold that another thread ended: the program knows only the holder's ids."""
    return entry(tid, tgid=tgid, comm=b"", cgroup=0, **about)


def test_a_hold_that_another_thread_ended_is_its_holders(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop", cgroup=b"4:memory:/system.slice/a.service\n")
    procfs.add(70, b"kworker/3:1", is_kernel=True)
    host.fold(
        released_by_another(8, 7, lock_type=SEMAPHORE, acquired=0, held=10),
        released_by_another(70, 70, lock_type=SEMAPHORE, acquired=0, held=10),
        released_by_another(99, 99, lock_type=SEMAPHORE, acquired=0, held=10),  # this process is gone
        entry(20, lock_type=SEMAPHORE, held=10),
    )
    assert set(host.exported()[0]["holds"]) == {
        ("a.service", "shop", "semaphore"),
        ("kernel", "kworker", "semaphore"),
        ("", "", "semaphore"),
        ("", "shop", "semaphore"),
    }


def test_it_has_the_name_of_now(host: Host, procfs: Procfs) -> None:
    """The name is that of the process with this id now, as no event tells when another one gets the id."""
    procfs.add(7, b"shop")
    host.fold(released_by_another(7, 7))
    host.holds._processes.keep(set())
    procfs.add(7, b"market")
    host.fold(released_by_another(7, 7))
    assert host.acquired() == {SHOP: 1, ("", "market", "mutex"): 1}


def test_an_event_without_names_does_not_rename_the_process(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop")
    host.fold(entry(7))
    host.fold(released_by_another(7, 7), entry(7))
    assert host.acquired() == {SHOP: 3}
    assert host.holds._processes.name(7) == ("", "shop")


# --- Series ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lines", [1000, 10_000])
def test_never_more_lines_than_allowed_and_totals_stay_exact(procfs: Procfs, max_lines: int) -> None:
    host = Host(procfs.root, Limits(max_lines=max_lines))
    put: dict[str, int] = defaultdict(int)
    for number in range(3000):
        kind = number % 4
        host.fold(entry(number + 1, lock_type=kind, comm=f"p{number}".encode(), acquired=2, held=number))
        put[NAMES[kind]] += 2
    values, _ = host.exported()
    for kind, count in put.items():
        mine = sum(value for labels, value in values["acquired"].items() if labels[2] == kind)
        assert mine == count
        assert values["acquired"]["other", "other", kind] > 0
    assert sum(values["holds"].values()) == 3000
    assert host.holds.by_type.exported_lines <= max_lines - 400
    assert host.holds.by_type.overflowed > 0


def test_series_of_processes_that_are_gone_are_retired(host: Host) -> None:
    host.fold(entry(7), entry(8, comm=b"market"))
    host.clock += 100 * NS
    host.fold(entry(8, comm=b"market"))
    host.holds.by_type.rearrange(Presence(), 50.0, host.clock / NS)
    assert host.acquired() == {("", "market", "mutex"): 2}
