"""Patterns resolved into places for probes: in real object files, and in the files of a small kernel."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockd import cli
from lockd.errors import HostError, UsageError
from lockd.kernel.manifest import Hook
from lockd.names.objects.mappings import Mappings
from lockd.trace import commands
from lockd.trace.core.call_stacks import NO_STACK, CallStacks
from lockd.trace.core.session import Progress
from lockd.trace.probes import pattern_options, patterns, stacksnoop
from lockd.trace.probes.binaries import Binary, find_binaries, has_name
from lockd.trace.probes.patterns import (
    KERNEL,
    TRACEPOINT,
    USER,
    KernelFunctions,
    Place,
    Probes,
    parse,
    resolve,
    user_functions,
)  # fmt: skip
from tests.needs import needs

SOURCE = """
int plain(int x) { return x; }
int another(int x) __attribute__((alias("plain")));
static int hidden(int x) { return x + 1; }
static int (*chosen(void))(int) { return hidden; }
int either(int x) __attribute__((ifunc("chosen")));
int a_variable;
int main(int argc, char **argv) {
  puts("running");
  fflush(stdout);
  return plain(either(argc)) + hidden(2) + getchar();
}
"""
CXX_SOURCE = """
#include <cstdio>
namespace shop { struct Till { int open(int); int close(); }; }
int shop::Till::open(int x) { return x; }
int shop::Till::close() { return 0; }
int main() { return shop::Till().open(1) + shop::Till().close() + getchar(); }
"""

needs_gcc = needs("gcc")


@pytest.mark.parametrize(
    ("text", "kind", "place", "name"),
    [
        ("vfs_read", KERNEL, "", "vfs_read"),
        ("p::vfs_*", KERNEL, "", "vfs_*"),
        ("c:malloc", USER, "c", "malloc"),
        ("p:c:malloc", USER, "c", "malloc"),
        ("/usr/bin/x:main", USER, "/usr/bin/x", "main"),
        ("/opt/app@2/a b/~x,y=z%:main", USER, "/opt/app@2/a b/~x,y=z%", "main"),
        ("p:./app@2:main", USER, "./app@2", "main"),
        ("x:ns::Class::*", USER, "x", "ns::Class::*"),
        ("*:pthread_*", USER, "*", "pthread_*"),
        ("t:sched:sched_*", TRACEPOINT, "", "sched:sched_*"),
        ("(?:vfs|ksys)_read", KERNEL, "", "(?:vfs|ksys)_read"),
    ],
)
def test_what_is_written(text: str, kind: str, place: str, name: str) -> None:
    pattern = parse(text)
    assert (pattern.kind, pattern.object, pattern.name) == (kind, place, name)


@pytest.mark.parametrize(
    ("text", "is_regex", "says"),
    [
        ("", False, "names no function"),
        ("c:", False, "names no function"),
        ("t:sched", False, "t:CATEGORY:EVENT"),
        ("u:pthread:mutex_entry", False, "USDT"),
        ("vfs_(", True, "no regular expression"),
    ],
)
def test_what_cannot_be_meant(text: str, is_regex: bool, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        parse(text, is_regex)


def test_wildcards_match_whole_names_and_expressions_beginnings() -> None:
    names = ["vfs_read", "vfs_readv", "do_vfs_read", "vfs.read"]

    def matching(text: str, is_regex: bool = False) -> list[str]:
        return [name for name in names if parse(text, is_regex).matcher()(name)]

    assert matching("vfs_read") == ["vfs_read"]
    assert matching("vfs_*") == ["vfs_read", "vfs_readv"]
    assert matching("vfs.*") == ["vfs.read"]
    assert matching("vfs.r", is_regex=True) == ["vfs_read", "vfs_readv", "vfs.read"]
    assert matching("^vfs_read$", is_regex=True) == ["vfs_read"]


@pytest.mark.parametrize(
    ("file", "name", "is_meant"),
    [
        ("libc.so.6", "c", True),
        ("libc-2.31.so", "c", True),
        ("ld-musl-x86_64.so.1", "c", True),
        ("libc.so.6", "libc", True),
        ("libc.so.6", "libc.so.6", True),
        ("libcrypt.so.1", "c", False),
        ("libstdc++.so.6.0.30", "stdc++", True),
        ("libpthread-2.31.so", "pthread", True),
        ("mysqld", "mysqld", True),
        ("mysqld", "mysql", False),
        ("libssl.so.3", "lib*", True),
    ],
)
def test_names_of_libraries(file: str, name: str, is_meant: bool) -> None:
    assert has_name(file, name) == is_meant


@pytest.fixture(scope="module", params=["pie", "no-pie", "static"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("probes")
    (directory / "a.c").write_text("#include <stdio.h>\n" + SOURCE)
    options = [f"-{request.param}", "-O1", "-fno-inline"]
    subprocess.run(["gcc", *options, "-o", directory / "program", directory / "a.c"], check=True)
    return directory / "program"


@pytest.fixture
def running(program: Path) -> Iterator[subprocess.Popen[bytes]]:
    with run(program) as child:
        yield child


@contextlib.contextmanager
def run(program: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program until its input is closed, and wait for its first line.

    A process that has just become a program has nothing mapped for a moment.
    """
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == b"running\n"
        yield child


def offsets(program: Path) -> dict[str, int]:
    """Return the offsets of the functions in the file, from objdump, which knows how a file is laid out."""
    done = subprocess.run(["objdump", "-tF", "-d", program], check=True, capture_output=True, text=True)
    found = re.findall(r"^[0-9a-f]+ <(\w+)> \(File Offset: (0x[0-9a-f]+)\):", done.stdout, re.MULTILINE)
    return {{"another": "plain"}.get(name, name): int(offset, 16) for name, offset in found}


@needs_gcc
def test_functions_of_a_program_begin_where_its_file_says(program: Path) -> None:
    found = resolve(parse(f"{program}:(plain|hidden|main)$", is_regex=True))
    at = offsets(program)
    assert {(place.name, place.hook) for place in found.places} == {
        (f"program:{name}", f"{program}+{at[name]:#x}") for name in ("plain", "hidden", "main")
    }
    assert not found.left_out


@needs_gcc
def test_a_function_of_two_names_is_one_place(program: Path) -> None:
    found = resolve(parse(f"{program}:(plain|another)$", is_regex=True))
    assert [place.name for place in found.places] == ["program:plain"]
    only = resolve(parse(f"{program}:another"))
    assert [(place.name, place.hook) for place in only.places] == [("program:another", found.places[0].hook)]


@needs_gcc
def test_a_function_that_is_chosen_when_the_program_starts_is_refused(program: Path) -> None:
    with pytest.raises(HostError, match="IFUNC"):
        resolve(parse(f"{program}:either"))
    found = resolve(parse(f"{program}:(either|plain)$", is_regex=True))
    assert [place.name for place in found.places] == ["program:plain"]
    assert list(found.remarks()) == [
        "1 left out: it stands for one of several functions (IFUNC), and which one is unknown: either"
    ]


@needs_gcc
def test_a_wildcard_passes_over_what_is_mapped_as_code_and_is_no_program(
    program: Path, tmp_path: Path
) -> None:
    """Runtimes map such files: a jitdump, or memory that they fill with code."""
    other = tmp_path / "code"
    other.write_bytes(b"no ELF" * 1000)

    def binaries() -> list[Binary]:
        return [Binary(str(p), 0, os.open(p, os.O_RDONLY)) for p in (other, program)]

    found = user_functions(parse("*:plain"), binaries())
    assert [place.name for place in found.places] == ["program:plain"]
    with pytest.raises(UsageError, match="code: is no program or library"):
        user_functions(parse("code:plain"), binaries()[:1])


@needs_gcc
def test_errors_say_what_was_looked_for_and_what_is_like_it(program: Path) -> None:
    with pytest.raises(
        UsageError, match=rf"anothr: none of the [\d,]+ .*{program} matches; did you mean .*another"
    ):
        resolve(parse(f"{program}:anothr"))
    with pytest.raises(UsageError, match=r"none of the .* functions of .* matches"):
        resolve(parse(f"{program}:a_variable"))
    with pytest.raises(UsageError, match=r"matches [\d,]+ user functions; rule: at most 1,000"):
        resolve(parse("c:*"))


@needs_gcc
def test_a_program_by_the_process_that_runs_it(program: Path, running: subprocess.Popen[bytes]) -> None:
    at = offsets(program)["plain"]
    for name in ("program", "pro*", str(program)):
        (place,) = resolve(parse(f"{name}:plain"), (running.pid,)).places
        assert (place.hook, place.pid) == (f"{program}+{at:#x}", running.pid)
    with pytest.raises(
        UsageError, match=f"nothing: process {running.pid} has mapped no .*; it has .*program"
    ):
        resolve(parse("nothing:plain"), (running.pid,))


@needs_gcc
def test_a_file_that_was_replaced_is_found_as_it_is_mapped(program: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copy(program, copy)
    at = offsets(copy)["plain"]
    with run(copy) as child:
        before = os.stat(copy)
        shutil.copy(program, tmp_path / "other")
        os.replace(tmp_path / "other", copy)
        (place,) = resolve(parse("copy:plain"), (child.pid,)).places
        assert place.hook.endswith(f"+{at:#x}")
        assert os.path.samestat(os.stat(place.file), before)


@needs_gcc
def test_a_file_that_is_replaced_later_is_not_probed_in_its_place(program: Path, tmp_path: Path) -> None:
    """Its owner could have the path lead to a program of root before the probe is attached."""
    copy = tmp_path / "copy"
    shutil.copy(program, copy)
    before = os.stat(copy)
    (place,) = resolve(parse(f"{copy}:plain")).places
    shutil.copy(program, tmp_path / "other")
    os.replace(tmp_path / "other", copy)
    assert place.hook == f"{copy}+{offsets(copy)['plain']:#x}"
    assert os.path.samestat(os.stat(place.file), before)
    (again,) = resolve(parse(f"{copy}:plain")).places
    assert os.path.samestat(os.stat(again.file), os.stat(copy))


@needs_gcc
def test_names_of_cxx_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text(CXX_SOURCE)
    subprocess.run(["g++", "-O0", "-o", tmp_path / "program", tmp_path / "a.cc"], check=True)
    found = resolve(parse(f"{tmp_path}/program:shop::Till::*"))
    assert [place.name for place in found.places] == [
        "program:_ZN4shop4Till4openEi",
        "program:_ZN4shop4Till5closeEv",
    ]
    assert resolve(parse(f"{tmp_path}/program:_ZN4shop4Till4openEi")).places == found.places[:1]


def test_libraries_of_this_host() -> None:
    (place,) = resolve(parse("c:getppid")).places
    assert place.name == "libc.so.6:getppid"
    assert place.pid == 0
    assert os.path.samefile(place.file, _own_libc())
    (moved,) = resolve(parse("pthread:pthread_mutex_lock")).places
    assert moved.name in ("libc.so.6:pthread_mutex_lock", "libpthread.so.0:pthread_mutex_lock")
    with pytest.raises(UsageError, match="no library of that name"):
        resolve(parse("nosuchlibrary:f"))
    with pytest.raises(UsageError, match="add -p PID"):
        resolve(parse("lib*:f"))


@pytest.mark.parametrize("device", ["", "00:fe"])
def test_the_function_that_strlen_stands_for_here(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must be the function that the dynamic linker has chosen for this very process.

    On btrfs and overlayfs maps shows another `device` than stat() returns.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    chosen = ctypes.cast(libc.strlen, ctypes.c_void_p).value or 0
    lines = Path("/proc/self/maps").read_text().splitlines()
    fields = next(
        line.split()
        for line in lines
        if int(line.split("-")[0], 16) <= chosen < int(line.split()[0].split("-")[1], 16)
    )
    offset = chosen - int(fields[0].split("-")[0], 16) + int(fields[2], 16)
    if device:
        shown, changed = f" {fields[3]} ".encode(), f" {device} ".encode()
        monkeypatch.setattr(patterns, "Mappings", lambda text: Mappings(text.replace(shown, changed)))
    (place,) = resolve(parse("c:strlen")).places
    assert place.hook.endswith(f"+{offset:#x}")


def _own_libc() -> str:
    return next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    )


def test_objects_of_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    with pytest.raises(UsageError, match=f"process {child.pid}: No such process"):
        find_binaries("c", (child.pid,))


def test_the_name_of_a_mapped_file_cannot_change_a_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(shutil.copy(shutil.which("cat") or "", tmp_path / "cat\x1b]0;title\x07"))
    monkeypatch.setattr(commands, "require_privileges", lambda: None)
    with subprocess.Popen([file], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        child.stdin.write(b"x")
        child.stdin.flush()
        assert child.stdout.read(1)  # it has become that program
        assert cli.main(["trace", "stackcount", "nothing:x", "-p", str(child.pid), "1"]) == 2
        child.stdin.close()
    assert r"it has cat\x1b]0;title\x07, " in capfd.readouterr().err


def test_the_name_of_a_function_cannot_change_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "program:\x1b[2J"
    probes = Probes(parse("program:*"), (Place(name, "program+0x10"),), {"no reason": (name,)})
    monkeypatch.setattr(pattern_options, "resolve", lambda *_: probes)
    pattern_options.resolve_probes(argparse.Namespace(pattern="program:*", pids=()), "test")
    hooks = (Hook("", "program+0x10", "uprobe", True),)
    session: Any = SimpleNamespace(
        title="test", manifest=SimpleNamespace(hooks=hooks), progress=Progress(sys.stderr)
    )
    pattern_options.report_attached(session, probes)
    event = stacksnoop.Event(0, "comm", 1, 1, 0, NO_STACK, NO_STACK)
    print(stacksnoop._as_text(event, 0.0, name, CallStacks()))
    told = capfd.readouterr()
    assert (told.out + told.err).count(r"program:\x1b[2J") == 3
    assert "\x1b" not in told.out + told.err


WITHOUT_MAIN_THREAD = f"""
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall({93 if os.uname().machine == "aarch64" else 60}, 0)  # exit(), of the main thread
"""


@pytest.mark.parametrize(
    ("functions", "says"), [(("f",), "were not traced"), (("f", "g"), "may not have been traced")]
)
def test_a_main_thread_that_has_ended_is_reported(
    functions: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel ends the probe of one process with its main thread."""
    session: Any = SimpleNamespace(title="test", report=lambda: None)
    with subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD], stdin=subprocess.PIPE) as child:
        places = [
            Place(f"c:{name}", f"libc.so.6+{name}", pid) for pid in (0, child.pid) for name in functions
        ]
        stat = Path(f"/proc/{child.pid}/stat")
        while ") Z " not in stat.read_text():
            assert child.poll() is None
            time.sleep(0.01)
        pattern_options.report(session, Probes(parse("c:*"), tuple(places)))
        pattern_options.report(
            session, Probes(parse("c:*"), tuple(place for place in places if not place.pid))
        )
    told = f"test: process {child.pid}: its main thread has ended; since then, its other threads {says}\n"
    assert capfd.readouterr().err == told


KALLSYMS = """\
ffffffff81000000 T _stext
ffffffff81001000 T vfs_read
ffffffff81001100 T vfs_write
ffffffff81001200 T vfs_blacklisted
ffffffff81001300 t vfs_untraceable
ffffffff81001400 t vfs_twice
ffffffff81001500 t vfs_twice
ffffffff81001600 t copied.isra.0
ffffffff81001700 t vfs_read.cold
ffffffff81001800 t __pfx_vfs_read
ffffffff82000000 D vfs_data
ffffffff83000000 T _sinittext
ffffffff83000100 t vfs_init
ffffffff83001000 T _einittext
ffffffffc0000000 t vfs_module\t[ext4]
ffffffffc0001000 t vfs_made_0123456789abcdef\t[bpf]
"""
TRACEABLE = ["vfs_read", "vfs_write", "vfs_blacklisted", "vfs_twice", "copied.isra.0", "vfs_module [ext4]"]


@pytest.fixture
def kernel(tmp_path: Path) -> KernelFunctions:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    (tmp_path / "available_filter_functions").write_text("".join(f"{one}\n" for one in TRACEABLE))
    (tmp_path / "blacklist").write_text("0xffffffff81001200-0xffffffff81001300\tvfs_blacklisted\n")
    return KernelFunctions(tmp_path, tmp_path / "kallsyms", tmp_path / "blacklist")


def test_functions_of_a_kernel(kernel: KernelFunctions) -> None:
    found = kernel.find(parse("vfs_*"))
    assert found.names == ("vfs_read", "vfs_write", "vfs_module")
    assert {reason.split("(")[0].strip(): names for reason, names in found.left_out.items()} == {
        "the kernel allows no probes on it": ("vfs_blacklisted",),
        "it cannot be traced": ("vfs_untraceable",),
        "several functions have that name": ("vfs_twice",),
    }
    assert kernel.find(parse("vfs_r", is_regex=True)).names == ("vfs_read",)
    assert kernel.find(parse("copied")).names == ("copied.isra.0",)
    for missing in ("vfs_init", "vfs_data", "vfs_reed", "vfs_made*"):
        with pytest.raises(UsageError, match="none of the 9 functions of this kernel"):
            kernel.find(parse(missing))
    with pytest.raises(UsageError, match=r"did you mean .*vfs_read"):
        kernel.find(parse("vfs_reed"))


def test_a_kernel_that_tells_no_more_than_names(kernel: KernelFunctions, tmp_path: Path) -> None:
    (tmp_path / "available_filter_functions").unlink()
    (tmp_path / "blacklist").unlink()
    assert kernel.find(parse("vfs_*")).names == (
        "vfs_read", "vfs_write", "vfs_blacklisted", "vfs_untraceable", "vfs_module",
    )  # fmt: skip


def test_a_kernel_that_hides_its_addresses(kernel: KernelFunctions, tmp_path: Path) -> None:
    (tmp_path / "kallsyms").write_text(re.sub(r"(?m)^[0-9a-f]+", "0" * 16, KALLSYMS))
    with pytest.raises(HostError, match="kptr_restrict"):
        kernel.find(parse("vfs_read"))
