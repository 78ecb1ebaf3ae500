"""`lockd trace hist` and `latency` against a program whose system calls are known, and beside bpftrace."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import time
from collections import Counter
from typing import Any

import pytest

from lockd.load.host import ensure_tracefs
from lockd.trace.core.histogram import LOG2, Linear
from lockd.trace.probes.tracepoints import fields_of
from tests.support.bpftrace import bpftrace
from tests.support.checks import beside_another_tool
from tests.support.tracing import Done, Trace, trace
from tests.support.workload import Start

USAGE = 2
TIMES = 10
ERRORS = {"ESPIPE": -29, "EBADF": -9}
SPAWNER = """
import os, sys
sys.stdin.read(1)
for _ in range(20):
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
"""
Groups = dict[tuple[Any, ...], dict[str, Any]]


def groups(done: Done) -> Groups:
    """Return the histograms of a trace in JSON, by the values of their keys."""
    assert (done.code, done.lost) == (0, "none"), done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    assert done.events == sum(group["count"] for group in found)
    keys = [
        tuple(tuple(label) if isinstance(label, list) else label for label in group["key"].values())
        for group in found
    ]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, found, strict=True))


def buckets(group: dict[str, Any]) -> dict[tuple[int | None, int | None], int]:
    """Return the counts of the buckets that are not empty, by their bounds."""
    return {(one["from"], one["below"]): one["count"] for one in group["buckets"] if one["count"]}


def at_least(group: dict[str, Any], value: int) -> int:
    """Return the number of events in the bucket of `value` and in those above it."""
    low, _ = LOG2.bounds(LOG2.slot(value))
    return sum(one["count"] for one in group["buckets"] if (one["from"] or 0) >= (low or 0))


def returned(truth: dict[str, Any]) -> Counter[int]:
    """Return how often pread64 returned each value."""
    numbers = {ERRORS.get(name) or int(name): count for name, count in truth["pread64"].items()}
    return Counter(numbers)


def in_buckets(values: Counter[int], scale: Any = LOG2) -> dict[tuple[int | None, int | None], int]:
    found: Counter[tuple[int | None, int | None]] = Counter()
    for value, count in values.items():
        found[scale.bounds(scale.slot(value))] += count
    return dict(found)


def traced(workload: Start, *words: object) -> tuple[dict[str, Any], Groups, str]:
    """Run the workload system_calls under a trace; return its truth, the trace's histograms, and its comm."""
    calls = workload("system_calls", TIMES)
    with Trace(*words, "-p", calls.pid, "--format", "json") as one:
        truth = calls.run()
        return truth, groups(one.stop()), calls.comm


def test_values_are_exact(workload: Start) -> None:
    truth, found, _ = traced(workload, "hist", "syscalls:sys_exit_pread64", "ret")
    (group,) = found.values()
    values = returned(truth)
    assert buckets(group) == in_buckets(values)
    assert group["sum"] == sum(value * count for value, count in values.items())
    assert group["max"] == 65536


def test_values_in_equal_steps(workload: Start) -> None:
    steps = Linear(-10, 110, 20)
    truth, found, _ = traced(workload, "hist", "syscalls:sys_exit_pread64", "ret", "--linear=-10,110,20")
    (group,) = found.values()
    assert buckets(group) == in_buckets(returned(truth), steps)


def test_values_by_another_field_and_by_process(workload: Start) -> None:
    truth, found, comm = traced(
        workload, "hist", "syscalls:sys_exit_pread64", "ret", "--by", "ret,comm,pid,tid"
    )
    names = {value: name for name, value in ERRORS.items()}
    assert {key: group["count"] for key, group in found.items()} == {
        (names.get(value, value), comm, truth["tgid"], truth["tgid"]): count
        for value, count in returned(truth).items()
    }


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        (("ret > 7",), lambda value: value > 7),
        (("ret >= 7", "ret != 100"), lambda value: value >= 7 and value != 100),
        (("ret < 0",), lambda value: value < 0),
        (("ret <= -10",), lambda value: value <= -10),
        (("ret == 0x1000",), lambda value: value == 4096),
        (("ret >= -2147483648",), lambda value: True),
        (("ret > -3000000000",), lambda value: True),
    ],
)
def test_filters(filters: tuple[str, ...], holds: Any, workload: Start) -> None:
    options = [word for text in filters for word in ("--filter", text)]
    truth, found, _ = traced(workload, "hist", "syscalls:sys_exit_pread64", "ret", *options)
    (group,) = found.values()
    assert buckets(group) == in_buckets(
        Counter({value: count for value, count in returned(truth).items() if holds(value)})
    )


def test_arguments_have_their_types(workload: Start) -> None:
    """The argument fd of pread64 is an unsigned int: where the program passes -1, its value is 2^32 - 1."""
    truth, found, _ = traced(workload, "hist", "syscalls:sys_enter_pread64", "fd", "--by", "fd")
    assert found[2**32 - 1,]["count"] == truth["pread64"]["EBADF"]
    assert sum(group["count"] for group in found.values()) == returned(truth).total()


def test_values_by_stack(workload: Start) -> None:
    truth, found, _ = traced(workload, "hist", "syscalls:sys_exit_pread64", "ret", "--by", "stack", "-U")
    for (stack,) in found:
        assert stack[-1] in ("pread64", "__pread64", "__libc_pread64", "pread")
        assert stack[-2] == "main"
    assert sum((Counter(buckets(group)) for group in found.values()), Counter()) == in_buckets(
        returned(truth)
    )


def test_texts_are_counted(workload: Start) -> None:
    """The program forks once and starts two threads, always under the same comm."""
    calls = workload("system_calls", 1)
    with Trace("hist", "sched:sched_process_fork", "parent_comm", "-p", calls.pid, "--format", "csv") as one:
        calls.run()
        done = one.stop()
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert rows == [{"bucket_value": calls.comm, "bucket_count": str(done.events)}]
    assert done.events == 3  # a child and two threads


def test_texts_that_are_elsewhere_in_the_record() -> None:
    with Trace("hist", "sched:sched_process_exec", "filename", "--by", "filename", "--format", "json") as one:
        for _ in range(3):
            subprocess.run(["/bin/true"], check=True)
        done = one.stop()
    (group,) = (group for key, group in groups(done).items() if key == ("/bin/true",))
    assert group["buckets"][0]["value"] == "/bin/true"
    assert group["count"] >= 3


def test_every_tracepoint_of_this_kernel_can_be_read() -> None:
    read = 0
    for path in (ensure_tracefs() / "events").glob("*/*/format"):
        text = path.read_text()
        common = text.count("\tfield:") - text.count(" common_")
        assert len(fields_of(text)) == common, path
        read += 1
    assert read > 500


def test_latencies_by_result(workload: Start) -> None:
    words = ("latency", "pread64,ppoll,futex,readv,nanosleep,wait4", "--by", "ret")
    truth, found, _ = traced(workload, *words)
    counts = {key: group["count"] for key, group in found.items()}
    k, reads = truth["k"], truth["pread64"]
    assert counts == {
        ("pread64", "success", ""): sum(reads.values()) - reads["ESPIPE"] - reads["EBADF"],
        ("pread64", "ESPIPE", ""): reads["ESPIPE"],
        ("pread64", "EBADF", ""): reads["EBADF"],
        ("ppoll", "success", ""): 2 * k,
        ("futex", "ETIMEDOUT", ""): k,
        ("futex", "EAGAIN", ""): k,
        ("readv", "EINTR", ""): k,
        ("readv", "ERESTARTSYS", ""): k,
        ("readv", "success", ""): k,
        ("readv", "", "yes"): 1,
        ("nanosleep", "success", ""): 1,
        ("wait4", "success", ""): 1,
    }


def test_latencies_are_as_long_as_the_calls(workload: Start) -> None:
    truth, found, _ = traced(workload, "latency", "ppoll,futex,nanosleep,wait4,readv", "--by", "ret")
    polls = found["ppoll", "success", ""]
    short, long = truth["short_us"], truth["long_us"]
    assert at_least(polls, short) == 2 * TIMES
    assert at_least(polls, long) >= TIMES
    assert polls["max"] >= long
    assert polls["sum"] >= TIMES * (short + long)
    assert found["futex", "ETIMEDOUT", ""]["sum"] >= TIMES * short
    assert found["futex", "EAGAIN", ""]["max"] < found["futex", "ETIMEDOUT", ""]["sum"]
    # A call that is stopped in the middle and goes on afterwards is one call. Its time includes the stop.
    assert found["nanosleep", "success", ""]["max"] >= truth["slept_us"]
    assert found["wait4", "success", ""]["max"] >= truth["waited_us"]


def test_calls_that_go_on_are_left_out_if_asked(workload: Start) -> None:
    truth, found, _ = traced(workload, "latency", "readv", "--no-ongoing")
    assert {key: group["count"] for key, group in found.items()} == dict.fromkeys(
        [("success",), ("EINTR",), ("ERESTARTSYS",)], truth["k"]
    )


def test_who_is_stopped_is_still_in_its_call() -> None:
    script = "import sys, time; sys.stdin.read(1); time.sleep(600)"
    with subprocess.Popen(["/usr/bin/python3", "-c", script], stdin=subprocess.PIPE) as sleeper:
        assert sleeper.stdin
        with Trace("latency", "clock_nanosleep", "-p", sleeper.pid, "--format", "json") as one:
            sleeper.stdin.write(b"g")
            sleeper.stdin.close()
            time.sleep(1)
            sleeper.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            found = groups(one.stop())
        sleeper.kill()
    assert {key: group["count"] for key, group in found.items()} == {("", "yes"): 1}
    assert found["", "yes"]["max"] >= 1_000_000


def test_short_calls_are_left_out_if_asked(workload: Start) -> None:
    truth, found, _ = traced(workload, "latency", "ppoll", "-m", "20ms", "--by", "none", "--no-ongoing")
    (group,) = found.values()
    assert TIMES <= group["count"] <= 2 * TIMES
    assert at_least(group, 20_000) == group["count"]
    assert group["max"] >= truth["long_us"]


def test_units(workload: Start) -> None:
    truth, found, _ = traced(workload, "latency", "nanosleep", "--by", "none", "--unit", "ns", "--no-ongoing")
    (group,) = found.values()
    assert group["unit"] == "ns"
    assert group["max"] >= truth["slept_us"] * 1000
    ((low, high),) = buckets(group)
    assert low is not None and high is not None and low <= group["max"] < high


def test_latencies_by_stack_and_thread(workload: Start) -> None:
    truth, found, comm = traced(workload, "latency", "readv", "--by", "stack,comm,tid", "-U")
    ongoing = [(stack, name, tid) for stack, name, tid, is_ongoing in found if is_ongoing]
    ((stack, name, tid),) = ongoing
    assert "stuck" in stack
    assert (name, tid) == (comm, truth["stuck"])
    assert all("main" in stack for stack, *_, is_ongoing in found if not is_ongoing)


def test_all_calls(workload: Start) -> None:
    """Trace all calls of a process, some of which never return, or return elsewhere: these are left out."""
    truth, found, _ = traced(workload, "latency", "all", "--by", "none")
    counts = {key[0]: group["count"] for key, group in found.items() if not key[1]}
    assert counts["pread64"] == sum(truth["pread64"].values())
    assert counts["ppoll"] == 2 * truth["k"]
    assert counts["tgkill"] == 2 * truth["k"]
    assert counts["nanosleep"] == counts["wait4"] == 1
    assert not {"exit", "exit_group", "rt_sigreturn", "restart_syscall"} & counts.keys()
    # Ongoing at the end: the workload waits for its next command, and one thread is stuck in readv.
    assert {key[0]: group["count"] for key, group in found.items() if key[1]} == {"read": 1, "readv": 1}


def test_threads_that_end_in_a_call(workload: Start) -> None:
    """Calls in which threads end by exit_group(), by exec or by SIGKILL count, in processes that the program
    starts.
    """
    one = workload("exit_in_call", TIMES)
    with Trace("latency", "futex", "--by", "comm,ret", "--format", "json") as calls:
        truth = one.run()
        found = groups(calls.stop())
    ours = {key[1:]: group for key, group in found.items() if key[0] == one.comm}
    assert {key: group["count"] for key, group in ours.items()} == {("ERESTARTSYS", ""): 3 * TIMES}
    assert ours["ERESTARTSYS", ""]["sum"] >= 3 * TIMES * 20_000
    assert truth


def test_a_thread_that_takes_over_the_process_by_exec(workload: Start) -> None:
    """The thread enters execve() under one thread id and leaves it under another; no call is left behind."""
    one = workload("exec_thread", TIMES, 4)
    with Trace("latency", "futex,execve", "-p", one.pid, "--format", "json") as calls:
        one.run()
        found = groups(calls.stop())
    assert {key: group["count"] for key, group in found.items()} == {
        ("futex", "ETIMEDOUT", ""): 2 * TIMES,
        ("futex", "ERESTARTSYS", ""): 4,
        ("execve", "success", ""): 1,
    }


def test_vfork_is_as_long_as_the_child_runs() -> None:
    """The child returns from vfork as well, though it never called it; that return does not count."""
    with subprocess.Popen(["/usr/bin/python3", "-c", SPAWNER], stdin=subprocess.PIPE) as spawner:
        assert spawner.stdin
        with Trace("latency", "vfork,clone,clone3", "-p", spawner.pid, "--format", "json") as one:
            spawner.stdin.write(b"g")
            spawner.stdin.close()
            found = groups(one.finish())
    assert sum(group["count"] for group in found.values()) == 20
    assert {(ret, ongoing) for _, ret, ongoing in found} == {("success", "")}


def test_between_two_tracepoints(workload: Start) -> None:
    """The two tracepoints are those of a system call, so that the truth is known."""
    words = ("latency", "syscalls:sys_enter_ppoll,sys_exit_ppoll")
    truth, found, _ = traced(workload, *words)
    ((key, group),) = found.items()
    assert key == ("",)
    assert group["count"] == 2 * truth["k"]
    assert group["sum"] >= TIMES * (truth["short_us"] + truth["long_us"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("hist", "syscalls:sys_exit_raed", "ret", "1"), "did you mean syscalls:sys_exit_read"),
        (("hist", "syscalls:sys_exit_read", "rte", "1"), "did you mean ret?"),
        (("hist", "syscalls:sys_exit_read", "ret", "1", "--by", "cmm"), "cmm is not one of its fields"),
        (("hist", "syscalls:sys_exit_read", "ret", "1", "--filter", "ret ~ 1"), "OP one of"),
        (("hist", "syscalls:sys_enter_read", "fd", "1", "--filter", "fd < -1"), "is never -1"),
        (("hist", "sched:sched_waking", "comm", "1", "--linear", "0,10,1"), "is a text"),
        (("hist", "sched:sched_waking", "comm", "1", "--linear", "0,10,3"), "whole steps"),
        (("latency", "raed", "1"), "did you mean"),
        (("latency", "exit_group", "1"), "never returns"),
        (("latency", "restart_syscall", "1"), "part of the system call"),
        (("latency", "read", "1", "--by", "fd"), "--by fd: rule: comm, pid, tid, stack, ret or none"),
        (("latency", "irq:softirq_entry", "1"), "two tracepoints"),
        (("latency", "irq:softirq_entry,softirq_exi", "1"), "did you mean irq:softirq_exit"),
    ],
)
def test_what_cannot_be_is_said_at_once(words: tuple[str, ...], says: str) -> None:
    done = trace(*words)
    assert done.code == USAGE
    assert says in done.err


def bpftrace_counts(printed: list[dict[str, Any]], name: str) -> dict[tuple[int | None, int | None], int]:
    """Return the buckets of a histogram of bpftrace with the bounds as lockd gives them.

    bpftrace's `max` is the last value in the bucket, while lockd's upper bound is outside of it.
    """
    (data,) = (one["data"][name] for one in printed if one.get("type") == "hist" and name in one["data"])
    return {(one.get("min"), one["max"] + 1): one["count"] for one in data if one["count"]}


@beside_another_tool
def test_values_beside_bpftrace(workload: Start) -> None:
    calls = workload("system_calls", TIMES)
    script = f"tracepoint:syscalls:sys_exit_pread64 /pid == {calls.pid}/ {{ @ret = hist(args->ret); }}"
    words = ("hist", "syscalls:sys_exit_pread64", "ret", "-p", calls.pid, "--format", "json")
    with bpftrace(script, calls) as printed, Trace(*words) as one:
        calls.run()
        found = groups(one.stop())
    (group,) = found.values()
    assert buckets(group) == bpftrace_counts(printed, "@ret")


@beside_another_tool
def test_latencies_beside_bpftrace(workload: Start) -> None:
    calls = workload("system_calls", TIMES)
    script = f"""
        tracepoint:syscalls:sys_enter_ppoll /pid == {calls.pid}/ {{ @at[tid] = nsecs; }}
        tracepoint:syscalls:sys_exit_ppoll /@at[tid]/ {{
            @calls = count(); @ns = sum(nsecs - @at[tid]); delete(@at[tid]);
        }}
    """
    words = ("latency", "ppoll", "-p", calls.pid, "--unit", "ns", "--format", "json")
    with bpftrace(script, calls) as printed, Trace(*words) as one:
        calls.run()
        found = groups(one.stop())
    (group,) = found.values()
    theirs = {name: value for one in printed for name, value in one["data"].items() if name != "@at"}
    assert group["count"] == theirs["@calls"]
    assert group["sum"] == pytest.approx(theirs["@ns"], rel=0.02)
