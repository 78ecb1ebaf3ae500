"""Kernel locks that are held for a known time: waits by type, where they happen, and those that go on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from checks import about, at_rest
from conftest import Start
from lockd_process import Lockd, Metrics
from workload import Workload

COUNT, SUM = "lockd_kernel_lock_wait_seconds_count", "lockd_kernel_lock_wait_seconds_sum"
MAX, WAITING = "lockd_kernel_lock_max_wait_us", "lockd_kernel_lock_waiting"
SITE_WAITS = "lockd_kernel_lock_site_waits_total"
SITE_SECONDS = "lockd_kernel_lock_site_wait_seconds_total"

SITES = {
    "mutex": (r"pipe_write",),
    "rwsem_write": (r"write", r"rmdir|unlink|remov|dirop|lookup"),
    "rwsem_read": (r"iterate_dir|getdents|readdir",),
}
"""Functions that wait, by lock type: of pipes, of the file system's writing, of directories."""


@pytest.fixture(scope="module", autouse=True)
def tracepoints(lockd: Lockd) -> None:
    hooks = lockd.metrics(settled=False).labels("lockd_hook_attached", program="kernel_locks")
    attached = lockd.metrics(settled=False).sum("lockd_hook_attached", program="kernel_locks")
    if attached < len(hooks):
        pytest.skip("host: this kernel has no tracepoints lock:contention_begin and _end (5.19)")


def check_kernel_locks(metrics: Metrics, comm: str, truth: dict[str, Any]) -> None:
    """Counts exact, times within tolerance, for every lock type that the truth names."""
    for lock_type, told in truth["kernel"].items():
        labels = {"comm": comm, "lock_type": lock_type}
        assert metrics.sum(COUNT, **labels) == told["waits"], lock_type
        assert metrics.sum(SUM, **labels) * 1e6 == about(told["wait_us"], told["waits"]), lock_type
        assert metrics.max(MAX, window="1m", **labels) == about(told["max_us"]), lock_type


def need_symbols() -> None:
    if Path("/proc/sys/kernel/kptr_restrict").read_text().strip() == "2":
        pytest.skip("host: kernel.kptr_restrict hides the addresses of functions")


def sites_of(metrics: Metrics, one: Workload, lock_type: str) -> dict[tuple[str, str], float]:
    """Waits by lock and site."""
    return {
        (told["lock"], told["site"]): metrics.sum(SITE_WAITS, **told)
        for told in metrics.labels(SITE_WAITS, comm=one.comm, lock_type=lock_type)
    }


def test_counts_are_exact_and_times_right(lockd: Lockd, workload: Start, scratch: Path) -> None:
    one = workload("kernel_locks", 50, 3000, scratch)
    truth = one.run()
    metrics = at_rest(lockd, one.comm)
    check_kernel_locks(metrics, one.comm, truth)
    assert metrics.dropped == 0
    one.finish()


def test_waits_that_go_on_and_where_they_happen(lockd: Lockd, workload: Start, scratch: Path) -> None:
    need_symbols()
    # A lock has a name a second after its first wait: the second and third are counted by it.
    rounds, hold_us = 3, 1_500_000
    one = workload("kernel_locks", rounds, hold_us, scratch)
    one.go()
    for waits in ({"mutex"}, {"rwsem_write"}, {"rwsem_write", "rwsem_read"}):
        lockd.until(lambda m, waits=waits: all(is_waited_for(m, one, kind) for kind in waits), 15)
    truth = one.truth()
    metrics = at_rest(lockd, one.comm)
    check_kernel_locks(metrics, one.comm, truth)
    for lock_type, expected in SITES.items():
        sites = sites_of(metrics, one, lock_type)
        assert all(site not in ("unknown", "") for _, site in sites), sites
        for pattern in expected:
            found = {(lock, site): waits for (lock, site), waits in sites.items() if re.search(pattern, site)}
            assert found, (pattern, sites)
            assert set(found.values()) <= {rounds - 1, rounds}, found
        waits = sum(sites.values())
        seconds = metrics.sum(SITE_SECONDS, comm=one.comm, lock_type=lock_type)
        assert seconds == pytest.approx(waits * hold_us / 1e6, rel=0.03)
    one.finish()


def is_waited_for(metrics: Metrics, one: Workload, lock_type: str) -> bool:
    """By one thread, since a while, as the maximum shows."""
    labels = {"comm": one.comm, "lock_type": lock_type}
    return metrics.sum(WAITING, **labels) == 1 and metrics.max(MAX, window="1m", **labels) > 0


def test_the_lock_of_an_address_space(lockd: Lockd, workload: Start) -> None:
    need_symbols()
    rounds = 400
    one = workload("mmap_lock", rounds, 256)
    truth = one.run()
    metrics = at_rest(lockd, one.comm)
    told = truth["kernel"]["rwsem_read"]
    labels = {"comm": one.comm, "lock_type": "rwsem_read"}
    # The lock may come free between asking for it and going to sleep: a wait that the truth lacks.
    waits = metrics.sum(COUNT, **labels)
    assert told["waits"] <= waits <= rounds
    assert metrics.sum(SUM, **labels) * 1e6 == about(told["wait_us"], waits)
    assert metrics.max(MAX, window="1m", **labels) == about(told["max_us"])
    sites = sites_of(metrics, one, "rwsem_read")
    assert {lock for lock, _ in sites} == {"mmap_lock"}
    assert 0 < sum(sites.values()) <= waits
    assert all("mincore" in site for _, site in sites)
    one.finish()
