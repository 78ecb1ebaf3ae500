"""Totals are exact where maps are too small: a workload's own series + `other` + dropped = truth.

An event that finds no room in a map has lost its process. So `other` holds the events of every process,
whatever the filter says. The workloads do what no other program does, which tells their events apart:
priority-inheritance waits and EDEADLK, off-CPU time for the reason `signal`, waits for a mutex while nobody
else uses pipes. A second daemon, whose maps have room for everybody, shows whether another program did the
same after all: as much more may be in `other`. The interval of the second daemon includes the one that is
checked. So the bounds hold however busy the host is, and on a quiet host they meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import Start, Workload

LONG = (pytest.mark.thorough("a minute of nothing else"), pytest.mark.timeout(900))
AGREEING = {
    "lockd_futex_lock_blocked_total": "lockd_futex_blocked_seconds_count",
    "lockd_futex_lock_blocked_seconds_total": "lockd_futex_blocked_seconds_sum",
    "lockd_kernel_lock_site_waits_total": "lockd_kernel_lock_wait_seconds_count",
    "lockd_kernel_lock_site_wait_seconds_total": "lockd_kernel_lock_wait_seconds_sum",
    "lockd_offcpu_waker_seconds_total": "lockd_offcpu_blocked_seconds_sum",
}
"""Pairs of families that count the same events by different labels, so that their sums agree."""


def in_all(metrics: Metrics, name: str) -> float:
    """Return the sum of a family over all its series, including the retired ones."""
    return metrics.sum(name) + metrics.sum("lockd_retired_value", metric=name)


class Comparison:
    """A workload between two scrapes of two daemons: one with small maps, one that has room for all."""

    def __init__(self, small: Lockd, large: Lockd, one: Workload) -> None:
        self._one = one
        self._large_before = large.metrics()
        self._small_before = small.metrics()
        self.truth = one.run()
        self._small = small.metrics()
        self._large = large.metrics()
        for metrics in (self._small, self._large):
            for one_family, another in AGREEING.items():
                expected = pytest.approx(in_all(metrics, another), rel=1e-9)
                assert in_all(metrics, one_family) == expected, one_family

    def counted(self, name: str, **labels: str) -> float:
        """Return what the small daemon counted: the series of this process, and the increase of `other`."""
        others = self._small.sum(name, comm="other", **labels)
        others -= self._small_before.sum(name, comm="other", **labels)
        return self._small.sum(name, comm=self._one.comm, **labels) + others

    def dropped(self, program: str, **labels: str) -> float:
        """Return how many events of a program the small daemon dropped."""
        return self._added("lockd_dropped_events_total", map=program, **labels)

    def overflowed(self, program: str) -> float:
        """Return how many events of a program went to the overflow map of the small daemon."""
        return self._added("lockd_overflow_events_total", map=program)

    def foreign(self, name: str, **labels: str) -> float:
        """Return what the large daemon counted for all other processes. This is right only if its count for
        this process is the `truth`.
        """
        everybody = self._large.sum(name, **labels) - self._large_before.sum(name, **labels)
        return everybody - self._large.sum(name, comm=self._one.comm, **labels)

    def preemptions(self) -> float:
        """Return the number of preemptions of all processes by the large daemon: the waits for a CPU that
        followed no blocking.
        """
        names = [f"lockd_offcpu_{part}_seconds_count" for part in ("runqueue", "blocked")]
        waits, absences = (self._large.sum(name) - self._large_before.sum(name) for name in names)
        return waits - absences

    def check(self, program: str, truth: int, name: str, **labels: str) -> None:
        """Assert that nothing is lost and nothing counted twice."""
        assert self._large.sum(name, comm=self._one.comm, **labels) == truth, (name, labels)
        counted = self.counted(name, **labels)
        assert truth - self.dropped(program) <= counted, (name, labels)
        assert counted <= truth + self.foreign(name, **labels), (name, labels)

    def _added(self, name: str, **labels: str) -> float:
        return self._small.sum(name, **labels) - self._small_before.sum(name, **labels)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """The daemon with room for everybody."""
    config = {"maps": {"entries": 32_768, "threads": 32_768}, "series": {"max": 1_000_000}}
    with daemon(tmp_path_factory.mktemp("large"), **config) as lockd:
        yield lockd


@contextmanager
def daemon(directory: Path, **config: Any) -> Iterator[Lockd]:
    """A daemon with a configuration of its own, which must end well."""
    lockd = Lockd(directory, {"programs": {"futex": {"mode": "calls"}}, **config})
    try:
        yield lockd
    finally:
        code = lockd.stop()
    assert code == 0, "".join(lockd.log)


@pytest.mark.parametrize("blocking", [500, pytest.param(100_000, marks=LONG)])
def test_futex_waits_that_find_no_place(large: Lockd, workload: Start, tmp_path: Path, blocking: int) -> None:
    one = workload("many_addrs", 5000, blocking, 1)
    with daemon(tmp_path, maps={"entries": 64}, filter={"comms": [one.comm]}) as small:
        run = Comparison(small, large, one)
    for kind, told in run.truth["futex"].items():
        run.check("futex", told["waits"], "lockd_futex_waits_total", kind=kind)
        run.check("futex", told["blocked"], "lockd_futex_blocked_seconds_count", kind=kind)
    for error, count in run.truth["errors"].items():
        run.check("futex", count, "lockd_futex_errors_total", error=error)
    assert run.overflowed("futex") > 4000
    one.finish()


def test_absences_that_find_no_place(large: Lockd, workload: Start, tmp_path: Path) -> None:
    one = workload("crowd", 300, 50, 20_000)
    with daemon(tmp_path, maps={"entries": 64}, filter={"comms": [one.comm]}) as small:
        run = Comparison(small, large, one)
    for told in run.truth["offcpu"]:
        labels = {"state": told["state"], "reason": told["reason"]}
        run.check("offcpu", told["count"], "lockd_offcpu_blocked_seconds_count", **labels)
    assert run.overflowed("offcpu") > 1000
    one.finish()


def test_kernel_lock_waits_that_find_no_place(large: Lockd, workload: Start, tmp_path: Path) -> None:
    one = workload("pipe_crowd", 200, 5, 3000)
    with daemon(tmp_path, maps={"entries": 64}, filter={"comms": [one.comm]}) as small:
        run = Comparison(small, large, one)
    for lock_type, told in run.truth["kernel"].items():
        run.check("kernel_locks", told["waits"], "lockd_kernel_lock_wait_seconds_count", lock_type=lock_type)
    assert run.overflowed("kernel_locks") > 100
    one.finish()


@pytest.mark.parametrize(
    ("entries", "threads"),
    [
        (64, 300),  # fewer than this host has without the workload
        # Threads that ran before have their place, so that hardly any events of others are dropped here.
        pytest.param(512, 700, marks=pytest.mark.thorough("the same on a larger scale")),
    ],
)
def test_threads_that_find_no_place(
    large: Lockd, workload: Start, tmp_path: Path, entries: int, threads: int
) -> None:
    """Dropped events have no label that tells what they were: any futex call of any process may be among
    them, even a wake.
    """
    one = workload("crowd", threads, 50, 20_000, 1)
    with daemon(tmp_path, maps={"threads": entries}, filter={"comms": [one.comm]}) as small:
        run = Comparison(small, large, one)
    truth = run.truth["futex"]["lock"]["waits"]
    run.check("futex", truth, "lockd_futex_waits_total", kind="lock")
    dropped = run.dropped("futex", reason="threads_full")
    foreign = run.foreign("lockd_futex_waits_total") + run.foreign("lockd_futex_wakes_total")
    counted = run.counted("lockd_futex_waits_total", kind="lock")
    assert truth <= counted + dropped <= truth + foreign
    assert dropped >= truth * (threads - entries) / threads

    name, truth = "lockd_offcpu_blocked_seconds_count", run.truth["offcpu"][0]["count"]
    run.check("offcpu", truth, name, reason="lock")
    dropped = run.dropped("offcpu", reason="threads_full")
    # The preemptions of threads that have no place are dropped as well.
    foreign = run.foreign(name) + run.preemptions()
    assert truth <= run.counted(name, reason="lock") + dropped <= truth + foreign
    one.finish()
