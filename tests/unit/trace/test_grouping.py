"""The labels of --by, from rows as the programs write them."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lockd.load.source import assemble
from lockd.trace.core.grouping import columns_of, defines, linear
from tests.needs import needs

PROGRAM = """
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
typedef uint64_t u64;
typedef uint32_t u32;
#define __always_inline inline
%s
int main(void) {
%s
}
"""
EDGES = [-(2**63), -(2**31) - 1, -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


@needs("gcc")
@pytest.mark.parametrize(
    "bounds",
    [
        "0,10,1",
        "-10,110,20",
        "-20,-10,5",
        "-4000000000,4000000000,8000000",
        "-2147483648,0,0x80000000",
        "0,0xffffffff,0xffffffff",
        "0xffffffff81000000,0xffffffff82000000,0x100000",
        "-0x8000000000000000,0x7fffffffffffffff,0xffffffffffffffff",
        "0,0xffffffffffffffff,0xffffffffffffffff",
    ],
)
def test_programs_and_output_have_the_same_steps(bounds: str, tmp_path: Path) -> None:
    """Each value and each bound is taken as it is, whatever type C gives to the text of a number."""
    scale = linear(bounds)
    limits = (scale.first, scale.last)
    values = sorted({
        value for near in (*limits, *EDGES) for value in (near - 1, near, near + 1)
        if -(2**63) <= value < 2**64
    })  # fmt: skip
    source = assemble(["include/histogram.bpf.h"], defines(argparse.Namespace(by=(), linear=scale)))
    calls = [f"histogram_slot({value % 2**64:#x}ULL, {int(value < 0)})" for value in values]
    lines = "\n".join(f'  printf("%u\\n", {call});' for call in calls)
    (tmp_path / "slots.c").write_text(PROGRAM % (source.text, lines))
    subprocess.run(["gcc", "-o", tmp_path / "slots", tmp_path / "slots.c"], check=True)
    printed = subprocess.run([tmp_path / "slots"], check=True, capture_output=True, text=True).stdout
    assert dict(zip(values, map(int, printed.split()), strict=True)) == {
        value: scale.slot(value) for value in values
    }


@pytest.mark.parametrize(
    "bounds",
    ["0,0x10000000000000000,0x10000000000000000", "-0x8000000000000001,-1,0x8000000000000000",
     "-1,0x8000000000000000,0x8000000000000001"],
)  # fmt: skip
def test_bounds_that_no_field_can_reach_are_refused(bounds: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="rule: MIN and MAX are numbers of 64 bits"):
        linear(bounds)


def test_the_name_of_a_thread_ends_at_the_first_nul_and_controls_no_terminal() -> None:
    """Before Linux 5.17 (06c5088aeedd), the end of an older, longer name may stand behind the NUL."""
    stacks = [("user", "u4"), ("kernel", "u4")]
    rows = np.zeros(3, [("id", "u8"), ("comm", "S16"), ("stacks", stacks)])
    rows["comm"] = [b"ls\0h", b"ls", b"\x1b[2J"]
    rows["id"] = 7 << 32 | 8
    columns = columns_of(rows)
    assert columns["comm"] == ["ls", "ls", "?[2J"]
    assert (columns["pid"], columns["tid"]) == ([7] * 3, [8] * 3)
