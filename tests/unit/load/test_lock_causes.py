"""The absence of a holder that stands for all of its absences in one hold, with the code of the programs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lockd.load.source import BPF_DIR
from tests.needs import needs

HOLDS = 2000
THREADS = 500
FIRST_SECONDS, SECOND_SECONDS = 55, 9
PROGRAM = """
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
typedef uint64_t u64;
typedef uint32_t u32;
typedef uint16_t u16;
typedef int16_t s16;
typedef uint8_t u8;
#undef __always_inline
#define __always_inline inline
struct thread;

static u32 bpf_get_prandom_u32(void)
{
    static u64 state = 1;
    state = state * 6364136223846793005 + 1442695040888963407;
    return state >> 32;
}

%(definitions)s

static int noted;

static void note_absence(struct absence *absence, u32 tid, struct thread *t)
{
    noted++;
}

%(function)s

int main(void)
{
    u64 threads = %(threads)d, first = %(first)dULL, second = first + %(second)dULL;
    int kept = 0;

    for (int i = 0; i < %(holds)d; i++) {
        struct hold hold = {.waiting = threads};

        add_to_hold(&hold, HOLDER_BLOCKED, 0, threads * first, threads, first);
        noted = 0;
        add_to_hold(&hold, HOLDER_BLOCKED, 0, threads * second, threads, second);
        kept += noted;
    }
    printf("%%d\\n", kept);
}
"""


def definition(file: str, begin: str) -> str:
    """Return the definition that begins with these words in a file of the programs, to its closing brace."""
    found = re.search(rf"^{re.escape(begin)}.*?(?:\}};|^\}};?)$", (BPF_DIR / file).read_text(), re.M | re.S)
    assert found, begin
    return found[0]


@needs("gcc")
@pytest.mark.parametrize("unit_ns", [1000, 10**6, 10**9], ids=["us", "ms", "s"])
def test_an_absence_is_kept_in_proportion_to_its_time(tmp_path: Path, unit_ns: int) -> None:
    """In the last case the threads together wait for 27,500 s, and then for 4,500 s more."""
    file, inline = "daemon/lock_causes.bpf.c", "static __always_inline "
    definitions = [
        definition(file, f"{inline}u64 time_between("),
        *(definition(file, begin) for begin in ("enum holder_state {", "struct absence {")),
        *(definition(file, begin) for begin in ("struct hold_times {", "struct hold {")),
    ]
    text = PROGRAM % {
        "definitions": "\n".join(definitions), "function": definition(file, f"{inline}void add_to_hold("),
        "threads": THREADS, "holds": HOLDS,
        "first": FIRST_SECONDS * unit_ns, "second": SECOND_SECONDS * unit_ns,
    }  # fmt: skip
    (tmp_path / "holds.c").write_text(text)
    subprocess.run(["gcc", "-o", tmp_path / "holds", tmp_path / "holds.c"], check=True)
    printed = subprocess.run([tmp_path / "holds"], check=True, capture_output=True, text=True).stdout
    share = SECOND_SECONDS / (FIRST_SECONDS + SECOND_SECONDS)
    assert int(printed) / HOLDS == pytest.approx(share, abs=0.03)
