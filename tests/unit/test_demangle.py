"""Names of C++ and Rust functions, with c++filt and without it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from doubled_symbol import doubled

from lockd.names import demangle
from lockd.names.demangle import Demangler, shortened

ROOT = Path(__file__).resolve().parents[2]

CPP = [
    ("_ZN4shop8Registry3addEi", "shop::Registry::add"),
    ("_ZN4shop8Registry3addEi.constprop.0", "shop::Registry::add"),
    ("_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector<int, std::allocator<int> >::push_back"),
    ("_ZN3FoocvbEv", "Foo::operator bool"),
    ("main", "main"),
    ("runtime.futex.abi0", "runtime.futex"),
    ("_Znonsense", "_Znonsense"),
    ("", ""),
]
RUST = [
    ("_ZN4core3ptr13drop_in_place17h0123456789abcdefE", "core::ptr::drop_in_place"),
    ("_RNvMsr_NtCs3ssYzQotkvD_3std4pathNtB5_7PathBuf3new", "<std::path::PathBuf>::new"),
]


@pytest.mark.parametrize(("symbol", "name"), CPP + RUST)
def test_by_cppfilt(symbol: str, name: str) -> None:
    assert Demangler().name(symbol) == name


@pytest.mark.parametrize(("symbol", "name"), CPP)
def test_by_the_runtime(symbol: str, name: str) -> None:
    assert Demangler(("/nonexistent/c++filt",)).name(symbol) == name


@pytest.mark.parametrize("command", [("/bin/sleep", "1000"), ("/bin/true",), ("/bin/cat", "/dev/zero")])
def test_a_child_that_answers_nothing_or_too_much(command: tuple[str, ...]) -> None:
    demangler = Demangler(command)
    start = time.monotonic()
    assert demangler.name("_ZN1a1bEv") == "_ZN1a1bEv"
    assert time.monotonic() - start < 10
    demangler.close()


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757])
@pytest.mark.parametrize("user", [0, 12345])
def test_only_what_root_alone_may_write_is_run(tmp_path: Path, user: int, mode: int) -> None:
    program = tmp_path / "c++filt"
    program.write_text("#!/bin/sh\nwhile read symbol; do echo run; done\n")
    program.chmod(mode)
    os.chown(program, user, user)
    demangler = Demangler((str(program),))
    assert demangler.name("_ZN1a1bEv") == ("run" if (user, mode) == (0, 0o755) else "a::b")
    demangler.close()


def test_what_is_in_path_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++filt").write_text("#!/bin/sh\nwhile read symbol; do echo run; done\n")
    (tmp_path / "c++filt").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert Demangler().name("_ZN1a1bEv") == "a::b"


def test_a_child_that_was_killed_is_started_again() -> None:
    demangler = Demangler()
    assert demangler.name("_ZN1a1bEv") == "a::b"
    child = demangler._child
    assert child
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    names = [demangler.name(symbol) for symbol in ("_ZN1a1cEv", "_ZN1a1dEv")]
    assert names[-1] == "a::d"
    demangler.close()


def test_a_symbol_that_ends_in_a_newline_does_not_shift_the_names_of_those_after_it() -> None:
    demangler = Demangler()
    assert demangler.name("_ZN1a1bEv\n") == "_ZN1a1bEv?"
    assert [demangler.name(f"_ZN1a{n}{'b' * n}Ev") for n in (1, 2, 3)] == ["a::b", "a::bb", "a::bbb"]


def test_long_names() -> None:
    long = "std::map<" + "int, " * 50 + "int>::operator<<"
    assert shortened(long) == "std::map<...>::operator<<"
    assert shortened("f" * 200) == "f" * 117 + "..."
    assert shortened("a\nb") == "a?b"
    huge = "_ZN" + "1a" * 2000 + "E"
    assert len(Demangler().name(huge)) == 120


ORPHAN = """
import sys
sys.path.insert(0, {root!r})
from lockd.names import demangle
demangle.SECONDS = 60
demangler = demangle.Demangler()
demangler.name("_ZN1a1bEv")
print(demangler._child.pid, flush=True)
demangler.name({symbol!r})
"""


def test_a_child_dies_with_its_parent_however_busy_it_is() -> None:
    lines = textwrap.dedent(ORPHAN).format(root=str(ROOT), symbol=doubled(60))
    with subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        stat = Path(f"/proc/{child}/stat")
        deadline = time.monotonic() + 30
        while int(stat.read_text().rpartition(")")[2].split()[11]) < 5:  # it is busy
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parent.kill()
    deadline = time.monotonic() + 5
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < deadline, stat.read_text()
        time.sleep(0.01)


def test_a_child_may_take_so_much_cpu_and_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demangle, "SECONDS", 60.0)
    monkeypatch.setattr(demangle, "CPU_SECONDS", 1)
    demangler = Demangler(("/bin/sh", "-c", "while :; do :; done"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert demangler.name("_ZN1a1bEv") == "_ZN1a1bEv"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 0.5 < after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    demangler = Demangler()
    demangler.name("_ZN1a1bEv")
    assert demangler._child
    limits = [
        resource.prlimit(demangler._child.pid, one) for one in (resource.RLIMIT_AS, resource.RLIMIT_CPU)
    ]
    assert limits == [(demangle.MEMORY, demangle.MEMORY), (1, 1)]
    demangler.close()


def test_a_child_is_replaced_after_so_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demangle, "NAMES_OF_CHILD", 3)
    demangler = Demangler()
    pids = set()
    for at in range(7):
        assert demangler.name(f"_ZN1a2f{at}Ev") == f"a::f{at}"
        assert demangler._child
        pids.add(demangler._child.pid)
    assert len(pids) == 3
    demangler.close()
