"""Tests of the housekeeping of a real sampler: what it forgets about processes, and what it keeps.

The maps of the kernel are made up, and there is no namer.
"""

from __future__ import annotations

import ctypes
import shutil
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockd.advice import GO
from lockd.kernel.manifest import Manifest
from lockd.kernel.maps import Buffers, HashMap
from lockd.kernel.pairs import ELEMENT_WORDS, Control, Written
from lockd.load.source import assemble
from lockd.names.protocol import GoWaitsAnswer
from lockd.process.clock import NS
from lockd.sample import drain
from lockd.sample import sampler as sampler_module
from lockd.sample.aggregates.identities import Filter
from lockd.sample.locks.runtimes import HOTSPOT
from lockd.sample.sampler import LONGEST_UNFOLDED, Sampler, SamplerSettings
from tests.support.busy_host import FUTEX, FUTEX_KEY
from tests.support.kernel_hold_host import WHO
from tests.support.maps import Map
from tests.support.small_procfs import Procfs

INCLUDED = ("common", "arch", "capture")
SOURCE = assemble([*(f"include/{name}.bpf.h" for name in INCLUDED), "daemon/futex.bpf.c"], {})
CONTROL = [(name, "u4") for name in ("window", "restraint", "is_timed", "sampler", "exporter")]
CALL = [("since", "u8"), ("uaddr", "u8"), ("kind", "u1"), ("guess", "u1"), ("restart", "u1")]
THREAD = np.dtype(
    [
        *((name, "u8") for name in ("off_since", "woken_at", "thread_pointer")),
        ("tgid", "u4"),
        ("state", "u1"),
        ("call", CALL),
    ]
)
TGID, OTHER = 70, 80


class Threads(HashMap):
    """A map of threads with made-up content. Threads of `busy` processes switch between any two reads."""

    def __init__(self) -> None:
        self.name, self.entries = "threads", 1 << 16
        self.threads = np.zeros(0, THREAD)
        self.busy: set[int] = set()
        self.reads = 0

    def add(self, tgid: int, address: int = 0) -> None:
        """Add the only thread of a process. It waits for the lock at `address`, or only sleeps."""
        thread = np.zeros(1, THREAD)
        thread["tgid"], thread["off_since"] = tgid, time.monotonic_ns() - NS
        thread["state"] = SOURCE.enums["state"].index("interruptible")
        if address:
            thread["call"]["since"], thread["call"]["uaddr"] = thread["off_since"], address
            thread["call"]["kind"] = thread["call"]["guess"] = SOURCE.enums["futex_kind"].index("lock")
        self.threads = np.concatenate([self.threads, thread])

    def add_on_cpu(self, tgid: int) -> None:
        """Add the only thread of a process, which runs, or has ended without a program seeing it."""
        self.add(tgid)
        self.threads["off_since"][-1] = 0

    def lookup(self, key: Any) -> Any:
        found = self.threads[self.threads["tgid"] == key[0]]
        return found if len(found) else np.zeros(1, THREAD)

    def delete(self, keys: Any) -> None:
        self.threads = self.threads[~np.isin(self.threads["tgid"], keys)]

    def read(self, _: Buffers) -> tuple[Any, Any]:
        self.reads += 1
        self.threads["off_since"] += np.isin(self.threads["tgid"], list(self.busy))
        return self.threads["tgid"].astype(np.uint64), self.threads


class Maps:
    """Stands for Pairs: nothing is ever written by a program."""

    def __init__(self, threads: Threads) -> None:
        table = SimpleNamespace(name="futex", entries=64, key=FUTEX_KEY, value=FUTEX)
        self.pairs = {"futex": (table, table)}
        known = np.dtype([("uaddr", "u8"), ("tgid", "u4"), ("guess", "u4")])
        places = [(name, "u8") for name in HOTSPOT]
        self.hashes = {"threads": threads, "known_locks": Map(known, "u4"), "hotspots": Map("u4", places)}
        self.losses = self.run_times = SimpleNamespace(read=lambda: np.zeros(64, np.int64))
        words = np.zeros(2 * ELEMENT_WORDS * len(SOURCE.enums["written"]), np.uint32)
        self.control = Control(memoryview(np.zeros(1, CONTROL).view(np.uint32)), CONTROL)
        self.written = Written(memoryview(words), SOURCE.enums["written"], self.control)
        self.buffers = None
        self.is_settled = False  # so that nothing is drained


@pytest.fixture(params=["asleep", "busy"])
def threads(request: pytest.FixtureRequest) -> Threads:
    """Return threads that sleep, or that are switched so often that no two reads find them the same."""
    threads = Threads()
    if request.param == "busy":
        threads.busy = {TGID, OTHER}
    return threads


@pytest.fixture
def sampler(procfs: Procfs, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """A sampler that has just begun, on a host with the processes TGID and OTHER."""
    monkeypatch.setattr(drain, "Pairs", lambda *_: Maps(threads))
    constants = {**SOURCE.constants, "SLOTS": 28, "SLOT_NONE": 255}
    manifest = Manifest(0, (), (), (), (), SOURCE.enums, constants)
    for tgid in (TGID, OTHER):
        procfs.add(tgid, b"comm%d" % tgid)
        threads.add(tgid)
    return Sampler(manifest, [], SamplerSettings(), procfs.root)


def keep_house(sampler: Sampler) -> None:
    now = time.monotonic()
    sampler._survey(now, is_whole=True)
    sampler._keep_house(now)


def test_a_wait_that_has_just_ended_counts_in_the_ranking(sampler: Sampler) -> None:
    """Until it is folded, it is neither an ongoing wait nor one that has ended."""
    keep_house(sampler)
    table = SimpleNamespace(entries=64, key=FUTEX_KEY, value=FUTEX, drain_into=drain_one_wait)
    sampler._collector.backlogs["futex"].drain(cast("HashMap", table))
    assert sampler.futex
    sampler._next_housekeeping, sampler._next_fold = 0, np.inf
    sampler.tick()
    entries = sampler.futex.by_kind._entries
    assert entries["waited"].max() == pytest.approx(30 * NS, rel=0.1)


def drain_one_wait(keys_at: int, values_at: int, _: int) -> int:
    """Store the row of a wait of 30 s, as HashMap.drain_into() does. Returns the number of rows."""
    key, value = np.zeros(1, FUTEX_KEY), np.zeros(1, FUTEX)
    key["tid"] = value["who"]["tgid"] = TGID
    value["who"]["comm"] = b"shop"
    value["calls"], value["blocked_ns"] = 1, 30 * NS
    ctypes.memmove(keys_at, key.ctypes.data, key.nbytes)
    ctypes.memmove(values_at, value.ctypes.data, value.nbytes)
    return 1


def tick_with_one_row(sampler: Sampler) -> None:
    """Drain the row of drain_one_wait() just after a fold, and tick when a second has passed."""
    table = SimpleNamespace(entries=64, key=FUTEX_KEY, value=FUTEX, drain_into=drain_one_wait)
    sampler._collector.backlogs["futex"].drain(cast("HashMap", table))
    sampler._collector.has_rows_of_processes = True
    sampler._folded, sampler._next_housekeeping = time.monotonic(), np.inf
    sampler._next_fold = 0
    sampler.tick()


def test_few_rows_are_folded_late_but_their_processes_are_named_soon(
    sampler: Sampler, procfs: Procfs
) -> None:
    assert sampler.futex
    procfs.remove(TGID)
    procfs.add(TGID, b"shop", cgroup=b"0::/system.slice/shop.service\n")
    tick_with_one_row(sampler)
    assert sampler._collector.unfolded_rows == 1
    procfs.remove(TGID)
    sampler._folded -= LONGEST_UNFOLDED
    sampler._next_fold = 0
    sampler.tick()
    assert sampler._collector.unfolded_rows == 0
    assert ("shop.service", "shop", "lock") in sampler.futex.by_kind.live()[1]


def test_many_rows_are_folded_within_a_second(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "FEW_ROWS", 0)
    tick_with_one_row(sampler)
    assert sampler._collector.unfolded_rows == 0


def has_series(sampler: Sampler, later: float) -> bool:
    """Keep house as if `later` seconds had passed. Return whether there is a series of drain_one_wait()."""
    assert sampler.futex
    sampler._survey(time.monotonic(), is_whole=True)
    sampler._keep_house(time.monotonic() + later)
    return any("shop" in labels for labels in sampler.futex.by_kind.live()[1])


@pytest.mark.parametrize("ends", ["at once", "unreaped"])
def test_a_living_process_without_a_thread_in_the_table_keeps_its_series(
    sampler: Sampler, threads: Threads, procfs: Procfs, ends: str
) -> None:
    """Of the threads that wait for locks of the kernel, few are in the table if no other program runs."""
    threads.threads = threads.threads[:0]
    table = SimpleNamespace(entries=64, key=FUTEX_KEY, value=FUTEX, drain_into=drain_one_wait)
    sampler._collector.backlogs["futex"].drain(cast("HashMap", table))
    sampler.fold()
    idle = sampler._limits.idle_seconds
    assert has_series(sampler, idle + 1)
    assert has_series(sampler, 2 * idle)
    if ends == "unreaped":
        procfs.end_leader(TGID)
    else:
        procfs.remove(TGID)
    assert not has_series(sampler, 2 * idle + 10)


def waited_seconds(sampler: Sampler, tgid: int, says: int) -> float:
    """Return the seconds that count once a Go program `says` for how many seconds it has waited."""
    assert sampler._go_waits
    assert sampler._go_waits.is_asked
    sampler._go_waits.note_answer(GoWaitsAnswer((tgid,), (says * NS,)), time.monotonic())
    return float(sampler._go_waits.series["waited_ns"].sum() / NS)


def test_waits_of_go_before_a_restart_are_known_after_it(sampler: Sampler) -> None:
    """After a restart it takes a while until the namer says which processes have Go."""
    assert sampler._go_waits
    assert sampler._user_locks
    sampler._go_waits.restore([(TGID, 5 * NS)])
    keep_house(sampler)
    sampler._user_locks.advice[TGID] = GO
    keep_house(sampler)
    assert waited_seconds(sampler, TGID, 7) == 2


def test_waits_of_go_that_the_filter_left_out_are_not_counted_later(sampler: Sampler) -> None:
    assert sampler._go_waits
    assert sampler._user_locks
    sampler._user_locks.advice[TGID] = GO
    keep_house(sampler)
    assert waited_seconds(sampler, TGID, 5) == 0
    sampler.reload(SamplerSettings(filter=Filter(exclude_comms=(f"comm{TGID}",))))
    keep_house(sampler)
    sampler.reload(SamplerSettings())
    sampler._user_locks.advice[TGID] = GO
    keep_house(sampler)
    assert waited_seconds(sampler, TGID, 9) == 0


def test_waits_of_go_of_a_process_that_has_ended_are_forgotten(sampler: Sampler, threads: Threads) -> None:
    assert sampler._go_waits
    assert sampler._user_locks
    sampler._go_waits.restore([(TGID, 5 * NS), (OTHER, 5 * NS)])
    threads.threads = threads.threads[:1]
    keep_house(sampler)
    threads.add(OTHER)  # another process has got the id
    sampler._user_locks.advice[OTHER] = GO
    keep_house(sampler)
    assert waited_seconds(sampler, OTHER, 7) == 0


GONE = 90
"""A process that is not in procfs."""


def test_an_entry_that_no_program_will_delete_is_deleted(sampler: Sampler, threads: Threads) -> None:
    """A thread that fails in its exec may end under the id of its leader. Its process is gone then."""
    threads.add_on_cpu(GONE)
    keep_house(sampler)
    assert GONE in threads.threads["tgid"]
    keep_house(sampler)
    assert threads.threads["tgid"].tolist() == [TGID, OTHER]


def test_the_entry_of_a_thread_that_runs_stays(sampler: Sampler, threads: Threads, procfs: Procfs) -> None:
    procfs.add(GONE, b"lives")
    threads.add_on_cpu(GONE)
    for _ in range(3):
        keep_house(sampler)
    assert GONE in threads.threads["tgid"]


def test_the_entry_of_a_thread_off_the_cpu_stays(sampler: Sampler, threads: Threads) -> None:
    """A program sees this thread run again, and end."""
    threads.add(GONE)
    for _ in range(3):
        keep_house(sampler)
    assert GONE in threads.threads["tgid"]


def test_the_entry_that_another_thread_has_got_stays(
    sampler: Sampler, threads: Threads, procfs: Procfs
) -> None:
    """Another thread may get the id of the one that ended, between any two looks."""
    threads.add_on_cpu(GONE)
    keep_house(sampler)
    sampler._survey(time.monotonic(), is_whole=True)
    threads.threads["off_since"][-1] = time.monotonic_ns()
    sampler._keep_house(time.monotonic())
    assert GONE in threads.threads["tgid"]
    threads.threads["off_since"][-1] = 0
    procfs.add(GONE, b"new")
    keep_house(sampler)
    shutil.rmtree(procfs.root / str(GONE))
    keep_house(sampler)
    assert GONE in threads.threads["tgid"], "it is gone for the first time"
    keep_house(sampler)
    assert GONE not in threads.threads["tgid"]


def test_a_process_that_gets_the_id_of_one_that_has_ended_has_its_own_unit(
    sampler: Sampler, threads: Threads, procfs: Procfs
) -> None:
    """On a host with cgroup v1 both can have the same cgroup id, so that their events look alike."""
    event = np.zeros(1, WHO)
    event["tgid"], event["cgroup"], event["comm"] = TGID, 1, b"shop"
    procfs.add(TGID, b"shop", cgroup=b"4:memory:/system.slice/first.service\n0::/\n")
    assert sampler._identities.identify_thread(event[0])[0] == ("first.service", "shop")
    threads.threads = threads.threads[1:]
    procfs.remove(TGID)
    keep_house(sampler)
    keep_house(sampler)
    procfs.add(TGID, b"shop", cgroup=b"4:memory:/system.slice/second.service\n0::/\n")
    assert sampler._identities.identify_thread(event[0])[0] == ("second.service", "shop")


@pytest.mark.parametrize("address", [0, 0x1000])
def test_a_survey_for_deadlocks_reads_threads_again_only_if_one_waits_for_a_lock(
    sampler: Sampler, threads: Threads, address: int
) -> None:
    threads.add(90, address)
    sampler._survey(time.monotonic(), is_whole=False)
    assert threads.reads == (2 if address else 1)
    assert sampler._deadlocks.has_waits == bool(address)
    assert set(sampler._last_seen.tolist()) == {TGID, OTHER, 90}
    threads.threads["woken_at"][-1] = time.monotonic_ns()
    sampler._survey(time.monotonic(), is_whole=False)
    assert not sampler._deadlocks.has_waits, "a thread that was woken may run"
    threads.threads["woken_at"][-1] = 0
    threads.busy.add(90)
    sampler._survey(time.monotonic(), is_whole=False)
    assert not sampler._deadlocks.has_waits, "an entry that changes is not believed"
    assert set(sampler._last_seen.tolist()) == {TGID, OTHER, 90}


def test_a_survey_of_all_threads_pushes_no_active_thread_out(sampler: Sampler, threads: Threads) -> None:
    """On a host where as many threads wait as the programs know, all are noted at once in every survey."""
    detail = sampler.contention
    kind_names = np.array(["lock"], object)

    def note(program: str, tids: Any, now: float) -> Any:
        who = np.zeros(len(tids), [("tgid", np.uint32), ("thread_comm", "S16")])
        processes = np.empty(len(tids), object)
        processes[:] = [("shop.service", "shop")] * len(tids)
        waits = SimpleNamespace(tids=tids, who=who, codes=np.ones(len(tids)), processes=processes)
        kinds = np.zeros(len(tids), np.int64)
        return detail.thread_rows(program, cast(Any, waits), kinds, kind_names, now)

    active = np.array([7])
    ones = np.ones(1, np.int64)
    detail.add_waits(detail.threads, note("futex", active, 1.0), 1000 * ones, ones, 1000 * ones)
    assert len(detail.threads.used) == 64, "a table has only the rows that it needs"
    waiting = 100 + np.arange(threads.entries)
    for survey in (2.0, 3.0):
        for program in ("futex", "offcpu"):
            note(program, waiting, survey)
    (row,) = note("futex", active, 4.0)
    assert detail.threads["blocked_ns"][row] == 1000
