"""The kernel tier on real kernels, in emulated machines: kernels.py has which, and what is left out.

A machine that stopped answering is an error of type VmLost, and says nothing about lockd; one whose kernel
died is of type KernelPanic. What is printed in the machines is in tests/vm/build, as it comes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.machine.kernel import unpacked
from tests.machine.qemu import KernelPanic
from tests.vm import guests, inside, matrix
from tests.vm.emulator import need_emulator
from tests.vm.inside import Run
from tests.vm.kernels import COMPLAINTS, KERNELS, SKIPS, Skip
from tests.vm.module_build import build_module

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
KLOCKSTAT = Path("/usr/sbin/klockstat-bpfcc")
"""Of bcc's tools, to be run in the machines; their Python has bcc."""

pytestmark = pytest.mark.timeout(3600)  # all machines


@pytest.fixture(scope="session")
def runs() -> Iterator[dict[str, Future[Run]]]:
    """The tier on every kernel, as many at a time as there are processors: a machine takes one."""
    need_emulator()
    modules = HERE / "module/build"
    modules.mkdir(exist_ok=True)
    for kernel in KERNELS:
        found = unpacked(kernel.series, kernel.suite)
        shutil.copy(build_module(found, kernel.suite), modules / f"{found.release}.ko")
    shutil.copy(KLOCKSTAT, modules / "klockstat.py")
    BUILD.mkdir(exist_ok=True)
    with guests.checkout() as disk, ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            kernel.series: pool.submit(inside.run, kernel, disk, BUILD / f"{kernel.series}.log")
            for kernel in KERNELS[2:] + KERNELS[:2]  # the newer ones take longest, and begin
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(params=[kernel.series for kernel in KERNELS])
def run(request: pytest.FixtureRequest, runs: dict[str, Future[Run]]) -> Run:
    return runs[request.param].result()


def test_every_test_passes(run: Run, record_property: pytest.RecordProperty) -> None:
    passed = sum(case.outcome == "passed" for case in run.cases)
    record_property("summary", f"{run.release}: {passed} of {len(run.cases)} passed in {run.seconds:.0f} s")
    failed = [f"{case.name}\n{case.words}" for case in run.cases if case.outcome in ("failed", "error")]
    assert not failed, "\n".join(failed)
    assert run.code == 0, run.printed[-5000:]
    assert passed > 0


def test_only_what_is_listed_is_skipped(run: Run) -> None:
    unlisted = [
        f"{case.name}: {case.words}"
        for case in run.cases
        if case.outcome == "skipped"
        and not any(skip.allows(run.series, case.name, case.words) for skip in SKIPS)
    ]
    assert not unlisted, "\n".join(unlisted)


@pytest.mark.parametrize("skip", SKIPS, ids=lambda skip: f"{skip.series}: {skip.test}")
def test_every_listed_skip_happens(skip: Skip, runs: dict[str, Future[Run]]) -> None:
    assert any(
        skip.allows(series, case.name, case.words)
        for series in skip.series.split()
        for case in runs[series].result().cases
        if case.outcome == "skipped"
    )


def test_the_kernel_complains_of_nothing(run: Run) -> None:
    complaints = [line for line in run.kernel_log.splitlines() if COMPLAINTS.search(line)]
    assert not complaints, run.kernel_log


def test_a_kernel_that_dies_is_no_lost_machine(runs: dict[str, Future[Run]]) -> None:
    for future in runs.values():
        future.result()
    with (
        guests.checkout() as disk,
        guests.booted(KERNELS[0], disk) as machine,
        pytest.raises(KernelPanic, match="sysrq triggered crash"),
    ):
        machine.run("sh", "-c", "echo c >/proc/sysrq-trigger")


def test_doctor_says_why_not(run: Run) -> None:
    assert run.doctor_code == 0, run.doctor
    rows = matrix.hooks_of(run.doctor)
    assert {row.mechanism for row in rows if row.is_available} >= {"kprobe", "kretprobe", "fentry", "fexit"}
    for row in rows:
        assert row.is_available or len(row.reason.split()) >= 4, row


def test_the_matrix_in_the_readme_is_true(runs: dict[str, Future[Run]]) -> None:
    """What `tests/vm/matrix.py` made it of; that says how to make it anew."""
    seen = {series: matrix.of_run(future.result()) for series, future in runs.items()}
    (BUILD / matrix.RESULTS.name).write_text(json.dumps(seen, indent=2) + "\n")
    assert matrix.without_releases(seen) == matrix.without_releases(matrix.results())
