"""Threads that wait for so long together that an int64 has no room for it: no total is wrong, and none falls.

100,000 idle threads wait for 292 years in 26 hours.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from lockd import messages
from lockd.columns import wide_sums
from lockd.columns.index import Groups
from lockd.columns.wide_sums import WIDE
from lockd.export.detail import ProfileQuery
from lockd.export.exposition import Exposition
from lockd.export.wait_profile import profile_of_waits
from lockd.process.clock import NS
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.series.block import Block
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import Presence
from lockd.sample.series.series import Series
from tests.support.busy_host import MS, NR_READ, BusyHost, Process
from tests.support.kernel_hold_host import READ, entry
from tests.support.kernel_hold_host import Host as HoldHost
from tests.support.small_procfs import Procfs

LONG_MS = 2**62 // MS
"""Milliseconds for which all threads of one entry wait together: 146 years.

With three entries, even the sum of one fold is too large for an int64.
"""
POOL = ("pool.service", "pool")
LOCKS = 3


class Pool:
    """A process that idles on locks and in a system call, and how long it has waited for each."""

    def __init__(self, procfs: Path) -> None:
        self.host = BusyHost(procfs)
        self.waited_ns = 0
        self.have_locks_named()

    def have_locks_named(self) -> None:
        """Let time pass until the locks have names. Before that, waits count as those of other locks."""
        for _ in range(2):
            self.wait(0)

    def wait(self, ms: int) -> None:
        waits = Process(7, *POOL, locks=LOCKS, blocked_ms=ms, calls=(NR_READ,) * LOCKS, call_ms=ms)
        self.host.step([waits], [])
        self.waited_ns += ms * MS

    def exposed(self) -> dict[str, set[float]]:
        """The values of /metrics by name, without those of the condition variable."""
        block = Block(self.host.limits.buckets_us, 28)
        self.host.futex.export(block, self.host.now)
        self.host.offcpu.export(block, self.host.now)
        exposition = Exposition(choose_encoder("")[0], Path("/proc"))
        text = exposition.text(*messages.unpack(memoryview(block.pack()))).decode()
        found: dict[str, set[float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("comm") == "pool" and sample.labels.get("kind") != "cond":
                    found.setdefault(sample.name, set()).add(sample.value)
        return found

    def check(self) -> None:
        """Check that every value is the nearest float to the true one. So no value falls either."""
        exposed = self.exposed()
        for name, times in {
            "lockd_futex_blocked_seconds_sum": LOCKS,
            "lockd_futex_lock_blocked_seconds_total": 1,
            "lockd_offcpu_blocked_seconds_sum": LOCKS,
            "lockd_offcpu_waker_seconds_total": LOCKS,
        }.items():
            assert exposed[name] == {float(times * self.waited_ns) / NS}, name


def test_metrics_do_not_fall_not_even_over_a_restart(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    for ms in (LONG_MS, 1, LONG_MS, LONG_MS, 3, LONG_MS):
        pool.wait(ms)
        pool.check()
    assert pool.waited_ns > 2**63
    before, pool.host = pool.host, BusyHost(tmp_path)
    for old, new in zip(before.series, pool.host.series, strict=True):
        head, arrays = messages.unpack(memoryview(messages.pack(*old.save())))
        new.restore(head, {name: np.asarray(array) for name, array in arrays.items()}, before.now)
    pool.check()
    pool.have_locks_named()
    for ms in (1, LONG_MS, LONG_MS, 2):
        pool.wait(ms)
        pool.check()


def test_tables_of_threads_and_locks(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    shown = []
    for ms in (LONG_MS, LONG_MS, LONG_MS, 1000):
        pool.wait(ms)
        tables, arrays = pool.host._contention.tables(pool.host.now, {}, {})
        is_lock = [kind == "lock" for kind in tables["locks"]["text"]["kind"]]
        assert sum(is_lock) == LOCKS
        blocked_us = arrays["locks.blocked_us"][is_lock]
        assert blocked_us == pytest.approx(pool.waited_ns / 1000, rel=1e-15)
        shown.append(blocked_us)
        assert max(arrays["threads.blocked_us"]) == pytest.approx(LOCKS * pool.waited_ns / 1000, rel=1e-15)
    assert (shown[-1] - shown[-2] == 1e6).all()


def test_groups_of_flame_graphs(tmp_path: Path) -> None:
    """The times are right to the microsecond, and so are those of what came between two moments."""
    pool = Pool(tmp_path)
    blocks, query = [], ProfileQuery("offcpu", {})
    for ms in (LONG_MS, LONG_MS, 7):
        pool.wait(ms)
        head, arrays = pool.host.offcpu.stacks.block(ContentionTables(lambda tgid, tid: "", 1).threads)
        about = {"time": pool.host.now, "monotonic": pool.host.now}
        blocks.append(messages.unpack(memoryview(messages.pack({**head, **about}, arrays))))
        (sample,) = profile_of_waits(query, blocks[-1]).samples
        assert sample.values == (LOCKS * pool.waited_ns // 1000, 0, 0)
    (sample,) = profile_of_waits(query, blocks[2], blocks[1]).samples
    assert sample.values == (LOCKS * 7000, 0, 0)


def test_locks_of_the_kernel_that_many_threads_hold(procfs: Procfs) -> None:
    host = HoldHost(procfs.root)
    for times in (3, 6):
        host.fold(*(entry(tid, lock_type=READ, held=2**62, comm=b"pool", tgid=1) for tid in range(1, 4)))
        values, _ = host.exported()
        assert values["held"][("", "pool", "rwsem_read")] == float(times * 2**62) / NS
        (row,) = host.api()
        assert row["held_us"] == times * 2**62 / 1000


def test_what_retired_series_had_is_exact_and_they_go_on_with_it() -> None:
    series = Series(
        "offcpu_waker", {"sum_ns": WIDE}, counters={"sum_ns": "seconds"}, names=(0, 1), lines=1,
        budget=LineBudget(Limits()), others=1,
    )  # fmt: skip
    truth = {("a", "one"): 5 * 2**62 + 7, ("a", "two"): 2**64 - 1}
    for labels, ns in truth.items():
        row = series.row(labels, 0.0)
        parts = np.array([2**62] * (ns >> 62) + [ns % 2**62], np.uint64)
        wide_sums.add(series["sum_ns"], Groups(np.full(len(parts), row)), parts)
    series.rearrange(Presence(), 60.0, 100.0)
    assert series.retired == 2
    assert series._retired_values == {"sum_ns": sum(truth.values())}
    assert series.retired_values() == {"seconds": sum(truth.values()) / NS}
    for labels, ns in truth.items():
        row = series.row(labels, 101.0)
        assert wide_sums.to_ints(series["sum_ns"][[row]]) == [ns]
        assert series.seconds("sum_ns", np.array([row])).tolist() == [float(ns) / NS]
    assert series.retired_values() == {"seconds": 0}
