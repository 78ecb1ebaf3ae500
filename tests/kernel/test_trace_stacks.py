"""`lockd trace stackcount` and `stacksnoop` against programs that call functions a known number of times."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.checks import beside_another_tool
from tests.support.lockd_process import CHECKOUT, ROOT
from tests.support.trace_process import Trace

SOURCE = r"""
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#define APART __attribute__((noinline, noclone, noipa))
volatile int sink;
int shared(int x);
APART int leaf(int x) { sink += x; return sink; }
APART int via_a(int x) { return leaf(x) + 1; }
APART int via_b(int x) { return leaf(x) + via_a(x); }
APART int via_shared(int x) { return shared(x) + 1; }
APART int asks(void) { return syscall(SYS_getpgid, 0) + 1; }
APART void *threads_do(void *unused) { for (int i = 0; i < 50; i++) sink += leaf(i); return 0; }
void *goes_on(void *unused)
{
    for (char byte; read(0, &byte, 1) == 1; write(1, "d", 1)) threads_do(0);
    return 0;
}
int main(int argc, char **argv)
{
    char byte;
    pthread_t threads[4];
    while (read(0, &byte, 1) == 1) {
        if (byte == 't') {
            for (int i = 0; i < 4; i++) pthread_create(&threads[i], 0, threads_do, 0);
            for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
        }
        if (byte == 'e') {
            pthread_create(&threads[0], 0, goes_on, 0);
            write(1, "d", 1);
            syscall(SYS_exit, 0); /* ends the main thread alone */
        }
        for (int i = 0; byte == 'g' && i < 100; i++) {
            sink += via_a(i);
            if (i % 4 == 0) sink += via_b(i);
            if (i % 5 == 0) sink += via_shared(i);
            if (i % 10 == 0) sink += shared(i) + asks();
        }
        write(1, "d", 1);
    }
}
"""
SHARED = "__attribute__((noinline, noclone)) int shared(int x) { return x + 1; }\n"
LEAF = Counter(
    {("main", "via_a", "leaf"): 100, ("main", "via_b", "leaf"): 25, ("main", "via_b", "via_a", "leaf"): 25}
)
"""The calls of leaf() that the program makes for one command `g`, by stack."""
OF_SHARED = Counter({("main", "via_shared", "shared"): 20, ("main", "shared"): 10})
ASKED = 10
BUILDS = {
    "pie": ("-O2", "-fomit-frame-pointer", "-fPIE", "-pie"),
    "static": ("-O2", "-fomit-frame-pointer", "-fno-pie", "-static"),
    "fp": ("-O2", "-fno-omit-frame-pointer"),
}


class Program:
    """One run of a program that takes commands of one byte and answers each with `d`."""

    def __init__(self, *command: object) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self.process.pid

    def do(self, what: str = "g") -> None:
        """Send a command, and wait until the program has done it."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(what.encode())
        self.process.stdin.flush()
        assert self.process.stdout.read(1) == b"d"

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The paths of the program by build. Each program has the name of its build; its library is
    libshared.so.1.
    """
    directory = tmp_path_factory.mktemp("stacks")
    (directory / "a.c").write_text(SOURCE)
    (directory / "shared.c").write_text(SHARED)
    library = directory / "libshared.so.1"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, directory / "shared.c"], check=True)
    for name, options in BUILDS.items():
        other = directory / "shared.c" if name == "static" else library
        command = [
            "gcc",
            *options,
            "-o",
            directory / name,
            directory / "a.c",
            other,
            f"-Wl,-rpath,{directory}",
            "-pthread",
        ]
        subprocess.run(command, check=True)
    return {name: directory / name for name in BUILDS}


@pytest.fixture
def start(built: dict[str, Path]) -> Iterator[Callable[[str], Program]]:
    started: list[Program] = []

    def start(build: str) -> Program:
        started.append(Program(built[build]))
        return started[-1]

    yield start
    for one in started:
        one.end()


Start = Callable[[str], Program]


def from_main(stack: list[str]) -> tuple[str, ...]:
    """Return a stack without the functions that call main()."""
    return tuple(stack[stack.index("main") :]) if "main" in stack else tuple(stack)


def counted(text: str) -> Counter[tuple[str, ...]]:
    """Return the counts in the JSON of a trace, by stack."""
    found: Counter[tuple[str, ...]] = Counter()
    for line in text.splitlines():
        one = json.loads(line)
        found[from_main(one["stack"])] += one["count"]
    return found


@pytest.mark.parametrize(
    ("build", "unwind"), [("pie", "dwarf"), ("static", "dwarf"), ("fp", "dwarf"), ("fp", "fp")]
)
def test_calls_of_a_function_by_stack(build: str, unwind: str, start: Start) -> None:
    one = start(build)
    trace = Trace("stackcount", f"{build}:leaf", "-p", one.pid, "--format", "json", "--unwind", unwind)
    one.do()
    assert counted(trace.stop()) == LEAF
    assert trace.lost == {}


def test_a_function_of_a_library_by_its_short_name(start: Start, built: dict[str, Path]) -> None:
    one = start("pie")
    for pattern in (
        "shared:shared",
        "libshared.so.1:sha*",
        f"{built['pie'].parent}/libshared.so.1:shared",
        "lib*:shared",
    ):
        trace = Trace("stackcount", pattern, "-p", one.pid, "--format", "json")
        one.do()
        assert counted(trace.stop()) == OF_SHARED


IN_A_CONTAINER = 'mount -t tmpfs none "$1"; cp "$2" "$1/program"; cp "$3" "$1"; exec "$1/program"'


def test_a_program_in_a_file_system_of_its_own(built: dict[str, Path], tmp_path: Path) -> None:
    """The test's own file system has another program under the path of the traced one."""
    library = built["pie"].parent / "libshared.so.1"
    (tmp_path / "program").write_bytes(built["static"].read_bytes())
    one = Program("unshare", "-m", "sh", "-ec", IN_A_CONTAINER, "-", tmp_path, built["pie"], library)
    one.do("-")  # returns once the program has begun
    for pattern in ("program:leaf", f"{tmp_path}/program:leaf"):
        trace = Trace("stackcount", pattern, "-p", one.pid, "--format", "json")
        one.do()
        assert counted(trace.stop()) == LEAF
    one.end()


def test_only_the_processes_that_were_asked_for(start: Start, built: dict[str, Path]) -> None:
    wanted, other, third = start("pie"), start("pie"), start("pie")
    traces = [
        Trace("stackcount", "pie:leaf", "-p", wanted.pid, "--format", "json"),
        Trace("stackcount", "pie:leaf", "-p", f"{wanted.pid},{third.pid}", "--format", "json"),
        Trace("stackcount", f"{built['pie']}:leaf", "--format", "json"),
    ]
    for one, times in ((wanted, 1), (other, 2), (third, 3)):
        for _ in range(times):
            one.do()
    counts = []
    for trace in traces:
        by_process: Counter[int] = Counter()
        for line in trace.stop().splitlines():
            by_process[json.loads(line)["pid"]] += json.loads(line)["count"]
        counts.append(by_process)
    leaf = LEAF.total()
    assert counts[0] == {wanted.pid: leaf}
    assert counts[1] == {wanted.pid: leaf, third.pid: 3 * leaf}
    assert counts[2] == {wanted.pid: leaf, other.pid: 2 * leaf, third.pid: 3 * leaf}


@pytest.mark.parametrize("pattern", ["pie:leaf", "pie:*"])
def test_calls_by_all_threads_of_a_process(pattern: str, start: Start) -> None:
    one = start("pie")
    trace = Trace("stackcount", pattern, "-p", one.pid, "--format", "json")
    one.do("t")
    found = counted(trace.stop())
    by_threads = {stack: count for stack, count in found.items() if stack[-1] == "leaf"}
    assert [(stack[-2:], count) for stack, count in by_threads.items()] == [(("threads_do", "leaf"), 200)]


@pytest.mark.parametrize(
    ("tool", "pattern", "says"),
    [
        ("stackcount", "pie:leaf", "were not traced"),
        ("stacksnoop", "pie:leaf", "were not traced"),
        ("stackcount", "pie:*", "may not have been traced"),
    ],
)
def test_threads_that_outlive_the_main_thread_are_reported(
    tool: str, pattern: str, says: str, start: Start
) -> None:
    one = start("pie")
    trace = Trace(tool, pattern, "-p", one.pid, "--format", "json")
    one.do("e")
    while ") Z " not in Path(f"/proc/{one.pid}/stat").read_text():
        time.sleep(0.01)
    one.do()
    written = trace.stop()
    assert f"process {one.pid}: its main thread has ended; since then, its other threads {says}" in trace.said
    if pattern == "pie:leaf":
        assert written == ""


def test_tracepoints(start: Start) -> None:
    one = start("pie")
    trace = Trace("stackcount", "t:syscalls:sys_enter_getpgid", "-p", one.pid, "-U", "--format", "json")
    one.do()
    assert counted(trace.stop()) == {("main", "asks", "syscall"): ASKED}
    trace = Trace("stackcount", "t:syscalls:sys_e*_getpgid", "-p", one.pid, "--format", "json")
    one.do()
    found = counted(trace.stop())
    assert {stack[:3] for stack in found} == {("main", "asks", "syscall")}
    assert found.total() == 2 * ASKED
    assert all("do_syscall" in " ".join(stack) for stack in found)


def test_a_regular_expression(start: Start) -> None:
    one = start("pie")
    trace = Trace("stackcount", "-r", "pie:via_[ab]$", "-p", one.pid, "--format", "json")
    one.do()
    assert counted(trace.stop()) == {
        ("main", "via_a"): 100,
        ("main", "via_b"): 25,
        ("main", "via_b", "via_a"): 25,
    }
    assert "tracing 2 user functions" in trace.said


def test_intervals_begin_anew(start: Start, tmp_path: Path) -> None:
    """The program gets its second command only when the trace has printed what came of the first."""
    one = start("pie")
    trace = Trace("stackcount", "pie:leaf", "-p", one.pid, "-T", "-i", "200ms", "-U", "-o", tmp_path / "out")
    texts = ""
    for round_ in (1, 2):
        one.do()
        while texts.count("  leaf\n") < round_ * len(LEAF):
            assert trace.process.poll() is None
            texts = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
    trace.stop()
    parts = re.split(r"^\d\d:\d\d:\d\d$", (tmp_path / "out").read_text(), flags=re.MULTILINE)
    sums = [sum(map(int, re.findall(r"^    (\d+)$", part, re.MULTILINE))) for part in parts]
    assert len(parts) > 2
    assert sum(sums) == 2 * LEAF.total()
    assert max(sums) <= LEAF.total()


def test_stacks_as_bcc_prints_them(start: Start, built: dict[str, Path]) -> None:
    """The printed stacks have the addresses and offsets that nm shows."""
    one = start("static")
    trace = Trace("stackcount", "static:leaf", "-p", one.pid, "-P", "-s", "-v", "-d")
    one.do()
    stacks = [part.splitlines() for part in trace.stop().split("\n\n") if part.strip()]
    assert [int(stack[-1]) for stack in stacks] == [25, 25, 100], "the largest comes last"
    symbols = subprocess.check_output(["nm", built["static"]], text=True)
    starts = {
        name: int(address, 16) for address, name in re.findall(r"^(\w+) \w (\w+)$", symbols, re.MULTILINE)
    }
    for stack in stacks:
        assert stack[0] == "    --"
        assert stack[-2] == f"    static [{one.pid}]"
        frames = [
            re.fullmatch(r"  ([0-9a-f]{16}) (\w+)\+(0x[0-9a-f]+) \[static\]", line) for line in stack[1:-2]
        ]
        for frame in frames:
            assert frame, stack
            if starts.get(frame[2], 0):
                assert int(frame[1], 16) == starts[frame[2]] + int(frame[3], 16)
        assert frames[0]
        assert (frames[0][2], frames[0][3]) == ("leaf", "0x0")


def test_folded(start: Start) -> None:
    one = start("pie")
    trace = Trace("stackcount", "pie:leaf", "-p", one.pid, "-f", "-d")
    one.do()
    found: Counter[tuple[str, ...]] = Counter()
    for line in trace.stop().splitlines():
        frames, _, count = line.rpartition(" ")
        assert frames.startswith("pie;")
        assert frames.endswith(";-")
        found[from_main(frames.split(";")[1:-1])] += int(count)
    assert found == LEAF


MANY = 300


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with many functions, each called three times for a command, and one that takes no probe."""
    directory = tmp_path_factory.mktemp("crowd")
    functions = "".join(f"APART int one_{n}(int x) {{ sink += x; return {n}; }}\n" for n in range(MANY))
    calls = "".join(f"sink += one_{n}(i);" for n in range(MANY))
    (directory / "a.c").write_text(
        "#include <unistd.h>\n#define APART __attribute__((noinline, noclone, noipa))\nvolatile int sink;\n"
        f"{functions}"
        '__asm__(".text\\n.globl one_halts\\n.type one_halts,@function\\n"\n'
        '        "one_halts: hlt\\nret\\n.size one_halts,2\\n");\n'
        "int main(void) { char byte; while (read(0, &byte, 1) == 1) {"
        f'for (int i = 0; i < 3; i++) {{ {calls} }} write(1, "d", 1); }} }}\n'
    )
    subprocess.run(["gcc", "-O2", "-o", directory / "crowd", directory / "a.c"], check=True)
    return directory / "crowd"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="host: not an x86-64 processor")
def test_many_functions_of_which_one_is_refused(crowd: Path) -> None:
    one = Program(crowd)
    trace = Trace("stackcount", "crowd:one_*", "-p", one.pid, "--format", "json")
    one.do()
    found = counted(trace.stop())
    one.end()
    assert found == {("main", f"one_{n}"): 3 for n in range(MANY)}
    assert f"tracing {MANY} user functions, without crowd:one_halts" in trace.said


def test_stacks_that_have_no_room_are_counted_and_told(crowd: Path) -> None:
    one = Program(crowd)
    trace = Trace(
        "stackcount", "-r", "crowd:one_[0-9]", "-p", one.pid, "--stack-storage-size", 1, "--format", "json"
    )
    one.do()
    found = counted(trace.stop())
    one.end()
    lost = found[("[stack lost]",)]
    assert lost > 0
    assert found.total() == 3 * MANY
    assert trace.lost == {"stacks: full": lost}


def test_events_in_their_order(start: Start) -> None:
    one = start("pie")
    trace = Trace("stacksnoop", "pie:leaf", "-p", one.pid, "--format", "json")
    one.do()
    events = [json.loads(line) for line in trace.stop().splitlines()]
    expected = []
    for i in range(100):
        expected.append(("main", "via_a", "leaf"))
        if i % 4 == 0:
            expected += [("main", "via_b", "leaf"), ("main", "via_b", "via_a", "leaf")]
    assert [from_main(event["stack"]) for event in events] == expected
    assert {(event["pid"], event["tid"], event["comm"], event["function"]) for event in events} == {
        (one.pid, one.pid, "pie", "pie:leaf")
    }
    times = [event["time"] for event in events]
    assert times == sorted(times)
    assert all(0 <= event["cpu"] < (os.cpu_count() or 1) for event in events)
    assert trace.lost == {}


def test_events_of_several_threads_are_in_order(start: Start) -> None:
    one = start("pie")
    trace = Trace("stacksnoop", "pie:leaf", "-p", one.pid, "--format", "json")
    one.do("t")
    events = [json.loads(line) for line in trace.stop().splitlines()]
    assert Counter(event["tid"] for event in events).most_common(1)[0][1] == 50
    assert len({event["tid"] for event in events} - {one.pid}) == 4
    assert {tuple(event["stack"][-2:]) for event in events} == {("threads_do", "leaf")}
    times = [event["time"] for event in events]
    assert len(times) == 200
    assert times == sorted(times)


def test_events_as_text_and_an_end_after_some(start: Start) -> None:
    one = start("pie")
    trace = Trace("stacksnoop", "t:syscalls:sys_enter_getpgid", "-p", one.pid, "-n", 3, "-s")
    one.do()
    head, *events = trace.result().rstrip("\n").replace("FUNCTION\n", "FUNCTION\n\n").split("\n\n")
    assert head.split() == ["TIME(s)", "COMM", "PID", "CPU", "FUNCTION"]
    assert len(events) == 3
    for event in events:
        line, *frames = event.split("\n")
        assert re.fullmatch(rf"\d+\.\d{{9}} +pie +{one.pid} +\d+ +syscalls:sys_enter_getpgid", line)
        assert [frame.split("+")[0] for frame in frames if "[pie]" in frame][:2] == ["\tasks", "\tmain"]
        assert re.search(r"^\tdo_syscall_64\+0x[0-9a-f]+$", event, re.MULTILINE)


BPFTRACE = """
BEGIN { printf("begun\\n"); }
uprobe:PATH:leaf /pid == PID/ { @stacks[ustack(perf)] = count(); @calls = count(); }
tracepoint:syscalls:sys_enter_getpgid /pid == PID/ { @asked = count(); }
"""


@beside_another_tool
def test_side_by_side_with_bpftrace(start: Start, built: dict[str, Path]) -> None:
    """The program has frame pointers, from which bpftrace takes its stacks."""
    one = start("fp")
    text = BPFTRACE.replace("PATH", str(built["fp"])).replace("PID", str(one.pid))
    script = subprocess.Popen(["bpftrace", "-f", "json", "-e", text], stdout=subprocess.PIPE, text=True)
    assert script.stdout
    while "begun" not in (line := script.stdout.readline()):
        assert line, "bpftrace did not begin"
    leaf = Trace("stackcount", "fp:leaf", "-p", one.pid, "--unwind", "fp", "--format", "json")
    asked = Trace("stackcount", "t:syscalls:sys_enter_getpgid", "-p", one.pid, "--format", "json")
    for _ in range(3):
        one.do()
    ours, asks = counted(leaf.stop()), counted(asked.stop())
    script.send_signal(2)
    maps = [json.loads(line)["data"] for line in script.stdout if line.strip()]
    assert script.wait(60) == 0
    by_stack = next(data["@stacks"] for data in maps if "@stacks" in data)
    theirs: Counter[tuple[str, ...]] = Counter()
    for stack, count in by_stack.items():
        names = re.findall(r"[0-9a-f]+ (\w+)\+", stack)
        theirs[from_main(names[::-1])] += count
    # At the first instruction of a function, the frame pointer is still that of its caller. So the caller is
    # missing in stacks by frame pointers.
    without_callers: Counter[tuple[str, ...]] = Counter()
    for called, count in ours.items():
        without_callers[(*called[:-2], called[-1])] += count
    assert theirs in (ours, without_callers)
    assert ours.total() == next(data["@calls"] for data in maps if "@calls" in data) == 3 * LEAF.total()
    assert asks.total() == next(data["@asked"] for data in maps if "@asked" in data) == 3 * ASKED


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("stackcount", "c:mallok", "1"), 2, "c:mallok: none of the "),
        (("stackcount", "u:c:x", "1"), 2, "USDT"),
        (("stackcount", "t:syscalls:sys_enter_getpgit", "1"), 2, "did you mean syscalls:sys_enter_getpgid"),
        (("stackcount", "c:getppid", "-i", "1", "--format", "pprof", "-o", "/dev/null"), 2, "-i/--interval"),
        (("stackcount", "c:getppid", "-D", "1", "2"), 2, "given twice"),
        (("stacksnoop", "c:getppid", "-n", "0"), 2, "'0' is not a whole number above 0"),
        (("stackcount", "c:getppid", "-p", "4194304"), 2, "process 4194304: No such process"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], code: int, says: str) -> None:
    done = subprocess.run(
        [*CHECKOUT, "trace", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
