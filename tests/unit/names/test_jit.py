"""Names of compiled functions from perf maps and jit dumps in a process's own /tmp."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockd.names.objects import jit
from lockd.names.objects.jit import CHECK_SECONDS, MAX_BYTES, PATIENCE_SECONDS, READING_SHARE, JitNames
from lockd.process.clock import NS, TICKS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """Return the directory in procfs of process 7, which has the id 3 in its own PID namespace."""
    directory = tmp_path / "7"
    (directory / "root/tmp").mkdir(parents=True)
    (directory / "status").write_text("Name:\tjava\nUid:\t0\t0\t0\t0\nNSpid:\t7\t3\n")
    started_seconds_ago(directory, 60)
    return directory


def started_seconds_ago(process: Path, seconds: float) -> None:
    start = int((time.clock_gettime(time.CLOCK_BOOTTIME) - seconds) * TICKS)
    (process / "stat").write_text(f"7 (ja va) S {'0 ' * 18}{start} 0\n")


def named(names: JitNames, address: int) -> str:
    found = names.function(address, [])
    return found[1] if found else ""


class Clock:
    """A clock that the test sets, and that goes on by `step` seconds whenever it is read."""

    def __init__(self) -> None:
        self.now = self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_map_is_read_again_when_it_has_grown(process: Path) -> None:
    path = process / "root/tmp/perf-3.map"
    path.write_text("1000 20 one\n0x2000 10 LShop;::two words\nnonsense\n2010 zz bad\n")
    clock = Clock()
    names = JitNames(process, clock)
    assert [named(names, a) for a in (0x1000, 0x101F, 0x1020, 0x2005)] == [
        "one",
        "one",
        "",
        "LShop;::two words",
    ]
    with path.open("a") as file:
        file.write("1000 8 replaced\n3000 8 new\n")
    clock.now = CHECK_SECONDS
    assert [named(names, a) for a in (0x3000, 0x1000, 0x1010)] == ["new", "replaced", ""]


def test_a_map_that_appears_later_is_looked_for_ten_times_a_second(process: Path) -> None:
    clock = Clock()
    names = JitNames(process, clock)
    assert named(names, 0x1000) == ""
    (process / "root/tmp/perf-3.map").write_text("1000 20 one\n")
    clock.now = 0.05
    assert (named(names, 0x1000), names.reads) == ("", 0)
    clock.now = 0.1
    assert (named(names, 0x1000), names.reads) == ("one", 1)


@pytest.mark.parametrize(
    ("changed_seconds_ago", "name"),
    [
        pytest.param(70, "", id="by an earlier process"),
        pytest.param(60, "one", id="at the start"),
        pytest.param(30, "one", id="later"),
    ],
)
def test_a_map_of_an_earlier_process_with_the_same_id_is_not_read(
    process: Path, changed_seconds_ago: float, name: str
) -> None:
    """A container whose first process is restarted keeps its /tmp, and the process has the same id again."""
    path = process / "root/tmp/perf-3.map"
    path.write_text("1000 20 one\n")
    changed = time.time() - changed_seconds_ago
    os.utime(path, (changed, changed))
    clock = Clock()
    names = JitNames(process, clock)
    assert (named(names, 0x1000), names.has_names) == (name, bool(name))
    path.write_text("1000 20 now\n")
    clock.now = 2 * PATIENCE_SECONDS
    assert named(names, 0x1000) == "now"


def test_names_stay_when_the_clock_of_the_host_is_set_forward(
    process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the new time the process started after the map was written."""
    path, now = process / "root/tmp/perf-3.map", time.time_ns()
    path.write_text("1000 20 one\n")
    clock = Clock()
    names = JitNames(process, clock)
    assert named(names, 0x1000) == "one"
    monkeypatch.setattr(time, "time_ns", lambda: now + 3600 * NS)
    clock.now = 2 * PATIENCE_SECONDS
    assert named(names, 0x1000) == "one"
    with path.open("a") as file:
        file.write("2000 20 two\n")
    clock.now = 4 * PATIENCE_SECONDS
    assert [named(names, at) for at in (0x1000, 0x2000)] == ["one", "two"]
    path.rename(process / "old")  # which keeps the inode from being used again
    path.write_text("1000 20 earlier\n")
    clock.now = 6 * PATIENCE_SECONDS
    assert named(names, 0x1000) == "", "another file is judged by its time"


def test_a_map_that_has_no_names_yet_is_no_reading(process: Path) -> None:
    path = process / "root/tmp/perf-3.map"
    path.touch()
    clock = Clock()
    names = JitNames(process, clock)
    assert (named(names, 0x1000), names.reads) == ("", 0)
    path.write_text("1000 20 one\n")
    clock.now = CHECK_SECONDS
    assert (named(names, 0x1000), names.reads) == ("one", 1)


def test_a_map_that_could_not_be_read_is_read_again(process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For instance because there was no memory for a moment. The file may never change again."""
    path = process / "root/tmp/perf-3.map"
    path.write_text("1000 20 one\n")
    clock = Clock()
    names = JitNames(process, clock)

    def fail(*_: int) -> bytes:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        assert named(names, 0x1000) == ""
    clock.now = CHECK_SECONDS
    assert (named(names, 0x1000), names.reads) == ("one", 1)


def test_a_line_that_is_still_being_written_is_no_name(process: Path) -> None:
    (process / "root/tmp/perf-3.map").write_text("1000 20 one\n2000 20 tw")
    names = JitNames(process)
    assert [named(names, a) for a in (0x1000, 0x2000)] == ["one", ""]


def test_a_name_that_was_replaced_is_noticed(process: Path) -> None:
    path = process / "root/tmp/perf-3.map"
    path.write_text("1000 20 one\n")
    clock = Clock()
    names = JitNames(process, clock)
    assert named(names, 0x1000) == "one"
    path.write_text("1000 20 other\n")
    clock.now = CHECK_SECONDS
    assert named(names, 0x1000) == "one"
    clock.now = CHECK_SECONDS + PATIENCE_SECONDS
    assert named(names, 0x1000) == "other"


def test_what_takes_long_to_read_is_not_read_all_the_time(process: Path) -> None:
    path = process / "root/tmp/perf-3.map"
    path.write_text("1000 20 one\n")
    clock = Clock()
    clock.step = 1.0  # reading the file takes so long
    names = JitNames(process, clock)
    for _ in range(READING_SHARE - 1):
        assert named(names, 0x3000) == ""
        with path.open("a") as file:
            file.write("2000 20 more\n")
    assert names.reads == 1


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("void Names.enterMonitor()", "Names.enterMonitor"),
        ("java.lang.Object a.B$C.<init>(java.lang.Object[], int)", "a.B$C.<init>"),
        ("void Names$$Lambda$14/0x0000000800c01228.run()", "Names$$Lambda$14.run"),
        (f"int a.B.long({'java.lang.Object, ' * 30})", "a.B.long"),
        ("_complete_monitor_locking_Java", "_complete_monitor_locking_Java"),
        ("StubRoutines (1)", "StubRoutines (1)"),
        ("LazyCompile:*take /srv/app.js:10", "LazyCompile:*take /srv/app.js:10"),
        ("shop::take(int)", "shop::take(int)"),
        ("void take(int)", "void take(int)"),
        ("void .take(int)", "void .take(int)"),
        ("void take.(int)", "void take.(int)"),
    ],
)
def test_methods_of_java_as_hotspot_writes_them(process: Path, written: str, name: str) -> None:
    (process / "root/tmp/perf-3.map").write_text(f"0x00007fd7a4eca5e0 0x00000000000005c8 {written}\n")
    assert named(JitNames(process), 0x7FD7A4ECA5E1) == name


def test_names_that_were_made_to_take_long_take_no_longer_than_others(process: Path) -> None:
    """A pattern that looks for a dot and then for a bracket looks for the bracket from every dot on."""
    times = []
    for name in ("x" * 254, "." * 254):
        text = "".join(f"{0x1000 * n:x} 10 a {name}\n" for n in range(10_000))
        (process / "root/tmp/perf-3.map").write_text(text)
        began = time.process_time()
        assert named(JitNames(process), 0x1000) == f"a {name}"
        times.append(time.process_time() - began)
    assert times[1] < 3 * times[0] + 0.1, times


def record(kind: int, body: bytes) -> bytes:
    return struct.pack("<IIQ", kind, 16 + len(body), 0) + body


def test_a_dump(process: Path) -> None:
    load = struct.pack("<IIQQQQ", 3, 3, 0x5000, 0x5000, 0x40, 1) + b"compiled\0" + bytes(0x40)
    data = struct.pack("<IIIIIIQQ", 0x4A695444, 1, 40, 62, 0, 3, 0, 0) + record(2, b"debug") + record(0, load)
    (process / "root/tmp/jit-3.dump").write_bytes(data + record(0, load[:10]))
    names = JitNames(process)
    assert [named(names, a) for a in (0x5000, 0x503F, 0x5040)] == ["compiled", "compiled", ""]


OVERLAPPING = [
    (0x1000, 0x100, "old"),
    (0x5200, 0x100, "old"),
    (0x5000, 0x1000, "around"),
    (0xF00, 0x300, "new"),
    (0x5100, 0x10, "inside"),
]
"""Address, size and name of functions, in the order in which they are written."""


@pytest.mark.parametrize("kind", ["map", "dump"])
def test_a_function_that_lies_over_older_ones_has_their_addresses(process: Path, kind: str) -> None:
    if kind == "map":
        lines = [f"{at:x} {size:x} {name}\n" for at, size, name in OVERLAPPING]
        (process / "root/tmp/perf-3.map").write_text("".join(lines))
    else:
        records = [
            record(0, struct.pack("<IIQQQQ", 3, 3, at, at, size, 1) + name.encode() + b"\0")
            for at, size, name in OVERLAPPING
        ]
        (process / "root/tmp/jit-3.dump").write_bytes(DUMP_HEADER + b"".join(records))
    names = JitNames(process)
    found = [named(names, at) for at in (0xF10, 0x1050, 0x5050, 0x5105, 0x5250)]
    assert found == ["new", "new", "around", "inside", ""]


@pytest.mark.parametrize("kind", ["fifo", "link", "other user", "huge"])
def test_what_is_not_believed(process: Path, tmp_path: Path, kind: str) -> None:
    path = process / "root/tmp/perf-7.map"
    outside = tmp_path / "outside"
    outside.write_text("1000 20 outside\n")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(outside)  # which leads nowhere from the process's root
    elif kind == "other user":
        path.write_text("1000 20 other\n")
        os.chown(path, 12345, 12345)
    else:
        path.write_text("1000 20 early\n")
        os.truncate(path, MAX_BYTES + 100)
    assert named(JitNames(process), 0x1000) == ""


def test_of_too_many_functions_those_written_last_are_known(
    process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "MAX_FUNCTIONS", 100)
    lines = [f"{0x1000 * n:x} 10 f{n}\n" for n in range(1, 201)]
    (process / "root/tmp/perf-3.map").write_text("".join(lines))
    names = JitNames(process)
    assert [named(names, 0x1000 * n) for n in (1, 100, 102, 200)] == ["", "", "f102", "f200"]


def test_a_process_has_no_more_functions_for_having_more_files(
    process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "MAX_FUNCTIONS", 100)
    for number in (3, 7):
        lines = [f"{number}{n:04x}000 10 f{n}\n" for n in range(1, 81)]
        (process / f"root/tmp/perf-{number}.map").write_text("".join(lines))
    names = JitNames(process)
    assert named(names, 0x30001000) == "f1"
    assert len(names._starts) == 100


@pytest.mark.parametrize("name", ["f", "f" * 256, "\U00020000" * 64, "f\udcff" * 128])
def test_what_names_take_is_estimated_by_their_lengths_and_has_a_bound(process: Path, name: str) -> None:
    count = MAX_BYTES // 300
    with (process / "root/tmp/perf-3.map").open("wb") as file:
        for n in range(count):
            line = f"{0x1000 * n:x} 10 {n:05}{name}\n"
            file.write(line.encode("utf-8", "surrogateescape"))
    before = resident_bytes()
    names = JitNames(process)
    assert names.function(0x1000 * (count - 1), [])
    taken = resident_bytes() - before
    assert taken < 1.2 * names.memory + MAX_BYTES
    assert names.memory < jit.MAX_MEMORY + 10_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


DUMP_HEADER = struct.pack("<IIIIIIQQ", 0x4A695444, 1, 40, 62, 0, 3, 0, 0)


def test_a_dump_of_endless_records_is_read_for_a_while_only(
    process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = process / "root/tmp/jit-3.dump"
    path.write_bytes(DUMP_HEADER + record(2, b"") * 100_000)
    read = os.pread
    reads = []
    monkeypatch.setattr(jit, "MAX_RECORDS", 1000)
    monkeypatch.setattr(os, "pread", lambda *about: reads.append(about) or read(*about))
    assert named(JitNames(process), 0x5000) == ""
    assert len(reads) <= jit.MAX_RECORDS + 1


MEMORY = """
import resource, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from lockd.names.objects.jit import JitNames
from lockd.names.server import MEMORY_BYTES
resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES // 2, MEMORY_BYTES // 2))
names = JitNames(Path({process!r}))
print(names.function({address}, []))
"""


def test_a_huge_map_takes_less_than_half_of_what_the_namer_may_have(process: Path) -> None:
    with (process / "root/tmp/perf-3.map").open("w") as file:
        for n in range(1_200_000):
            file.write(f"{0x7F0000000000 + 64 * n:x} 40 void com.example.Class{n}.method(int)\n")
    last = 0x7F0000000000 + 64 * (n - 1)
    lines = MEMORY.format(root=str(ROOT), process=str(process), address=last)
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"com.example.Class{n - 1}.method" in done.stdout
