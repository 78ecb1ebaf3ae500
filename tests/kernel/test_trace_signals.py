"""`lockd trace signals` against a program that knows which signals it sends and gets, and beside bpftrace."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.bpftrace import bpftrace
from tests.support.checks import beside_another_tool
from tests.support.tracing import Done, Trace, trace
from tests.support.workload import Start

USAGE = 2
NEXT_ID = Path("/proc/sys/kernel/ns_last_pid")
"""The id that the last new process got. What is written to it decides which id is the next."""
KERNEL = "[kernel]"
Signals = Counter[tuple[Any, ...]]


def sent(truth: dict[str, Any]) -> Signals:
    return Counter(tuple(one) for one in truth["sent"])


def seen(rows: list[dict[str, Any]]) -> Signals:
    """Return the signals of a trace's rows in the form in which the program tells them."""
    return Counter(
        (
            row["signal"], row["code"], int(row["sender_pid"]), int(row["pid"]), int(row["tid"]), row["to"],
            row["result"],
        )
        for row in rows
    )  # fmt: skip


def of_program(signals: Signals, truth: dict[str, Any]) -> Signals:
    """Return the signals whose sender or receiver the program knows. Other processes may send any others."""
    known = {pid for one in truth["sent"] for pid in one[2:4]} - {0}
    return Counter({one: count for one, count in signals.items() if known & set(one[2:4])})


def rows_of(done: Done) -> list[dict[str, Any]]:
    assert (done.code, done.lost) == (0, "none"), done.err
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert len(rows) == done.events
    return rows


def test_every_signal_has_its_sender_receiver_and_fate(workload: Start) -> None:
    program = workload("signals")
    with Trace("signals", "--format", "json") as one:
        truth = program.run()
        rows = rows_of(one.stop())
    assert of_program(seen(rows), truth) == sent(truth)
    ours = [row for row in rows if row["pid"] == truth["child"]]
    assert {row["sender"] for row in ours} == {row["receiver"] for row in ours} == {program.comm}
    by_kernel = [row for row in rows if row["signal"] == "SIGVTALRM" and row["pid"] == truth["pid"]]
    assert {(row["sender"], row["running_pid"]) for row in by_kernel} == {(KERNEL, truth["pid"])}
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert abs(datetime.fromisoformat(rows[-1]["time"]) - datetime.now(timezone.utc)).total_seconds() < 600


def test_of_one_process_and_some_signals(workload: Start) -> None:
    """A trace of a process has the signals that it sends and those that are sent to it."""
    program = workload("signals")
    with Trace(
        "signals", "-p", program.pid, "--signal", "usr1,SIGVTALRM,RTMIN+2,9", "--format", "csv"
    ) as one:
        truth = program.run()
        done = one.stop()
    rows = list(csv.DictReader(io.StringIO(done.out)))
    asked = {"SIGUSR1", "SIGVTALRM", "SIGRTMIN+2", "SIGKILL"}
    assert seen(rows) == Counter({one: count for one, count in sent(truth).items() if one[0] in asked})


def test_summary(workload: Start) -> None:
    program = workload("signals")
    with Trace("signals", "--count", "-p", program.pid, "--format", "json") as one:
        truth = program.run()
        program.finish()
        done = one.finish()  # by itself: the process has ended
    assert (done.code, done.lost) == (0, "none")
    counts = Counter(
        {
            (row["signal"], row["sender_pid"], row["pid"]): row["count"]
            for row in map(json.loads, done.out.splitlines())
        }
    )
    wanted: Signals = Counter()
    for (name, _, sender, receiver, *_), count in sent(truth).items():
        if program.pid in (sender, receiver):
            wanted[name, sender, receiver] += count
    parent = {key for key in counts if key[2] == os.getpid()}  # gets SIGCHLD at the end
    assert parent == {("SIGCHLD", program.pid, os.getpid())}
    assert Counter({key: count for key, count in counts.items() if key not in parent}) == wanted


def test_signals_come_as_they_happen() -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as sleep, Trace("signals", "-p", sleep.pid) as one:
        assert one.process.stdout
        assert one.process.stdout.readline().split()[:3] == ["TIME", "SENDER", "PID"]
        os.kill(sleep.pid, signal.SIGCONT)
        line = one.process.stdout.readline().split()  # while the trace goes on
        assert one.process.poll() is None
        sleep.kill()
        ids = [str(os.getpid()), "sleep", str(sleep.pid), str(sleep.pid)]
        assert line[2:] == [*ids, "process", "SIGCONT", "SI_USER", "ignored"]


def test_an_id_that_is_used_again_is_not_traced() -> None:
    if not NEXT_ID.exists():
        pytest.skip("host: this kernel lets nobody choose the next process id (CONFIG_CHECKPOINT_RESTORE)")
    sleep = ["/bin/sleep", "600"]
    with contextlib.ExitStack() as opened:
        first, second = (opened.enter_context(subprocess.Popen(sleep)) for _ in range(2))
        opened.callback(second.kill)
        one = opened.enter_context(
            Trace("signals", "-p", f"{first.pid},{second.pid}", "--signal", "CONT", "--format", "json")
        )
        assert one.process.stdout
        os.kill(first.pid, signal.SIGCONT)
        lines = [one.process.stdout.readline()]
        first.kill()
        first.wait()
        # The trace looks for ended processes after each time that it writes what came. So it has done so
        # between two lines of which the second is about a signal that was sent after the first was written.
        for _ in range(2):
            os.kill(second.pid, signal.SIGCONT)
            lines.append(one.process.stdout.readline())
        for _ in range(100):  # others may start a process at the same moment
            NEXT_ID.write_text(str(first.pid - 1))
            again = opened.enter_context(subprocess.Popen(sleep))
            opened.callback(again.kill)
            if again.pid == first.pid:
                break
        assert again.pid == first.pid
        os.kill(again.pid, signal.SIGCONT)
        os.kill(second.pid, signal.SIGCONT)
        time.sleep(0.5)
        done = one.stop()
    rows = rows_of(replace(done, out="".join(lines) + done.out))
    assert [row["pid"] for row in rows] == [first.pid, *3 * [second.pid]]


def test_a_storm_is_counted_or_said_to_be_lost() -> None:
    """The storm has more signals than there is room for while the trace is stopped and does not read them."""
    storm = "import os, signal\nfor _ in range(100000): os.kill(os.getpid(), signal.SIGURG)"
    waiting = subprocess.Popen(
        ["/usr/bin/python3", "-c", f"input()\n{storm}"], stdin=subprocess.PIPE, text=True
    )
    with (
        waiting,
        Trace("signals", "-p", waiting.pid, "--signal", "URG", "--count", "--format", "json") as one,
    ):
        one.process.send_signal(signal.SIGSTOP)
        assert waiting.stdin
        waiting.stdin.write("\n")
        waiting.stdin.close()
        waiting.wait()
        one.process.send_signal(signal.SIGCONT)
        done = one.finish()
    (row,) = map(json.loads, done.out.splitlines())
    lost = int(done.lost.removeprefix("trace: full ").replace(",", ""))
    assert row["count"] == done.events > 1000
    assert lost > 0
    assert row["count"] + lost == 100_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--signal", "TREM"), "did you mean SIGTERM"),
        (("--signal", "65"), "'65' is no signal"),
        (("--signal", ""), "'' is no signal"),
        (("-p", "4194304"), "process 4194304"),
    ],
)
def test_what_cannot_be_is_said_at_once(words: tuple[str, ...], says: str) -> None:
    done = trace("signals", *words, "1")
    assert done.code == USAGE
    assert says in done.err


@beside_another_tool
def test_beside_bpftrace(workload: Start) -> None:
    program = workload("signals")
    script = "tracepoint:signal:signal_generate { @[args->sig, args->pid] = count(); }"
    with bpftrace(script, program) as printed, Trace("signals", "--format", "json") as one:
        truth = program.run()
        time.sleep(0.2)
        rows = rows_of(one.stop())
    (theirs,) = (part["data"]["@"] for part in printed if part.get("type") == "map")
    tids = {pid for one in truth["sent"] for pid in one[3:5]}
    found: Counter[tuple[int, int]] = Counter()
    for key, count in theirs.items():
        number, tid = map(int, key.split(","))
        if tid in tids:
            found[number, tid] = count
    numbers = {"SIGRTMIN+2": 36, "SIGRTMIN+3": 37}
    ours = Counter(
        (numbers.get(row["signal"]) or signal.Signals[row["signal"]].value, row["tid"])
        for row in rows
        if row["tid"] in tids
    )
    assert ours == found
