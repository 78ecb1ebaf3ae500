"""What all one-shot tools share: how they begin and end, what they say, and what they leave to others."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockd.errors import HostError
from lockd.load.hooks import Candidate, Part, Way
from lockd.load.settings import Trace as settings_of
from lockd.trace.core import options
from lockd.trace.core.session import Session
from tests.support.checks import in_one_of_some_tries
from tests.support.lockd_process import CANNOT, CHECKOUT, ROOT, Lockd
from tests.support.trace_process import folded
from tests.support.tracing import Done, Trace, trace
from tests.support.workload import Start

GETPPID = "t:syscalls:sys_enter_getppid"
USAGE = 2
ROUNDED = 0.05
"""The seconds by which a trace may take longer than it reports, because it reports tenths."""
PERF_EVENT = "anon_inode:[perf_event]"
"""The file that a descriptor is of which keeps a program attached to a tracepoint."""


def chains(stacks: Counter[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
    """Return the counts of stacks by the functions of the workload call_tree that are in them."""
    found: Counter[tuple[str, ...]] = Counter()
    for stack, count in stacks.items():
        found[tuple(name for name in stack if re.fullmatch(r"f[0-7]", name))] += count
    return found


def test_counts_and_chains_are_exact(workload: Start) -> None:
    tree = workload("call_tree", 2000, 3)
    with Trace("stackcount", GETPPID, "-p", tree.pid, "--format", "folded") as one:
        calls = tree.run()["calls"]
        tree.finish()
        done = one.finish()  # by itself: the process has ended
    assert done.code == 0
    assert (done.events, done.lost) == (calls, "none")
    found = chains(folded(done.out))
    assert found.total() == calls
    assert {len(chain) for chain in found} == {3}, found
    assert 400 < len(found) <= 512


def test_processes_that_end_at_once_have_names(workload: Start) -> None:
    """The processes live for some 20 ms, while the trace reads its captures every 50 ms."""
    with Trace("stackcount", GETPPID, "--format", "json", "-U") as one:
        trees = []
        for _ in range(20):
            trees.append(workload("call_tree", 20, 2, 1000))
            trees[-1].run()
            trees[-1].finish()
        done = one.stop()
    comms = {tree.comm for tree in trees}
    rows = [row for row in map(json.loads, done.out.splitlines()) if row["comm"] in comms]
    assert sum(row["count"] for row in rows) == 20 * 20
    named = [row for row in rows if len([name for name in row["stack"] if re.fullmatch("f[0-7]", name)]) == 2]
    assert sum(row["count"] for row in named) > 10 * 20  # a busy host is too late for some processes


def test_two_traces_at_once(workload: Start) -> None:
    trees = [workload("call_tree", 1000, 2), workload("call_tree", 2000, 2)]
    of_both = f"{trees[0].pid},{trees[1].pid}"
    with (
        Trace("stackcount", GETPPID, "-p", trees[0].pid) as one,
        Trace("stackcount", GETPPID, "-p", of_both) as both,
    ):
        for tree in trees:
            tree.run()
        trees[0].finish()
        assert one.finish().events == 1000
        assert both.process.poll() is None  # one of its processes goes on
        trees[1].finish()
        assert both.finish().events == 3000


def test_a_daemon_beside_a_trace_counts_on(narrow: Lockd, workload: Start) -> None:
    locks = workload("mutex_handover", 100, 2000)
    with Trace("stackcount", "t:syscalls:sys_enter_futex", "-p", locks.pid) as one:
        truth = locks.run()["futex"]["lock"]
        metrics = narrow.metrics()
        locks.finish()
        done = one.finish()
    again = workload("mutex_handover", 100, 2000)
    again.run()
    after = narrow.metrics()
    assert done.events == truth["waits"] + 200
    for seen, comm in ((metrics, locks.comm), (after, again.comm)):
        assert seen.sum("lockd_futex_blocked_seconds_count", comm=comm, kind="lock") == truth["blocked"]
    assert metrics.sum("lockd_hook_attached") == after.sum("lockd_hook_attached")
    again.finish()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_what_was_gathered(workload: Start, number: int) -> None:
    tree = workload("call_tree", 500, 1)
    with Trace("stackcount", GETPPID, "-p", tree.pid, "--format", "folded") as one:
        tree.run()
        done = one.stop(number)
    assert done.code == 0
    assert folded(done.out).total() == 500
    assert done.events == 500


def test_a_signal_while_it_attaches_ends_it(tmp_path: Path) -> None:
    """As from a terminal, the loader gets the signal as well. Nothing was gathered, so nothing is printed."""
    environment = {**os.environ, "CACHE_DIRECTORY": str(tmp_path)}  # empty, so that it has to compile
    with contextlib.ExitStack() as ends:
        one = Trace("stackcount", GETPPID, start_new_session=True, env=environment)
        ends.push(one)  # only to end it: to enter it would wait until it is attached
        deadline = time.monotonic() + 30
        while not Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(one.process.pid, signal.SIGINT)
        done = one.finish()
    assert (done.code, done.out, done.err) == (130, "", "")


def test_the_second_signal_ends_it_at_once(workload: Start, tmp_path: Path) -> None:
    """The second signal comes while the trace prints into a pipe that nobody reads."""
    tree = workload("call_tree", 20_000, 6)
    with Trace("stackcount", GETPPID, "-p", tree.pid) as one:
        tree.run()
        os.kill(one.process.pid, signal.SIGINT)
        time.sleep(3)
        assert one.process.poll() is None, "it was to print more than a pipe holds"
        os.kill(one.process.pid, signal.SIGINT)
        assert one.process.wait(5) == 130


def test_a_duration_ends_it() -> None:
    """The trace ends later than asked for only where the host is too busy to let it run."""

    def attempt() -> list[str]:
        began = time.monotonic()
        done = trace("stackcount", GETPPID, "300ms")
        assert done.code == 0
        said = re.search(r"([\d.]+) s, ", done.err)
        assert said, done.err
        assert 0.3 <= float(said[1]) <= time.monotonic() - began
        return [] if said[1] == "0.3" else [said[0]]

    in_one_of_some_tries(attempt)


def hooks_of(pid: int) -> int:
    """Return to how many tracepoints the trace with this process id is attached."""
    found = 0
    with contextlib.suppress(OSError):  # the trace has ended
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the descriptor has been closed
                found += os.readlink(f"/proc/{pid}/fd/{descriptor}") == PERF_EVENT
    return found


def most_calls(hooks: list[int]) -> int:
    """Return how many calls a trace may have counted, at most, for a thread that made one call each time that
    it had found so many hooks of the trace.

    The trace gets its hooks from the loader once all are attached, and counts only after that. It stops
    counting before it detaches the first. A call just before the first hooks are found may come after them.
    """
    assert any(hooks), "nothing was seen to be attached"
    first = next(at for at, number in enumerate(hooks) if number)
    last = len(hooks) - 1 - hooks[::-1].index(max(hooks))
    return last - max(first - 1, 0) + 1


def test_what_comes_while_hooks_are_detached_does_not_count(tmp_path: Path) -> None:
    """Hooks are detached one after another, which takes seconds. The one of accept4() is among the last."""
    file = tmp_path / "counts"
    hooks = "t:syscalls:sys_enter_[ae].*"
    with (
        socket.socket() as no_listener,
        Trace("stackcount", "-r", hooks, "-K", "--format", "json", "-o", file, "1") as one,
    ):
        found = []
        while one.process.poll() is None:
            found.append(hooks_of(one.process.pid))
            with pytest.raises(OSError, match="Invalid argument"):
                no_listener.accept()
            time.sleep(0.001)
        done = one.finish()
    assert done.code == 0
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row["pid"] == os.getpid()]
    assert 0 < sum(row["count"] for row in rows) <= most_calls(found)


def test_what_comes_while_hooks_are_attached_does_not_count(tmp_path: Path) -> None:
    """Hooks are attached one after another, which takes seconds. The one of access() is among the first."""
    file = tmp_path / "counts"
    found: list[int] = []
    is_over = threading.Event()
    hooks = "t:syscalls:sys_enter_[ae].*"
    one = Trace("stackcount", "-r", hooks, "-K", "--format", "json", "-o", file, "1")

    def call() -> None:
        while not is_over.wait(0.001):
            found.append(hooks_of(one.process.pid))
            os.access("/", os.F_OK)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        with one:
            done = one.finish()
    finally:
        is_over.set()
        caller.join()
    assert done.code == 0
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row["pid"] == os.getpid()]
    assert 0 < sum(row["count"] for row in rows) <= most_calls(found)


def test_it_ends_with_its_process() -> None:
    """The trace ends although nobody has waited for the process, which is thus still there as a zombie."""
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        with Trace("stackcount", GETPPID, "-p", sleeper.pid) as one:
            sleeper.kill()
            assert one.finish().code == 0
    finally:
        sleeper.kill()
        sleeper.wait()


def part(what: str, *hooks: Candidate) -> Part:
    return Part("trace", what, (Way("tracepoint", hooks, ()),))


def session_of(*parts: Part, optional: tuple[str, ...] = ()) -> Session:
    """Return a session for parts whose hooks all run a BPF program of stackcount."""
    args = argparse.Namespace(
        unwind="dwarf", kernel_stacks_only=False, user_stacks_only=False, stack_storage_size=16
    )
    settings = options.load_settings(
        args, settings_of(parts=parts, files=("trace/stackcount.bpf.c",), pairs=("stackcount",))
    )
    return Session("test", settings, 0.1, optional=optional)


THERE = Candidate("trace", "count_stack", "tracepoint", "syscalls:sys_enter_getppid")
MISSING = Candidate("trace", "count_stack", "tracepoint", "syscalls:sys_enter_nonsense")


def test_a_part_that_cannot_be_done_leaves_nothing_open() -> None:
    descriptors = sorted(os.listdir("/proc/self/fd"))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with (
        pytest.raises(
            HostError, match=r"^test: others cannot be traced here: tracepoint: this kernel has no"
        ),
        session_of(part("calls", THERE), part("others", MISSING)),
    ):
        pass
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_what_is_optional_may_be_missing(capfd: pytest.CaptureFixture[str]) -> None:
    lacking = replace(MISSING, hook="syscalls:sys_enter_rubbish", required=False)
    parts = part("calls", THERE, lacking), part("others", MISSING)
    with session_of(*parts, optional=("others",)) as session:
        assert list(session.windows())
    told = capfd.readouterr().err
    assert "test: not attached: tracepoint syscalls:sys_enter_rubbish: this kernel has no tracepoint" in told


def says(done: Done, code: int, pattern: str) -> None:
    assert (done.code, done.out) == (code, "")
    assert all(line.startswith("lockd: error: ") for line in done.err.splitlines()), done.err
    assert re.match(f"lockd: error: {pattern}\n", done.err), done.err


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["-p", "0"], ".*'0' is not a whole number above 0"),
        (["-p", "1,x"], ".*'x' is not a whole number above 0"),
        (["-p", "4194304"], "process 4194304: No such process"),
        (["1", "2"], "unrecognized arguments: 2"),
        (["0"], ".*'0' is not a duration above 0, such as 10, 500ms or 2m"),
        (["1y"], ".*'1y' is not a duration .*"),
        (["--format", "xml"], ".*invalid choice: 'xml' .*"),
        (["-o", "/nonexistent/file"], "/nonexistent/file: cannot be written: No such file or directory"),
        (["-o", "/proc/none"], "/proc/none: cannot be written: .*"),
        (["-o", "/tmp"], "/tmp: cannot be written: Is a directory"),
        (["--flamegraph", "/tmp/x.png"], "--flamegraph /tmp/x.png: rule: a name that ends in .svg or .html"),
        (["--flamegraph", "/nonexistent/x.svg"], "/nonexistent/x.svg: cannot be written: .*"),
        (["--flamegraph", "/tmp/x.svg", "-o", "/tmp/x.svg"], "--flamegraph .*: --output is the same file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_at_once(words: list[str], pattern: str) -> None:
    says(trace("stackcount", GETPPID, *words), USAGE, pattern)


WITH_A_THREAD = """
import sys, threading, time
thread = threading.Thread(target=sys.stdin.readline)
thread.start()
print(thread.native_id, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def threaded() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and a thread of it that ends when it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_A_THREAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


def test_a_thread_is_no_process(threaded: tuple[subprocess.Popen[str], int]) -> None:
    pattern = f"process {threaded[1]}: it is a thread; rule: the id of a process"
    says(trace("stackcount", GETPPID, "-p", threaded[1]), USAGE, pattern)


def test_it_ends_with_its_thread(threaded: tuple[subprocess.Popen[str], int]) -> None:
    """A trace of a thread ends with the thread, though its process goes on."""
    process, tid = threaded
    with Trace("offcpu", "-t", tid, "--format", "json") as one:
        time.sleep(0.3)
        assert one.process.poll() is None
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
        done = one.finish()
    assert done.code == 0
    assert {row["tid"] for row in map(json.loads, done.out.splitlines())} == {tid}
    says(trace("offcpu", "-t", tid), USAGE, f"thread {tid}: No such thread")


def test_without_root_it_is_said_at_once() -> None:
    unprivileged = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all"]
    for words in (["stackcount", "no_such_function"], ["stackcount", GETPPID, "-o", "/nonexistent/x"]):
        command = [*unprivileged, *CHECKOUT, "trace", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (CANNOT, "")
        assert re.fullmatch(r"lockd: error: user id 65534, .*: run it with sudo\n", done.stderr)


def test_without_a_tool_it_names_them() -> None:
    done = trace()
    assert (done.code, done.out) == (USAGE, "")
    assert "stackcount" in done.err


def on_terminal(*words: object) -> tuple[int, bytes]:
    """Run a trace on a terminal. Return its exit code and all that it writes to the terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*CHECKOUT, "trace", *map(str, words)], cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # EIO: nobody has the other end any more
            break
        said += part
    os.close(ours)
    return process.wait(60), said


def test_progress_on_a_terminal(workload: Start) -> None:
    tree = workload("call_tree", 100_000, 1, 2000)
    tree.go()
    began = time.monotonic()
    code, said = on_terminal("stackcount", GETPPID, "-p", tree.pid, "1s", "-o", "/dev/null")
    assert code == 0
    shown = re.findall(rb"\r\x1b\[K(\d+) s, ([\d,]+) events, 0 lost; Ctrl-C ends", said)
    assert len(shown) >= 2
    counts = [int(events) for _, events in shown]
    assert counts == sorted(counts)
    last = said.rsplit(b"\r\x1b[K", 1)[1]
    end = re.fullmatch(rb"lockd trace stackcount: ([\d.]+) s, \d+ events, lost: none\r\n", last)
    assert end
    assert 1.0 <= float(end[1]) <= time.monotonic() - began
    assert 0 < counts[-1] <= 1 + 500 * (float(end[1]) + ROUNDED), "a call in 2 ms"


PROGRESS = re.compile(
    rb"\d+ s, [\d,]+ events, [\d,]+ lost; Ctrl-C ends"
    rb"|lockd trace \w+: (?:attaching|tracing(?! )|detaching|naming [\d,]+ stacks)"
)


@pytest.mark.parametrize(
    "words",
    ["stackcount", "stackcount -i 200ms", "stackcount -T -i 200ms --format folded", "stacksnoop"],
)
def test_nothing_is_printed_behind_the_progress(words: str, workload: Start) -> None:
    tree = workload("call_tree", 100_000, 1, 2000)
    tree.go()
    code, said = on_terminal(*words.split(), GETPPID, "-p", tree.pid, "1s")
    assert code == 0
    shown = [part for part in said.split(b"\r\x1b[K") if PROGRESS.match(part)]
    assert len(shown) >= 3
    assert not [part for part in shown if b"\n" in part]


def test_no_progress_on_a_pipe() -> None:
    began = time.monotonic()
    done = trace("stackcount", GETPPID, "1")
    assert "\r" not in done.err
    last = r"^lockd trace stackcount: ([\d.]+) s, [\d,]+ events, lost: none\n\Z"
    end = re.search(last, done.err, re.MULTILINE)
    assert end
    assert 1.0 <= float(end[1]) <= time.monotonic() - began


def test_pprof_is_not_for_a_terminal(tmp_path: Path) -> None:
    code, said = on_terminal("stackcount", GETPPID, "--format", "pprof", "1")
    assert code == USAGE
    assert b"--format pprof: it is not for a terminal; rule: with -o FILE, or into a pipe" in said
    file = tmp_path / "file"
    code, said = on_terminal("stackcount", GETPPID, "--format", "pprof", "200ms", "-o", file)
    assert code == 0
    assert file.read_bytes()[:2] == b"\x1f\x8b"


def test_formats_and_a_flame_graph_of_one_trace(workload: Start, tmp_path: Path) -> None:
    tree = workload("call_tree", 400, 2)
    graph, file = tmp_path / "graph.svg", tmp_path / "out.folded"
    words = ["--flamegraph", graph, "--format", "folded", "-o", file]
    with Trace("stackcount", GETPPID, "-p", tree.pid, *words) as one:
        tree.run()
        done = one.stop()
    assert (done.code, done.out) == (0, "")
    assert folded(file.read_text()).total() == 400
    assert "count: 400 in all" in graph.read_text()
    assert f"lockd trace stackcount {GETPPID} -p {tree.pid}" in graph.read_text()


def test_a_flame_graph_is_all_that_was_asked_for(workload: Start, tmp_path: Path) -> None:
    tree = workload("call_tree", 400, 2)
    with Trace("stackcount", GETPPID, "-p", tree.pid, "--flamegraph", tmp_path / "graph.html") as one:
        tree.run()
        done = one.stop()
    assert (done.code, done.out) == (0, "")
    assert "count: 400 in all" in (tmp_path / "graph.html").read_text()


def test_a_full_disk_is_told() -> None:
    with open("/dev/full", "w") as full:
        to = {"stdout": full, "stderr": subprocess.PIPE, "capture_output": False}
        done = trace("stackcount", "t:syscalls:sys_enter_read", "300ms", **to)
    assert done.code == 1
    assert "standard output: cannot be written: No space left on device" in done.err


def test_stacks_that_come_too_fast_are_counted_and_nothing_else_suffers(workload: Start) -> None:
    tree = workload("call_tree", 60_000, 12)
    with Trace("stackcount", GETPPID, "-p", tree.pid, "--format", "folded") as one:
        tree.run()
        tree.finish()
        done = one.finish()
    assert done.code == 0
    assert done.events == 60_000
    found = folded(done.out)
    assert found.total() == 60_000
    lost = sum(count for stack, count in found.items() if "[stack lost]" in stack)
    assert lost > 0
    assert (
        sum(int(n.replace(",", "")) for n in re.findall(r"stacks: [a-z ]+ ([\d,]+)", done.lost)) >= lost > 0
    )
    whole = Counter({stack: count for stack, count in found.items() if "[stack lost]" not in stack})
    assert all(len(chain) == 12 for chain in chains(whole))


@pytest.mark.thorough("a storm")
def test_memory_stays_bounded_however_many_stacks(workload: Start) -> None:
    tree = workload("call_tree", 300_000, 12)
    with Trace("stackcount", GETPPID, "-p", tree.pid, "--format", "folded", "-o", "/dev/null") as one:
        tree.run()
        status = Path(f"/proc/{one.process.pid}/status").read_text()
        done = one.stop()
    assert done.events == 300_000
    most = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert most
    assert int(most[1]) < 400 << 10
