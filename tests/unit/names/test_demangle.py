"""Names of C++ and Rust functions, demangled by binutils' library."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lockd.names.objects import demangle
from lockd.names.objects.demangle import Demangler, shorten_name
from tests.needs import needs
from tests.support.doubled_symbol import doubled

ROOT = Path(__file__).resolve().parents[3]

CPP = [
    ("_ZN4shop8Registry3addEi", "shop::Registry::add"),
    ("_ZN4shop8Registry3addEi.constprop.0", "shop::Registry::add"),
    ("_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector<int, std::allocator<int> >::push_back"),
    ("_ZN3FoocvbEv", "Foo::operator bool"),
    ("_ZN4shop8Registry3addEi.isra.0.cold", "shop::Registry::add"),
    ("take.llvm.1234567890123", "take"),
    ("main", "main"),
    ("main.cold", "main"),
    ("runtime.futex.abi0", "runtime.futex"),
    ("_Znonsense", "_Znonsense"),
    ("", ""),
]
RUST = [
    (
        "_ZN55_$LT$shop..part..Part$u20$as$u20$core..clone..Clone$GT$5clone17h0123456789abcdefE.llvm.42",
        "<shop::part::Part as core::clone::Clone>::clone",
    ),
    ("_ZN4core3ptr13drop_in_place17h0123456789abcdefE", "core::ptr::drop_in_place"),
    ("_RNvMsr_NtCs3ssYzQotkvD_3std4pathNtB5_7PathBuf3new", "<std::path::PathBuf>::new"),
    ("_RINvCs1234_7mycrate3fooSdE", "mycrate::foo::<[f64]>"),
    ("_RNvXCs1234_7mycrateSdNtB2_3Sum5total", "<[f64] as mycrate::Sum>::total"),
]


@pytest.mark.parametrize(("symbol", "name"), CPP + RUST)
def test_by_binutils(symbol: str, name: str) -> None:
    assert Demangler().name(symbol) == name


@pytest.mark.parametrize("name", ["com.acme.part.PartService.get", "com.acme.Room.part", "main.cold"])
def test_a_function_of_java_or_go_is_no_clone(name: str) -> None:
    demangler = Demangler()
    demangler.name(name)
    assert demangler.name(name, may_be_clone=False) == name
    assert demangler.name(f"{name}.abi0", may_be_clone=False) == name


def descriptors() -> set[int]:
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    return {number for number in listed if os.path.exists(f"/proc/self/fd/{number}")}  # not that of listdir()


def test_too_few_descriptors_lose_none() -> None:
    """Of the two pipes to the child process, only one can be made."""
    demangler, symbol = Demangler(), "_ZN4shop8Registry3addEi"
    used = descriptors()
    free = [number for number in range(max(used) + 4) if number not in used]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[2] + 1, limits[1]))
    try:
        assert demangler.name(symbol) == symbol
        assert descriptors() == used
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_binutils_symbols_stay_mangled(caplog: pytest.LogCaptureFixture) -> None:
    demangler = Demangler("/nonexistent/libbfd-*.so")
    assert "install the package binutils" in caplog.text
    for symbol in ("_ZN4shop8Registry3addEi", "_ZN4shop8Registry3addEi.constprop.0"):
        assert demangler.name(symbol) == "_ZN4shop8Registry3addEi"
    assert demangler._child is None


def test_as_cppfilt_has_them() -> None:
    """Every name in the C++ runtime library is demangled as by c++filt, which is made of the same library."""
    library = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    path = next(line.split(" => ")[1] for line in library.splitlines() if "libstdc++.so.6" in line)
    listed = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-1].split("@")[0] for line in listed.splitlines()]
    mangled = [symbol for symbol in symbols if symbol.startswith("_Z") and len(symbol) < demangle.MAX_MANGLED]
    assert len(mangled) > 1000
    told = subprocess.run(
        ["c++filt", "-p"], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    demangler = Demangler()
    assert [demangler.name(symbol) for symbol in mangled] == [shorten_name(name) for name in told]
    demangler.close()


def test_a_name_that_takes_forever_is_left_as_it_is() -> None:
    demangler = Demangler()
    start = time.monotonic()
    endless = doubled(60)
    assert demangler.name(endless) == shorten_name(endless)
    assert time.monotonic() - start < 10
    assert demangler.name("_ZN1a1bEv") == "a::b"
    demangler.close()


@needs("gcc")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a file away")
@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757])
@pytest.mark.parametrize("user", [0, 12345])
def test_only_what_root_alone_may_write_is_loaded(tmp_path: Path, user: int, mode: int) -> None:
    library = tmp_path / "libbfd-1-system.so"
    code = (
        'char *strdup(const char *); char *bfd_demangle(void *a, char *b, int c) { return strdup("loaded"); }'
    )
    command = ["gcc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=code, text=True, check=True)
    library.chmod(mode)
    os.chown(library, user, user)
    demangler = Demangler(str(tmp_path / "libbfd-*-system.so"))
    assert demangler.name("_ZN1a1bEv") == ("loaded" if (user, mode) == (0, 0o755) else "_ZN1a1bEv")
    demangler.close()


def test_a_child_that_was_killed_is_started_again() -> None:
    demangler = Demangler()
    assert demangler.name("_ZN1a1bEv") == "a::b"
    child = demangler._child
    assert child
    os.kill(child.pid, signal.SIGKILL)
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
    assert shorten_name(long) == "std::map<...>::operator<<"
    assert shorten_name("f" * 200) == "f" * 117 + "..."
    assert shorten_name("a\nb") == "a?b"
    huge = "_ZN" + "1a" * 2000 + "E"
    assert len(Demangler().name(huge)) == 120


LONG_ARGUMENTS = "<" + "alloc::vec::Vec<fn(u8) -> u8>, " * 5 + "u8>"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("<app::A{} as app::B{}>::f::{}", "<app::A<...> as app::B<...>>::f::<...>"),
        ("<lock_api::rwlock::RwLock{}>::write", "<lock_api::rwlock::RwLock<...>>::write"),
        ("<app::A{}>::f::{closure#0}", "<app::A<...>>::f::{closure#0}"),
        (
            "<<std::sync::once::Once>::call_once::{}::{closure#0} as core::ops::FnOnce{}>::call_once",
            "<<std::sync::once::Once>::call_once::<...>::{closure#0} as core::ops::FnOnce<...>>::call_once",
        ),
        ("<fn(u8) -> u8 as app::A{}>::f", "<fn(u8) -> u8 as app::A<...>>::f"),
        ("core::ptr::drop_in_place::{}", "core::ptr::drop_in_place::<...>"),
        ("app::A{}::f", "app::A<...>::f"),
    ],
)
def test_long_names_of_rust_keep_their_own_type(name: str, short: str) -> None:
    assert shorten_name(name.replace("{}", LONG_ARGUMENTS)) == short


@pytest.mark.parametrize("letter", ["f", "\\xff", "\U00020000"])
def test_what_is_remembered_of_long_symbols_has_a_bound(letter: str) -> None:
    """A symbol may have four times as many characters as bytes, or characters of four bytes."""
    demangler = Demangler("/nonexistent")
    for number in range(5000):
        assert len(demangler.name(f"{number}_{letter * 4090}")) == demangle.MAX_NAME
    taken = sum(sys.getsizeof(text) for pair in demangler._known.items() for text in pair)
    assert demangle.CACHED_BYTES / 2 < taken <= demangle.CACHED_BYTES
    assert demangler._known_bytes == taken
    assert "4999_" in next(reversed(demangler._known)), "the last ones are known"


ORPHAN = """
import sys
sys.path.insert(0, {root!r})
from lockd.names.objects import demangle
demangle.SECONDS = demangle.CPU_SECONDS = 60
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

    def has_ended() -> bool:
        try:
            return ") Z " in stat.read_text()
        except (FileNotFoundError, ProcessLookupError):  # the second if it ends while the file is read
            return True

    deadline = time.monotonic() + 20
    while not has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_may_take_so_much_cpu_and_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demangle, "SECONDS", 60.0)
    monkeypatch.setattr(demangle, "CPU_SECONDS", 1)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    demangler = Demangler()
    endless = doubled(60)
    assert demangler.name(endless) == shorten_name(endless)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 0.2 < after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    demangler.name("_ZN1a1bEv")
    assert demangler._child
    pid = demangler._child.pid
    assert resource.prlimit(pid, resource.RLIMIT_CPU) == (1, 1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    assert 0 < resource.prlimit(pid, resource.RLIMIT_AS)[0] < size + 2 * demangle.MEMORY
    demangler.close()


def test_a_child_has_nothing_open_and_may_do_nothing() -> None:
    demangler = Demangler()
    with open("/etc/hostname", "rb"):
        demangler.name("_ZN1a1bEv")
    assert demangler._child
    process = Path(f"/proc/{demangler._child.pid}")
    assert sorted(fd.name for fd in (process / "fd").iterdir()) == ["0", "1"]
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")
    assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0
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
