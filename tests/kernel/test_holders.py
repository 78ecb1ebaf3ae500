"""The code that made threads wait for a user-space lock, compared with what programs know (holders.h)."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.needs import absence
from tests.support.checks import in_one_of_some_tries, mode_calls_is_thorough, until_names_come
from tests.support.lockd_process import Lockd
from tests.support.pprof_decoder import Decoded
from tests.support.workload import NUMBERS, OURS, Workload

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
BUILD = PROGRAMS / "build"
POINTS = 0.03
"""How far a share may be from the truth."""
ELSEWHERE = 0.02
"""How far the share that lockd charges to others than the program's holders may be above the truth."""
GO_POINTS = 0.08
"""How far a share of Go's profile may be from lockd's: Go charges a wait to whoever ends it."""
MOSTLY = 0.8
"""The least share of the functions that keep the interpreter lock. Another thread has this lock for moments
only, unless it is preempted then."""
SECONDS = 8
HOLDS = "lockd_futex_lock_holder_seconds_total"
REFUSED = "lockd_holder_refused_seconds_total"
TOOLS = {
    "c": ("gcc", "g++"), "musl": ("musl-gcc",), "rust": ("cargo", "rustc"), "rust_v0": ("cargo", "rustc"),
    "cgo": ("go", "gcc"),
}  # fmt: skip
KINDS = [
    "normal",
    pytest.param("recursive", marks=pytest.mark.thorough("its outermost unlock is as that of a normal one")),
    "pi",
    "rwlock",
]
"""Locks of glibc: each is released in a way of its own."""
ANOTHER = pytest.mark.thorough("its locks are released as others of this list are")
OF_OTHERS = [
    pytest.param("c", "holders_cpp", "plain", 3, marks=ANOTHER),
    pytest.param("c", "holders_cpp", "shared", 3, marks=ANOTHER),
    pytest.param("musl", "holders_musl", "normal", 3, marks=ANOTHER),
    pytest.param("musl", "holders_musl", "recursive", 3, marks=ANOTHER),
    pytest.param("rust", "holders_rust", "std", 3, marks=ANOTHER),
    pytest.param("rust_v0", "holders_rust_v0", "std", 3, marks=ANOTHER),
    pytest.param("rust_v0", "holders_rust_v0", "parking", 1, marks=ANOTHER),
    pytest.param("cgo", "holders_go", "pthread", 3, marks=ANOTHER),
    ("rust", "holders_rust", "parking", 1),  # each of its threads sleeps on a word of its own
]
"""The target of the Makefile, the program, the lock, and how many threads wait at a time."""


def daemon(path: Path, samples: int) -> Lockd:
    return Lockd(path, {"filter": {"comms": [OURS]}, "profile": {"samples_per_second": samples}})


def name(what: str) -> str:
    """Return a `comm` for a program, of the form that `narrow` and `calls` count."""
    return f"h{next(NUMBERS)}.{os.getpid():x}.{what[:4]}"


def build(target: str, program: str) -> None:
    """Build the program, or skip the test where the tools are missing.

    A machine without the tools may have been given the program.
    """
    missing = [tool for tool in TOOLS[target] if absence(tool)]
    if missing and (BUILD / program).exists():
        return
    if missing:
        pytest.skip(f"host: {', '.join(missing)} is missing")
    subprocess.run(["make", "-s", "-C", PROGRAMS, target], check=True)


PYTHON = "/usr/bin/python3"


class Program(Workload):
    """A program of tests/programs."""

    def __init__(self, name: str, *arguments: object, comm: str) -> None:
        super().__init__(str(BUILD / name), *arguments, comm=comm)


Seconds = Counter[str]
"""Seconds by the name of a holder's function."""


def held(lockd: Lockd, comm: str) -> Seconds:
    """Return for how many seconds each holder of the process's locks has made threads wait.

    Releases whose lock has no name after five seconds count for the process `other`. In an emulated machine
    it can take that long to find the name.
    """
    metrics = lockd.metrics()
    seconds = Seconds()
    for labels in metrics.labels(HOLDS, comm=comm):  # one holder may hold several locks
        function = labels["holder"].rpartition("::")[2].rpartition(":")[2]
        seconds[function] += metrics.sum(HOLDS, **labels)
    return seconds


def run(lockd: Lockd, one: Program) -> tuple[dict[str, Any], Seconds]:
    """Run a program of holders.h. Returns what it knows, and what lockd says about the same time."""
    one.run()
    before = held(lockd, one.comm)
    truth = one.run()
    found = held(lockd, one.comm)
    found.subtract(before)
    return truth, found


@mode_calls_is_thorough
@pytest.mark.parametrize("lock", KINDS)
def test_the_code_that_made_threads_wait_is_found(either: Lockd, lock: str) -> None:
    build("c", "holders_c")
    assert_found(either, "holders_c", lock, 3)


@mode_calls_is_thorough
@pytest.mark.parametrize(("target", "program", "lock", "askers"), OF_OTHERS, ids=str)
def test_it_is_found_in_other_languages_and_libraries(
    either: Lockd, target: str, program: str, lock: str, askers: int
) -> None:
    build(target, program)
    assert_found(either, program, lock, askers)


@mode_calls_is_thorough
def test_a_process_cannot_wait_in_the_queue_of_anothers_lock(either: Lockd) -> None:
    """A process chooses the address of its lock, so that its threads seem to wait for the lock of another."""
    until_names_come(either, Workload("colliding_locks", 2, 10_000, comm=name("first")))
    before = held(either, "other").total()
    one = Workload("colliding_locks", 400, 10_000, comm=name("coll"))
    waited = one.run()["waited_us"] / 1e6
    nameless = held(either, "other").total() - before
    named = held(either, one.comm).total()
    one.kill()
    assert nameless <= named
    assert waited / 2 < named + nameless < 2 * waited


@pytest.mark.thorough("a comparison with another tool")
def test_the_mutex_profile_of_go_agrees(narrow: Lockd) -> None:
    """The same functions hold a mutex of C and a mutex of Go.

    lockd's shares for the first agree with those in Go's mutex profile of the second.
    """
    build("cgo", "holders_go")

    def attempt() -> list[str]:
        of_c = Program("holders_go", "pthread", 3, SECONDS, comm=name("c"))
        truth, found = run(narrow, of_c)
        of_c.kill()
        of_go = Program("holders_go", "sync", 3, SECONDS, comm=name("go"))
        of_go.run()
        truth_of_go = of_go.run()
        os.kill(of_go.pid, signal.SIGUSR1)
        profile = of_go.truth()
        of_go.kill()
        named = {name: found[f"pthread_{name}"] for name in truth["holders"]}
        print(truth, dict(found), truth_of_go, profile)
        ours, theirs = shares(named), shares({name: profile[name] for name in named})
        return [
            f"{name}: {ours[name]:.3f}, by Go {theirs[name]:.3f}"
            for name in ours
            if abs(ours[name] - theirs[name]) > GO_POINTS
        ]

    in_one_of_some_tries(attempt)


def shares(amounts: dict[str, float]) -> dict[str, float]:
    total = sum(amounts.values())
    return {name: amount / total for name, amount in amounts.items()}


OF_PYTHON = [
    "lock",
    pytest.param("rlock", marks=pytest.mark.thorough("it is a lock as threading.Lock is")),
]


@mode_calls_is_thorough
@pytest.mark.parametrize("lock", OF_PYTHON)
def test_functions_of_python_are_found(either: Lockd, lock: str) -> None:
    """Since Python 3.14 each waiting thread sleeps on a word of its own.

    The shares are then exact only if one thread waits at a time.
    """
    is_new = [PYTHON, "-c", "import sys; sys.exit(sys.version_info >= (3, 14))"]
    askers = 1 if subprocess.run(is_new, check=False).returncode else 3
    assert_found(either, PYTHON, lock, askers, PROGRAMS / "holders.py")


@mode_calls_is_thorough
@pytest.mark.parametrize(
    "askers", [1, pytest.param(3, marks=pytest.mark.thorough("a GIL that several threads want"))]
)
def test_the_function_of_python_that_keeps_the_interpreter_is_found(either: Lockd, askers: int) -> None:
    """The function computes, and other threads wait for the GIL in one wait of 5 ms after another.

    A thread that has given up the GIL waits until another one has got it. Nobody is to blame for that wait.
    """

    def attempt() -> list[str]:
        one = Program(PYTHON, PROGRAMS / "holders.py", "gil", askers, SECONDS, comm=name("gil"))
        truth, found = run(either, one)
        one.kill()
        print(truth, dict(found))
        named = {name: found[f"gil_{name}"] for name in truth["holders"]}
        blamed = sum(found.values()) - found["(no release)"]
        off = off_shares(truth, named)
        if sum(named.values()) < MOSTLY * blamed:
            off.append(f"others: {dict(found)}")
        if sum(named.values()) > truth["waited_us"] / 1e6 * (1 + POINTS):
            off.append(f"{sum(named.values())} s, not {truth['waited_us']} us")
        if found["(no release)"] > ELSEWHERE * 5 * blamed:  # it is nearly all without the rule for the GIL
            off.append(f"no release: {found['(no release)']} s")
        return off

    in_one_of_some_tries(attempt)


def off_shares(truth: dict[str, Any], named: dict[str, float]) -> list[str]:
    """Return words for each function whose share is not about what the program knows."""
    all_named, of_holders = sum(named.values()), sum(truth["holders"].values())
    if not all_named:
        return ["none of the holders"]
    return [
        f"{name}: {named[name] / all_named:.3f}, not {waited_us / of_holders:.3f}"
        for name, waited_us in truth["holders"].items()
        if abs(named[name] / all_named - waited_us / of_holders) > POINTS
    ]


def assert_found(lockd: Lockd, program: str, lock: str, askers: int, *arguments: object) -> None:
    """Run the program and check that lockd finds its three holders with the right shares.

    The program takes its times outside of the calls. They are exact only as far as it gets its processors.
    """

    def attempt() -> list[str]:
        one = Program(program, *arguments, lock, askers, SECONDS, comm=name(lock))
        one.hurry()
        before = lockd.metrics().sum(REFUSED)
        truth, found = run(lockd, one)
        total = sum(found.values())
        refused = lockd.metrics().sum(REFUSED) - before  # of all programs on the host
        one.kill()
        print(program, lock, truth, dict(found), f"{total:.3f} s, {refused:.3f} s refused")
        of_holders = sum(truth["holders"].values())
        named = {name: found[f"{lock}_{name}"] for name in truth["holders"]}
        all_named = sum(named.values())
        if not all_named:
            return [f"none of the holders in {found}"]
        off = off_shares(truth, named)
        others, nobody = 1 - all_named / total, 1 - of_holders / truth["waited_us"]
        if others > nobody + ELSEWHERE:
            off.append(f"others: {others:.3f}, not {nobody:.3f}")
        if total > truth["waited_us"] / 1e6 * (1 + POINTS):
            off.append(f"{total} s, not {truth['waited_us']} us")
        if total + refused < of_holders / 1e6 * (1 - POINTS):
            off.append(f"{total} s, not {of_holders} us")
        return off

    in_one_of_some_tries(attempt)


def test_timeouts_and_signals_blame_nobody(either: Lockd) -> None:
    until_names_come(either, Workload("futex_errors", 5, 0, 0, 20_000, comm=name("first")))
    before = held(either, "other").total()
    one = Workload("futex_errors", 200, 0, 100, 20_000, comm=name("time"))
    one.run()
    found, nameless = held(either, one.comm), held(either, "other").total() - before
    one.kill()
    assert list(found) == ["(no release)"]
    assert nameless <= found.total()
    assert found.total() + nameless >= 200 * 0.02 / 2


ENDS = 30


def test_a_holder_that_ended_is_told_from_one_that_released(either: Lockd) -> None:
    until_names_come(either, Workload("owner_ends", 2, 20_000, comm=name("first")))
    # Earlier tests may have raised this value. A wait that is shorter is sampled by chance only.
    either.until(lambda metrics: metrics.max("lockd_holder_seconds_per_sample") < 0.05 / 2, 60)
    before = held(either, "other").total()
    one = Workload("owner_ends", ENDS, 50_000, comm=name("ends"))
    truth = one.run()
    found = held(either, one.comm)
    nameless = held(either, "other").total() - before
    one.kill()
    print(truth, found, nameless)
    assert found["(owner ended)"] >= (1 - ELSEWHERE) * found.total() > 0
    assert nameless <= found.total() / 2
    assert ENDS * 0.05 <= found.total() + nameless <= truth["futex"]["lock"]["blocked_us"] / 1e6


def test_the_holder_is_in_the_table_and_in_the_profiles(narrow: Lockd) -> None:
    build("c", "holders_c")
    one = Program("holders_c", "normal", 1, 2, comm=name("table"))
    run(narrow, one)
    narrow.settle()
    (row,) = [row for row in narrow.waited_for(kind="lock") if row["comm"] == one.comm]
    page = narrow.get(f"/flamegraph?program=futex&by=holder&comm={one.comm}").decode()
    profile = Decoded(narrow.get(f"/debug/pprof/holders?comm={one.comm}"))
    one.kill()
    first = row["holders"][0]
    assert first["site"] == "holders_c:normal_long"
    assert "holders_c:normal_long" in first["stack"]
    assert sum(holder["share"] for holder in row["holders"]) == pytest.approx(1.0)
    assert "holders_c:normal_long" in page
    assert "holders_c:normal" in page
    assert profile.within("waited")["holders_c:normal_long"] > 0


FEW, FEW_SECONDS = 10, 40
STANDARD_DEVIATIONS = 4
"""How far an estimate may be off. Without bias, it is farther off once in 16,000 times."""


@pytest.mark.thorough("most of a minute of nothing else")
def test_few_samples_are_right_on_average(host: None, tmp_path: Path) -> None:
    """Each release is sampled with the probability waited / T and then counts for T, the time per sample.

    A release for which threads waited for T or longer is always sampled and counts for what they waited. The
    variance of what a holder is charged is the sum of waited * (T - waited): at most T times the truth.
    """
    build("c", "holders_c")
    with daemon(tmp_path, FEW) as lockd:
        one = Program("holders_c", "normal", 3, FEW_SECONDS, comm=name("few"))
        one.run()
        before = held(lockd, one.comm)
        one.go()
        longest, end = 0.0, time.monotonic() + FEW_SECONDS
        while time.monotonic() < end:
            longest = max(longest, lockd.metrics(settled=False).max("lockd_holder_seconds_per_sample"))
            time.sleep(0.5)  # the value changes once a second, unless there are too many samples
        truth = one.truth()
        found = held(lockd, one.comm)
        found.subtract(before)
        metrics = lockd.metrics()
        one.kill()
        for holder, waited_us in truth["holders"].items():
            waited = waited_us / 1e6
            off = STANDARD_DEVIATIONS * math.sqrt(longest * waited)
            assert found[f"normal_{holder}"] == pytest.approx(waited, abs=off), holder
        assert metrics.sum("lockd_holder_samples_total") <= 1.5 * FEW * FEW_SECONDS
        assert lockd.stop() == 0, "".join(lockd.log)


def test_without_samples_nothing_of_it_is_there(host: None, tmp_path: Path) -> None:
    with daemon(tmp_path, 0) as lockd:
        one = Workload("mutex_handover", 20, 2000, comm=name("none"))
        one.run()
        metrics, rows = lockd.metrics(), lockd.api("locks")
        one.kill()
        assert [row for row in rows if row["comm"] == one.comm and row["blocked_count"] >= 20]
        assert not [name for name in metrics.samples if "holder" in name]
        assert not [row for row in rows if row["holders"]]
        assert lockd.stop() == 0, "".join(lockd.log)
