"""The stacks of `lockd trace futex`: names with commas, deep stacks, lost stacks, stacks of wakes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.futex_rows import read, total
from tests.support.trace_process import Trace
from tests.support.workload import Start

Compile = Callable[[str, str], Path]

DEPTHS = r"""
#include <linux/futex.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static uint32_t two = 2;
static long times_blocked(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw;
}
__attribute__((noinline)) int block(void)
{
    struct timespec t = {0, 100000};
    long before = times_blocked();
    while (times_blocked() == before)
        syscall(SYS_futex, &two, FUTEX_WAIT_PRIVATE, 2, &t, 0, 0);
    return 0;
}
__attribute__((noinline)) int wait_below(int depth)
{
    int below = depth ? wait_below(depth - 1) : block();
    __asm__ volatile(""); /* or the compiler makes a loop of it */
    return below + 1;
}
int main(void)
{
    char byte;
    write(1, "r", 1);
    read(0, &byte, 1);
    for (int depth = 0; depth < 100; depth++)
        wait_below(depth);
    write(1, "d", 1);
    read(0, &byte, 1);
}
"""
"""A program with 100 waits that block, each at a stack of another depth. On a busy processor, the timeout of
a wait may be over before it blocks; then the wait is repeated."""

TEMPLATES = r"""
#include <linux/futex.h>
#include <utility>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static unsigned two = 2;
template <typename Key, typename Value> struct Table {
    __attribute__((noinline)) long find(Key key, Value value)
    {
        struct timespec t = {0, 1000000};
        return syscall(SYS_futex, &two, FUTEX_WAIT_PRIVATE, 2, &t, 0, 0) + sizeof(key) + sizeof(value);
    }
};
int main()
{
    char byte;
    write(1, "r", 1);
    read(0, &byte, 1);
    long sum = 0;
    for (int i = 0; i < 20; i++)
        sum += Table<int, std::pair<char, long>>().find(1, {});
    write(1, "d", 1);
    read(0, &byte, 1);
    return sum == 0;
}
"""


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    """Compiles a program, optimised and without frame pointers, in the language of `suffix`."""

    def make(text: str, suffix: str) -> Path:
        source = tmp_path / f"program{suffix}"
        source.write_text(text)
        command = "g++" if suffix == ".cpp" else "gcc"
        subprocess.run([command, "-O2", "-w", "-o", source.with_suffix(""), source], check=True)
        return source.with_suffix("")

    return make


def run_traced(program: Path, *options: object) -> tuple[str, Trace]:
    """Run a program with the protocol of DEPTHS under a trace. Return what the trace wrote, and the trace."""
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.read(1) == b"r"
        trace = Trace("futex", "-p", process.pid, *options)
        process.stdin.write(b"g")
        process.stdin.flush()
        assert process.stdout.read(1) == b"d"
        text = trace.stop()
        process.stdin.close()
    return text, trace


def test_commas_in_names_of_templates(compiled: Compile) -> None:
    text, _ = run_traced(compiled(TEMPLATES, ".cpp"))
    (row,) = read(text)
    assert (row["wait_count"], row["blocked_count"], row["errors"]) == (20, 20, 20)
    frames = row["stack"].split(";")
    assert "Table<int, std::pair<char, long> >::find" in frames


@pytest.mark.thorough("six seconds for a rare case")
def test_rows_whose_stack_is_lost_keep_their_counts(compiled: Compile) -> None:
    program = compiled(DEPTHS, ".c")
    text, trace = run_traced(program, "--stack-storage-size", 4)
    rows = read(text)
    lost = [row for row in rows if row["stack"].endswith("[stack lost]")]
    assert trace.lost["stacks: full"] == total(lost, "blocked_count") > 0
    assert total(rows, "blocked_count") == 100
    text, trace = run_traced(program)
    assert trace.lost == {}
    rows = read(text)
    assert total(rows, "blocked_count") == 100
    depths = [row["stack"].count(";wait_below") for row in rows if row["blocked_count"]]
    assert sorted(depths) == sorted(min(depth + 1, 100) for depth in range(100))


def test_all_stacks_are_those_of_wakes_as_well(workload: Start) -> None:
    one = workload("mutex_handover", 20, 1000)
    trace = Trace("futex", "-p", one.pid, "--all-stacks")
    truth = one.run()
    rows = read(trace.stop())
    assert total(rows, "wake_count") == truth["wakes"]
    assert all("pthread_mutex_unlock" in row["stack"] for row in rows if row["wake_count"])
    assert all("pthread_mutex_lock" in row["stack"] for row in rows if row["wait_count"])
