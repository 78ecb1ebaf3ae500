"""The units of threads in real cgroups: nested, removed, made again, of version 1, frozen, of containers."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockd.export.catalog import CATALOG
from lockd.names.labels.cgroup_paths import Unit
from tests.support.cgroups import mounted, unified_hierarchy
from tests.support.container_paths import CONTAINERS, ID
from tests.support.descriptor_store import DescriptorStore
from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import NUMBERS, Start, Workload

BLOCKED = "lockd_futex_blocked_seconds_count"
SLICE = f"lockdtest{os.getpid()}.slice"
COUNT, SUM = "lockd_offcpu_blocked_seconds_count", "lockd_offcpu_blocked_seconds_sum"
MAX = "lockd_offcpu_max_blocked_us"
INFO = "lockd_unit_info"
SEEN_SECONDS = 10.0
LEFT_SECONDS = 10.0
THAWED_SECONDS = 1.0
"""How long a thread may take to run again once its cgroup is thawed."""

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def cgroup2() -> Iterator[Path]:
    """The unified hierarchy of this host."""
    with unified_hierarchy() as place:
        yield place


@pytest.fixture(scope="module")
def lockd(tmp_path_factory: pytest.TempPathFactory, host: None, cgroup2: Path) -> Iterator[Lockd]:
    """A daemon that found the unified hierarchy when it started, and counts only these workloads."""
    config = {"filter": {"comms": [f"*.{os.getpid():x}.*"]}}
    daemon = Lockd(tmp_path_factory.mktemp("units"), config)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes a cgroup and its parents. They are removed after the test."""
    made: list[Path] = []

    def cgroup(root: Path, *path: str) -> Path:
        directory = root
        for name in path:
            directory /= name
            if not directory.exists():
                directory.mkdir()
                made.append(directory)
        return directory

    yield cgroup
    for directory in reversed(made):
        if directory.exists():
            remove(directory)


def remove(cgroup: Path) -> None:
    """Remove a cgroup. A process that was waited for may still be in it for a moment."""
    deadline = time.monotonic() + LEFT_SECONDS
    while True:
        try:
            return cgroup.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def move(one: Workload, cgroup: Path) -> None:
    (cgroup / "cgroup.procs").write_text(str(one.pid))


def test_a_process_below_a_service_is_the_services(
    lockd: Lockd, workload: Start, cgroup2: Path, make: Make
) -> None:
    service, path = "lockd-nested.service", (SLICE, "lockd-nested.service", "payload")
    for attempt in range(2):  # the second time it is another cgroup of the same name
        cgroup = make(cgroup2, *path)
        one = workload("mutex_handover", 5, 1000)
        move(one, cgroup)
        truth = one.run()["futex"]["lock"]
        metrics = lockd.metrics()
        assert metrics.sum(BLOCKED, comm=one.comm, unit=service) == truth["blocked"] == 5
        assert metrics.sum(BLOCKED, comm=one.comm, kind="lock") == truth["blocked"]
        one.finish()
        remove(cgroup)
        remove(cgroup.parent)
        after = lockd.metrics()
        assert after.sum(BLOCKED, comm=one.comm, unit=service) == 5, f"round {attempt}: it is removed"
        assert after.sum(BLOCKED, unit=service) == 5 * (attempt + 1)


def test_processes_that_end_at_once_and_their_cgroup_with_them(
    lockd: Lockd, workload: Start, cgroup2: Path, make: Make
) -> None:
    service = "lockd-short.service"
    cgroup = make(cgroup2, SLICE, service)
    storm = workload("fork_storm", 100)
    move(storm, cgroup)
    truth = storm.run()["futex"]["lock"]
    assert lockd.metrics().sum(BLOCKED, comm=storm.comm, unit=service, kind="lock") == truth["blocked"]
    storm.finish()
    # lockd knows the cgroup by now. Another process in it ends before lockd looks at that process.
    one = workload("futex_errors", 10, 10, 5, 1000)
    move(one, cgroup)
    one.go()
    one.finish()
    remove(cgroup)
    metrics = lockd.metrics()
    waits = metrics.sum(BLOCKED, comm=one.comm, kind="lock")
    assert waits == metrics.sum(BLOCKED, comm=one.comm, unit=service, kind="lock") > 0


def test_a_container_of_v1_is_not_what_started_it(
    lockd: Lockd, workload: Start, cgroup2: Path, make: Make
) -> None:
    v1 = mounted("cgroup", "name=systemd") or mounted("cgroup", "rw")
    if not v1:
        pytest.skip("host: has no cgroups of v1")
    one = workload("mutex_handover", 5, 1000)
    move(one, make(cgroup2, SLICE, "lockd-docker.service"))
    move(one, make(v1, SLICE, ID))
    one.run()
    metrics = lockd.metrics()
    assert metrics.sum(BLOCKED, comm=one.comm, kind="lock") == 5
    assert metrics.sum(BLOCKED, comm=one.comm, unit=ID[:12]) == 5
    one.finish()


def test_a_thread_frozen_by_its_cgroup_waits_for_nothing_else(
    lockd: Lockd, workload: Start, cgroup2: Path, make: Make
) -> None:
    """A thawed thread goes on with its futex wait in restart_syscall, which counts as the futex call."""
    service = make(cgroup2, SLICE, "lockd-frozen.service")
    stopped = {"state": "other", "reason": "stopped"}

    def waits(metrics: Metrics) -> bool:
        return metrics.sum("lockd_futex_waiting", comm=one.comm) == 1 or time.monotonic() > earliest_end

    for seconds in (6, 30):
        one, spinner = workload("timed_wait", seconds * 1000), workload("spinner", 3)
        earliest_end = time.monotonic() + seconds
        for process in (one, spinner):
            move(process, service)
            process.go()
        lockd.until(waits, SEEN_SECONDS)
        before = time.monotonic()
        (service / "cgroup.freeze").write_text("1")
        while "frozen 1" not in (service / "cgroup.events").read_text():
            time.sleep(0.001)
        time.sleep(0.01)  # the kernel says so just before the last thread leaves its CPU
        began = time.monotonic()
        for comm in (one.comm, spinner.comm):
            lockd.until(lambda m, comm=comm: m.max(MAX, comm=comm, **stopped) > 300_000, SEEN_SECONDS)
        assert lockd.metrics().sum("lockd_futex_waiting", comm=one.comm) == 0
        least = time.monotonic() - began
        (service / "cgroup.freeze").write_text("0")
        thawed = time.monotonic()
        most = thawed - before
        for process in (one, spinner):
            process.truth()
            process.finish()
        if thawed < earliest_end - THAWED_SECONDS:
            break  # else the wait did not go on: this machine took longer than that to come here
    assert thawed < earliest_end - THAWED_SECONDS, "the wait ended before it could go on"
    metrics = lockd.metrics()
    reasons = {labels["reason"] for labels in metrics.labels(COUNT, comm=one.comm)}
    # A page of the program that is not in memory has to be read when the thread comes to it.
    assert reasons - {"disk"} == {"lock", "stopped", "socket"}
    assert metrics.sum(COUNT, comm=one.comm, **stopped) == 1
    assert least <= metrics.sum(SUM, comm=one.comm, **stopped) <= most
    assert metrics.sum(COUNT, comm=one.comm, reason="lock") == 2
    # The threads of the spinner ran when they were frozen. lockd must not take that for a page fault.
    assert metrics.sum(SUM, comm=spinner.comm, **stopped) > least
    assert metrics.sum(SUM, comm=spinner.comm, reason="fault") < 0.05


@pytest.mark.parametrize(("path", "unit"), CONTAINERS.items())
def test_what_the_cgroup_of_a_unit_says_is_exported(
    lockd: Lockd, workload: Start, cgroup2: Path, make: Make, path: str, unit: Unit
) -> None:
    number = f"{next(NUMBERS):x}"
    own = number + ID[len(number) :]  # each case is another container

    def renamed(text: str) -> str:
        return text.replace(ID, own).replace(ID[:12], own[:12])

    one = workload("mutex_handover", 5, 1000)
    # Some of the paths are parents of others, so each is made below a cgroup of its own.
    names = renamed(path).replace("../", "").strip("/").split("/")
    move(one, make(cgroup2, f"lockd-test-{os.getpid()}-{number}", *names))
    one.run()
    metrics = lockd.metrics()
    assert metrics.sum(BLOCKED, comm=one.comm, unit=renamed(unit.name)) == 5
    (info,) = metrics.labels(INFO, unit=renamed(unit.name))
    assert Unit(*(info[label] for label in CATALOG[INFO].labels)) == Unit(*map(renamed, unit))
    one.finish()


def test_a_restart_learns_again_what_cgroups_say(
    tmp_path: Path, host: None, workload: Start, cgroup2: Path, make: Make
) -> None:
    """The counts of a unit are taken over. Its info is read anew, from the processes that are there."""
    store, own = DescriptorStore(tmp_path), f"{next(NUMBERS):x}" + ID
    cgroup = make(cgroup2, f"lockd-test-{os.getpid()}-restart", "docker", own[:64])
    one = workload("stuck_mutex")
    move(one, cgroup)
    one.go()
    try:
        for _ in range(2):
            daemon = store.start(tmp_path)
            daemon.until(lambda m: m.sum(INFO, unit=own[:12], container_id=own[:64]) == 1, 2 * SEEN_SECONDS)
            assert daemon.stop() == 0, "".join(daemon.log)
    finally:
        one.kill()
        store.close()


def test_units_that_have_series_have_info_and_no_others(lockd: Lockd) -> None:
    metrics = lockd.metrics()
    told = [labels["unit"] for labels in metrics.labels(INFO)]
    units = {
        labels.get("unit", "") for name in metrics.samples if name != INFO for labels in metrics.labels(name)
    }
    assert sorted(told) == sorted(units - {"", "kernel", "other"})
    assert len(told) == metrics.sum("lockd_series", family="unit")
