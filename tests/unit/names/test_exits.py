"""Where functions are left, as objdump lists them, of x86-64 and arm64; and of a library that is here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockd.names.objects.function_exits import FunctionExits, find_exits, parse_exits

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
    assert find_exits("/nonexistent", 0x1000, 0x1030) is None


def test_of_a_program(tmp_path: Path) -> None:
    """Each address is one that the assembler says a return is at."""
    source = tmp_path / "it.s"
    source.write_text(
        ".globl one\n.type one, @function\none: nop\nret\n.globl two\n.type two, @function\ntwo: nop\n"
    )
    subprocess.run(["gcc", "-shared", "-nostdlib", source, "-o", tmp_path / "it.so"], check=True)
    listed = subprocess.run(["nm", tmp_path / "it.so"], check=True, capture_output=True, text=True).stdout
    places = {line.split()[2]: int(line.split()[0], 16) for line in listed.splitlines()}
    found = find_exits(str(tmp_path / "it.so"), places["one"], places["two"])
    assert found and len(found.returns) == 1 and places["one"] < found.returns[0] < places["two"]
