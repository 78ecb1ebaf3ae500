"""`lockd trace klock` in mode `contention`, which sees only waits: records, tables and profiles of the waits
for locks that are held for a known time.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import trace_process
from tests.support.checks import in_one_of_some_tries, off
from tests.support.lockd_process import CANNOT, ROOT, is_lack
from tests.support.trace_process import Trace, one_shot, samples_of
from tests.support.workload import Start, Workload

SITES = {
    "mutex": {"pipe->mutex"},
    "rwsem_write": {"inode->i_rwsem"},
    "rwsem_read": {"inode->i_rwsem"},
}
"""Names of the locks of the workload kernel_locks, by type."""
MOST_LOST = 0.05
"""The share of waits that may be lost."""
FEW_ENTRIES = """\
import sys
from lockd import cli
from lockd.trace.klock import klock
klock.ENTRIES = 8
sys.exit(cli.main())
"""
"""A lockd whose maps of waits have room for eight threads in one window."""


@pytest.fixture
def klock() -> Iterator[Callable[..., Trace]]:
    """Starts `lockd trace klock` in the mode that counts only waits."""
    with contextlib.ExitStack() as traces:
        yield lambda *words: traces.enter_context(
            one_shot("klock", "--mode", "contention", "--time", "1h", *words)
        )


def records_of(text: str, comm: str) -> list[list[str]]:
    """Return the lines of the samples of `comm`, read as CSV."""
    return [line for line in csv.reader(text.splitlines()) if line[0] == "s" and line[1] == comm]


def stacks_of(text: str) -> dict[int, list[str]]:
    return {int(line[1]): line[2:] for line in csv.reader(text.splitlines()) if line[0] == "t"}


def check_records(
    trace: Trace, one: Workload, truth: dict[str, Any], period_ns: int, threads: int = 1
) -> list[str]:
    """Assert that the counts are exact for each lock type of the truth, and that `threads` threads wait for
    the mutex. Return the times that are off.

    Waits that are counted as lost may be missing: the kernel did not run the program, because it ran already
    on that CPU. Then nothing can be said about times. With many lost waits, nothing can be said about counts
    either.
    """
    text = trace.stop()
    lost, found = sum(trace.lost.values()), []
    if lost > MOST_LOST * sum(told["waits"] for told in truth["kernel"].values()):
        return [str(trace.lost)]
    records, stacks = records_of(text, one.comm), stacks_of(text)
    lines = [line for line in records if len(line) == 9]
    assert len(records) - lost <= len(lines)  # a wait whose end was lost goes on in its last record
    for kind, told in truth["kernel"].items():
        mine = [line for line in lines if line[3] == kind]
        waits, waited_ns = (sum(int(line[column]) for line in mine) for column in (7, 6))
        assert told["waits"] - lost <= waits <= told["waits"], kind
        if not lost:
            found += off(kind, waited_ns / 1e3, told["wait_us"], told["waits"], 0, told["least_us"])
    assert all(int(line[5]) % period_ns == 0 for line in lines)
    keys = [(line[2], line[3], line[4], line[5]) for line in lines]
    waiting = {line[2] for line in lines if line[3] == "mutex"}
    assert threads - lost <= len(waiting) <= threads
    assert len(set(keys)) == len(keys)  # one for each thread, lock and period
    for line in lines:
        ids = re.fullmatch(r"P(\d+)_T(\d+)", line[2])
        assert ids and int(ids[1]) == one.pid
        assert all(re.fullmatch(r"(\S+\+)?0x[0-9a-f]+", place) for place in stacks[int(line[8])])
    return found


@pytest.mark.parametrize(
    "period_ms", [50, pytest.param(7, marks=pytest.mark.thorough("the same with another period"))]
)
def test_records(period_ms: int, klock: Callable[..., Trace], workload: Start, scratch: Path) -> None:
    def attempt() -> list[str]:
        one = workload("kernel_locks", 20, 30_000, scratch)
        trace = klock("--period", period_ms, "-p", one.pid)
        truth = one.run()
        return check_records(trace, one, truth, period_ms * 1_000_000)

    in_one_of_some_tries(attempt)


def test_a_record_is_of_the_period_in_which_the_wait_ended(
    klock: Callable[..., Trace], workload: Start, scratch: Path
) -> None:
    one = workload("kernel_locks", 1, 300_000, scratch)
    trace = klock("-p", one.pid)
    began = time.monotonic_ns()
    one.run()
    ended = time.monotonic_ns()
    lines = [line for line in records_of(trace.stop(), one.comm) if int(line[6]) > 100_000_000]
    assert len(lines) == 4
    for line in lines:
        assert began <= int(line[5]) + 50_000_000 - int(line[6]) + 50_000_000
        assert int(line[5]) <= ended


def test_a_crowd_at_one_lock(klock: Callable[..., Trace], workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload("pipe_crowd", 100, 3, 30_000)
        trace = klock("-p", one.pid)
        truth = one.run()
        return check_records(trace, one, truth, 50_000_000, threads=100)

    in_one_of_some_tries(attempt)


def test_waits_that_find_no_room_are_told_as_lost(
    klock: Callable[..., Trace], workload: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_process, "CHECKOUT", ("/usr/bin/python3", "-c", FEW_ENTRIES))
    one = workload("pipe_crowd", 100, 3, 30_000)
    trace = klock("-p", one.pid)
    told = one.run()["kernel"]["mutex"]["waits"]
    records = [line for line in records_of(trace.stop(), one.comm) if line[3] == "mutex"]
    counted = sum(int(line[7]) for line in records if len(line) == 9)
    lost = dict(trace.lost)
    assert not [what for what in lost if "without names" in what]
    full = lost.pop("kernel_locks: full", 0)
    assert full > 0
    assert counted < told
    # Waits for other locks of the process, such as mmap_lock, may have found no room either.
    assert counted + full >= told - sum(lost.values())


def test_a_wait_that_goes_on_is_in_the_records_and_marked(
    klock: Callable[..., Trace], workload: Start, scratch: Path
) -> None:
    one = workload("kernel_locks", 1, 600_000_000, scratch)
    trace, without = klock("-p", one.pid), klock("-p", one.pid, "--no-ongoing")
    began = time.monotonic_ns()
    one.go()
    time.sleep(1.5)
    text = trace.stop()
    (line,) = (line for line in records_of(text, one.comm) if line[3] == "mutex")
    assert line[9:] == ["ongoing"]
    assert 0 < int(line[6]) < time.monotonic_ns() - began
    assert int(line[7]) == 1
    assert any("pipe_write+" in place for place in stacks_of(text)[int(line[8])])
    assert [line for line in records_of(without.stop(), one.comm) if line[3] == "mutex"] == []


def test_threads_and_locks_can_be_chosen(klock: Callable[..., Trace], workload: Start, scratch: Path) -> None:
    one = workload("kernel_locks", 5, 5_000, scratch)
    by_lock = klock("-p", one.pid, "--lock", "pipe->mutex", "--format", "json")
    by_caller = klock("-p", one.pid, "--caller", "iterate_dir", "--format", "json")
    others = klock("-p", "1", "--format", "json")
    one.run()
    found = samples_of(by_lock.stop())
    assert {(sample["type"], sample["lock"]) for sample in found} == {("mutex", "pipe->mutex")}
    assert sum(sample["waits"] for sample in found) == 5
    assert {sample["type"] for sample in samples_of(by_caller.stop())} == {"rwsem_read"}
    assert [sample for sample in samples_of(others.stop()) if sample["comm"] == one.comm] == []


def test_a_profile_names_locks_and_callers(
    klock: Callable[..., Trace], workload: Start, scratch: Path
) -> None:
    one = workload("kernel_locks", 5, 20_000, scratch)
    trace = klock("-p", one.pid, "--format", "json")
    truth = one.run()
    found = [sample for sample in samples_of(trace.stop()) if sample["type"] in SITES]
    for kind, names in SITES.items():
        mine = [sample for sample in found if sample["type"] == kind and sample["wait_ns"] > 1_000_000]
        assert {sample["lock"] for sample in mine} == names
        assert {sample["stack"][-1] for sample in mine} == {f"[{kind} {name}]" for name in names}
        assert sum(sample["waits"] for sample in mine) == truth["kernel"][kind]["waits"]
        assert all("mutex_lock" not in sample["stack"][-2] for sample in mine)


def milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


def test_tables_as_klockstat_prints_them(klock: Callable[..., Trace], workload: Start, scratch: Path) -> None:
    one = workload("kernel_locks", 10, 20_000, scratch)
    trace = klock("-p", one.pid, "--callers", "-S", "acq_total", "-T", "-s", 2, "-L", "pipe->mutex")
    truth = one.run()["kernel"]["mutex"]
    stamp, _, head, line, caller, longest, *_ = trace.stop().strip().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d", stamp)
    assert re.split(r"  +", head.strip()) == [
        "Caller", "Avg Wait", "Count", "Max Wait", "Total Wait", "Type", "Lock",
    ]  # fmt: skip
    function, average, count, most, total, kind, lock = re.split(r"  +", line.strip())
    assert re.fullmatch(r"\w*pipe_write\+0x[0-9a-f]+", function)
    assert (count, kind, lock) == (str(truth["waits"]), "mutex", "pipe->mutex")
    assert milliseconds(average) >= 20
    assert milliseconds(most) >= milliseconds(average)
    assert milliseconds(total) == pytest.approx(10 * milliseconds(average), rel=0.05)
    assert re.fullmatch(r"vfs_write\+0x[0-9a-f]+", caller.strip())
    assert f"longest: {one.comm} (" in longest


def test_by_thread_and_at_intervals(klock: Callable[..., Trace], workload: Start, scratch: Path) -> None:
    one = workload("kernel_locks", 20, 20_000, scratch)
    trace = klock("-p", one.pid, "--callers", "-P", "-i", "500ms")
    one.run()
    deadline = time.monotonic() + 30
    while trace.written.count("Avg Wait") < 2:  # the third is that of the rest, at the end
        assert time.monotonic() < deadline
        time.sleep(0.05)
    text = trace.stop()
    rows = [line.split() for line in text.splitlines() if one.comm in line]
    assert text.count("Avg Wait") >= 3
    waits = {(row[0], row[9]): 0 for row in rows}
    for row in rows:
        waits[row[0], row[9]] += int(row[4])
    assert sorted(count for (_, kind), count in waits.items() if kind == "mutex") == [20]


def test_mode_all_works_or_says_why_not() -> None:
    command = [
        "/usr/bin/python3",
        "-m",
        "lockd",
        "trace",
        "klock",
        "--mode",
        "all",
        "-p",
        str(os.getpid()),
        "0.1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        assert done.returncode == CANNOT and is_lack(done.stderr), done.stderr
        assert re.search(r"holds cannot be traced here: fentry: .+; kprobe: .+", done.stderr)
        assert not done.stdout
    else:
        assert "mode all: every access" in done.stderr
