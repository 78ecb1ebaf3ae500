"""Times of single steps of BPF programs, each by itself, in test runs in the kernel (BPF_PROG_TEST_RUN)."""

from __future__ import annotations

import ctypes
import os
import statistics
from pathlib import Path
from typing import Any

from lockd.kernel.calls import bpf, describe
from lockd.load.source import HEADERS

SOURCE = Path(__file__).with_name("steps.bpf.c")
TIMES = 64
"""The number of times that each program of steps.bpf.c does its step."""
STEPS = {
    "clock_read": "a clock read",
    "thread_id": "the thread's id",
    "current_task": "the current task",
    "array": "add to an array's element",
    "per_cpu_array": "add to a per-CPU array's element",
    "hash": "add to a hash entry",
    "wide_hash": "add to a hash entry, key of 32 bytes",
    "hash_overwrite": "overwrite a hash entry",
    "hash_insert_delete": "insert and delete a hash entry",
}
"""The functions of steps.bpf.c, and their steps in words."""
NOTHING = "nothing"
BPF_PROG_TEST_RUN, REPEAT = 10, 20_000


class TestRun(ctypes.Structure):
    """The part of union bpf_attr that BPF_PROG_TEST_RUN reads and writes."""

    _fields_ = (
        ("prog_fd", ctypes.c_uint32), ("retval", ctypes.c_uint32), ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32), ("data_in", ctypes.c_uint64), ("data_out", ctypes.c_uint64),
        ("repeat", ctypes.c_uint32), ("duration", ctypes.c_uint32),
    )  # fmt: skip


def steps(rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """The nanoseconds of each of STEPS, by its words, and the reasons why others of them cannot run here."""
    from bcc import BPF  # type: ignore[import-untyped,unused-ignore]

    os.environ["BCC_KERNEL_SOURCE"] = str(HEADERS)
    module: Any = BPF(text=SOURCE.read_text())
    for table, key in (
        (module["narrow"], module["narrow"].Key(7)),
        (module["wide"], module["wide"].Key(tid=7)),
    ):
        table[key] = table.Leaf(1)
    programs, refused = {}, {}
    for name in (NOTHING, *STEPS):
        try:
            programs[name] = module.load_func(name, BPF.SCHED_CLS).fd
        except Exception as error:
            refused[STEPS.get(name, "an empty program")] = str(error)
    each = [{name: _test_run(fd) for name, fd in programs.items()} for _ in range(rounds)]
    module.cleanup()
    medians = {name: statistics.median(one[name] for one in each) for name in programs}
    if NOTHING not in medians:  # the time of a step cannot be told from that of its program
        return {}, refused
    nothing = medians.pop(NOTHING)
    return {STEPS[name]: (run - nothing) / TIMES for name, run in medians.items()}, refused


def _test_run(program: int) -> int:
    """The nanoseconds of a run of a program, as the mean of REPEAT runs."""
    packet = ctypes.create_string_buffer(64)
    attr = TestRun(program, data_size_in=64, data_in=ctypes.addressof(packet), repeat=REPEAT)
    if bpf(BPF_PROG_TEST_RUN, attr) < 0:
        raise OSError(ctypes.get_errno(), f"BPF_PROG_TEST_RUN: {describe(ctypes.get_errno())}")
    return int(attr.duration)
