"""What `lockd trace futex` writes, against what the programs that it traces know."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.test_holders import POINTS, Program, build, name, shares
from tests.support.checks import SHARE, in_one_of_some_tries, off
from tests.support.futex_rows import Row, read, total
from tests.support.lockd_process import CHECKOUT, ROOT
from tests.support.trace_process import Trace, samples_of
from tests.support.workload import Start, Workload

LOCKTRACE = (
    "pid,tid,addr,blocked_us,sys_us,max_blocked_us,max_sys_us,"
    "wait_count,blocked_count,wake_count,errors,stack"
)
"""The head line of the CSV that locktrace prints."""
FUTEX = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]


def check_counts(rows: list[Row], truth: dict[str, Any]) -> None:
    for kind, told in truth["futex"].items():
        assert total(rows, "wait_count", kind=kind) == told["waits"], kind
        assert total(rows, "blocked_count", kind=kind) == told["blocked"], kind
    assert total(rows, "wait_count") == sum(told["waits"] for told in truth["futex"].values())
    assert total(rows, "wake_count") == truth["wakes"]
    assert total(rows, "errors") == sum(truth.get("errors", {}).values())


def times_off(rows: list[Row], truth: dict[str, Any]) -> list[str]:
    """Return the times that are too short, which a disturbance of the program explains. Assert that no time
    is too long.
    """
    found = []
    for kind, told in truth["futex"].items():
        blocked = total(rows, "blocked_us", kind=kind)
        longest = max(row["max_blocked_us"] for row in rows if row["kind"] == kind)
        assert blocked <= told["blocked_us"] + told["blocked"], kind
        assert longest <= told["max_us"] + 1, kind
        count = told["blocked"]
        found += off(kind, blocked, told["blocked_us"], count, count, told["least_us"])
        found += off(f"longest {kind}", longest, told["max_us"], 1, 1, told["max_least_us"])
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_in_futex(one: Workload) -> None:
    """Wait until the main thread of a workload is asleep in the system call futex."""
    until(lambda: Path(f"/proc/{one.pid}/syscall").read_text().split()[0] == FUTEX)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("mutex_handover", (100, 2000)),
        ("pi_mutex", (50, 2000)),
        ("rwlock", (50, 2000)),
        ("semaphore", (50, 2000)),
        ("cond_pingpong", (500,)),
        ("futex_errors", (100, 1000, 50, 1000)),
        ("requeue", (20,)),
        ("futex2", (50,)),
    ],
)
def test_counts_are_exact_and_times_right(program: str, arguments: tuple[int, ...], workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload(program, *arguments)
        one.hurry()
        trace = Trace("futex", "-p", one.pid, "--names", "-d")
        truth = one.run()
        rows = read(trace.stop())
        one.finish()
        assert trace.lost == {}
        assert re.search(r"calls of which the end was not seen +0$", trace.said, re.M), trace.said
        assert {row["pid"] for row in rows} == {one.pid}
        check_counts(rows, truth)
        return times_off(rows, truth)

    in_one_of_some_tries(attempt)


@pytest.mark.parametrize(
    ("program", "arguments", "holder"),
    [
        ("mutex_handover", (100, 2000), "unlock"),
        ("pi_mutex", (50, 2000), "unlock"),
        ("rwlock", (50, 2000), "unlock"),
        ("owner_ends", (10, 5000), "(owner ended)"),
        ("futex_errors", (50, 0, 20, 5000), "(no release)"),
    ],
)
def test_every_release_is_counted_for_the_code_that_held_the_lock(
    program: str, arguments: tuple[int, ...], holder: str, workload: Start, tmp_path: Path
) -> None:
    one, written = workload(program, *arguments), tmp_path / "held.csv"
    trace = Trace("futex", "-p", one.pid, "--holders", written)
    (truth,) = [told for kind, told in one.run()["futex"].items() if kind in ("lock", "pi")]
    trace.stop()
    assert trace.lost == {}
    with written.open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["pid"], row["holder"]) for row in rows} == {(str(one.pid), holder)}
    assert sum(int(row["releases"]) for row in rows) == truth["blocked"]
    # A wait counts until the wake-up; the workload reads the clock later.
    waited = sum(int(row["waited_us"]) for row in rows)
    assert 0.5 * truth["least_us"] <= waited <= truth["blocked_us"] + truth["blocked"]
    assert all(bool(row["stack"]) == (not holder.startswith("(")) for row in rows)


def report_by_holder(path: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*CHECKOUT, "trace", "report", "--by", "holder", "--format", "json", path],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return samples_of(done.stdout)


@pytest.mark.parametrize("lock", ["normal", "rwlock"])
def test_holders_are_charged_for_what_threads_waited(lock: str, tmp_path: Path) -> None:
    """The shares of the holders are right, as test_holders.py shows for the daemon, but here every release
    counts. This holds for the file of holders and for the report of it.
    """
    build("c", "holders_c")

    def attempt() -> list[str]:
        one, written = Program("holders_c", lock, 3, 4, comm=name(lock)), tmp_path / "held.csv"
        one.hurry()
        one.run()
        trace = Trace("futex", "-p", one.pid, "--holders", written)
        truth = one.run()["holders"]
        trace.stop()
        one.kill()
        with written.open() as file:
            waited = {row["holder"]: int(row["waited_us"]) for row in csv.DictReader(file)}
        reported = {row["holder"]: row["waited.sum"] for row in report_by_holder(written)}
        print(truth, waited, reported)
        true = shares(truth)
        return [
            f"{which} in the {where}: {share:.3f}, not {true[which]:.3f}"
            for where, told in (("file", waited), ("report", reported))
            for which, share in shares({which: told.get(f"{lock}_{which}", 0) for which in truth}).items()
            if abs(share - true[which]) > POINTS
        ]

    in_one_of_some_tries(attempt)


def test_columns_and_order_are_those_of_locktrace(workload: Start) -> None:
    one = workload("mutex_handover", 20, 1000)
    trace = Trace("futex", "-p", one.pid)
    addr = one.run()["addr"]
    text = trace.stop()
    assert text.splitlines()[0] == LOCKTRACE
    rows = read(text)
    assert [row["blocked_us"] for row in rows] == sorted((row["blocked_us"] for row in rows), reverse=True)
    assert {row["addr"] for row in rows} == {addr}
    (blocked,) = [row for row in rows if row["blocked_count"]]
    comm, *frames = blocked["stack"].split(";")
    assert comm == one.comm
    functions = [name for name in frames if name in ("asker", "lock", "pthread_mutex_lock")]
    assert functions == ["asker", "lock", "pthread_mutex_lock"], (frames, trace.said)
    assert all(line.count('"') == 2 for line in text.splitlines()[1:])


def test_a_lock_has_the_name_of_its_variable(workload: Start) -> None:
    one = workload("mutex_handover", 20, 1000)
    trace = Trace("futex", "-p", one.pid, "--names")
    one.run()
    rows = read(trace.stop())
    assert {(row["kind"], row["lock"]) for row in rows} == {("lock", "mutex_handover:handover_mutex")}
    assert total(rows, "ongoing") == 0


@pytest.mark.parametrize("began", ["during the trace", "before the trace"])
def test_a_wait_that_goes_on_counts_and_is_marked(began: str, workload: Start) -> None:
    one = workload("stuck_mutex")
    if began == "before the trace":
        truth = one.run()
        trace_since = time.monotonic_ns()
        trace = Trace("futex", "-p", one.pid, "--names")
        time.sleep(0.5)
        least = 0.5e6
    else:
        trace = Trace("futex", "-p", one.pid, "--names")
        truth = one.run()
        trace_since = truth["since_monotonic_ns"]
        time.sleep(0.5)
        least = (time.monotonic_ns() - truth["since_monotonic_ns"]) / 1000 - 20_000
    rows = read(trace.stop())
    most = (time.monotonic_ns() - trace_since) / 1000
    (row,) = [row for row in rows if row["wait_count"]]
    assert (row["tid"], row["addr"]) == (truth["tid"], truth["addr"])
    assert (row["wait_count"], row["blocked_count"], row["ongoing"]) == (1, 1, 1)
    assert (row["kind"], row["lock"]) == ("lock", "stuck_mutex:stuck_mutex")
    assert least <= row["blocked_us"] <= most
    assert row["max_blocked_us"] == row["blocked_us"]
    assert re.search(r"^stuck\.[^;]*;.*waiter;.*pthread_mutex_lock;", row["stack"]), row["stack"]


def test_a_wait_that_ends_in_the_trace_counts_from_its_beginning(workload: Start) -> None:
    """A wait that is ongoing when the trace begins is found, and counts from the beginning of the trace."""
    for seconds in (4, 30):
        one = workload("timed_wait", seconds * 1000)
        earliest_end = time.monotonic() + seconds
        one.go()
        until_in_futex(one)
        before = time.monotonic()
        trace = Trace("futex", "-p", one.pid, "--names")
        attached = time.monotonic()
        if attached < earliest_end:
            break
        trace.stop()  # the wait has ended: this machine took longer than that to attach
    assert attached < earliest_end, "not attached before the wait ended"
    one.truth()
    most = time.monotonic() - before
    (row,) = read(trace.stop())
    assert (row["wait_count"], row["blocked_count"], row["errors"], row["ongoing"]) == (1, 1, 1, 0)
    assert earliest_end - attached < row["blocked_us"] / 1e6 < most
    assert "main;futex_wait_2" in row["stack"]


def test_several_processes_and_no_other_and_it_ends_with_them(workload: Start) -> None:
    traced = [workload("mutex_handover", 20, 1000), workload("semaphore", 20, 1000)]
    other = workload("mutex_handover", 20, 1000)
    trace = Trace("futex", "-p", ",".join(str(one.pid) for one in traced))
    truths = {one.pid: one.run() for one in traced}
    other.run()
    for one in traced:
        assert trace.process.poll() is None
        one.finish()
    rows = read(trace.result())
    assert {row["pid"] for row in rows} == set(truths)
    for pid, truth in truths.items():
        (told,) = truth["futex"].values()
        assert total(rows, "wait_count", pid=pid) == told["waits"]
        assert total(rows, "wake_count", pid=pid) == truth["wakes"]


def test_threads_that_end_in_a_call(workload: Start) -> None:
    one = workload("exit_in_call", 8)
    trace = Trace("futex")
    truth = one.run()
    rows = [row for row in read(trace.stop()) if row["pid"] in truth["pids"].values()]
    told = truth["futex"]["lock"]
    assert (total(rows, "wait_count"), total(rows, "blocked_count")) == (told["waits"], told["blocked"])
    assert all(row["max_blocked_us"] >= truth["held_us"] for row in rows if row["blocked_count"])


def test_a_thread_that_calls_exec(workload: Start) -> None:
    one = workload("exec_thread", 20, 4)
    trace = Trace("futex", "-p", one.pid, "-d")
    truth = one.run()
    rows = read(trace.stop())
    told = truth["futex"]["lock"]
    others = total(rows, "blocked_count") - told["blocked"]
    assert (total(rows, "wait_count") - told["waits"], others) == (4, 4)
    assert total(rows, "errors") == truth["errors"]["ETIMEDOUT"]
    assert re.search(r"end was not seen +0$", trace.said, re.M), trace.said


def test_a_stop_interrupts_a_call_and_it_goes_on(workload: Start) -> None:
    one = workload("timed_wait", 5000)
    trace = Trace("futex", "-p", one.pid, "-d")
    one.go()
    until_in_futex(one)
    stopped = time.monotonic()
    one.process.send_signal(signal.SIGSTOP)
    until(lambda: "State:\tT" in Path(f"/proc/{one.pid}/status").read_text())
    one.process.send_signal(signal.SIGCONT)
    until(lambda: "State:\tS" in Path(f"/proc/{one.pid}/status").read_text())
    stopped_us = (time.monotonic() - stopped) * 1e6
    truth = one.truth()
    rows = read(trace.stop())
    assert re.search(r"restarted after a stop +1$", trace.said, re.M), trace.said
    assert re.search(r"end was not seen +0$", trace.said, re.M), trace.said
    assert total(rows, "wait_count") == 2
    # The time in which the thread was stopped does not count. It ended before the thread was seen asleep
    # again.
    assert (1 - SHARE) * truth["us"] - stopped_us < total(rows, "blocked_us") < truth["us"]


def test_histograms_have_every_wait_that_blocked(workload: Start, tmp_path: Path) -> None:
    one = workload("futex_errors", 20, 1000, 50, 20_000)
    path = tmp_path / "hists.txt"
    trace = Trace("futex", "-p", one.pid, "--hist", path)
    truth = one.run()
    rows = read(trace.stop())
    locks: dict[str, list[tuple[int, int, int]]] = {}
    for line in path.read_text().splitlines():
        if head := re.fullmatch(rf"PID {one.pid}, LOCK (0x[0-9a-f]+)", line):
            slots = locks.setdefault(head[1], [])
        elif slot := re.fullmatch(r" +(\d+) -> (\d+) +: (\d+) +\|\** *\|", line):
            slots.append((int(slot[1]), int(slot[2]), int(slot[3])))
        else:
            assert line == "" or "distribution" in line
    blocked = Counter[str]()
    for row in rows:
        blocked[row["addr"]] += row["blocked_count"]
    assert {addr: sum(n for *_, n in slots) for addr, slots in locks.items()} == {
        addr: count for addr, count in blocked.items() if count
    }
    (slots,) = locks.values()
    assert sum(n for *_, n in slots) == truth["futex"]["lock"]["blocked"]
    # Each timeout is 20,000 us or more; what the thread takes until it sleeps is not blocked time. The slot
    # begins at 16,384 us.
    assert sum(n for _, high, n in slots if high >= 20_000) >= 20


def test_what_finds_no_room_is_counted_all_the_same_and_told(workload: Start) -> None:
    one = workload("many_addrs", 2000, 100)
    trace = Trace("futex", "-p", one.pid, "--entries", 8)
    truth = one.run()
    rows = read(trace.stop())
    told = truth["futex"]["lock"]
    nameless = [row for row in rows if row["pid"] == 0]
    assert nameless[0]["stack"] == "[no room]"
    assert trace.lost["futex: counted without names"] == total(nameless, "wait_count") > 0
    assert (total(rows, "wait_count"), total(rows, "blocked_count")) == (told["waits"], told["blocked"])
    assert total(rows, "errors") == sum(truth["errors"].values())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("-p", "4194304"), 2, "process 4194304"),
        (("-p", "x"), 2, "'x' is not a whole number above 0"),
        (("0",), 2, "is not a duration above 0"),
        (("--hist", "/nowhere/file", "1"), 2, "/nowhere/file: cannot be written"),
        (("-o", "/nowhere/file", "1"), 2, "/nowhere/file: cannot be written"),
    ],
)
def test_what_cannot_be_is_said_at_once(arguments: tuple[str, ...], code: int, says: str) -> None:
    done = subprocess.run(
        [*CHECKOUT, "trace", "futex", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
