"""Kernel locks that are held for a known time: the waits for them by type, their sites, and ongoing waits."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from lockd.kernel.btf import KernelTypes
from tests.support.checks import at_rest, in_one_of_some_tries, off
from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import Start, Workload

COUNT, SUM = "lockd_kernel_lock_wait_seconds_count", "lockd_kernel_lock_wait_seconds_sum"
MAX, WAITING = "lockd_kernel_lock_max_wait_us", "lockd_kernel_lock_waiting"
SITE_WAITS = "lockd_kernel_lock_site_waits_total"
SITE_SECONDS = "lockd_kernel_lock_site_wait_seconds_total"

SITES = {
    "mutex": (r"pipe_write",),
    "rwsem_write": (r"write", r"rmdir|unlink|remov|dirop|lookup"),
    "rwsem_read": (r"iterate_dir|getdents|readdir",),
}
"""Patterns of the functions that wait, by lock type. They write to a pipe, write to a file, remove from a
directory, and read a directory."""
MEMBERS = {"mutex": "pipe->mutex", "rwsem_write": "inode->i_rwsem", "rwsem_read": "inode->i_rwsem"}
TRACEPOINTS = {"contention_begin", "contention_end"}


@pytest.fixture(scope="module", autouse=True)
def tracepoints(narrow: Lockd) -> None:
    """Skip where the kernel lacks the tracepoints of contention. Where it has them, lockd uses both."""
    types = KernelTypes()
    if any(types.tracepoint_args(name) is None for name in TRACEPOINTS):
        pytest.skip("host: this kernel has no tracepoints lock:contention_begin and _end (5.19)")
    metrics = narrow.metrics(settled=False)
    hooks = metrics.labels("lockd_hook_attached", program="kernel_locks")
    assert {hook["hook"] for hook in hooks} == TRACEPOINTS
    assert metrics.sum("lockd_hook_attached", program="kernel_locks") == len(TRACEPOINTS)


def check(metrics: Metrics, comm: str, truth: dict[str, Any]) -> list[str]:
    """Assert exact counts for every lock type that the truth names; return words for times that are off."""
    found = []
    for lock_type, told in truth["kernel"].items():
        labels = {"comm": comm, "lock_type": lock_type}
        assert metrics.sum(COUNT, **labels) == told["waits"], lock_type
        found += off(
            lock_type, metrics.sum(SUM, **labels) * 1e6, told["wait_us"], told["waits"], 0, told["least_us"]
        )
        longest_us = metrics.max(MAX, window="1m", **labels)
        found += off(f"longest {lock_type}", longest_us, told["max_us"], 1, 0, told["max_least_us"])
    return found


def test_counts_are_exact_and_times_right(narrow: Lockd, workload: Start, scratch: Path) -> None:
    def attempt() -> list[str]:
        one = workload("kernel_locks", 50, 3000, scratch)
        truth = one.run()
        found = check(at_rest(narrow, one.comm), one.comm, truth)
        one.finish()
        return found

    in_one_of_some_tries(attempt)


def need_symbols() -> None:
    if Path("/proc/sys/kernel/kptr_restrict").read_text().strip() == "2":
        pytest.skip("host: kernel.kptr_restrict hides the addresses of functions")


def sites_of(metrics: Metrics, one: Workload, lock_type: str) -> dict[tuple[str, str], float]:
    """Return the number of waits by lock and site."""
    return {
        (told["lock"], told["site"]): metrics.sum(SITE_WAITS, **told)
        for told in metrics.labels(SITE_WAITS, comm=one.comm, lock_type=lock_type)
    }


def is_waited_for(metrics: Metrics, one: Workload, lock_type: str) -> bool:
    """Whether one thread waits for a lock of this type, and has waited long enough to be in the maximum."""
    labels = {"comm": one.comm, "lock_type": lock_type}
    return metrics.sum(WAITING, **labels) == 1 and metrics.max(MAX, window="1m", **labels) > 0


def test_waits_that_go_on_and_where_they_happen(narrow: Lockd, workload: Start, scratch: Path) -> None:
    need_symbols()
    # A lock gets its name some time after its first wait. The waits of later rounds are counted under it.
    rounds, hold_us = 3, 1_500_000
    one = workload("kernel_locks", rounds, hold_us, scratch)
    one.go()
    for types in ({"mutex"}, {"rwsem_write"}, {"rwsem_write", "rwsem_read"}):
        narrow.until(lambda m, types=types: all(is_waited_for(m, one, kind) for kind in types), 15)
    truth = one.truth()
    metrics = at_rest(narrow, one.comm)
    check(metrics, one.comm, truth)
    for lock_type, expected in SITES.items():
        labels = {"comm": one.comm, "lock_type": lock_type}
        assert metrics.sum(SUM, **labels) * 1e6 >= truth["kernel"][lock_type]["waits"] * hold_us
        assert metrics.max(MAX, window="1m", **labels) >= hold_us
        sites = sites_of(metrics, one, lock_type)
        assert all(site not in ("unknown", "") for _, site in sites), sites
        for pattern in expected:
            at = {key: waits for key, waits in sites.items() if re.search(pattern, key[1])}
            found = list(at.values())
            assert found, (pattern, sites)
            assert {lock for lock, _ in at} == {MEMBERS[lock_type]}, sites
            assert all(0 < waits <= rounds for waits in found), (pattern, sites)
        seconds = metrics.sum(SITE_SECONDS, **labels)
        assert sum(sites.values()) * hold_us / 1e6 <= seconds <= metrics.sum(SUM, **labels) + 1e-6
    one.finish()


def test_a_lock_is_shown_while_a_thread_waits_for_it(narrow: Lockd, workload: Start, scratch: Path) -> None:
    """A lock is shown after a second of waiting. Its site is not known until the wait has ended."""
    one = workload("kernel_locks", 1, 2_500_000, scratch)
    one.go()
    for lock_type in ("mutex", "rwsem_write", "rwsem_read"):
        (row,) = waited_for_now(narrow, one.comm, lock_type)
        assert (row["waiting"], row["threads"], row["blocked_count"]) == (1, 1, 0)
        assert 1e6 <= row["waiting_us"] <= row["max_blocked_us"]
        assert row["site"] in ("", "unknown")
    truth = one.truth()
    check(at_rest(narrow, one.comm), one.comm, truth)
    # The rows of spinlocks are left out, as any thread may wait for one.
    rows = [row for row in narrow.api("locks", comm=one.comm) if row["kind"] in truth["kernel"]]
    assert [row for row in rows if row["waiting"] or not row["blocked_count"]] == []
    assert sum(row["blocked_count"] for row in rows) == sum(
        each["waits"] for each in truth["kernel"].values()
    )
    one.finish()


def waited_for_now(daemon: Lockd, comm: str, lock_type: str) -> list[dict[str, Any]]:
    """Return the rows of locks of this type for which threads wait, once there are some; none after 30 s."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        rows = [row for row in daemon.api("locks", comm=comm, kind=lock_type) if row["waiting"]]
        if rows:
            return rows
        time.sleep(0.05)
    return []


def test_the_lock_of_an_address_space(narrow: Lockd, workload: Start) -> None:
    need_symbols()
    rounds = 400

    def attempt() -> list[str]:
        one = workload("mmap_lock", rounds, 256)
        truth = one.run()
        metrics = at_rest(narrow, one.comm)
        told, labels = truth["kernel"]["rwsem_read"], {"comm": one.comm, "lock_type": "rwsem_read"}
        # The lock may be released when a thread has asked for it and does not sleep yet. The truth lacks such
        # a wait.
        waits = metrics.sum(COUNT, **labels)
        assert told["waits"] <= waits <= rounds
        sites = sites_of(metrics, one, "rwsem_read")
        assert {lock for lock, _ in sites} == {"mmap_lock"}
        assert all("mincore" in site for _, site in sites)
        assert 0 < sum(sites.values()) <= waits
        one.finish()
        longest_us = metrics.max(MAX, window="1m", **labels)
        found = off("longest", longest_us, told["max_us"], 1, 0, told["max_least_us"])
        sum_us = metrics.sum(SUM, **labels) * 1e6
        return found + off("mmap_lock", sum_us, told["wait_us"], waits, 0, told["least_us"])

    in_one_of_some_tries(attempt)
