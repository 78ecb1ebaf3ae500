"""Holds of kernel locks from what programs count to what is exported: totals, names, holds that go on."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_procfs import Procfs

from lockd import snapshot
from lockd.manifest import Manifest
from lockd.names.messages import LockAnswer
from lockd.names.processes import Processes
from lockd.names.resolver import Resolver
from lockd.names.units import Units
from lockd.sample.ahead import FORGET_AFTER, MOST, CountedAhead
from lockd.sample.block import Block
from lockd.sample.detail import Detail
from lockd.sample.identities import Filter, Identities
from lockd.sample.kernel_holds import ABANDONED_NS, NS, KernelHoldAggregates
from lockd.sample.limits import Budget, Limits
from lockd.sample.window import window_of

MUTEX, READ, WRITE, SEMAPHORE = range(4)
NAMES = ("mutex", "rwsem_read", "rwsem_write", "semaphore", "spinlock")
SLOTS, SLOT_NONE = 28, 255
LOCK = 0xFFFF_8880_0000_0000
US = 1000

WHO = [("cgroup", "u8"), ("comm", "S16"), ("thread_comm", "S16"), ("tgid", "u4"), ("kernel_thread", "u4")]
KEY = np.dtype([("lock", "u8"), ("tid", "u4"), ("type", "u1"), ("slot", "u1"), ("pad", "u2")])
VALUE = np.dtype(
    [("acquisitions", "u8"), ("holds", "u8"), ("hold_ns", "u8"), ("max_hold_ns", "u8"),
     ("is_mmap_lock", "u8"), ("who", WHO)]
)  # fmt: skip
HELD_KEY = np.dtype([("lock", "u8"), ("tid", "u4"), ("pad", "u4")])
HELD = np.dtype(
    [("since", "u8", 4), ("tgid", "u4"), ("depth", "u1"), ("type", "u1"), ("asked", "u1"), ("untimed", "u1")]
)

Entry = tuple[tuple[Any, ...], tuple[Any, ...]]


def slot_of(ns: int) -> int:
    return min(max(ns - 1, 0) // US, 2**27).bit_length()


def entry(
    tid: int, *, lock: int = LOCK, lock_type: int = MUTEX, acquired: int = 1, held: int | None = None,
    tgid: int = 0, comm: bytes = b"shop", cgroup: int = 1,
) -> Entry:  # fmt: skip
    """An entry of the aggregate: locks taken, and one hold of so many ns."""
    slot, holds, ns = (SLOT_NONE, 0, 0) if held is None else (slot_of(held), 1, held)
    who = (cgroup, comm, b"thread", tgid or tid, 0)
    return (lock, tid, lock_type, slot, 0), (acquired, holds, ns, ns, 0, who)


class Host:
    """The aggregates of one host, whose processes are in `procfs`."""

    def __init__(self, procfs: Path, limits: Limits | None = None, wanted: Filter | None = None) -> None:
        limits = limits or Limits()
        processes = Processes(Units(procfs), procfs)
        manifest = Manifest(
            source_hash="", attached_ns=0, chosen=(), hooks=(), maps=(), functions=(),
            enums={"lock_type": tuple(f"LOCK_{name.upper()}" for name in NAMES)},
            constants={"SLOTS": SLOTS, "SLOT_NONE": SLOT_NONE},
        )  # fmt: skip
        self.identities = Identities(processes, wanted or Filter())
        self.detail = Detail(processes.thread_comm, 1000)
        self.budget, self.limits = Budget(limits), limits
        self.holds = KernelHoldAggregates(
            manifest, limits, self.budget, self.detail, Resolver(procfs), processes
        )
        self.clock = time.monotonic_ns()

    def fold(self, *entries: Entry, overflowed: bool = False) -> None:
        keys = np.array([key for key, _ in entries], KEY)
        values = np.array([value for _, value in entries], VALUE)
        self.holds.fold(window_of(keys, values, self.identities, overflowed), self.clock / NS)

    def look(self, *held: Entry, waits: tuple[tuple[int, int], ...] = ()) -> None:
        """What the table of locks held has in it at this moment, and the (lock, tid) that are waited for."""
        keys = np.array([key for key, _ in held], HELD_KEY)
        values = np.array([value for _, value in held], HELD)
        waited = np.array([(lock, tid, 0) for lock, tid in waits], HELD_KEY)
        self.holds.note_holding(keys, values, waited, self.identities, self.clock)

    def held(
        self, tid: int, *ago: float, lock: int = LOCK, lock_type: int = MUTEX, asked: bool = False,
        untimed: bool = False, tgid: int = 0,
    ) -> Entry:  # fmt: skip
        """A lock taken so many seconds ago; of which `asked`, the last is only asked for."""
        since = [self.clock - int(seconds * NS) for seconds in ago] + [0] * (4 - len(ago))
        return (lock, tid, 0), (since, tgid or tid, len(ago) - asked, lock_type, asked, untimed)

    def exported(self) -> tuple[dict[str, dict[tuple[str, ...], float]], dict[tuple[str, ...], list[int]]]:
        """Values by metric and labels, and the buckets of the histogram of holds."""
        block = Block(self.limits.buckets_us, SLOTS)
        self.holds.export(block, self.clock / NS)
        head, arrays = snapshot.unpack(memoryview(block.pack()))
        labels = {each["name"]: [tuple(row) for row in each["labels"]] for each in head["metrics"]}
        holds = "lockd_kernel_lock_hold_seconds"
        acquired = "lockd_kernel_lock_acquisitions_total"
        assert set(labels) == {holds, acquired}
        width = len(self.limits.buckets_us) + 1
        buckets = np.array(arrays[f"{holds}.buckets"]).reshape(-1, width)
        values = {
            "acquired": dict(zip(labels[acquired], arrays[acquired], strict=True)),
            "held": dict(zip(labels[holds], arrays[f"{holds}.sum"], strict=True)),
            "holds": dict(zip(labels[holds], buckets.sum(axis=1).tolist(), strict=True)),
        }
        return values, dict(zip(labels[holds], buckets.tolist(), strict=True))

    def acquired(self) -> dict[tuple[str, ...], float]:
        return self.exported()[0]["acquired"]

    def api(self) -> list[dict[str, Any]]:
        """The rows of /api/v1/locks."""
        tables, arrays = self.detail.tables(self.clock / NS, {})
        table = tables["locks"]
        columns = {**table["text"], **table["lists"]}
        columns |= {name: arrays[f"locks.{name}"].tolist() for name in table["numbers"]}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.fixture
def procfs(tmp_path: Path) -> Procfs:
    return Procfs(tmp_path)


@pytest.fixture
def host(procfs: Procfs) -> Host:
    return Host(procfs.root)


SHOP = ("", "shop", "mutex")


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
    """The program knows the holder's ids and nothing else."""
    return entry(tid, tgid=tgid, comm=b"", cgroup=0, **about)


def test_a_hold_that_another_thread_ended_is_its_holders(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop", cgroup=b"4:memory:/system.slice/a.service\n")
    procfs.add(70, b"kworker/3:1", cmdline=b"", parent=2)
    host.fold(
        released_by_another(8, 7, lock_type=SEMAPHORE, acquired=0, held=10),
        released_by_another(70, 70, lock_type=SEMAPHORE, acquired=0, held=10),
        released_by_another(99, 99, lock_type=SEMAPHORE, acquired=0, held=10),  # gone
        entry(20, lock_type=SEMAPHORE, held=10),
    )
    assert set(host.exported()[0]["holds"]) == {
        ("a.service", "shop", "semaphore"),
        ("kernel", "kworker", "semaphore"),
        ("", "", "semaphore"),
        ("", "shop", "semaphore"),
    }


def test_it_has_the_name_of_now(host: Host, procfs: Procfs) -> None:
    """No event tells when a process is called something else: another one has its id by now."""
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


# --- Acquisitions that programs learn of when the lock is released ------------------------------------


def test_what_is_held_for_long_is_counted_once(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop")
    host.look(host.held(7, 0.9, asked=True))
    assert host.acquired() == {}  # perhaps it is about to wait
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
    assert len(host.holds._ahead) == 0
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
    host.look(host.held(8, 6.0, asked=True, lock=LOCK + 64, tgid=7))  # the other was released
    nameless = {"lock": 0, "comm": b"", "cgroup": 0}
    host.fold(entry(0, lock_type=READ, acquired=5, **nameless), overflowed=True)
    host.fold(entry(0, acquired=4, **nameless), overflowed=True)
    other = ("other", "other", "mutex")
    assert host.acquired() == {SHOP: 2, ("other", "other", "rwsem_read"): 5, other: 3}
    host.fold(entry(0, acquired=4, **nameless), overflowed=True)
    assert host.acquired()[other] == 7


def test_what_is_counted_ahead_is_bounded_and_forgotten() -> None:
    ahead = CountedAhead()
    tids = np.arange(2 * MOST)
    locks, since, types = np.full(2 * MOST, LOCK, np.uint64), np.ones(2 * MOST), np.zeros(2 * MOST)
    unknown = ahead.unknown(locks, tids, since, 0.0)
    assert unknown.sum() == MOST
    ahead.add(locks[unknown], tids[unknown], since[unknown], types[unknown])
    assert not ahead.unknown(locks, tids, since, 1.0).any()
    ahead.forget(locks[:10], tids[:10])
    assert ahead.unknown(locks, tids, since, 2.0).sum() == 10
    assert len(ahead) == MOST - 10
    none: npt.NDArray[Any] = np.empty(0, np.uint64)
    ahead.unknown(none, none, none, FORGET_AFTER + 3.0)
    assert len(ahead) == 0


class Kernel:
    """Programs that count as with kprobes, and the truth."""

    def __init__(self) -> None:
        self.holding: dict[tuple[int, int], tuple[int, bool]] = {}
        """Since when, and whether it was only asked for, by lock and thread."""
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
        """The end of a wait, or of a hold."""
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
    # What is held for long is in the totals, whether it is ever released or not.
    host.clock += 2 * NS
    fold()
    look()
    assert sum(host.acquired().values()) == kernel.taken
    for lock, tid in list(kernel.holding):
        kernel.go_on(lock, tid, host.clock, gives_up=False)
        kernel.go_on(lock, tid, host.clock, gives_up=False)
    fold()
    assert sum(host.acquired().values()) == kernel.taken
    assert len(host.holds._ahead) == 0


# --- Holds that go on -----------------------------------------------------------------------------


def test_the_longest_hold_in_progress(host: Host, procfs: Procfs) -> None:
    procfs.add(7, b"shop")
    host.fold(entry(7, acquired=2, held=2 * NS))
    host.look(
        host.held(7, 3.0),
        host.held(8, 5.0, 0.5, tgid=7),  # the outer of two
        host.held(9, 0.01, asked=True, tgid=7),  # by no means yet
        host.held(7, 0.25, 4.0, lock=LOCK + 64, lock_type=READ, asked=True),
    )
    mutex, rwsem = sorted(host.api(), key=lambda row: str(row["kind"]))
    assert (mutex["holding_us"], mutex["holding_tid"]) == (5e6, 8)
    assert (mutex["held_us"], mutex["max_held_us"]) == (2e6, 5e6)
    assert (rwsem["kind"], rwsem["holding_us"], rwsem["acquisitions"]) == ("rwsem_read", 4e6, 1)
    host.look()
    assert [(row["holding_us"], row["holding_tid"]) for row in host.api()] == [(0, 0)] * 2
    assert {row["max_held_us"] for row in host.api()} == {2e6, 0}


def test_four_nested_and_one_more_asked_for(host: Host, procfs: Procfs) -> None:
    """There is room for four times: the first has given way to the one that was asked for."""
    procfs.add(7, b"shop")
    (key, (since, *rest)) = host.held(7, 0.01, 8.0, 7.0, 6.0, lock_type=SEMAPHORE)
    host.look((key, (since, *rest[:-2], True, False)))
    (row,) = host.api()
    assert row["holding_us"] == 8e6
    assert host.acquired() == {}


def test_the_api_shows_holds_beside_the_waits_for_the_same_lock(host: Host) -> None:
    locks, processes = host.detail.locks, np.empty(3, object)
    processes[:] = [("", "shop")] * 3

    def describe(positions: npt.NDArray[np.int64]) -> dict[str, Any]:
        return {
            "program": 2,
            "address": np.array([LOCK, LOCK, LOCK + 64], np.uint64)[positions],
            "kind": "mutex",
            "kind_number": MUTEX,
            "process": processes[positions],
            "site": np.array(["here", "there", "here"], object)[positions],
            "lock": np.array(["named", "named", ""], object)[positions],
            "blocked_ns": np.array([5, 9, 7])[positions],
        }

    locks.rows(np.arange(1, 4).astype(np.uint64), 0.0, describe)
    host.fold(
        entry(7, acquired=4, held=40 * US),
        entry(7, lock=LOCK + 128, acquired=1, held=50 * US),
        entry(9, comm=b"other one", acquired=1, held=10 * US),
    )
    rows = host.api()
    told = [(r["address"], r["comm"], r["lock"], r["site"], r["acquisitions"], r["held_us"]) for r in rows]
    assert told == [
        (hex(LOCK), "shop", "named", "there", 4, 40.0),  # once, where most time was lost
        (hex(LOCK + 64), "shop", "", "here", 0, 0.0),
        (hex(LOCK), "shop", "named", "here", 0, 0.0),
        (hex(LOCK + 128), "shop", "", "", 1, 50.0),
        (hex(LOCK), "other one", "named", "", 1, 10.0),
    ]
    assert {row["program"] for row in rows} == {"kernel_locks"}
    assert all(row["blocked_us"] == 0 and row["stack"] == [] for row in rows[3:])


def test_a_flood_of_locks_leaves_room_for_both_kinds_of_rows(host: Host) -> None:
    locks, process = host.detail.locks, np.empty(1, object)
    process[0] = ("", "shop")

    def describe(positions: npt.NDArray[np.int64]) -> dict[str, Any]:
        return {
            "program": 2,
            "kind": "mutex",
            "address": positions,
            "blocked_ns": 1 + positions,
            "process": process,
        }

    locks.rows(np.arange(1, 5001).astype(np.uint64), 0.0, describe)
    for start in range(0, 40_000, 4000):
        host.fold(*(entry(7, lock=LOCK + 64 * i, held=i + 1) for i in range(start, start + 4000)))
    rows = host.api()
    assert len(rows) == 1000
    assert [row["holds"] for row in rows] == [0] * 750 + [1] * 250
    assert rows[0]["blocked_us"] == 5.0
    assert [rows[at]["held_us"] for at in (750, 751)] == [40.0, 39.999]
    assert sum(host.acquired().values()) == 40_000


def test_locks_held_longest_get_names(procfs: Procfs) -> None:
    (procfs.root / "kallsyms").write_text(f"{LOCK:x} D init_task\n{LOCK + 64:x} D some_lock\n")
    host = Host(procfs.root)
    host.fold(entry(7, lock=LOCK + 64, held=9), entry(7, lock=LOCK + 2**32, held=5))
    host.look()
    asked = {row["address"]: row["lock"] for row in host.api()}
    assert set(asked.values()) == {""}
    named: dict[str, str] = {}
    deadline = time.monotonic() + 10
    while set(named.values()) != {"some_lock", "anon"}:
        assert time.monotonic() < deadline, named
        for answer in host.holds._locks._resolver.answers():
            assert isinstance(answer, LockAnswer)
            host.holds._locks.name(answer)
        named = {row["address"]: row["lock"] for row in host.api()}
        time.sleep(0.01)
    assert named[hex(LOCK + 64)] == "some_lock"


# --- Holders that are gone ----------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[tuple[int, threading.Event]]:
    """A thread of this process, and what ends it."""
    end, started = threading.Event(), threading.Event()
    ids: list[int] = []

    def work() -> None:
        ids.append(threading.get_native_id())
        started.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    yield ids[0], end
    end.set()
    thread.join()


def test_a_lock_whose_holder_is_gone_is_given_up(worker: tuple[int, threading.Event]) -> None:
    tid, end = worker
    host = Host(Path("/proc"))
    host.clock += 2 * ABANDONED_NS  # the thread has held it since it was there
    held = [
        host.held(tid, 70.0, asked=True, tgid=os.getpid()),
        host.held(tid, 70.0, 65.0, lock=LOCK + 1, lock_type=READ, tgid=os.getpid()),
        host.held(tid, 70.0, lock=LOCK + 2, lock_type=SEMAPHORE, tgid=os.getpid()),
        host.held(tid, 59.0, lock=LOCK + 3, tgid=os.getpid()),
    ]
    host.look(*held)
    assert sum(host.acquired().values()) == 1
    assert host.holds.abandoned() is None
    end.set()
    deadline = time.monotonic() + 10
    while Path(f"/proc/self/task/{tid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gone = host.holds.abandoned()
    assert gone
    keys, holds = gone
    assert sorted(keys["lock"].tolist()) == [LOCK, LOCK + 1]
    assert holds == 3
    assert sum(host.acquired().values()) == 1  # it was taken, and will not be counted again
    host.fold(entry(tid, acquired=1))
    assert sum(host.acquired().values()) == 2


def test_a_thread_that_has_the_id_of_one_that_is_gone(worker: tuple[int, threading.Event]) -> None:
    tid, _ = worker
    processes = Processes(Units(Path("/proc")))
    now = time.monotonic_ns()
    assert processes.has_thread(os.getpid(), tid, now)
    assert not processes.has_thread(os.getpid(), tid, now - 3600 * NS)
    assert not processes.has_thread(os.getpid(), 1, now)


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
    host.holds.by_type.retire(host.clock / NS - 50, lambda labels: False)
    assert host.acquired() == {("", "market", "mutex"): 2}
