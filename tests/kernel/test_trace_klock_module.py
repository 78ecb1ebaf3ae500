"""`lockd trace klock --mode all` against the kernel test module, which knows all about its locks."""

from __future__ import annotations

import csv
import os
import platform
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import beside_another_tool, in_one_of_some_tries
from tests.support.lock_module import MODULE, LockModule, Script, Truth, TypeTruth
from tests.support.lock_scripts import CROWDS, scripts
from tests.support.trace_process import one_shot, samples_of
from tests.tries import tries

MECHANISMS = ("fentry", "kprobe")
SHARE, EACH_NS = 0.05, 500_000
"""The tolerance of times: a share, or nanoseconds for each of the waits or holds, whichever is more."""
TRIES = 3
"""The number of tries of every script: an emulated machine may stand still between the module's reading of
the clock and lockd's."""
LONG = 3600
"""The duration that traces are given, in seconds. Each is stopped long before its end."""
NUMBERS = ("waits", "acquisitions", "holds", "wait_ns", "hold_ns")

pytestmark = pytest.mark.timeout(1500)


@dataclass
class Seen:
    """What a profile and records of one mechanism show of the scripts, and the truths of these."""

    samples: list[dict[str, Any]]
    records: list[list[str]]
    truths: dict[str, Truth]
    """The truths by the names of the scripts."""
    lost: dict[str, int]

    def of(self, name: str, kind: str) -> dict[str, int]:
        """Return the sums for one script and lock type: NUMBERS from the profile; `accesses` and
        `record_wait_ns` from the records.
        """
        comm = comm_of(name)
        mine = [one for one in self.samples if one["comm"] == comm and one["type"] == kind]
        lines = [line for line in self.records if line[1] == comm and line[3] == kind]
        sums = {name: sum(one[name] for one in mine) for name in NUMBERS}
        return {
            **sums,
            "accesses": sum(int(line[7]) for line in lines),
            "record_wait_ns": sum(int(line[6]) for line in lines),
        }


SCRIPTS = {**scripts(), **CROWDS}


class Rounds:
    """Runs of scripts while one mechanism makes a profile and records of them: first of all scripts, then of
    single ones again.
    """

    def __init__(self, module: LockModule, mechanism: str) -> None:
        self._module = module
        self._words = ("klock", "--mode", "all", "--mechanism", mechanism, "--format")
        self._of_all: Seen | None = None

    def seen(self, name: str, attempt: int = 0) -> Seen:
        """Return what was seen of a script. The first attempt is the run of all scripts; for each further
        one, the script runs anew.
        """
        if attempt:
            return self._watch({name: SCRIPTS[name]})
        if not self._of_all:
            self._of_all = self._watch(SCRIPTS)
        return self._of_all

    def _watch(self, scripts: Mapping[str, Script]) -> Seen:
        with one_shot(*self._words, "json", LONG) as profile, one_shot(*self._words, "csv", LONG) as records:
            truths = {name: self._module.run(script, comm_of(name)) for name, script in scripts.items()}
            lines = [line for line in csv.reader(records.stop().splitlines()) if line[0] == "s"]
            samples = samples_of(profile.stop())
            self._module.end_threads()
            return Seen(samples, lines, truths, {**profile.lost, **records.lost})


def comm_of(name: str) -> str:
    return f"kt{list(SCRIPTS).index(name)}"


@pytest.fixture(scope="module", params=MECHANISMS)
def rounds(request: pytest.FixtureRequest, module: LockModule) -> Rounds:
    return Rounds(module, request.param)


def off(told: TypeTruth, found: dict[str, int]) -> list[str]:
    """Return the differences from the module's truth, in words. Records count attempts, which may include
    those that gave up waiting.
    """
    gave_up = max(0, told.failed if told.waits else 0)
    words = []
    for name, truth in (("waits", told.waits), ("acquisitions", told.acquisitions), ("holds", told.holds)):
        if found[name] != truth:
            words.append(f"{name} {found[name]}, truth {truth}")
    if found["accesses"] not in (told.acquisitions, told.acquisitions + gave_up):
        words.append(f"accesses {found['accesses']}, truth {told.acquisitions}, gave up {gave_up}")
    for name, truth, count in (
        ("wait_ns", told.wait_ns, told.waits),
        ("record_wait_ns", told.wait_ns, told.waits),
        ("hold_ns", told.hold_ns, told.holds),
    ):
        if found[name] != pytest.approx(truth, rel=SHARE, abs=EACH_NS * count):
            words.append(f"{name} {found[name]}, truth {truth}")
    return words


@pytest.mark.parametrize("name", scripts())
def test_counts_are_exact_and_times_right(name: str, rounds: Rounds) -> None:
    found = []
    for attempt in tries(TRIES):
        seen = rounds.seen(name, attempt)
        truth = seen.truths[name].threads
        found.append(
            {kind: words for kind, told in truth.items() if (words := off(told, seen.of(name, kind)))}
        )
        if not found[-1]:
            return
    pytest.fail(f"off in each of {TRIES} tries: {found}\n{seen.lost}")


@pytest.mark.parametrize("name", CROWDS)
def test_of_a_crowd_every_acquisition_is_counted(name: str, rounds: Rounds) -> None:
    """A kretprobe follows only a few threads at a time; the others are lost, and counted as such.

    An interrupt may take a lock under the name of the thread that it interrupts. The interrupt of the console
    does so to a thread that prints.
    """
    found = []
    for attempt in tries(TRIES):
        seen = rounds.seen(name, attempt)
        missed = any("return missed" in what for what in seen.lost)
        told = {
            (kind, what): (seen.of(name, kind)[what], getattr(truth, what))
            for kind, truth in seen.truths[name].threads.items()
            for what in (("acquisitions",) if missed else ("waits", "acquisitions", "holds"))
        }
        found.append({key: pair for key, pair in told.items() if pair[0] != pair[1]})
        if not found[-1]:
            return
    pytest.fail(f"seen and truth, in each of {TRIES} tries: {found}\n{seen.lost}")


def test_a_return_missed_of_threads_that_are_not_traced_is_no_loss(module: LockModule) -> None:
    with subprocess.Popen(["sleep", str(LONG)]) as idle:
        try:
            words = ("--mode", "all", "--mechanism", "kprobe", "--format", "json", LONG)
            with one_shot("klock", *words) as of_all, one_shot("klock", "-p", idle.pid, *words) as of_idle:
                for name, script in CROWDS.items():
                    module.run(script, comm_of(name))
                of_idle.stop()
                of_all.stop()
                assert any("return missed" in what for what in of_all.lost)
                assert not any("return missed" in what for what in of_idle.lost)
        finally:
            idle.kill()


def is_blind_to_callers() -> bool:
    """Whether this kernel cannot walk a stack through the trampoline of a kretprobe: before 5.15."""
    return tuple(int(part) for part in platform.release().split(".")[:2]) < (5, 15)


WAITERS = [name.removeprefix("contended ") for name in scripts() if name.startswith("contended ")]


@pytest.mark.parametrize("function", WAITERS)
def test_the_caller_is_where_the_module_asks(function: str, rounds: Rounds) -> None:
    """The caller is right for waits and for holds.

    A function of the module that does nothing but call the kernel's function may jump to it instead. Then it
    is not on the stack, and the caller is a function of the module above it.
    """
    if is_blind_to_callers():
        pytest.skip("host: before 5.15 no stack leads through a kretprobe")
    name = f"contended {function}"
    seen, comm = rounds.seen(name), comm_of(name)
    callers = {one["stack"][-2] for one in seen.samples if one["comm"] == comm and one["waits"]}
    assert callers and callers <= {f"call_{function}", "take", "do_step"}
    holders = {one["stack"][-2] for one in seen.samples if one["comm"] == comm and one["holds"]}
    assert callers <= holders


CALLERS = ("call_mutex_lock", "take", "do_step")
"""The functions of the module that klockstat may take for the caller. It counts functions on the stack to
find the caller, and goes one too far here."""
KLOCKSTAT = MODULE.with_name("klockstat.py")
"""bcc's klockstat, which tests/vm puts there."""
ROW = re.compile(r"\s*b'(?P<caller>[\w.]+)\+0x[0-9a-f]+'\s+\d+\s+(?P<count>\d+)\s+\d+\s+(?P<total>\d+)")


class Klockstat:
    """A running klockstat of bcc."""

    def __init__(self) -> None:
        headers = Path(__file__).parents[2] / "lockd/bpf/headers"
        self._process = subprocess.Popen(
            ["/usr/bin/python3", "-u", KLOCKSTAT, "-i", "100000"], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env={**os.environ, "BCC_KERNEL_SOURCE": str(headers)},
        )  # fmt: skip
        assert self._process.stdout
        said = self._process.stdout.readline()
        assert said.startswith("Tracing"), said

    def stop(self) -> str:
        self._process.send_signal(signal.SIGINT)
        return self._process.communicate(timeout=300)[0]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@beside_another_tool
def test_side_by_side_with_klockstat(module: LockModule) -> None:
    """For mutexes, the only locks that klockstat follows, the counts are equal and the times agree within 2%.

    klockstat times a call until it returns, while lockd times the wait in it. For a free mutex, this
    difference is the whole time.

    klockstat loses a stack whose number another stack has ("Missed Kernel Stack"), and with it the caller.
    """
    if not KLOCKSTAT.exists():
        pytest.skip(f"host: {KLOCKSTAT} is not there; tests/vm puts it there")
    words = ("klock", "--mode", "all", "--mechanism", "fentry", "--format", "json", LONG)

    def attempt() -> list[str]:
        other = Klockstat()
        try:
            with one_shot(*words) as trace:
                for name in ("contended mutex_lock", "free mutex_lock", "contended mutex_lock"):
                    module.run(SCRIPTS[name], "ktside")
                theirs = other.stop()
                samples = [one for one in samples_of(trace.stop()) if one["comm"] == "ktside"]
        finally:
            other.kill()
        assert samples
        found = differences(theirs, samples)
        assert not found or "Missed Kernel Stack" in theirs, f"{found}\n{theirs}"
        return found

    in_one_of_some_tries(attempt)


def differences(theirs: str, samples: list[dict[str, Any]]) -> list[str]:
    """Return the differences between what klockstat printed and a trace, for the module's mutexes."""
    found = []
    waits, _, holds = theirs.partition("Avg Hold")
    for text, time_of, count_of in ((waits, "wait_ns", "accesses"), (holds, "hold_ns", "holds")):
        rows = [row for line in text.splitlines() if (row := ROW.match(line)) and row["caller"] in CALLERS]
        for column, ours, tolerance in (("count", count_of, 0), ("total", time_of, 0.02)):
            its, own = sum(int(row[column]) for row in rows), sum(one[ours] for one in samples)
            if its != pytest.approx(own, rel=tolerance):
                found.append(f"{ours}: {own}, by klockstat {its}")
    return found
