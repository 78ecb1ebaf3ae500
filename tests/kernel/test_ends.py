"""Threads and processes that end in a call, by exec or by the thousand: totals are right, nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockd.config.reader import read_text
from lockd.config.schema import Config
from lockd.load.child import run_loader
from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from lockd.sample.drain import Collector
from lockd.service.start import load_settings
from tests.kernel.test_nothing_left import IDS
from tests.kernel.test_signals import state_of, until
from tests.support.checks import at_rest, in_one_of_some_tries, off
from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import Start, Workload

WAITS, WAKES, ERRORS = "lockd_futex_waits_total", "lockd_futex_wakes_total", "lockd_futex_errors_total"
COUNT, SUM = "lockd_futex_blocked_seconds_count", "lockd_futex_blocked_seconds_sum"
MAX = "lockd_futex_max_blocked_us"

WAITING = "lockd_futex_waiting"
LOCKS_TWICE = """
import pathlib, sys, threading
pathlib.Path("/proc/self/comm").write_text(sys.argv[1])
print("runs", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""

MILLION = 1_000_000
IN_MINUTES = (pytest.mark.thorough("a minute or more of nothing else"), pytest.mark.timeout(1800))
SETTLED_SECONDS = 10.0
MOST_LINES = 10_000
"""The most lines after a storm: the default of `series.max`. The daemons of these tests may have more."""
MOST_LINES_OF_ONE = 1_000
"""The most lines for a storm of 20,000 processes or 50,000 threads, which is one process to the reader."""
STRAYS = 200
"""Threads that other programs on the host may start or end between two looks."""
MOST_GROWN_MIB = 64.0
"""The most that a process of lockd may grow in a storm, in MiB.

The tables of threads and locks have room for some 30,000 rows, which a storm fills: measured 37 MiB after the
first storm of 20,000, 54 after the third, 55 after the sixth.
"""


def children_of(pid: int) -> list[int]:
    """The processes that the main thread of a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lock_labels(one: Workload) -> dict[str, str]:
    return {"comm": one.comm, "kind": "lock"}


def test_a_call_whose_thread_is_killed_in_it(either: Lockd, workload: Start) -> None:
    one = workload("exit_in_call", 8)
    labels = lock_labels(one)
    truth = one.run()
    told = truth["futex"]["lock"]
    metrics = at_rest(either, one.comm)
    assert metrics.sum(COUNT, **labels) == told["blocked"]
    if metrics.counts_calls:
        assert metrics.sum(WAITS, **labels) == told["waits"]
        assert metrics.sum(ERRORS, comm=one.comm) == 0
    assert metrics.sum(SUM, **labels) * 1e6 >= told["blocked"] * truth["held_us"]
    assert metrics.max(MAX, **labels) == metrics.max("lockd_futex_lock_max_blocked_us", **labels) == 0
    one.finish()


def test_a_killed_thread_that_waits_in_its_end_waits_for_no_futex(either: Lockd) -> None:
    """The first process of a PID namespace waits, as it ends, for all others, whoever their parents are."""
    comm = f"init.{os.getpid():x}.0"  # like that of a workload, so that the daemons count it
    first = subprocess.Popen(
        ["unshare", "--pid", "--fork", sys.executable, "-c", LOCKS_TWICE, comm], stdout=subprocess.PIPE
    )
    assert first.stdout
    first.stdout.readline()
    (init,) = children_of(first.pid)
    entered = subprocess.Popen(["nsenter", f"--pid=/proc/{init}/ns/pid", "sleep", "1000"])
    try:
        until(lambda: len(children_of(entered.pid)) == 1, "the other process is in the namespace")
        (other,) = children_of(entered.pid)
        either.until(lambda now: now.sum(WAITING, comm=comm) == 1, SETTLED_SECONDS)
        entered.send_signal(signal.SIGSTOP)
        until(lambda: state_of(entered.pid) == "T", "the parent of the other one takes no notice of its end")
        os.kill(init, signal.SIGKILL)
        # In newer kernels a thread that waits so has the state I, which no thread in a futex call has.
        until(
            lambda: state_of(init) in ("S", "I") and state_of(other) == "Z",
            "the first one waits for the other",
        )
        either.until(lambda now: now.sum(WAITING, comm=comm) == 0, SETTLED_SECONDS)
        assert state_of(init) in ("S", "I")
    finally:
        entered.kill()
        entered.wait()
        first.kill()
        first.wait()


def test_exec_by_a_thread_that_is_not_the_leader(either: Lockd, workload: Start) -> None:
    others = 4

    def attempt() -> list[str]:
        one = workload("exec_thread", 20, others)
        labels = lock_labels(one)
        truth = one.run()
        told = truth["futex"]["lock"]
        assert truth["tid"] == one.pid
        metrics = at_rest(either, one.comm)
        assert metrics.sum(COUNT, **labels) == told["blocked"] + others
        if metrics.counts_calls:
            assert metrics.sum(WAITS, **labels) == told["waits"] + others
            assert metrics.sum(ERRORS, comm=one.comm) == truth["errors"]["ETIMEDOUT"]
        threads = either.api("threads", comm=one.comm, kind="lock", limit="1000")
        rows = {row["tid"]: row for row in threads if row["program"] == "futex"}
        assert {row["tgid"] for row in rows.values()} == {one.pid}
        assert sum(row["blocked_count"] for row in rows.values()) == told["blocked"] + others
        # Half of the calls came before exec, in another thread. Some may have ended before they blocked.
        unblocked = told["waits"] / 2 - rows[one.pid]["blocked_count"]
        assert 0 <= unblocked <= told["waits"] - told["blocked"]
        assert not any(row["waiting_us"] for row in rows.values())
        one.finish()
        # It is only known how long the other threads were blocked at least. The test of exit_in_call checks
        # the times of such calls.
        assert metrics.sum(SUM, **labels) * 1e6 >= truth["others_us"]
        return off(
            "longest",
            metrics.max(MAX, window="1m", **labels),
            told["max_us"],
            least_us=told["max_least_us"],
        )

    in_one_of_some_tries(attempt)


def test_an_exec_that_kills_its_thread_leaves_no_entry_behind(host: None, workload: Start) -> None:
    """The thread has taken over the leader's id by then, under which the programs see it end."""
    manifest, fds = run_loader(load_settings(read_text(Config, "", "test")))
    try:
        collector, processes = Collector(manifest, fds), Processes(Units())
        one = workload("failed_exec", 50)
        assert one.run()["failed"] == 50

        def vanished() -> set[int]:
            (tids, threads), _ = collector.threads()
            is_on_cpu = threads["off_since"] == 0
            ids = zip(tids[is_on_cpu].tolist(), threads["tgid"][is_on_cpu].tolist(), strict=True)
            return {tid for tid, tgid in ids if processes.is_gone(tgid)}

        # Few leave none: exec exchanges the ids of thread and leader. If the leader has not ended yet,
        # it leaves its CPU under the id of the thread, and its program deletes the thread's entry.
        left = vanished()
        assert len(left) >= 25
        for _ in range(2):
            collector.threads()
            collector.forget_vanished(processes.is_gone)
        assert not left & vanished()
        one.finish()
    finally:
        for fd in fds:
            os.close(fd)


def check_totals(before: Metrics, after: Metrics, one: Workload, truth: dict[str, Any]) -> None:
    """Check that each event counts once: for the process, or without its name if a map was full."""

    def check(told: int, name: str, most: int = 0, **labels: str) -> None:
        own = after.sum(name, comm=one.comm, **labels)
        other = after.sum(name, comm="other", **labels) - before.sum(name, comm="other", **labels)
        dropped = after.dropped - before.dropped
        assert own <= max(told, most), (name, labels, own, told, most)
        assert told <= own + other + dropped, (name, labels, own, other, dropped, told)

    told = truth["futex"]["lock"]
    # A call that sleeps twice is two waits in mode blocked.
    check(told["blocked"], COUNT, most=0 if after.counts_calls else told["sleeps"], kind="lock")
    assert after.sum(SUM, comm=one.comm) * 1e6 <= told["blocked_us"] + told["blocked"]
    if not after.counts_calls:
        return
    check(told["waits"], WAITS, kind="lock")
    check(truth["wakes"], WAKES)
    for error, count in truth["errors"].items():
        check(count, ERRORS, error=error)
    assert after.sum(WAITS, comm=one.comm, kind="lock") == after.sum(WAITS, comm=one.comm)
    assert after.sum(ERRORS, comm=one.comm) <= sum(truth["errors"].values())


def live_threads() -> int:
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def once_nothing_is_left(lockd: Lockd, one: Workload) -> Metrics:
    """Return the metrics once the programs remember no ended threads, and no thread of `one` waits."""

    def holds(metrics: Metrics) -> bool:
        return metrics.sum("lockd_map_entries", map="threads") <= live_threads() + STRAYS

    at_rest(lockd, one.comm)
    return lockd.until(holds, SETTLED_SECONDS)


def check_bounds(metrics: Metrics, one: Workload) -> None:
    lines = [labels for series in metrics.samples.values() for labels in series]
    assert sum(("comm", one.comm) in labels for labels in lines) < MOST_LINES_OF_ONE
    assert len(lines) <= MOST_LINES


def resident_mib(metrics: Metrics, process: str = "sampler") -> float:
    return metrics.sum("lockd_resident_bytes", process=process) / 2**20


def bpf_objects(lockd: Lockd) -> set[tuple[str, str]]:
    """Return the programs, maps and links of which the daemon has descriptors."""
    found: set[tuple[str, str]] = set()
    for file in Path(f"/proc/{lockd.process.pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now, so that it is no BPF object
            found |= set(IDS.findall(file.read_text()))
    return found


@pytest.mark.thorough("a storm")
def test_a_storm_of_short_lived_processes(either: Lockd, workload: Start) -> None:
    before = either.metrics()
    one = workload("fork_storm", 20_000)
    truth = one.run()
    one.finish()
    after = once_nothing_is_left(either, one)
    check_totals(before, after, one, truth)
    check_bounds(after, one)
    assert resident_mib(after) - resident_mib(before) < MOST_GROWN_MIB


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("clone_churn", (50_000,)),
        pytest.param("clone_churn", (MILLION, 50), marks=IN_MINUTES),
        pytest.param("many_addrs", (0, 100_000), marks=IN_MINUTES),
    ],
    ids=["threads", "a million threads", "100,000 locks"],
)
def test_a_churn_of_short_lived_threads_and_locks(
    either: Lockd, workload: Start, name: str, arguments: tuple[int, ...]
) -> None:
    before, loaded = either.metrics(), bpf_objects(either)
    one = workload(name, *arguments)
    truth = one.run()
    one.finish()
    after = once_nothing_is_left(either, one)
    check_totals(before, after, one, truth)
    check_bounds(after, one)
    for process in ("sampler", "namer"):
        assert resident_mib(after, process) - resident_mib(before, process) < MOST_GROWN_MIB, process
    for which, capacity in after.samples["lockd_map_capacity"].items():
        assert after.samples["lockd_map_entries"][which] <= capacity, which
    assert bpf_objects(either) == loaded
