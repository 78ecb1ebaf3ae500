"""Time off the CPU: counts and times by state and reason, the run queue, and who ended the wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import SHARE, in_one_of_some_tries, off, stolen_us
from tests.support.lockd_process import Lockd
from tests.support.workload import Start, Workload

COUNT, SUM = "lockd_offcpu_blocked_seconds_count", "lockd_offcpu_blocked_seconds_sum"
MAX = "lockd_offcpu_max_blocked_us"
RUNQUEUE = "lockd_offcpu_runqueue_seconds_sum"
WAKERS = "lockd_offcpu_waker_seconds_total"
PATIENCE_SECONDS = 10.0
"""The time that the tests wait for lockd on a machine that has no time for it."""


@pytest.fixture(autouse=True)
def said(record_property: Callable[[str, object], None]) -> None:
    """Record the mechanism that sees switches, for the matrix of tests/vm."""
    record_property("offcpu switches", "tracepoint")


def labels_of(comm: str, told: dict[str, Any]) -> dict[str, str]:
    return {"comm": comm, "state": told["state"], "reason": told["reason"]}


def offcpu_threads(lockd: Lockd, one: Workload) -> list[dict[str, Any]]:
    rows = lockd.api("threads", comm=one.comm, limit="1000")
    return [row for row in rows if row["program"] == "offcpu"]


def test_each_state_and_reason_has_its_count_and_time(narrow: Lockd, workload: Start, scratch: Path) -> None:
    reasons = set()

    def attempt() -> list[str]:
        one = workload("offcpu_mix", 50, scratch)
        truth = one.run()
        metrics = narrow.metrics()
        rows = {(row["tid"], row["kind"]): row for row in offcpu_threads(narrow, one)}
        # Some kernels hide some wake-ups. Then the time on the run queue is in the blocked time too.
        queued_us, found = truth["queued_us"], []
        for told in truth["offcpu"]:
            labels, reason = labels_of(one.comm, told), told["reason"]
            if told["count"]:
                reasons.add(reason)
            # A sleep whose time is up before its thread has left the CPU is no wait.
            counted = metrics.sum(COUNT, **labels)
            assert counted <= told["count"], reason
            found += [f"{reason}: {counted:g} of {told['count']}"] if counted < told["count"] else []
            sum_us, longest_us = metrics.sum(SUM, **labels) * 1e6, metrics.max(MAX, window="1m", **labels)
            found += off(f"longest {reason}", longest_us, told["max_us"], 1, queued_us, told["max_least_us"])
            is_with_queue = reason == "sleep" and told["sum_us"] - queued_us < sum_us < told["sum_us"]
            if not is_with_queue:
                found += off(reason, sum_us, told["sum_us"], told["count"], queued_us, told["least_us"])
        for told in truth["phases"]:
            row, reason = rows.get((told["tid"], told["reason"])), told["reason"]
            if not told["count"]:
                assert row is None
                continue
            assert row, f"no row for {told}"
            assert row["blocked_count"] == told["count"], reason
            found += off(
                f"thread's longest {reason}",
                row["max_blocked_us"],
                told["max_us"],
                1,
                queued_us,
                told["max_least_us"],
            )
            found += off(
                f"thread's {reason}",
                row["blocked_us"],
                told["sum_us"],
                told["count"],
                queued_us,
                told["least_us"],
            )
        one.finish()
        return found

    in_one_of_some_tries(attempt)
    if "disk" not in reasons:
        pytest.skip(f"host: the file system of {scratch} waits for no disk; all other reasons passed")


def test_every_reason_that_a_program_can_provoke(narrow: Lockd, workload: Start, scratch: Path) -> None:
    missing: list[str] = []

    def attempt() -> list[str]:
        one = workload("offcpu_reasons", 10, scratch)
        truth = one.run()
        metrics = narrow.metrics()
        rows = {(row["tid"], row["kind"]): row for row in offcpu_threads(narrow, one)}
        queued_us, found = truth["queued_us"], []
        missing[:] = truth["missing"]
        waits: dict[tuple[str, str], list[int]] = {}
        for told in truth["phases"]:
            reason, what, count = told["reason"], told["what"], told["count"]
            row = rows[told["tid"], reason]
            if what.startswith("clone") and row["blocked_count"] > count:
                # A fork may wait for a lock of the kernel in the same call, before it waits for its child.
                one.finish()
                return [f"{what}: {row['blocked_count']} waits, truth {count}"]
            assert row["blocked_count"] == count > 0, what
            found += off(what, row["blocked_us"], told["sum_us"], count, queued_us, told["least_us"])
            found += off(
                f"longest {what}", row["max_blocked_us"], told["max_us"], 1, queued_us, told["max_least_us"]
            )
            waits.setdefault((told["state"], reason), []).append(count)
        for (state, reason), counts in waits.items():
            of_all = metrics.sum(COUNT, comm=one.comm, state=state, reason=reason)
            start_byte = reason == "socket"  # the process most likely has to wait for it
            assert sum(counts) <= of_all <= sum(counts) + start_byte, reason
        nobodys = {labels["reason"] for labels in metrics.labels(COUNT, comm=one.comm)}
        # A fault or a fork may wait for a lock or the disk; nothing is left without a reason.
        nobodys -= {reason for _, reason in waits} | {"sleep", "kernel", "disk", "fault"}
        assert not nobodys
        one.finish()
        return found

    in_one_of_some_tries(attempt)
    if missing:
        pytest.skip(f"host: no {', '.join(missing)} here; all other reasons passed")


def test_a_wait_that_goes_on_is_in_the_maximum_only(narrow: Lockd, workload: Start) -> None:
    # The workload has renamed itself since its last event, and now waits for its start byte.
    one = workload("timed_wait", 1)
    labels = {"comm": one.comm, "state": "interruptible", "reason": "socket"}
    first = narrow.until(lambda m: m.max(MAX, **labels) > 0, PATIENCE_SECONDS)
    longest_us = first.max(MAX, **labels)
    second = narrow.until(lambda m: m.max(MAX, **labels) >= longest_us + 900_000, PATIENCE_SECONDS)
    assert second.sum(COUNT, **labels) == 0
    one.run()
    ended = narrow.metrics()
    assert ended.sum(COUNT, **labels) == 1
    assert ended.sum(SUM, **labels) * 1e6 >= second.max(MAX, **labels)
    one.finish()


def test_a_thread_that_spins_waits_for_the_cpu_only(narrow: Lockd, workload: Start) -> None:
    def attempt() -> list[str]:
        stolen_before_us = stolen_us()
        one = workload("spinner", 4)
        one.go()
        first = narrow.until(lambda m: m.sum(RUNQUEUE, comm=one.comm) > 0.2, 10)
        second = narrow.until(lambda m: m.sum(RUNQUEUE, comm=one.comm) > 1, 10)
        truth = one.truth()
        metrics = narrow.metrics()
        waits = [[m.sum(name, comm=one.comm) for name in (COUNT, SUM)] for m in (first, second)]
        # Before it spins, a thread may wait to be moved to its CPU.
        waits_us = {row["tid"]: row["blocked_us"] for row in offcpu_threads(narrow, one)}
        told_us = sum(thread["runqueue_us"] for thread in truth["threads"])
        for thread in truth["threads"]:
            assert waits_us.get(thread["tid"], 0) < 0.01 * told_us or thread["voluntary_switches"]
        one.finish()
        # The truth is wall time less CPU time, which includes what the hypervisor and interrupts took. The
        # process has one more thread, which only starts and ends the others.
        seen_us, lost_us = metrics.sum(RUNQUEUE, comm=one.comm) * 1e6, stolen_us() - stolen_before_us
        words = f"run queue: {seen_us:.0f} us, truth {told_us} us, stolen {lost_us:.0f} us; waits {waits}"
        is_right = (1 - SHARE) * told_us - lost_us <= seen_us <= (1 + SHARE) * told_us
        # Waits differ if the second scrape took so long that the threads had ended, or if a page of the
        # program came from the disk.
        return [] if is_right and waits[0] == waits[1] else [words]

    in_one_of_some_tries(attempt)


def test_the_time_is_charged_to_the_process_that_ended_the_wait(narrow: Lockd, workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload("waker", 50)
        truth = one.run()
        metrics = narrow.metrics()
        waiter, labels = truth["waiter"], labels_of(truth["waiter"], truth)
        assert metrics.sum(COUNT, **labels) == truth["count"]
        for comm in (waiter, one.comm):
            assert metrics.sum(WAKERS, comm=comm) == pytest.approx(metrics.sum(SUM, comm=comm))
        one.finish()
        charged_us = metrics.sum(WAKERS, comm=waiter, waker=one.comm) * 1e6
        return off("pipe", charged_us, truth["sum_us"], truth["count"], truth["queued_us"], truth["least_us"])

    in_one_of_some_tries(attempt)


def test_a_worker_of_the_kernel_is_not_in_the_call_that_made_it(narrow: Lockd, workload: Start) -> None:
    """Such a worker has the registers of the thread that was to make it, which may be blocked on a lock."""
    one = workload("ring_worker", 20)
    truth = one.run()
    metrics = narrow.metrics()
    assert metrics.sum(COUNT, comm=one.comm, reason="kthread") >= truth["sleeps"]
    kinds = {row["kind"] for row in offcpu_threads(narrow, one) if row["tid"] == truth["worker"]}
    assert "kthread" in kinds
    assert kinds <= {"kthread", "kernel"}
