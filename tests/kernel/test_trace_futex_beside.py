"""`lockd trace futex` says the same in all its formats, and as the daemon, bpftrace and the report."""

from __future__ import annotations

import json
import subprocess
from collections import Counter

import pytest

from tests.support.checks import PER_SWITCH_US, beside_another_tool
from tests.support.futex_rows import Row, read, total
from tests.support.lockd_process import Lockd
from tests.support.trace_process import Trace
from tests.support.workload import Start, Workload


def check_blocked(seen_us: float, told: dict[str, float]) -> None:
    """Assert that the blocked time of one of several tracers is possible by the truth.

    Each tracer reads the clock in its own program. Time that the host takes between two of these readings is
    in the sum of one tracer only.
    """
    least_us = told["least_us"] - PER_SWITCH_US * told["blocked"]
    assert least_us <= seen_us <= told["blocked_us"] + told["blocked"]


def test_formats_say_the_same(workload: Start) -> None:
    one = workload("mutex_handover", 20, 1000)
    traces = {name: Trace("futex", "-p", one.pid, "--format", name) for name in ("csv", "json", "folded")}
    told = one.run()["futex"]["lock"]
    texts = {name: trace.stop() for name, trace in traces.items()}
    rows = read(texts["csv"])
    objects = [json.loads(line) for line in texts["json"].splitlines()]
    counts = ("wait_count", "blocked_count", "wake_count", "errors")
    key = ("pid", "tid", "addr", *counts)
    assert sorted([row[name] for name in key] for row in rows) == sorted(
        [one[name] for name in key] for one in objects
    )
    folded = [line.rpartition(" ") for line in texts["folded"].splitlines()]
    assert {stack for stack, _, _ in folded} == {row["stack"] for row in rows if row["blocked_count"]}
    check_blocked(sum(int(value) for *_, value in folded), told)
    check_blocked(total(rows, "blocked_us"), told)


def test_beside_the_daemon_both_say_the_same(calls: Lockd, workload: Start) -> None:
    one = workload("futex_errors", 100, 500, 50, 1000)
    trace = Trace("futex", "-p", one.pid, "--names")
    told = one.run()["futex"]["lock"]
    rows = read(trace.stop())
    metrics = calls.metrics()
    name = "lockd_futex_blocked_seconds"
    assert total(rows, "wait_count") == metrics.sum("lockd_futex_waits_total", comm=one.comm)
    assert total(rows, "blocked_count") == metrics.sum(f"{name}_count", comm=one.comm)
    assert total(rows, "wake_count") == metrics.sum("lockd_futex_wakes_total", comm=one.comm)
    assert total(rows, "errors") == metrics.sum("lockd_futex_errors_total", comm=one.comm)
    check_blocked(total(rows, "blocked_us"), told)
    check_blocked(metrics.sum(f"{name}_sum", comm=one.comm) * 1e6, told)
    assert {row["kind"] for row in rows} == {"lock"}


BPFTRACE = """
tracepoint:syscalls:sys_enter_futex /pid == $1/ { @op[args->op & 127] = count(); @since[tid] = nsecs; }
tracepoint:syscalls:sys_exit_futex /@since[tid]/ {
    @us = sum((nsecs - @since[tid]) / 1000);
    delete(@since[tid]);
}
tracepoint:sched:sched_process_exit /tid == $1/ { exit(); }
interval:ms:100 /!@begun/ { @begun = 1; printf("begun\\n"); }
"""
"""bpftrace attaches its probes in this order, so all are attached when it says that it has begun."""


def bpftraced(one: Workload) -> tuple[Counter[int], float, list[Row], Trace]:
    """Run a workload under bpftrace and a trace. Return the number of calls by operation and the time of all
    calls in microseconds, both by bpftrace; then the rows of the trace, and the trace.
    """
    script = subprocess.Popen(
        ["bpftrace", "-f", "json", "-e", BPFTRACE.replace("$1", str(one.pid))],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert script.stdout
    while "begun" not in (line := script.stdout.readline()):
        assert line, "bpftrace did not begin"
    trace = Trace("futex", "-p", one.pid)
    one.run()
    one.finish()
    rows = read(trace.result())
    maps = [json.loads(line)["data"] for line in script.stdout if line.strip()]
    assert script.wait(30) == 0
    operations = next(data["@op"] for data in maps if "@op" in data)
    (us,) = (data["@us"] for data in maps if "@us" in data)
    return Counter({int(op): count for op, count in operations.items()}), us, rows, trace


WAITS, WAKES = (0, 6, 9, 11, 13), (1, 3, 4, 5, 7, 10, 12)
"""The operations of futex(2) that wait, and those that wake, by number."""


@beside_another_tool
@pytest.mark.parametrize(
    ("program", "arguments"),
    [("cond_pingpong", (300,)), ("pi_mutex", (50, 2000)), ("futex_errors", (50, 1000, 20, 1000))],
)
def test_side_by_side_with_bpftrace(program: str, arguments: tuple[int, ...], workload: Start) -> None:
    one = workload(program, *arguments)
    operations, us, rows, trace = bpftraced(one)
    assert trace.lost == {}
    assert total(rows, "wait_count") == sum(operations[op] for op in WAITS)
    assert total(rows, "wake_count") == sum(operations[op] for op in WAKES)
    calls = sum(operations.values())
    # bpftrace cuts each time to whole microseconds.
    ours = total(rows, "blocked_us") + total(rows, "sys_us")
    assert ours == pytest.approx(us, rel=0.02, abs=2 * calls)


def test_report_live_says_what_the_trace_says(workload: Start) -> None:
    one = workload("mutex_handover", 30, 1000)
    trace = Trace(
        "report", "--live", "-p", one.pid, "--format", "json", "-c", "wait.count,wake.count,blocked.sum"
    )
    told = one.run()
    (lock,) = [json.loads(line) for line in trace.stop().splitlines()]
    assert (lock["lock"], lock["kind"]) == ("mutex_handover:handover_mutex", "lock")
    assert (lock["wait.count"], lock["wake.count"]) == (30, told["wakes"])
    assert lock["blocked.sum"] <= told["futex"]["lock"]["blocked_us"]
    assert lock["this%"] == lock["cum%"] == 100


def test_report_live_says_who_held_the_lock(workload: Start) -> None:
    one = workload("mutex_handover", 30, 1000)
    trace = Trace("report", "--by", "holder", "--live", "-p", one.pid, "--format", "json")
    told = one.run()
    (held,) = [json.loads(line) for line in trace.stop().splitlines()]
    assert (held["lock"], held["kind"], held["releases"]) == ("mutex_handover:handover_mutex", "lock", 30)
    assert held["holder"].endswith("unlock")
    assert 30 * 1000 <= held["waited.sum"] <= told["futex"]["lock"]["blocked_us"]
