"""Runs the tests of all tiers and prints a summary of their results at the end.

Usage: python3 -m tests.run [--all]

By default it leaves out the tests that are marked `thorough`, as `make test` does; with --all it is
`make test-all`. The output of a tier in the background is in tests/build/TIER.log, and is printed at the end.

The tests of tests/kernel that measure times run first, and alone. The tests that are marked `untimed` run
beside the unit tests afterwards.

The tiers in emulated machines (vm, system) only compute, and take as long as all other tiers together. They
run in the background, in a session of their own with a low weight and in the scheduling class SCHED_IDLE. So
they get the time in which the tests of the tier kernel wait, which is most of it, and the tests of the tier
kernel measure as if they were alone. Tests in a machine measure by its clock, which counts instructions.

The machines need a session of their own because Linux shares processors among sessions first
(sched_autogroup). A session with both normal threads and threads of SCHED_IDLE has hardly any weight on a
processor where only one of the latter runs. Beside such a session, Linux 6.18 let ready threads of other
sessions wait for 10 s and longer.
"""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.tries import LOST, TRIES, allowance
from tests.vm import guests
from tests.vm.emulator import why_no_emulator
from tests.vm.kernels import KERNELS

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(__file__).with_name("build")
GATE, STRICT = "--gate", "--no-skips-allowed"
"""Options of tests/conftest.py. `make test` installs all that tests need: only the host excuses a skip."""
LOW_WEIGHT = 'echo 19 2>/dev/null >/proc/self/autogroup || true; exec "$@"'
"""A script that gives its session the nice value 19 and runs a command. A kernel without
CONFIG_SCHED_AUTOGROUP has no such file, and does not share processors among sessions."""
# The tiers in the background end when this process ends.
IN_THE_BACKGROUND = (
    "setsid", "sh", "-c", LOW_WEIGHT, "sh", "chrt", "--idle", "0", "setpriv", "--pdeathsig", "TERM",
)  # fmt: skip


@dataclass(frozen=True)
class Tier:
    """The tests of a directory below tests/ that one pytest process runs, with these options."""

    name: str
    directory: str
    options: Sequence[str] = ()
    is_logged: bool = False
    """Whether its output goes to its log instead of the terminal."""
    is_in_machines: bool = False

    @property
    def report(self) -> Path:
        return BUILD / f"{self.name}.xml"

    @property
    def log(self) -> Path:
        return BUILD / f"{self.name}.log"

    def command(self, gate: bool) -> list[str]:
        before = IN_THE_BACKGROUND if self.is_in_machines else ()
        pytest = [sys.executable, "-m", "pytest", f"tests/{self.directory}"]
        words = [*before, *pytest, f"--junitxml={self.report}"]
        return [*words, "-o", "junit_family=xunit1", *self.options, STRICT, *([GATE] if gate else [])]


IN_MACHINES = (
    Tier("vm", "vm", is_logged=True, is_in_machines=True),
    Tier("system", "system", is_logged=True, is_in_machines=True),
)
KERNEL = Tier("kernel", "kernel", ("-m", "not untimed", "--durations=30"))
# In the tiers untimed and unit, several tests run at a time: their programs wait more than they compute. The
# tests of a module stay in one process (loadfile), since they share what the fixtures of the module start.
BY_MODULE = ("--dist", "loadfile", "--durations=10")
UNTIMED = Tier("untimed", "kernel", ("-m", "untimed", "-n", "2", *BY_MODULE), is_logged=True)
UNIT = Tier("unit", "unit", ("-n", "4", *BY_MODULE))
TIERS = (*IN_MACHINES, KERNEL, UNTIMED, UNIT)
"""All tiers, in the order in which they are started."""


@dataclass(frozen=True)
class Result:
    """The result of a tier. `code` is pytest's exit code."""

    name: str
    code: int
    minutes: float
    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    """The number of skipped tests, by reason."""
    tries: dict[str, list[int]] = field(default_factory=dict)
    """The numbers of tries used, by test, of the tests that may try again."""
    lost: dict[str, str] = field(default_factory=dict)
    """The file with the output of a lost machine, by the test that took another machine as a further try."""

    @property
    def failed(self) -> int:
        """The number of failed tests; at least 1 if pytest itself failed."""
        return max(self.outcomes["failed"], self.code != 0)


def result_of(name: str, code: int, minutes: float, report: Path) -> Result:
    """Return the result of a tier that has ended, from its report in JUnit's format."""
    result = Result(name, code, minutes)
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        test = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        result.outcomes[outcome_of(case)] += 1
        if (skipped := case.find("skipped")) is not None:
            result.skipped[(skipped.get("message") or "").partition("\n")[0]] += 1
        for one in case.iter("property"):
            if one.get("name") == TRIES:
                result.tries.setdefault(test, []).append(int(one.get("value", 0)))
            if one.get("name") == LOST:
                result.lost[test] = one.get("value", "")
    return result


def outcome_of(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def summary(results: Iterable[Result], minutes: float) -> str:
    """Return the text about all tiers: passed, failed and skipped tests, reasons, tries, and minutes."""
    results = list(results)
    lines = [f"{'tier':8} {'passed':>7} {'failed':>7} {'skipped':>8} {'minutes':>8}"]
    for one in results:
        counts = one.outcomes
        lines.append(
            f"{one.name:8} {counts['passed']:7} {one.failed:7} {counts['skipped']:8} {one.minutes:8.1f}"
        )
    skipped: Counter[str] = sum((one.skipped for one in results), Counter())
    lines += [f"skipped {count:4}: {reason}" for reason, count in skipped.most_common()]
    for one in results:
        further = {test: sum(used) - len(used) for test, used in one.tries.items()}
        lines += [f"further tries {count}: {one.name}: {test}" for test, count in further.items() if count]
        lines += [f"lost machine: {one.name}: {test}: see {log}" for test, log in one.lost.items()]
        if may := sum(map(len, one.tries.values())):
            words = f"{sum(further.values())}, of {may} tests; {allowance(may)} may be"
            lines.append(f"further tries in {one.name}: {words}")
    passed, failed = sum(one.outcomes["passed"] for one in results), sum(one.failed for one in results)
    lines.append(f"{minutes:.1f} minutes in all")
    lines.append(f"{passed} passed, {failed} failed, {skipped.total()} skipped")
    return "\n".join(lines)


def prepare(gate: bool) -> None:
    """Download and compile what the machines need. Later, that would disturb the tests of the kernel."""
    if reason := why_no_emulator():
        print(f"no machines: {reason}")
        return
    try:
        guests.prepare([kernel for kernel in KERNELS if not (gate and kernel.only_thorough)])
    except (Exception, pytest.skip.Exception) as error:  # whatever it is: the tests in machines say it again
        print(f"the machines' parts cannot be made: {type(error).__name__}: {error}")


def run(tier: Tier, gate: bool) -> Result:
    """Run a tier to its end. Its output goes to the terminal, or to its log if it has one."""
    tier.report.unlink(missing_ok=True)
    began = time.monotonic()
    with ExitStack() as stack:
        log = stack.enter_context(tier.log.open("wb")) if tier.is_logged else None
        code = subprocess.run(
            tier.command(gate), cwd=ROOT, check=False, stdout=log, stderr=log and subprocess.STDOUT
        ).returncode
    return result_of(tier.name, code, (time.monotonic() - began) / 60, tier.report)


def main() -> int:
    if sys.argv[1:] not in ([], ["--all"]):
        print(__doc__, file=sys.stderr)
        return 2
    gate = not sys.argv[1:]
    BUILD.mkdir(exist_ok=True)
    began = time.monotonic()
    prepare(gate)
    results = []
    with ThreadPoolExecutor(len(TIERS)) as pool:
        running: dict[Tier, Future[Result]] = {}
        for tier in TIERS:
            if tier.is_logged:
                running[tier] = pool.submit(run, tier, gate)
            else:
                print(f"== {tier.name}", flush=True)
                results.append(run(tier, gate))
        for tier, future in running.items():
            results.append(future.result())
            print(f"== {tier.name}\n{tier.log.read_text(errors='replace')}", flush=True)
    print(summary(results, (time.monotonic() - began) / 60), flush=True)
    return int(any(one.failed for one in results))


if __name__ == "__main__":
    sys.exit(main())
