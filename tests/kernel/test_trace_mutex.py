"""`lockd trace mutex` against programs that know what they did, built with several C libraries."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import beside_another_tool
from tests.support.lockd_process import ROOT
from tests.support.workload import Workload

SOURCE = Path(__file__).with_name("mutexes.c")
FLAGS = ("-O2", "-fomit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-pthread")
BUILDS = {
    "glibc": ("gcc", "-fexceptions"),
    "glibc-static": ("gcc", "-fexceptions", "-static"),
    "musl": ("musl-gcc",),
    "musl-static": ("musl-gcc", "-static"),
}
SCENARIOS = (
    "holds", "contention", "trying", "timed", "condition_waits", "recursive", "robust", "errors",
    "given_by_another", "c11", "handler", "cancelled", "forked", "often",
)  # fmt: skip
LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")
NUMBERS = itertools.count()

Row = dict[str, Any]


@dataclass
class Trace:
    """The results of the trace of a program, and the program's truth by mutex."""

    rows: list[Row]
    truth: dict[str, dict[str, int]]
    said: str

    def of(self, mutex: str, state: str = "") -> list[Row]:
        return [row for row in self.rows if row["lock"].endswith(f":{mutex}") and row["state"] == state]

    def sum(self, mutex: str, column: str) -> int:
        return sum(row[column] for row in self.of(mutex))

    def errors(self, mutex: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for row in self.of(mutex):
            for name, count in row["errors"].items():
                found[name] = found.get(name, 0) + count
        return found


class Tracer:
    """A running `lockd trace mutex`, or another tool; its constructor returns once it is attached."""

    def __init__(self, *arguments: object, tool: str = "mutex") -> None:
        self.process = subprocess.Popen(
            ["/usr/bin/python3", "-m", "lockd", "trace", tool, *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr
        self._said: list[str] = []
        for line in self.process.stderr:
            self._said.append(line)
            if line.endswith(": tracing\n"):
                return
        raise AssertionError(f"lockd trace mutex ended with {self.process.wait()}: {''.join(self._said)}")

    def end(self, stop: bool = False) -> tuple[str, str]:
        """Wait for its end, which `stop` brings about as Ctrl-C does. Return its output and what it wrote to
        standard error.
        """
        if stop:
            self.process.send_signal(signal.SIGINT)
        output, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said
        return output, "".join(self._said) + said


def started(program: Path, *scenarios: str) -> Workload:
    return Workload(str(program), *scenarios, comm=f"mx.{os.getpid():x}.{next(NUMBERS)}")


def traced(program: Path, scenarios: tuple[str, ...], *options: str) -> Trace:
    """Run scenarios of a program under a trace, until the process ends."""
    process = started(program, *scenarios)
    try:
        tracer = Tracer("-p", process.pid, "--format", "json", *options)
        truth = process.run()
        process.finish()
        output, said = tracer.end()
    finally:
        if process.process.poll() is None:
            process.kill()
    rows = [json.loads(line) for line in output.splitlines()]
    assert {row["pid"] for row in rows} == {process.pid}
    return Trace(rows, truth, said)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, host: None) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("mutexes")
    built = {}
    for name, command in BUILDS.items():
        built[name] = directory / f"mutexes-{name}"
        subprocess.run([*command, *FLAGS, SOURCE, "-o", built[name]], check=True)
    return built


STATIC = pytest.mark.thorough("its functions are found as those of musl or glibc in a library are")
EACH_BUILD = [pytest.param(name, marks=[STATIC] * name.endswith("-static")) for name in BUILDS]
OF_GLIBC = [one for one in EACH_BUILD if str(one.values[0]).startswith("glibc")]


@pytest.fixture(scope="module", params=EACH_BUILD)
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def scenarios_of(build: str) -> tuple[str, ...]:
    """Return the scenarios of a build. Those of musl lack `cancelled`, because musl ends a cancelled thread
    without unwinding its stack.
    """
    return tuple(one for one in SCENARIOS if not (one == "cancelled" and build.startswith("musl")))


@pytest.fixture(scope="module")
def held(build: str, programs: dict[str, Path]) -> Iterator[Trace]:
    yield traced(programs[build], scenarios_of(build), "--held")


@pytest.fixture(scope="module")
def waits(build: str, programs: dict[str, Path]) -> Iterator[Trace]:
    yield traced(programs[build], scenarios_of(build))


def test_holds_are_counted_and_as_long_as_they_were(held: Trace) -> None:
    for mutex, true in held.truth.items():
        assert held.sum(mutex, "count") == true["held"], mutex
        # Each hold as the program measures it is inside of what lockd measures, and shorter by two probes.
        most = true["hold_ns"] * 1.05 + 1e6 + 50e3 * true["held"]
        assert true["hold_ns"] <= held.sum(mutex, "sum") <= most, (mutex, true)
    assert "lost: none" in held.said


def test_waits_are_counted_and_as_long_as_they_were(waits: Trace, build: str) -> None:
    for mutex, true in waits.truth.items():
        count = waits.sum(mutex, "count")
        if build.startswith("musl") and mutex in ("condition_waits_guard", "handler_guard", "plain"):
            assert count > true["taken"]  # musl's waits for conditions call pthread_mutex_lock()
            continue
        assert count == true["taken"], mutex
        assert waits.sum(mutex, "sum") <= true["wait_ns"], mutex
    least = waits.truth["contention_guard"]["wait_ns"] * 0.95 - 1e6
    assert waits.sum("contention_guard", "sum") >= least >= 50 * 3e6
    assert "lost: none" in waits.said


def test_calls_that_fail_are_counted_by_error(held: Trace, waits: Trace, build: str) -> None:
    timeouts = 3 if build.startswith("musl") else 4
    for trace in (held, waits):
        assert trace.errors("trying_guard") == {"EBUSY": 50}
        assert trace.errors("timed_guard") == {"ETIMEDOUT": timeouts}
        assert trace.errors("plain") == {"EBUSY": 50, "ETIMEDOUT": 1}
        assert trace.errors("errors_guard") == {"EDEADLK": 1}
        for scenario in ("holds", "contention", "recursive", "robust"):
            assert trace.errors(f"{scenario}_guard") == {}


def test_histograms_have_all_of_them(held: Trace, waits: Trace) -> None:
    for trace in (held, waits):
        for row in trace.rows:
            assert sum(bucket["count"] for bucket in row["buckets"]) == row["count"]
            least = sum(bucket["from"] * bucket["count"] for bucket in row["buckets"])
            assert least <= row["sum"] <= 2 * least + row["count"]
    (row,) = held.of("holds_guard")
    assert row["unit"] == "ns" and row["max"] >= 2_000_000
    assert row["buckets"][0]["from"] >= 1 << 20  # in nanoseconds; above it if no thread woke up in time


def test_stacks_and_threads_are_named(held: Trace, waits: Trace, build: str) -> None:
    for trace in (held, waits):
        (row,) = trace.of("holds_guard")
        assert row["comm"] == "holder"
        assert row["stack"][-3:] == ["hold_often", "take", "pthread_mutex_lock"]
        assert len(row["stack"]) <= 5
        assert row["lock"] == f"mutexes-{build}:holds_guard"
    # The hold that follows a wait for a condition belongs to the call that waits.
    stacks = {tuple(row["stack"][-2:]) for row in held.of("condition_waits_guard")}
    assert ("waits_for_condition", "pthread_cond_wait") in stacks
    assert ("waits_for_condition", "pthread_cond_timedwait") in stacks


@pytest.mark.parametrize("build", OF_GLIBC, indirect=True)
def test_a_cancelled_thread_runs_what_is_to_run_as_it_ends(held: Trace, waits: Trace) -> None:
    """A return probe in the stack of the thread would end the unwinding, and its mutex would stay held."""
    for trace in (held, waits):
        assert trace.truth["cancelled_guard"]["failed"] == 0


@pytest.mark.thorough("ten seconds; test_trace_futex.py has the same of waits")
def test_what_goes_on_is_marked(programs: dict[str, Path], tmp_path: Path) -> None:
    for options, states in (
        (("--held",), {("ongoing_guard", "still held"): 1, ("other", "still held, its thread has ended"): 1}),
        ((), {("ongoing_guard", "still waiting"): 2}),
    ):
        process = started(programs["glibc"], "ongoing")
        files = tmp_path / "all", tmp_path / "over"
        tracers = [
            Tracer("-p", process.pid, "--format", "json", "-o", files[0], *options),
            Tracer("-p", process.pid, "--format", "json", "-o", files[1], "--no-ongoing", *options),
        ]
        process.run()
        for tracer in tracers:
            tracer.end(stop=True)
        process.kill()
        everything, over = ([json.loads(line) for line in file.open()] for file in files)
        found = {(row["lock"].rpartition(":")[2], row["state"]): row for row in everything if row["state"]}
        assert {key: row["count"] for key, row in found.items()} == states
        assert all(row["sum"] >= 90e6 * row["count"] for row in found.values())
        assert {row["comm"] for row in found.values()} == ({"gone", process.comm} if options else {"waiter"})
        assert not any(row["state"] for row in over)


def test_waits_of_a_process_that_is_killed_are_counted(programs: dict[str, Path]) -> None:
    process = started(programs["glibc"], "ongoing")
    tracer = Tracer("-p", process.pid, "--format", "json")
    process.run()
    process.kill()
    output, _ = tracer.end()
    rows = [row for line in output.splitlines() if (row := json.loads(line))["state"]]
    assert {row["state"] for row in rows} == {"its thread ended as it waited"}
    assert sum(row["count"] for row in rows) == 2


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_process_with_its_own_library_in_its_own_file_system(
    programs: dict[str, Path], tmp_path: Path, is_replaced: bool
) -> None:
    """The process has its own mount namespace and root. Its library may have been replaced since it began, as
    by an upgrade.
    """
    jail = tmp_path / "jail"
    shutil.copytree(programs["glibc"].parent, jail / "bin")
    for library in map(Path, re.findall(r"(/\S+) \(0x", _ldd(programs["glibc"]))):
        (jail / library.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, jail / library.relative_to("/"))
    inside = tmp_path / "inside"
    inside.write_text(f'#!/bin/sh\nexec unshare --mount chroot {jail} /bin/mutexes-glibc "$@"\n')
    inside.chmod(0o755)
    process = started(inside, "holds")
    if is_replaced:
        library = jail / LIBC.relative_to("/")
        shutil.copy(library, jail / "new")
        os.replace(jail / "new", library)
    other = started(programs["glibc"], "holds")
    tracer = Tracer("-p", process.pid, "--held", "--format", "json")
    truth = process.run()["holds_guard"]
    other.run()
    other.finish()
    process.finish()
    rows = [json.loads(line) for line in tracer.end()[0].splitlines()]
    guard = [row for row in rows if row["lock"] == "mutexes-glibc:holds_guard"]
    assert [row["count"] for row in guard] == [truth["held"]]
    assert guard[0]["stack"][-3:] == ["hold_often", "take", "pthread_mutex_lock"]


def _ldd(program: Path) -> str:
    return subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout


@pytest.mark.thorough("ten seconds; tests/unit/trace has formats")
def test_every_format(programs: dict[str, Path], tmp_path: Path) -> None:
    process = started(programs["glibc"], "contention")
    formats = ("hist", "table", "csv", "folded", "pprof")
    graph = tmp_path / "graph.svg"
    tracers = {name: Tracer("-p", process.pid, "--format", name, "-o", tmp_path / name) for name in formats}
    tracers["graph"] = Tracer("-p", process.pid, "--flamegraph", graph)
    process.run()
    process.finish()
    for tracer in tracers.values():
        tracer.end()
    name = "mutexes-glibc:contention_guard"

    rows = [row for row in csv.DictReader((tmp_path / "csv").open()) if row["lock"] == name]
    assert sum(int(row["count"]) for row in rows) == 100
    (waiter,) = [row for row in rows if row["comm"] == "waiter"]
    assert waiter["stack"].endswith(";waits_often;take;pthread_mutex_lock")
    assert int(waiter["total_ns"]) >= 50 * 3_000_000 and int(waiter["max_ns"]) >= 3_000_000

    text = (tmp_path / "hist").read_text()
    (block,) = [one for one in text.split("\n\n") if one.startswith("@") and "waiter" in one and name in one]
    head, slots = block.split("]: \n")
    assert head.split("\n")[0] == f"@lock_latency_ns[{name}, "
    assert head.split("\n")[1:4] == ["    pthread_mutex_lock", "    take", "    waits_often"]
    assert head.endswith("\n, waiter")
    found = re.findall(r"^(\[\S+(?:, \S+\))?) +(\d+) \|@* *\|$", slots, re.MULTILINE)
    assert sum(int(count) for _, count in found) == 50 and len(found) == len(slots.splitlines())

    table = (tmp_path / "table").read_text().splitlines()
    assert table[0].split()[:4] == ["COUNT", "TOTAL_US", "MEAN_US", "MAX_US"]
    assert name in table[1] and "pthread_mutex_lock < take < waits_often" in table[1]

    folded = dict(line.rsplit(" ", 1) for line in (tmp_path / "folded").read_text().splitlines())
    (line,) = [one for one in folded if one.startswith("waiter;") and one.endswith(f";[{name}]")]
    assert ";waits_often;take;pthread_mutex_lock;" in line and int(folded[line]) >= 150e6

    assert (tmp_path / "pprof").read_bytes()[:2] == b"\x1f\x8b"
    assert "waits_often" in graph.read_text()


@pytest.mark.thorough("ten seconds for what a single one mostly shows")
def test_several_processes(programs: dict[str, Path]) -> None:
    """The traced processes use several C libraries. Another one that maps the same files is not traced."""
    processes = [started(programs[name], "holds") for name in ("glibc", "musl-static", "glibc")]
    other = started(programs["glibc"], "holds")
    pids = [process.pid for process in processes]
    tracer = Tracer("-p", ",".join(map(str, pids)), "--held", "--format", "json")
    for process in (*processes, other):
        process.run()
        process.finish()
    rows = [json.loads(line) for line in tracer.end()[0].splitlines()]
    assert {
        row["pid"]: row["count"] for row in rows if row["lock"].endswith(":holds_guard")
    } == dict.fromkeys(pids, 50)
    assert {row["pid"] for row in rows} == set(pids)


def test_other_tools_still_find_callers(programs: dict[str, Path]) -> None:
    """A return probe takes the return address of its function off the stack, but other tools find the callers
    all the same.
    """
    process = started(programs["glibc"], "contention")
    tracers = [
        Tracer("-p", process.pid, tool="mutex"),
        Tracer("-p", process.pid, "-U", "--format", "folded", "--no-ongoing", tool="offcpu"),
    ]
    process.run()
    process.finish()
    outputs = [tracer.end()[0] for tracer in tracers]
    waits = [line for line in outputs[1].splitlines() if ";pthread_mutex_lock" in line]
    assert any(line.startswith("waiter;") for line in waits)
    for line in waits:
        assert re.search(r"(;waits_often|;main;contention);take;pthread_mutex_lock", line), line


def test_without_stacks(programs: dict[str, Path]) -> None:
    found = traced(programs["glibc"], ("contention", "often"), "--no-stacks")
    assert {tuple(row["stack"]) for row in found.rows} == {()}
    for mutex, truth in found.truth.items():
        assert found.sum(mutex, "count") == truth["taken"]


SCRIPT = """
uprobe:LIBC:pthread_mutex_lock / pid == PID / { @since[tid] = nsecs; @mutex[tid] = arg0; }
uretprobe:LIBC:pthread_mutex_lock / @since[tid] / {
    @taken[@mutex[tid]] = stats(nsecs - @since[tid]); @from[@mutex[tid], tid] = nsecs; delete(@since[tid]);
}
uprobe:LIBC:pthread_mutex_unlock / @from[arg0, tid] / {
    @held[arg0] = stats(nsecs - @from[arg0, tid]); delete(@from[arg0, tid]);
}
interval:ms:100 { printf("attached\\n"); }
END { clear(@since); clear(@mutex); clear(@from); }
"""


@beside_another_tool
@pytest.mark.parametrize("scenario", ["holds", "contention", "often"])
def test_beside_bpftrace(programs: dict[str, Path], tmp_path: Path, scenario: str) -> None:
    """In one run, bpftrace scripts like pmlock and pmheld find the same counts and about the same times."""
    process = started(programs["glibc"], scenario)
    script = SCRIPT.replace("LIBC", os.path.realpath(LIBC)).replace("PID", str(process.pid))
    with subprocess.Popen(
        ["bpftrace", "-e", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as bpftrace:
        assert bpftrace.stdout
        assert "attached\n" in bpftrace.stdout
        tracers = [Tracer("-p", process.pid, "--format", "json", *options) for options in ((), ("--held",))]
        truth = process.run()[f"{scenario}_guard"]
        process.finish()
        rows = [[json.loads(line) for line in tracer.end()[0].splitlines()] for tracer in tracers]
        bpftrace.send_signal(signal.SIGINT)
        text = bpftrace.stdout.read()
    for what, found in zip(("taken", "held"), rows, strict=True):
        (row,) = _by_lock(found, f"mutexes-glibc:{scenario}_guard")
        theirs = re.search(rf"@{what}\[{int(row['address'], 16)}\]: count (\d+), .*total (\d+)", text)
        assert theirs, text
        count, total = map(int, theirs.groups())
        assert count == row["count"] == truth[what]
        if scenario == "often":  # the time is mostly that of the probes, and each tool times those of others
            continue
        assert abs(row["sum"] - total) <= 0.02 * total + 20e3 * count, (what, row["sum"], total)


def _by_lock(rows: list[Row], name: str) -> list[Row]:
    found = [row for row in rows if row["lock"] == name]
    one = {**found[0], "count": sum(row["count"] for row in found), "sum": sum(row["sum"] for row in found)}
    return [one]


def test_processes_without_mutexes_are_refused(tmp_path: Path) -> None:
    stripped = tmp_path / "stripped"
    subprocess.run(["gcc", "-O2", "-static", "-s", SOURCE, "-o", stripped, "-pthread"], check=True)
    process = started(stripped, "holds")
    done = _refused("-p", str(process.pid), "1")
    process.kill()
    assert done.returncode == 3
    assert f"process {process.pid}: " in done.stderr
    assert "has no function pthread_mutex_lock(); rule: a program that is linked statically" in done.stderr
    assert _refused("1").returncode == 2  # -p is missing
    nobody = _refused("-p", str(process.pid), "1")
    assert nobody.returncode == 2
    assert f"process {process.pid}: No such process" in nobody.stderr


def _refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/python3", "-m", "lockd", "trace", "mutex", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
