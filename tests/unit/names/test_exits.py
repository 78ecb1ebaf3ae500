"""The exits of functions, read from listings of objdump for x86-64 and arm64, and found in a real library."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lockd.names.objects import function_exits
from lockd.names.objects.function_exits import LONGEST_FUNCTION, FunctionExits, find_exits, parse_exits

X86 = """
0000000000001000 <wait>:
    1000:\tendbr64
    1004:\tpush   %rbp
    1005:\tje     2000 <wait.cold>
    100b:\tcall   3000 <other>
    1010:\tjne    1018 <wait+0x18>
    1012:\tpop    %rbp
    1013:\trepz ret
    1015:\tjmp    1012 <wait+0x12>
    1018:\tpop    %rbp
    1019:\tjmp    3000 <other>
"""
ARM = """
0000000000001000 <wait>:
    1000:\tpaciasp
    1004:\tcbz\tx0, 1010 <wait+0x10>
    1008:\tb.ne\t1010 <wait+0x10>
    100c:\tret
    1010:\tb\t4000 <other>
"""


def test_of_x86_64() -> None:
    assert parse_exits(X86, 0x1000, 0x1020) == FunctionExits((0x1013,), (0x3000,))


def test_of_arm64() -> None:
    assert parse_exits(ARM, 0x1000, 0x1014) == FunctionExits((0x100C,), (0x4000,))


@pytest.mark.parametrize("text", ["(bad)", "jmp    *%rax", "notrack jmp *%rdx", "br\tx16"])
def test_what_is_not_sure_is_not_told(text: str) -> None:
    assert parse_exits(f"{X86}    1020:\t{text}\n", 0x1000, 0x1030) is None


def test_nothing_is_not_sure() -> None:
    assert parse_exits("", 0x1000, 0x1030) is None
    assert find_exits(b"", 0x1000) is None


def test_a_function_that_is_too_long_is_not_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was disassembled"))
    assert find_exits(bytes(LONGEST_FUNCTION + 1), 0x1000) is None


def test_objdump_runs_without_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell runs in place of objdump, in the same way and with the same input, and shows what it may do."""
    shown = "cat /proc/self/status /proc/self/limits; od -An -tx1"
    monkeypatch.setattr(function_exits, "OBJDUMP", ("sh", "-c", shown))
    monkeypatch.setattr(function_exits, "parse_exits", lambda listing, *_: listing)
    text = str(find_exits(b"\xc3\x90", 0x1000))
    assert text.endswith(" c3 90\n")
    fields = dict(re.findall(r"^(\w+):\t(.*)$", text, re.MULTILINE))
    assert {fields[name] for name in ("CapPrm", "CapEff", "CapAmb")} <= {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert "0" not in fields["Uid"].split() + fields["Gid"].split()
    assert re.search(rf"^Max address space +{function_exits.MEMORY} ", text, re.MULTILINE)
    assert re.search(rf"^Max cpu time +{function_exits.CPU_SECONDS} ", text, re.MULTILINE)


def test_of_a_program(tmp_path: Path) -> None:
    """The one return of a function is found at an address inside of the function."""
    source = tmp_path / "it.s"
    source.write_text(
        ".globl one\n.type one, @function\none: nop\nret\n.globl two\n.type two, @function\ntwo: nop\n"
    )
    subprocess.run(["gcc", "-shared", "-nostdlib", source, "-o", tmp_path / "it.so"], check=True)
    listed = subprocess.run(["nm", tmp_path / "it.so"], check=True, capture_output=True, text=True).stdout
    places = {line.split()[2]: int(line.split()[0], 16) for line in listed.splitlines()}
    code = (tmp_path / "it.so").read_bytes()[places["one"] : places["two"]]  # its offsets are its addresses
    found = find_exits(code, places["one"])
    assert found and len(found.returns) == 1 and places["one"] < found.returns[0] < places["two"]
