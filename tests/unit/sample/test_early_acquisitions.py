"""Tests of early acquisitions: kernel locks that count as taken before their release, and only once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd import messages
from lockd.columns import index
from lockd.process.clock import NS
from lockd.sample.aggregates.early_acquisitions import FORGET_AFTER, MOST, EarlyCounts
from tests.support.kernel_hold_host import LOCK, MUTEX, READ, SHOP, US, Entry, Host, entry
from tests.support.small_procfs import Procfs


def test_what_is_held_for_long_is_counted_once(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop")
    host.look(host.held(7, 0.9, asked=True))
    assert host.acquired() == {}  # the thread may be about to wait
    held = host.held(7, 1.0, asked=True)
    for _ in range(3):
        host.look(held)
        assert host.acquired() == {SHOP: 1}
        host.clock += NS
    host.look()
    host.fold(entry(7, acquired=1, held=4 * NS), entry(8, tgid=7, acquired=1, held=10))
    assert host.acquired() == {SHOP: 2}
    host.fold(entry(7, acquired=1, held=10))
    assert host.acquired() == {SHOP: 3}
    assert len(host.holds.early) == 0
    (row,) = host.api()
    assert (row["acquisitions"], row["holds"]) == (3, 3)


@pytest.mark.parametrize("why", ["waits", "taken", "untimed"])
def test_what_is_not_known_to_be_held_is_not_counted(host: Host, procfs: Procfs, why: str) -> None:
    procfs.add(7, b"shop")
    held = host.held(7, 5.0, asked=why != "taken", untimed=why == "untimed")
    host.look(held, waits=((LOCK, 7),) if why == "waits" else ())
    assert host.acquired() == {}
    assert sum(row["holding_us"] > 0 for row in host.api()) == (why == "taken")


def test_a_wait_of_another_thread_or_for_another_lock_does_not_matter(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop")
    host.look(host.held(7, 5.0, asked=True), waits=((LOCK, 8), (LOCK + 64, 7)))
    assert host.acquired() == {SHOP: 1}


def test_taken_back_where_a_full_map_lost_the_names(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop")
    host.look(host.held(7, 5.0, asked=True), host.held(8, 5.0, asked=True, lock=LOCK + 64, tgid=7))
    host.clock += NS
    host.look(host.held(8, 6.0, asked=True, lock=LOCK + 64, tgid=7))  # the first lock was released
    nameless = {"lock": 0, "comm": b"", "cgroup": 0}
    host.fold(entry(0, lock_type=READ, acquired=5, **nameless), overflowed=True)
    host.fold(entry(0, acquired=4, **nameless), overflowed=True)
    other = ("other", "other", "mutex")
    assert host.acquired() == {SHOP: 2, ("other", "other", "rwsem_read"): 5, other: 3}
    host.fold(entry(0, acquired=4, **nameless), overflowed=True)
    assert host.acquired()[other] == 7


def test_what_is_counted_ahead_is_bounded_and_forgotten() -> None:
    ahead = EarlyCounts()
    tids = np.arange(2 * MOST)
    locks, since, types = np.full(2 * MOST, LOCK, np.uint64), np.ones(2 * MOST), np.zeros(2 * MOST)
    unknown = ahead.find_uncounted(locks, tids, since, 0.0)
    assert unknown.sum() == MOST
    ahead.add(locks[unknown], tids[unknown], since[unknown], types[unknown])
    assert not ahead.find_uncounted(locks, tids, since, 1.0).any()
    ahead.forget(locks[:10], tids[:10])
    assert ahead.find_uncounted(locks, tids, since, 2.0).sum() == 10
    assert len(ahead) == MOST - 10
    none: npt.NDArray[Any] = np.empty(0, np.uint64)
    ahead.find_uncounted(none, none, none, FORGET_AFTER + 3.0)
    assert len(ahead) == 0


def test_what_is_counted_ahead_is_known_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process has another seed, so that it has other hashes of the same locks and threads."""
    locks, tids = np.array([LOCK, LOCK, LOCK + 64], np.uint64), np.array([7, 8, 7], np.uint32)
    since, types = np.full(3, NS, np.uint64), np.array([MUTEX, MUTEX, READ], np.uint8)
    before = EarlyCounts()
    assert before.find_uncounted(locks, tids, since, 1.0).all()
    before.add(locks, tids, since, types)
    saved, _ = messages.unpack(memoryview(messages.pack({"ahead": before.save()}, {})))
    monkeypatch.setattr(index, "SEED", index.make_seed(bytes(range(index.SEED_BYTES))))
    after = EarlyCounts()
    after.restore(saved["ahead"])
    assert not after.find_uncounted(locks, tids, since, 2.0).any()
    counted = np.array([2, 1, 0])
    after.subtract(locks, tids, counted)
    assert counted.tolist() == [1, 0, 0]
    assert len(after) == 1


class Kernel:
    """Programs that count as with kprobes, and the true number of acquisitions."""

    def __init__(self) -> None:
        self.holding: dict[tuple[int, int], tuple[int, bool]] = {}
        """By lock and thread: since when, and whether the programs only know that the lock was asked for."""
        self.waiting: set[tuple[int, int]] = set()
        self.counted: list[Entry] = []
        self.taken = 0

    def ask(self, lock: int, tid: int, clock: int, contended: bool) -> None:
        if (lock, tid) in self.holding:
            return
        self.holding[lock, tid] = clock, True
        if contended:
            self.waiting.add((lock, tid))
        else:
            self.taken += 1

    def go_on(self, lock: int, tid: int, clock: int, gives_up: bool) -> None:
        """End the wait of a thread, or its hold."""
        since, asked = self.holding.get((lock, tid), (0, False))
        if (lock, tid) in self.waiting:
            self.waiting.remove((lock, tid))
            if gives_up:
                del self.holding[lock, tid]
                return
            self.taken += 1
            self.holding[lock, tid] = clock, False
            self.counted.append(entry(tid, lock=lock, tgid=1))
        elif since:
            self.counted.append(entry(tid, lock=lock, tgid=1, acquired=int(asked), held=clock - since))
            del self.holding[lock, tid]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "go on", "go on", "fold", "look", "look"]),
        st.integers(LOCK, LOCK + 2), st.integers(1, 3), st.booleans(),
        st.sampled_from([0, 10 * US, NS // 20, NS, 3 * NS]),
    ), max_size=60,
)  # fmt: skip


@given(steps=STEPS)
def test_totals_are_exact_whatever_happens_in_which_order(
    steps: list[tuple[str, int, int, bool, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    procfs = Procfs(tmp_path_factory.mktemp("procfs"))
    procfs.add(1, b"shop")
    host, kernel = Host(procfs.root), Kernel()
    before = 0.0

    def fold() -> None:
        if kernel.counted:
            host.fold(*kernel.counted)
        kernel.counted = []

    def look() -> None:
        held = [
            ((lock, tid, 0), ([since, 0, 0, 0], 1, not asked, MUTEX, asked, False))
            for (lock, tid), (since, asked) in kernel.holding.items()
        ]
        host.look(*held, waits=tuple(kernel.waiting))

    for what, lock, tid, flag, passes in steps:
        host.clock += passes
        if what == "ask":
            kernel.ask(lock, tid, host.clock, contended=flag)
        elif what == "go on":
            kernel.go_on(lock, tid, host.clock, gives_up=flag)
        elif what == "fold":
            fold()
        else:
            look()
        now = sum(host.acquired().values())
        assert before <= now <= kernel.taken
        before = now
    # A lock that is held for long is in the totals, whether or not it is ever released.
    host.clock += 2 * NS
    fold()
    look()
    assert sum(host.acquired().values()) == kernel.taken
    for lock, tid in list(kernel.holding):
        kernel.go_on(lock, tid, host.clock, gives_up=False)
        kernel.go_on(lock, tid, host.clock, gives_up=False)
    fold()
    assert sum(host.acquired().values()) == kernel.taken
    assert len(host.holds.early) == 0
