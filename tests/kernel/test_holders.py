"""Which code made threads wait for a user-space lock, against programs that know it (holders.h)."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import absence
from tests.support.checks import in_one_of_some_tries
from tests.support.lockd_process import Lockd
from tests.support.workload import NUMBERS, Workload

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
BUILD = PROGRAMS / "build"
POINTS = 0.03
"""How far a share may be from the truth."""
ELSEWHERE = 0.02
"""The share that holders may have in all which made nobody wait, above the truth."""
KNOWN_BY_NAME = ("rwlock", "shared", "parking")
"""Locks whose waits look like those of condition variables. They are not sampled until lockd knows better."""
SECONDS = 8
HOLDS = "lockd_futex_lock_holder_seconds_total"
REFUSED = "lockd_holder_refused_seconds_total"
TOOLS = {"c": ("gcc", "g++"), "musl": ("musl-gcc",), "rust": ("cargo", "rustc")}
LOCKS = [
    ("c", "holders_c", "normal", 3),
    ("c", "holders_c", "recursive", 3),
    ("c", "holders_c", "pi", 3),
    ("c", "holders_c", "rwlock", 3),
    ("c", "holders_cpp", "plain", 3),
    ("c", "holders_cpp", "shared", 3),
    ("musl", "holders_musl", "normal", 3),
    ("musl", "holders_musl", "recursive", 3),
    ("rust", "holders_rust", "std", 3),
    ("rust", "holders_rust", "parking", 1),  # each of its threads sleeps on a word of its own
]
"""Target of the Makefile, program, lock, and threads that wait at a time."""


def daemon(path: Path, mode: str, samples: int = 200, comms: str = "h[0-9]*") -> Lockd:
    config = {
        "filter": {"comms": [comms]},
        "programs": {"futex": {"mode": mode}},
        "profile": {"samples_per_second": samples},
        "budget": {"cpu": "none"},
        "series": {"top_locks": 1000},
    }
    return Lockd(path, config)


@pytest.fixture(scope="module", params=["blocked", "calls"])
def lockd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, host: None
) -> Iterator[Lockd]:
    one = daemon(tmp_path_factory.mktemp("lockd"), request.param)
    yield one
    assert one.stop() == 0, "".join(one.log)


def build(target: str) -> None:
    missing = [tool for tool in TOOLS[target] if absence(tool)]
    if missing:
        pytest.skip(f"host: {', '.join(missing)} is missing")
    subprocess.run(["make", "-s", "-C", PROGRAMS, target], check=True)


class Program(Workload):
    """A program of tests/programs."""

    def __init__(self, name: str, *arguments: object, comm: str) -> None:
        super().__init__(str(BUILD / name), *arguments, comm=comm)


def shares(lockd: Lockd, comm: str) -> tuple[dict[str, float], float]:
    """The share of each holder by the name of its function, and the sum in seconds."""
    metrics = lockd.metrics()
    seconds = {
        labels["holder"].rpartition("::")[2].rpartition(":")[2]: metrics.sum(HOLDS, **labels)
        for labels in metrics.labels(HOLDS, comm=comm)
    }
    total = sum(seconds.values())
    return {holder: waited / total for holder, waited in seconds.items()}, total


@pytest.mark.parametrize(("target", "program", "lock", "askers"), LOCKS, ids=str)
def test_the_code_that_made_threads_wait_is_found(
    lockd: Lockd, target: str, program: str, lock: str, askers: int
) -> None:
    """The program takes its times outside of the calls: it knows them as well as it gets its processors."""
    build(target)

    def attempt() -> list[str]:
        comm = f"h{next(NUMBERS)}.{os.getpid():x}.{lock[:4]}"
        one = Program(program, lock, askers, SECONDS, comm=comm)
        one.hurry()
        before = lockd.metrics().sum(REFUSED)
        truth = one.run()
        found, total = shares(lockd, comm)
        refused = lockd.metrics().sum(REFUSED) - before  # which may be anybody's
        one.kill()
        print(program, lock, truth, found, f"{total:.3f} s, {refused:.3f} s refused")
        of_holders = sum(truth["holders"].values())
        named = {name: found.get(f"{lock}_{name}", 0.0) for name in truth["holders"]}
        if not sum(named.values()):
            return [f"none of the holders in {found}"]
        off = [
            f"{name}: {named[name] / sum(named.values()):.3f}, not {waited_us / of_holders:.3f}"
            for name, waited_us in truth["holders"].items()
            if abs(named[name] / sum(named.values()) - waited_us / of_holders) > POINTS
        ]
        others, nobody = 1 - sum(named.values()), 1 - of_holders / truth["waited_us"]
        if others > nobody + ELSEWHERE:
            off.append(f"others: {others:.3f}, not {nobody:.3f}")
        if total > truth["waited_us"] / 1e6 * (1 + POINTS):
            off.append(f"{total} s, not {truth['waited_us']} us")
        if lock not in KNOWN_BY_NAME and total + refused < of_holders / 1e6 * (1 - POINTS):
            off.append(f"{total} s, not {of_holders} us")
        return off

    in_one_of_some_tries(attempt)


def test_timeouts_and_signals_blame_nobody(lockd: Lockd) -> None:
    comm = f"h{os.getpid()}.timeout"
    one = Workload("futex_errors", 200, 0, 100, 20_000, comm=comm)
    one.run()
    found, total = shares(lockd, comm)
    one.kill()
    assert found == {"(no release)": pytest.approx(1.0)}
    assert total >= 200 * 0.02 / 2


ENDS = 30


def test_a_holder_that_ended_is_told_from_one_that_released(lockd: Lockd) -> None:
    comm = f"h{os.getpid()}.ended"
    one = Workload("owner_ends", ENDS, 50_000, comm=comm)
    truth = one.run()
    found, total = shares(lockd, comm)
    one.kill()
    assert found["(owner ended)"] >= 1 - ELSEWHERE
    assert ENDS * 0.05 <= total <= truth["futex"]["lock"]["blocked_us"] / 1e6  # to the wake-up, and on


def test_the_holder_is_in_the_table_and_in_the_profiles(lockd: Lockd) -> None:
    build("c")
    comm = f"h{os.getpid()}.table"
    one = Program("holders_c", "normal", 1, 2, comm=comm)
    one.run()
    lockd.settle()
    (row,) = [row for row in lockd.waited_for(kind="lock") if row["comm"] == comm]
    page = lockd.get(f"/flamegraph?program=futex&by=holder&comm={comm}").decode()
    assert lockd.get(f"/debug/pprof/holders?comm={comm}")
    one.kill()
    first = row["holders"][0]
    assert first["site"] == "holders_c:normal_long"
    assert "holders_c:normal_long" in first["stack"]
    assert sum(holder["share"] for holder in row["holders"]) == pytest.approx(1.0)
    assert "holders_c:normal_long" in page
    assert "holders_c:normal" in page


FEW, FEW_SECONDS = 10, 40
STANDARD_DEVIATIONS = 4
"""An estimate without bias is farther off once in 16,000 times."""


def test_few_samples_are_right_on_average(host: None, tmp_path: Path) -> None:
    """Each release is sampled with the chance waited / T and then counts for T, or it counts for what was
    waited. The variance of what a holder gets is the sum of waited * (T - waited): at most T times the truth.
    """
    build("c")
    comm = f"h{os.getpid()}.few"
    lockd = daemon(tmp_path, "blocked", FEW)
    one = Program("holders_c", "normal", 3, FEW_SECONDS, comm=comm)
    one.go()
    longest, end = 0.0, time.monotonic() + FEW_SECONDS
    while time.monotonic() < end:
        longest = max(longest, lockd.metrics(settled=False).max("lockd_holder_seconds_per_sample"))
        time.sleep(0.5)  # it changes once a second, unless there are too many samples
    truth = one.truth()
    found, total = shares(lockd, comm)
    metrics = lockd.metrics()
    one.kill()
    for name, waited_us in truth["holders"].items():
        waited = waited_us / 1e6
        off = STANDARD_DEVIATIONS * math.sqrt(longest * waited)
        assert found.get(f"normal_{name}", 0.0) * total == pytest.approx(waited, abs=off), name
    assert metrics.sum("lockd_holder_samples_total") <= 1.5 * FEW * FEW_SECONDS
    assert lockd.stop() == 0, "".join(lockd.log)


def test_without_samples_nothing_of_it_is_there(host: None, tmp_path: Path) -> None:
    lockd = daemon(tmp_path, "blocked", 0)
    comm = f"h{os.getpid()}.none"
    one = Workload("mutex_handover", 20, 2000, comm=comm)
    one.run()
    metrics, rows = lockd.metrics(), lockd.api("locks")
    one.kill()
    assert [row for row in rows if row["comm"] == comm and row["blocked_count"] >= 20]
    assert not [name for name in metrics.samples if "holder" in name]
    assert not [row for row in rows if row["holders"]]
    assert lockd.stop() == 0, "".join(lockd.log)
