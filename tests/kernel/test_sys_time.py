"""Sys time of threads that call futex all the time: one call in eight is timed and stands for eight."""

from __future__ import annotations

import csv

from tests.support.lockd_process import Lockd
from tests.support.trace_process import Trace
from tests.support.workload import Start

CALLS = 300_000


def test_what_is_timed_stands_for_all(calls: Lockd, workload: Start) -> None:
    lost_before = calls.metrics().sum("lockd_dropped_events_total", map="futex", reason="recursion")
    one = workload("futex_errors", 0, CALLS, 0)
    trace = Trace("futex", "-p", one.pid)  # a trace times every call
    truth = one.run()
    rows = list(csv.DictReader(trace.stop().splitlines()))
    metrics = calls.metrics()
    one.finish()
    # On a busy host the sampler may be preempted in a map operation. Until it resumes, the kernel skips BPF
    # programs on that CPU.
    lost = metrics.sum("lockd_dropped_events_total", map="futex", reason="recursion") - lost_before
    assert CALLS - lost <= metrics.sum("lockd_futex_waits_total", comm=one.comm) <= CALLS
    sys_us = metrics.sum("lockd_futex_sys_seconds_total", comm=one.comm) * 1e6
    told_us = sum(int(row["sys_us"]) for row in rows)
    # Each of the two, daemon and trace, also times what the other one does in a call. If the host holds up a
    # call between their readings of the clock, only one of them counts that time, and the daemon counts it
    # eight times if it times this call.
    longest_told_us = max(int(row["max_sys_us"]) for row in rows)
    assert 0.5 * (told_us - longest_told_us) < sys_us < 2 * told_us + 8 * truth["longest_us"]
    longest_us = metrics.max("lockd_futex_max_sys_us", comm=one.comm)
    assert sys_us / CALLS < longest_us <= truth["longest_us"]
