"""Names of C++ and Rust functions, with c++filt and without it."""

from __future__ import annotations

import os
import time

import pytest

from lockd.names.demangle import Demangler, shortened

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


@pytest.mark.parametrize("command", [("sleep", "1000"), ("true",), ("cat", "/dev/zero")])
def test_a_child_that_answers_nothing_or_too_much(command: tuple[str, ...]) -> None:
    demangler = Demangler(command)
    start = time.monotonic()
    assert demangler.name("_ZN1a1bEv") == "_ZN1a1bEv"
    assert time.monotonic() - start < 10
    demangler.close()


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


def test_long_names() -> None:
    long = "std::map<" + "int, " * 50 + "int>::operator<<"
    assert shortened(long) == "std::map<...>::operator<<"
    assert shortened("f" * 200) == "f" * 117 + "..."
    assert shortened("a\nb") == "a?b"
    huge = "_ZN" + "1a" * 2000 + "E"
    assert len(Demangler().name(huge)) == 120
