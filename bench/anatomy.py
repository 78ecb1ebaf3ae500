"""Where the time goes that a futex call takes longer while lockd traces it, down to single helpers.

`sudo .venv/bin/python bench/anatomy.py [--quick]` writes bench/build/anatomy.json and .md. First the steps
that programs are made of, each by itself, by test runs in the kernel (BPF_PROG_TEST_RUN). Then the call, with
lockd's own programs at its hooks; again with all of them empty but one; and with all calls of one helper
replaced by a constant. The difference is what a part is worth in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import results
from loads import Load, built, ours
from variants import settings

from lockd.load import loader
from lockd.load.attach import RETURN_0
from lockd.load.bpf_syscall import bpf, describe
from lockd.load.btf import KernelTypes
from lockd.load.choose import choices_for
from lockd.load.hooks import Candidate
from lockd.load.host import Host, ensure_tracefs
from lockd.load.kept import Kept, default_directory
from lockd.load.module import Module
from lockd.load.source import HEADERS

Medians = dict[str, float]
Change = Callable[[str, bytes], bytes]
"""Makes other code of a function's name and code."""

SOURCE = Path(__file__).with_name("anatomy.bpf.c")
TIMES = 64
"""That each program there does its step."""
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
NOTHING = "nothing"
BPF_PROG_TEST_RUN, REPEAT = 10, 20_000
CALL, ONE = 0x85, bytes.fromhex("b700000001000000")
"""The operation, in the first byte of an instruction; its last four are the helper. And `r0 = 1`."""
HELPERS = {"clock reads": 5, "thread ids": 14}
"""Their numbers (enum bpf_func_id). A constant cannot stand for what gives a pointer."""
RUNS = 51
HOW = """A call that does not block (FUTEX_WAKE of nobody). What the programs do is divided twice: by program,
and by what a constant in place of a helper saves."""
UNTRACED, EMPTY, ALL = "untraced", "empty programs", "lockd's programs"


class TestRun(ctypes.Structure):
    """What BPF_PROG_TEST_RUN reads and writes of union bpf_attr."""

    _fields_ = (
        ("prog_fd", ctypes.c_uint32), ("retval", ctypes.c_uint32), ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32), ("data_in", ctypes.c_uint64), ("data_out", ctypes.c_uint64),
        ("repeat", ctypes.c_uint32), ("duration", ctypes.c_uint32),
    )  # fmt: skip


def steps(rounds: int) -> tuple[Medians, dict[str, str]]:
    """Nanoseconds of each of STEPS, by name; and why one has none here."""
    from bcc import BPF  # type: ignore[import-untyped,unused-ignore]

    os.environ["BCC_KERNEL_SOURCE"] = str(HEADERS)
    module: Any = BPF(text=SOURCE.read_text())
    for table in (module["narrow"], module["wide"]):
        key = table.Key(7) if table is module["narrow"] else table.Key(tid=7)
        table[key] = table.Leaf(1)
    programs, refused = {}, {}
    for name in (NOTHING, *STEPS):
        try:
            programs[name] = module.load_func(name, BPF.SCHED_CLS).fd
        except Exception as error:
            refused[name] = str(error)
    each = [{name: _test_run(fd) for name, fd in programs.items()} for _ in range(rounds)]
    module.cleanup()
    found = {name: statistics.median(one[name] for one in each) for name in programs}
    nothing = found.pop(NOTHING)
    return {name: (run - nothing) / TIMES for name, run in found.items()}, refused


def _test_run(program: int) -> int:
    """Nanoseconds of a run, the mean of REPEAT."""
    packet = ctypes.create_string_buffer(64)
    attr = TestRun(program, data_size_in=64, data_in=ctypes.addressof(packet), repeat=REPEAT)
    if bpf(BPF_PROG_TEST_RUN, attr) < 0:
        raise OSError(ctypes.get_errno(), f"BPF_PROG_TEST_RUN: {describe(ctypes.get_errno())}")
    return int(attr.duration)


class Call:
    """lockd's programs for futex calls, to be attached with some of their code left out."""

    def __init__(self) -> None:
        self._host = Host(KernelTypes(), ensure_tracefs())
        choices = choices_for(settings(("futex",)), self._host)
        self._source = loader.source_for(settings(("futex",)), choices, self._host)
        self._compiled = loader.compiled(self._source, Kept(default_directory()))
        (hooks,) = (choice.hooks for choice in choices if choice.part.what == "calls")
        self._hooks: list[Candidate] = [hook for hook, missing in hooks if not missing]
        self.functions = sorted({hook.function for hook in self._hooks if hook.required})
        """Those that a futex call runs."""

    def helpers(self, function: str) -> dict[str, int]:
        """How many calls of each of HELPERS are in its code, whether a call gets there or not."""
        code = self._compiled.functions[function]
        called = [_helper(code[at : at + 8]) for at in range(0, len(code), 8)]
        return {name: called.count(number) for name, number in HELPERS.items()}

    @contextlib.contextmanager
    def attached(self, change: Change) -> Iterator[None]:
        code = {name: change(name, code) for name, code in self._compiled.functions.items()}
        module = Module(replace(self._compiled, functions=code), self._source, self._host)
        try:
            for one in self._compiled.maps:
                for index in (0, 1) if one.inner else ():
                    module.put_map(one.name, index, f"{one.name}_{index}")
            for hook in self._hooks:
                module.attach(hook)
            yield
        finally:
            module.close()


def _helper(instruction: bytes) -> int:
    """Which helper it calls; 0 if none."""
    is_call = instruction[0] == CALL and not instruction[1]
    return int.from_bytes(instruction[4:], "little") if is_call else 0


def unchanged(_: str, code: bytes) -> bytes:
    return code


def empty(_: str, code: bytes) -> bytes:
    return RETURN_0


def only(function: str, name: str, code: bytes) -> bytes:
    return code if name == function else RETURN_0


def without(helper: int, _: str, code: bytes) -> bytes:
    words = (code[at : at + 8] for at in range(0, len(code), 8))
    return b"".join(ONE if _helper(word) == helper else word for word in words)


def variants(call: Call) -> dict[str, Change | None]:
    """By name; None: nothing attached."""
    found: dict[str, Change | None] = {UNTRACED: None, EMPTY: empty, ALL: unchanged}
    found |= {f"only {function}": partial(only, function) for function in call.functions}
    found |= {f"without {name}": partial(without, helper) for name, helper in HELPERS.items()}
    return found


def measured(call: Call, load: Load, rounds: int) -> Medians:
    """Nanoseconds of a futex call by variant; the order changes from round to round."""
    each: dict[str, list[float]] = {}
    every = list(variants(call).items())
    for number in range(rounds):
        turn = number % len(every)
        for name, change in (*every[turn:], *every[:turn]):
            with call.attached(change) if change else contextlib.nullcontext():
                each.setdefault(name, []).append(load.run())
    return {name: statistics.median(times) for name, times in each.items()}


def report(found: Medians, refused: dict[str, str], call: Medians, counts: dict[str, dict[str, int]]) -> str:
    """Markdown."""
    hooks, programs = call[EMPTY] - call[UNTRACED], call[ALL] - call[EMPTY]
    rows = [
        ("a call, untraced", call[UNTRACED]),
        ("+ hooks: empty programs", hooks),
        ("+ what lockd's programs do", programs),
    ]
    for function, of_helpers in counts.items():
        has = ", ".join(f"{count} {name}" for name, count in of_helpers.items() if count)
        rows.append((f"of it by `{function}` ({has or 'none of these helpers'} in its code)",
                     call[f"only {function}"] - call[EMPTY]))  # fmt: skip
    worth = {name: call[ALL] - call[f"without {name}"] for name in HELPERS}
    rows += [(f"of it {name}", time) for name, time in worth.items()]
    rows.append(("of it all else", programs - sum(worth.values())))
    lines = [f"# Where the time of a futex call goes\n\n{HOW}\n\n| part | ns |\n|---|---:|\n"]
    lines += [f"| {name} | {time:.0f} |\n" for name, time in rows]
    lines.append(f"\nAdded ÷ added by empty programs: {(hooks + programs) / hooks:.2f}.\n\n")
    lines.append("Single steps of a program, each by itself, without a hook:\n\n| step | ns |\n|---|---:|\n")
    lines += [f"| {STEPS[name]} | {time:.1f} |\n" for name, time in found.items()]
    lines += [f"\n{STEPS.get(name, name)}: not here: {reason}\n" for name, reason in refused.items()]
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    rounds = 5 if parser.parse_args().quick else 25
    found, refused = steps(rounds)
    call = Call()
    with tempfile.TemporaryDirectory(prefix="lockd-bench-") as name:
        built(Path(name))
        of_call = measured(call, ours(Path(name), RUNS)[0], rounds)
    counts = {function: call.helpers(function) for function in call.functions}
    data = {"host": results.host(), "steps": found, "call": of_call, "helpers": counts}
    results.write("anatomy", data, report(found, refused, of_call, counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
