"""Runs the kernel tier in a machine, and collects its report, the kernel's log and what doctor says."""

from __future__ import annotations

import re
import time
import warnings
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.machine.base import base
from tests.machine.qemu import KernelPanic, Machine, VmLost
from tests.tries import TRIES
from tests.vm import compiled, guests
from tests.vm.kernels import MODE_CALLS, Kernel, left_out

SECONDS = 7200.0
"""The time that the tier may take, by the host's clock. It is more than it takes on a slow host. With 2,400
seconds, machines on two kernels counted as lost at the last of their tests, and all were run again. A machine
that hangs is found by SILENCE."""
SILENCE = 400.0
"""The time that a test may take, by the host's clock: the machine's may leap (tests/machine/qemu.py)."""
REPORT = "/tmp/report.xml"
PYTHON = "/usr/bin/python3"
ENVIRONMENT = {
    "CI": "true",
    "PYTHONUNBUFFERED": "1",
    "CACHE_DIRECTORY": compiled.CACHE,
    "LOCKD_TEST_PERIOD": "200ms",
}


@dataclass(frozen=True)
class Case:
    """A test, as pytest's report has it."""

    name: str
    outcome: str
    """passed, failed, error or skipped"""
    words: str = ""
    """Why it was skipped or failed."""
    properties: dict[str, str] = field(default_factory=dict)
    tries: tuple[int, ...] = ()
    """The numbers of tries that the test used, if it may try again (tests/tries.py)."""


@dataclass(frozen=True)
class Run:
    """The results of the tier on one kernel."""

    series: str
    release: str
    cases: list[Case]
    code: int
    """pytest's exit code"""
    printed: str
    kernel_log: str
    doctor: str
    doctor_code: int
    death: str
    """The error of the machine when its kernel was made to die in the end."""
    seconds: float
    lost: Path | None = None
    """The output of a lost machine before this one; None if the first machine came to its end."""


def run(kernel: Kernel, disk: Path, log: Path, gate: bool) -> Run:
    """Boot `kernel` and run the tier in it; what it prints goes to `log` as it comes.

    With `gate`, the tests that are marked as thorough are left out.

    A lost machine is about the emulator and says nothing about lockd. After one, another machine is started,
    which counts as another try. Raises VmLost, KernelPanic.
    """
    try:
        return _run(kernel, disk, log, gate)
    except VmLost as lost:
        kept = log.with_suffix(".lost")
        log.replace(kept).open("a").write(f"\n{lost}\n")
        warnings.warn(
            f"{kernel.series}: lost a machine, see {kept}:\n{kept.read_text()[-2000:]}", stacklevel=1
        )
        return replace(_run(kernel, disk, log, gate), lost=kept)


def _run(kernel: Kernel, disk: Path, log: Path, gate: bool) -> Run:
    began = time.monotonic()
    options = [
        f"--{'deselect' if '::' in test else 'ignore'}=tests/kernel/{test}"
        for test in left_out(kernel.series, gate)
    ]
    if gate:
        options += ["--gate", *(f"--without={value}" for value in MODE_CALLS)]
    with log.open("w") as file, guests.booted(kernel, disk) as machine:

        def more(text: str) -> None:
            file.write(text)
            file.flush()

        release = machine.shell("uname -r")
        compiled.give(machine, base() / "root", "gate" if gate else "all")
        doctor = machine.run(PYTHON, "-m", "lockd", "doctor", seconds=300, cwd=guests.WORK)
        more(doctor.out)
        done = machine.run(
            PYTHON, "-m", "pytest", "tests/kernel", "-v", "--tb=short", "--durations=20",
            "-p", "no:cacheprovider", f"--junitxml={REPORT}", "-o", "junit_family=xunit1",
            "-o", "timeout=0", *options,
            seconds=SECONDS, cwd=guests.WORK, env=ENVIRONMENT, more=more, silence=SILENCE,
        )  # fmt: skip
        report = machine.run("cat", REPORT)
        kernel_log = machine.shell("dmesg")
        death = _killed(machine)
    return Run(
        kernel.series, release, cases_of(report.out) if report.code == 0 else [], done.code, done.out,
        kernel_log, doctor.out, doctor.code, death, time.monotonic() - began,
    )  # fmt: skip


def _killed(machine: Machine) -> str:
    """Make the kernel die, which ends the machine, and return the error that is raised then."""
    try:
        machine.run("sh", "-c", "echo c >/proc/sysrq-trigger")
    except (KernelPanic, VmLost) as error:
        return f"{type(error).__name__}: {error}"
    return "it goes on"


def cases_of(report: str) -> list[Case]:
    """Return the tests of a report in JUnit's format."""
    cases = []
    for case in ET.fromstring(report).iter("testcase"):
        outcome, words = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = {"failure": "failed"}.get(child.tag, child.tag)
                words = f"{child.get('message', '')}\n{child.text or ''}"
        name = re.sub(r".*\.", "", case.get("classname", "")) + "::" + case.get("name", "")
        properties = [(one.get("name", ""), one.get("value", "")) for one in case.iter("property")]
        used = tuple(int(value) for name, value in properties if name == TRIES)
        cases.append(Case(name, outcome, words, dict(properties), used))
    return cases
