"""Time off the CPU: counts and times by state and reason, the run queue, and who ended the wait."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Start
from lockd_process import Lockd, Metrics
from tolerance import about
from workload import Workload

COUNT, SUM = "lockd_offcpu_blocked_seconds_count", "lockd_offcpu_blocked_seconds_sum"
MAX = "lockd_offcpu_max_blocked_us"
RUNQUEUE = "lockd_offcpu_runqueue_seconds_sum"
WAKERS = "lockd_offcpu_waker_seconds_total"


def labels_of(one: Workload, told: dict[str, Any]) -> dict[str, str]:
    return {"comm": one.comm, "state": told["state"], "reason": told["reason"]}


@pytest.fixture(scope="module")
def mixed(lockd: Lockd, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workload, dict[str, Any], Metrics]:
    """One run of `offcpu_mix`: the workload, its truth, and the metrics after it."""
    one = Workload("offcpu_mix", 50, tmp_path_factory.mktemp("disk"), comm=f"mix.{os.getpid()}")
    truth = one.run()
    metrics = lockd.metrics()
    one.finish()
    return one, truth, metrics


@pytest.mark.parametrize("reason", ["sleep", "pipe", "poll", "lock", "disk"])
def test_each_reason_has_its_count_and_time(
    lockd: Lockd, mixed: tuple[Workload, dict[str, Any], Metrics], reason: str, tmp_path: Path
) -> None:
    one, truth, metrics = mixed
    told = next((told for told in truth["offcpu"] if told["reason"] == reason), None)
    if not told:
        pytest.skip(f"host: the file system of {tmp_path} has no O_DIRECT")
    labels = labels_of(one, told)
    assert metrics.sum(COUNT, **labels) == told["count"]
    # The process's sleeps are timed with what they spent on the run queue.
    queued_us = truth["queued_us"] if reason == "sleep" else 0
    seen_us = metrics.sum(SUM, **labels) * 1e6
    assert seen_us == about(told["sum_us"], told["count"]) or (
        told["sum_us"] - queued_us < seen_us < told["sum_us"]
    )
    longest = metrics.max(MAX, window="1m", **labels)
    assert longest == about(told["max_us"]) or told["max_us"] - queued_us < longest < told["max_us"]
    assert metrics.dropped == 0


@pytest.mark.parametrize("reason", ["sleep", "pipe", "poll", "lock", "disk"])
def test_each_thread_has_its_count_and_time(
    lockd: Lockd, mixed: tuple[Workload, dict[str, Any], Metrics], reason: str, tmp_path: Path
) -> None:
    one, truth, _ = mixed
    told = next((told for told in truth["phases"] if told["reason"] == reason), None)
    if not told:
        pytest.skip(f"host: the file system of {tmp_path} has no O_DIRECT")
    rows = lockd.api("threads", comm=one.comm, limit="1000")
    (row,) = [
        row
        for row in rows
        if row["program"] == "offcpu" and row["tid"] == told["tid"] and row["kind"] == reason
    ]
    assert row["blocked_count"] == told["count"]
    assert row["blocked_us"] == about(told["sum_us"], told["count"])
    assert row["max_blocked_us"] == about(told["max_us"])


def test_a_wait_that_goes_on_is_in_the_maximum_only(lockd: Lockd, workload: Start) -> None:
    one = workload("timed_wait", 0)  # it waits for its start byte
    labels = {"comm": one.comm, "state": "interruptible", "reason": "socket"}
    first = lockd.until(lambda m: m.max(MAX, **labels) > 0, 3)
    second = lockd.until(lambda m: m.max(MAX, **labels) >= first.max(MAX, **labels) + 900_000, 3)
    assert second.sum(COUNT, **labels) == 0
    truth = one.run()
    ended = lockd.metrics()
    assert truth["errno"] != 0
    assert ended.sum(COUNT, **labels) == 1
    assert ended.sum(SUM, **labels) * 1e6 >= second.max(MAX, **labels)


def steal_us(cpu: int) -> float:
    """Time that the hypervisor took from one CPU so far."""
    (line,) = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{cpu} ")]
    return int(line.split()[8]) / os.sysconf("SC_CLK_TCK") * 1e6


def test_a_thread_that_spins_waits_for_the_cpu_only(lockd: Lockd, workload: Start) -> None:
    stolen = [steal_us(cpu) for cpu in os.sched_getaffinity(0)]
    one = workload("spinner", 3)
    one.go()
    first = lockd.until(lambda m: m.sum(RUNQUEUE, comm=one.comm) > 0.3, 10)
    second = lockd.until(lambda m: m.sum(RUNQUEUE, comm=one.comm) > 1.5, 10)
    for name in (COUNT, SUM):
        assert second.sum(name, comm=one.comm) == first.sum(name, comm=one.comm)
    truth = one.truth()
    stolen_us = sum(steal_us(cpu) for cpu in os.sched_getaffinity(0)) - sum(stolen)
    metrics = lockd.metrics()
    told_us = sum(thread["runqueue_us"] for thread in truth["threads"])
    # Wall less CPU time holds what interrupts and the hypervisor took: 3% and the latter.
    assert metrics.sum(RUNQUEUE, comm=one.comm) * 1e6 == pytest.approx(told_us, abs=0.03 * told_us + stolen_us)
    spinners = {thread["tid"] for thread in truth["threads"] if not thread["voluntary_switches"]}
    assert spinners
    waits_us = {
        row["tid"]: row["blocked_us"]
        for row in lockd.api("threads", comm=one.comm, limit="1000")
        if row["program"] == "offcpu"
    }
    # Before it spins, a thread may wait to be moved to its CPU.
    assert all(waits_us.get(tid, 0) < 0.01 * told_us for tid in spinners)
    one.finish()


def test_the_time_is_charged_to_the_process_that_ended_it(workload: Start, tmp_path: Path) -> None:
    waker = f"wake.{os.getpid()}"
    waiter = f"W{waker[1:]}"
    lockd = Lockd(tmp_path, {"filter": {"comms": [waker, waiter]}})
    one = workload("waker", 50, comm=waker)
    truth = one.run()
    metrics = lockd.metrics()
    assert truth["waiter"] == waiter
    labels = labels_of(one, truth) | {"comm": waiter}
    assert metrics.sum(COUNT, **labels) == truth["count"]
    assert metrics.sum(SUM, **labels) * 1e6 == about(truth["sum_us"], truth["count"])
    assert metrics.sum(WAKERS, comm=waiter, waker=waker) == pytest.approx(metrics.sum(SUM, **labels))
    for comm in (waiter, waker):
        assert metrics.sum(WAKERS, comm=comm) == pytest.approx(metrics.sum(SUM, comm=comm))
    one.finish()
    assert lockd.stop() == 0
