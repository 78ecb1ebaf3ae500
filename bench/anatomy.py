"""Measure where the time goes that lockd adds to futex calls in mode `calls`, down to single helpers.

`sudo .venv/bin/python -m bench.anatomy [--quick]` writes bench/build/anatomy.json and .md. A load runs
untraced, with lockd's own programs at their hooks, with empty programs there, with all programs empty but
one, and with all calls of one helper replaced by a constant. The differences show what each part costs in its
place. Beside that, single steps of programs are measured by themselves (steps.py).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench import results
from bench.loads import Load, built, ours
from bench.steps import steps
from bench.variants import PROGRAMS, settings
from lockd.kernel.btf import KernelTypes
from lockd.load.bpf_object import BpfObject
from lockd.load.choose import choices_for
from lockd.load.compile import compile_cached
from lockd.load.compiled import CALL, CompileCache, default_directory
from lockd.load.hooks import Candidate
from lockd.load.host import Host
from lockd.load.programs import RETURN_0
from lockd.load.source import source_for

Change = Callable[[str, bytes], bytes]
"""Returns the code to load for a BPF function, given the function's name and its own code."""

ONE = bytes.fromhex("b700000001000000")
"""The instruction `r0 = 1`."""
HELPERS = {"clock reads": 5, "thread ids": 14}
"""Helpers with their numbers (enum bpf_func_id), which are the last four bytes of a call instruction. Helpers
that return a pointer are left out, because a constant cannot stand for a pointer."""
SELDOM = (
    "futex_restart",
    "futex_reentered",
    "on_sched_process_exec",
    "on_contention_begin",
    "on_contention_end",
)
"""The BPF functions that run in none of the loads."""
UNTRACED, EMPTY, ALL = "untraced", "empty programs", "lockd's programs"
RUNS = 51
HOW = """In mode `calls` of the program futex. What the programs do is divided in two ways: by program, each
alone among empty ones; and by what a constant in place of a helper saves. One program alone may have more or
less to do than beside the others."""


@dataclass(frozen=True)
class Account:
    """A load of ours, the programs of lockd that it runs, and the helpers that a constant may replace."""

    title: str
    load: str
    programs: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    """Names of HELPERS. There are none for a load whose threads block: with a constant, programs would take
    all threads for one, or for threads that never blocked."""


ACCOUNTS = (
    Account("A futex call that does not block", "futex wake", ("futex",), tuple(HELPERS)),
    Account("A round trip of two threads that wake each other by futexes", "futex ping-pong", PROGRAMS),
)


class Traced:
    """Programs of lockd that can be attached with some of their code left out."""

    def __init__(self, programs: tuple[str, ...]) -> None:
        self._host = Host(KernelTypes())
        asked = settings(programs, futex_mode="calls")
        choices = choices_for(asked, self._host)
        self._source = source_for(asked, choices, self._host)
        self._compiled = compile_cached(self._source, CompileCache(default_directory()))
        every = (hook for choice in choices for hook in choice.hooks)
        self._hooks: list[Candidate] = [hook for hook, missing in every if not missing]
        self.functions = sorted({hook.function for hook in self._hooks} - {*SELDOM})

    def helpers(self, function: str) -> dict[str, int]:
        """The number of calls of each of HELPERS in the code of a function, executed or not."""
        code = self._compiled.functions[function]
        called = [_helper(code[at : at + 8]) for at in range(0, len(code), 8)]
        return {name: called.count(number) for name, number in HELPERS.items()}

    @contextlib.contextmanager
    def attached(self, change: Change) -> Iterator[None]:
        code = {name: change(name, code) for name, code in self._compiled.functions.items()}
        bpf_object = BpfObject(replace(self._compiled, functions=code), self._source, self._host)
        try:
            for one in self._compiled.maps:
                for index in (0, 1) if one.inner else ():
                    bpf_object.set_map(one.name, index, f"{one.name}_{index}")
            for hook in self._hooks:
                bpf_object.attach(hook)
            yield
        finally:
            bpf_object.close()


def _helper(instruction: bytes) -> int:
    """The number of the helper that an instruction calls; 0 if it calls none."""
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


def measured(account: Account, traced: Traced, load: Load, rounds: int) -> dict[str, float]:
    """The median nanoseconds of a load, by what is attached. The order changes from round to round."""
    changes: list[tuple[str, Change | None]] = [(UNTRACED, None), (EMPTY, empty), (ALL, unchanged)]
    changes += [(f"only {function}", partial(only, function)) for function in traced.functions]
    changes += [(f"without {name}", partial(without, HELPERS[name])) for name in account.helpers]
    each: dict[str, list[float]] = {}
    for number in range(rounds):
        turn = number % len(changes)
        for name, change in (*changes[turn:], *changes[:turn]):
            with traced.attached(change) if change else contextlib.nullcontext():
                each.setdefault(name, []).append(load.run())
    return {name: statistics.median(times) for name, times in each.items()}


def table(account: Account, found: dict[str, float], counts: dict[str, dict[str, int]]) -> str:
    """The account as Markdown. `found` is from measured(); `counts` has the calls of helpers by function."""
    hooks, programs = found[EMPTY] - found[UNTRACED], found[ALL] - found[EMPTY]
    rows = [("untraced", found[UNTRACED]), ("+ hooks: empty programs", hooks), ("+ what they do", programs)]
    for function, of_helpers in counts.items():
        has = ", ".join(f"{count} {name}" for name, count in of_helpers.items() if count)
        words = f"by `{function}`" + (f" ({has} in its code)" if has else "")
        rows.append((words, found[f"only {function}"] - found[EMPTY]))
    worth = {name: found[ALL] - found[f"without {name}"] for name in account.helpers}
    rows += [*worth.items()]
    if worth:
        rows.append(("all but these", programs - sum(worth.values())))
    text = f"\n## {account.title}\n\n| part | ns |\n|---|---:|\n"
    text += "".join(f"| {name} | {time:.0f} |\n" for name, time in rows)
    return f"{text}\nAdded ÷ added by empty programs: {(hooks + programs) / hooks:.2f}.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    rounds = 5 if parser.parse_args().quick else 11
    alone, refused = steps(rounds)
    data: dict[str, object] = {"host": results.host(), "steps": alone}
    text = f"# Where the time goes\n\n{HOW}\n"
    with tempfile.TemporaryDirectory(prefix="lockd-bench-") as name:
        built(Path(name))
        loads = {load.name: load for load in ours(Path(name), RUNS)}
        for account in ACCOUNTS:
            traced = Traced(account.programs)
            found = measured(account, traced, loads[account.load], rounds)
            counts = {function: traced.helpers(function) for function in traced.functions}
            data[account.load] = {"ns": found, "helpers": counts}
            text += table(account, found, counts)
    text += "\n## Single steps of a program, without a hook\n\n| step | ns |\n|---|---:|\n"
    text += "".join(f"| {words} | {time:.1f} |\n" for words, time in alone.items())
    text += "".join(f"\nNot here: {words}: {reason}\n" for words, reason in refused.items())
    results.write("anatomy", data, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
