"""`lockd trace offcpu` and `offwake`: waits of known length at known stacks, and who ended them."""

from __future__ import annotations

import argparse
import functools
import json
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lockd.trace.core import options
from lockd.trace.core.session import Session
from lockd.trace.offcpu import offcpu
from tests.support.checks import SHARE, in_one_of_some_tries, off, stolen_us
from tests.support.lockd_process import Lockd
from tests.support.trace_process import folded, one_shot
from tests.support.workload import Start, Workload

COUNT = "lockd_offcpu_blocked_seconds_count"
K = 30
SLEEP = ["outer_sleep", "middle_sleep", "inner_sleep"]
CALLERS = {
    "inner_sleep": ["run", *SLEEP],
    "read_here": ["run", "read_here"],
    "fork_here": ["run", "fork_here"],
}
"""The functions on the stack of each place, outermost first."""
OLDER_COMM = "stacked_waits"
"""The comm of the thread that began before its process was renamed: it keeps the old name."""
Rows = list[dict[str, Any]]


def rows_of(written: str) -> Rows:
    """Return the rows of a trace with --format json."""
    return [json.loads(line) for line in written.splitlines()]


def at(rows: Rows, function: str, **labels: str) -> Rows:
    """Return the rows with `function` in their stack and with these labels; an empty value means that the row
    lacks the label.
    """
    return [
        row
        for row in rows
        if function in row["stack"] and all(row.get(name, "") == value for name, value in labels.items())
    ]


def total(rows: Rows, value: str = "wait_us") -> int:
    return sum(row[value] for row in rows)


def traced(one: Workload, *arguments: object, tool: str = "offcpu") -> tuple[Rows, dict[str, Any], float]:
    """Run a workload under a tool. Return the rows of the trace, the truth, and the seconds traced."""
    with one_shot(tool, "-p", one.pid, "--format", "json", *arguments) as trace:
        truth = one.run()
        rows = rows_of(trace.stop())
        assert not trace.lost
        return rows, truth, float(re.findall(r": ([\d.]+) s, [\d,]+ events", trace.said)[-1])


def names_of(stacks: Counter[tuple[str, ...]]) -> set[str]:
    return {name for stack in stacks for name in stack}


def test_each_stack_has_its_count_and_time(workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload("stacked_waits", K)
        rows, truth, _ = traced(one)
        found = []
        for told in truth["places"]:
            function, count = told["function"], told["count"]
            of_it = at(rows, function)
            assert {row["tid"] for row in of_it} == {told["tid"]}
            waits = [row for row in of_it if (row["state"], row["reason"]) == (told["state"], told["reason"])]
            assert total(waits, "count") == count > 0, function
            for row in waits:
                assert (row["comm"], row["pid"]) == (one.comm, one.pid)
                user = [name for name in row["stack"] if name in (*CALLERS[function], "run")]
                assert user == CALLERS[function]
                assert row["stack"][-2:] == ["schedule", "__schedule"]
            queued_us = truth["queued_us"]
            found += off(function, total(waits), told["sum_us"], count, queued_us, told["least_us"])
            longest = max(row["max_us"] for row in waits)
            found += off(f"longest {function}", longest, told["max_us"], 1, queued_us, told["max_least_us"])
        one.finish()
        return found

    in_one_of_some_tries(attempt)


def test_waits_without_an_end_or_a_beginning(workload: Start) -> None:
    one = workload("stacked_waits", K)
    rows, truth, seconds = traced(one)
    one.finish()
    (older,) = at(rows, "older_wait")
    assert (older["tid"], older["count"], older["reason"]) == (truth["older"], 1, "pipe")
    assert older["ongoing"] == older["began_before"] == "yes"
    assert older["wait_us"] == pytest.approx(seconds * 1e6, rel=0.02, abs=100_000)
    assert older["stack"][older["stack"].index("older_wait") - 1] == "older"
    assert any("pipe_read" in name for name in older["stack"])
    (late,) = at(rows, "late_wait")
    assert (late["tid"], late["count"], late["ongoing"]) == (truth["late"], 1, "yes")
    assert "began_before" not in late
    assert sum(told["sum_us"] for told in truth["places"]) < late["wait_us"] < older["wait_us"]
    # The main thread waited for its start byte since before the trace.
    (start,) = [row for row in rows if row["tid"] == one.pid and "began_before" in row]
    assert "ready" in start["stack"]
    assert "ongoing" not in start
    (end,) = [row for row in rows if row["tid"] == one.pid and "ongoing" in row]
    assert {"main", "finish"} & set(end["stack"])


def test_a_wait_from_before_is_left_out_with_its_sort_of_threads(workload: Start) -> None:
    one = workload("stacked_waits", 3)
    with one_shot("offcpu", "-p", one.pid, "-k", "--format", "json") as trace:
        one.run()
        assert not rows_of(trace.stop())
    one.finish()


def test_what_is_ongoing_can_be_left_out(workload: Start) -> None:
    one = workload("stacked_waits", K)
    rows, truth, _ = traced(one, "--no-ongoing")
    one.finish()
    assert not at(rows, "older_wait") + at(rows, "late_wait")
    assert not [row for row in rows if "ongoing" in row or "began_before" in row]
    assert total(at(rows, "read_here", reason="pipe"), "count") == truth["places"][1]["count"]


def test_bounds_of_a_wait(workload: Start) -> None:
    """A wait is timed from the switch-out, which is some time after its timer was set."""
    sleep_us, bound_us = 20_000, 15_000
    one = workload("stacked_waits", K, sleep_us)
    rows, truth, _ = traced(one, "-m", bound_us, "-M", 60_000_000)
    one.finish()
    assert total(at(rows, "inner_sleep"), "count") == truth["places"][0]["count"]
    assert at(rows, "late_wait")
    two = workload("stacked_waits", K, sleep_us)
    rows, _, _ = traced(two, "-M", bound_us)
    two.finish()
    assert not at(rows, "inner_sleep") + at(rows, "late_wait") + at(rows, "older_wait")
    assert at(rows, "read_here")
    assert max(row["max_us"] for row in rows) <= bound_us


def test_by_state(workload: Start) -> None:
    one = workload("stacked_waits", K)
    rows, truth, _ = traced(one, "--state", "2")
    one.finish()
    assert {row["state"] for row in rows} == {"uninterruptible"}
    assert total(at(rows, "fork_here", reason="child"), "count") == truth["places"][2]["count"]
    assert not at(rows, "read_here") + at(rows, "older_wait")


def test_single_threads_and_the_end_with_them(workload: Start) -> None:
    one = workload("stacked_waits", K)
    older = next(tid for tid in sorted(map(int, _threads(one.pid))) if tid != one.pid)
    with one_shot("offcpu", "-t", f"{one.pid},{older}", "--format", "json") as trace:
        one.run()
        one.finish()
        rows = rows_of(trace.result())
    assert {row["tid"] for row in rows} == {one.pid, older}
    (wait,) = at(rows, "older_wait")
    assert "ongoing" not in wait, "it ended with its process"


def _threads(pid: int) -> list[str]:
    return [path.name for path in Path(f"/proc/{pid}/task").iterdir()]


def test_folded_as_the_drawers_of_flame_graphs_read_it(workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload("stacked_waits", K)
        with one_shot("offcpu", "-p", one.pid, "-f", "-d") as trace:
            truth = one.run()
            stacks = folded(trace.stop())
        one.finish()
        assert {stack[0] for stack in stacks} == {one.comm, OLDER_COMM}
        for stack in stacks:
            assert stack.count("-") == 1
            user, kernel = stack[1 : stack.index("-")], stack[stack.index("-") + 1 :]
            assert not {"__schedule", "schedule"} & set(user)
            assert "do_syscall_64" not in kernel or "main" not in kernel
        found = []
        for told in truth["places"][:2]:
            seen = sum(
                us for stack, us in stacks.items() if told["function"] in stack and stack[-1] == "__schedule"
            )
            found += off(
                told["function"], seen, told["sum_us"], told["count"], truth["queued_us"], told["least_us"]
            )
        return found

    in_one_of_some_tries(attempt)


def test_stacks_of_one_side(workload: Start) -> None:
    one = workload("stacked_waits", 3)
    arguments = "offcpu", "-p", one.pid, "-f"
    with one_shot(*arguments, "-U") as user, one_shot(*arguments, "-K") as kernel:
        one.run()
        users, kernels = (names_of(folded(trace.stop())) for trace in (user, kernel))
    one.finish()
    assert {"inner_sleep", "read_here"} <= users
    assert "schedule" not in users
    assert "schedule" in kernels
    assert not {"read_here", "older_wait"} & kernels


def test_blocks_of_lines(workload: Start) -> None:
    one = workload("stacked_waits", K)
    with one_shot("offcpu", "-p", one.pid, "-d") as trace:
        truth = one.run()
        blocks = trace.stop().split("\n\n")
    one.finish()
    assert blocks.pop() == ""
    values = []
    for block in blocks:
        *frames, who, value = block.split("\n")
        assert all(re.fullmatch(r"    \S.*", frame) for frame in frames)
        assert re.fullmatch(rf"    -                ({re.escape(one.comm)}|{OLDER_COMM}) \(\d+\)", who)
        values.append(int(re.fullmatch(r"        (\d+)", value)[1]))  # type: ignore[index]
        names = [frame.strip() for frame in frames]
        if "inner_sleep" in names:
            assert [name for name in names if name in SLEEP] == SLEEP[::-1]
            assert names.index("--") < names.index("inner_sleep")
            assert who.endswith(f"({truth['places'][0]['tid']})")
    assert values == sorted(values)


def test_time_on_the_run_queue(workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload("spinner", 2)
        stolen = stolen_us()
        rows, truth, _ = traced(one, "--runqueue")
        stolen = stolen_us() - stolen
        one.finish()
        told_us = sum(thread["runqueue_us"] for thread in truth["threads"])
        tids = {thread["tid"] for thread in truth["threads"]}
        spinning = [row for row in rows if row["tid"] in tids and row["state"] == "runnable"]
        for row in spinning:
            assert (row["wait_us"], row["off_cpu_us"]) == (0, row["runqueue_us"])
        seen_us = total(spinning, "runqueue_us")
        words = f"run queue: {seen_us} us, truth {told_us} us, stolen {stolen:.0f} us"
        return [] if (1 - SHARE) * told_us - stolen <= seen_us <= (1 + SHARE) * told_us else [words]

    in_one_of_some_tries(attempt)


def test_who_is_preempted_does_not_wait(workload: Start) -> None:
    one = workload("spinner", 1)
    rows, truth, _ = traced(one)
    one.finish()
    assert "runnable" not in {row["state"] for row in rows}
    told_us = sum(thread["runqueue_us"] for thread in truth["threads"])
    tids = {thread["tid"] for thread in truth["threads"]}
    assert total([row for row in rows if row["tid"] in tids]) < 0.05 * told_us
    two = workload("spinner", 1)
    rows, truth, _ = traced(two, "--runqueue", "--state", "0")
    two.finish()
    assert {row["state"] for row in rows} == {"runnable"}
    assert total(rows, "wait_us") == 0 < total(rows, "runqueue_us")


def test_who_ended_a_wait(workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload("stacked_waits", K)
        rows, truth, _ = traced(one, tool="offwake")
        one.finish()
        sleep, pipe, fork = truth["places"]
        reads = at(rows, "read_here", reason="pipe")
        assert total(reads, "count") == pipe["count"]
        known = [row for row in reads if row["waker"] != "[unknown]"]  # some kernels hide some wake-ups
        assert total(known, "count") >= 0.9 * pipe["count"]
        for row in known:
            assert (row["waker"], row["waker_pid"], row["waker_tid"]) == (
                one.comm,
                str(one.pid),
                str(one.pid),
            )
            assert row["comm"] == one.comm
            target, waker = _halves(row)
            assert "read_here" in target
            assert "write_here" not in target
            assert "read_here" not in waker
            # The waker's stack is upside down: from the wake-up outward.
            assert [name for name in waker if name in ("write_here", "main")] == ["write_here", "main"]
            assert waker.index("try_to_wake_up") < waker.index("write_here")
            assert waker[-1] == one.comm
        naps = [row for row in at(rows, "inner_sleep") if row["waker"] != "[unknown]"]
        assert total(naps, "count") >= 0.9 * sleep["count"]
        for row in naps:
            assert row["waker"] == "[interrupt]", "a timer's, whatever it came upon"
            assert not [name for name in _halves(row)[1] if name in ("main", "do_idle")]
        forks = [row for row in at(rows, "fork_here", reason="child") if row["waker"] != "[unknown]"]
        assert total(forks, "count") >= 0.9 * fork["count"]
        assert not {row["waker_tid"] for row in forks} & {str(tid) for tid in (one.pid, fork["tid"])}
        (older,) = at(rows, "older_wait")
        assert older["stack"][-2:] == ["--", "[not woken]"]
        assert "waker" not in older
        return off(
            "read_here", total(reads), pipe["sum_us"], pipe["count"], truth["queued_us"], pipe["least_us"]
        )

    in_one_of_some_tries(attempt)


def _halves(row: dict[str, Any]) -> tuple[list[str], list[str]]:
    middle = row["stack"].index("--")
    return row["stack"][:middle], row["stack"][middle + 1 :]


def test_wakers_in_blocks_of_lines(workload: Start) -> None:
    one = workload("stacked_waits", 3)
    with one_shot("offwake", "-p", one.pid) as trace:
        one.run()
        blocks = trace.stop().split("\n\n")
    one.finish()
    assert blocks.pop() == ""
    (block,) = [block for block in blocks if "    write_here\n" in block and "    read_here\n" in block]
    lines = block.split("\n")
    assert lines[0] == f"    waker:           {one.comm} {one.pid}"
    middle = lines.index("    --               --")
    assert (
        lines.index("    main") < lines.index("    write_here") < lines.index("    try_to_wake_up") < middle
    )
    assert middle < lines.index("    __schedule") < lines.index("    read_here")
    assert re.fullmatch(rf"    target:          {re.escape(one.comm)} \d+", lines[-2])
    assert re.fullmatch(r"        \d+", lines[-1])


def test_the_end_by_duration_by_the_process_and_by_a_signal(workload: Start) -> None:
    one = workload("stacked_waits", 3)
    began = time.monotonic()
    with one_shot("offcpu", "-p", one.pid, "-f", "700ms") as trace:
        assert "older_wait" in trace.result()
        said = re.search(r"lockd trace offcpu: ([\d.]+) s", trace.said)
        assert said
        assert 0.7 <= float(said[1]) <= time.monotonic() - began
    for number in (signal.SIGINT, signal.SIGTERM):
        with one_shot("offcpu", "-p", one.pid, "-f") as trace:
            assert "older_wait" in trace.stop(number)
    with one_shot("offcpu", "-p", one.pid, "-f") as trace:
        one.run()
        one.finish()
        assert {"inner_sleep", "read_here"} <= names_of(folded(trace.result()))


def test_all_threads_of_the_host(workload: Start) -> None:
    def attempt() -> list[str]:
        one = workload("stacked_waits", K)
        with one_shot("offcpu", "--format", "json") as trace:
            truth = one.run()
            rows = rows_of(trace.stop())
        one.finish()
        assert len({row["pid"] for row in rows}) > 3
        place = truth["places"][1]
        reads = [row for row in at(rows, "read_here", reason="pipe") if row["pid"] == one.pid]
        assert total(reads, "count") == place["count"]
        return off(
            "read_here", total(reads), place["sum_us"], place["count"], truth["queued_us"], place["least_us"]
        )

    in_one_of_some_tries(attempt)


def test_threads_of_the_kernel_or_of_users_only(workload: Start) -> None:
    one = workload("stacked_waits", K)
    arguments = "offcpu", "--format", "json"
    with one_shot(*arguments, "-k") as kernel, one_shot(*arguments, "-u") as user:
        truth = one.run()
        of_kernel, of_users = rows_of(kernel.stop()), rows_of(user.stop())
    one.finish()
    assert of_kernel
    assert {row["reason"] for row in of_kernel} <= {"kthread", "kernel", "disk"}
    assert "kthread" not in {row["reason"] for row in of_users}
    assert not [row for row in of_kernel if row["pid"] == one.pid]
    reads = [row for row in at(of_users, "read_here", reason="pipe") if row["pid"] == one.pid]
    assert total(reads, "count") == truth["places"][1]["count"]


def test_beside_a_daemon_both_are_right(narrow: Lockd, workload: Start) -> None:
    one = workload("stacked_waits", K)
    rows, truth, _ = traced(one)
    metrics = narrow.metrics()
    one.finish()
    all_series = metrics.labels(COUNT, comm=one.comm)
    for told in truth["places"][1:]:
        labels = {"comm": one.comm, "state": told["state"], "reason": told["reason"]}
        # The daemon also counts the wait for the start byte, and the waits that reap children.
        assert metrics.sum(COUNT, **labels) >= told["count"], (told, all_series, metrics.dropped)
        waits = at(rows, told["function"], state=told["state"], reason=told["reason"])
        assert total(waits, "count") == told["count"], (told, rows)
    pipe = truth["places"][1]
    counted = metrics.sum(COUNT, comm=one.comm, state=pipe["state"], reason="pipe")
    # No other wait for a pipe has ended.
    assert counted == pipe["count"], (pipe, all_series, metrics.dropped)


def test_what_has_no_room_is_in_the_sum(
    workload: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, windows, has_begun = 2, Session.windows, threading.Event()
    smaller = functools.partial(options.load_settings, entries=few)
    monkeypatch.setattr(options, "load_settings", smaller)
    monkeypatch.setattr(Session, "windows", lambda self: has_begun.set() or windows(self))
    one, truth = workload("stacked_waits", 10), {}
    parser, out = argparse.ArgumentParser(), tmp_path / "out"
    offcpu.add_options(parser)
    args = parser.parse_args(["-p", str(one.pid), "--format", "json", "-o", str(out)])
    args.command_line = ""

    def work() -> None:
        has_begun.wait(60)
        truth.update(one.run())
        one.finish()

    thread = threading.Thread(target=work)
    thread.start()
    assert offcpu.run(args) == 0
    thread.join()
    rows = rows_of(out.read_text())
    (nobody,) = [row for row in rows if row["comm"] == "[no room]"]
    assert nobody["stack"] == []
    assert nobody["count"] > 0
    told_us = sum(place["sum_us"] for place in truth["places"])
    assert total(rows) > (1 - SHARE) * told_us


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-m 10 -M 5", "-m is not above -M"),
        ("--state 0", "with --runqueue"),
        ("--state x", "is no mask"),
        ("-k -U", "one of the two"),
        ("-t 2000000000", "thread 2000000000"),
        ("-p 1,x", "not a whole number"),
        ("-p 99999999999", "99999999999 is no id; rule: at most 2147483647"),
        ("-m 99999999999999999999", "rule: microseconds, below 9223372036854775"),
    ],
)
def test_bad_usage_is_told(arguments: str, words: str) -> None:
    done = subprocess.run(
        ["/usr/bin/python3", "-m", "lockd", "trace", "offcpu", *arguments.split()],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr
    assert not done.stdout
