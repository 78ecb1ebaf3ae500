"""The kernel tier on real kernels, in emulated machines. kernels.py lists the kernels and what is left out.

A machine that stopped answering is an error of type VmLost, which says nothing about lockd. A machine whose
kernel died is an error of type KernelPanic. The output of the machines goes to tests/vm/build as it comes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tries import LOST, TRIES
from tests.vm import guests, inside, matrix
from tests.vm.emulator import need_emulator
from tests.vm.inside import Run
from tests.vm.kernels import COMPLAINTS, KERNELS, LONGEST_FIRST, SKIPS, WAITS_FOR_DISK, Skip

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"

pytestmark = pytest.mark.timeout(0)
"""No limit: a test waits for its machine, which has limits of its own. Those leave out the time in which the
machine gets no processor of this host, and in `make test-all` that may be hours."""


EACH = [
    pytest.param(
        kernel,
        id=kernel.series,
        marks=[pytest.mark.thorough(kernel.only_thorough)] * bool(kernel.only_thorough),
    )
    for kernel in KERNELS
]
"""Every kernel as a parameter, with the mark that leaves it out of `make test` if that is to be."""


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Run]]]:
    """Run the tier on every kernel that is asked for, as many at a time as there are processors: a machine
    takes one. Yield the runs by series."""
    need_emulator()
    gate = bool(request.config.getoption("gate"))
    kernels = [kernel for kernel in LONGEST_FIRST if not (gate and kernel.only_thorough)]
    guests.prepare(kernels)
    BUILD.mkdir(exist_ok=True)
    with guests.checkout() as disk, ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            kernel.series: pool.submit(inside.run, kernel, disk, BUILD / f"{kernel.series}.log", gate)
            for kernel in kernels
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(params=EACH)
def run(request: pytest.FixtureRequest, runs: dict[str, Future[Run]]) -> Run:
    return runs[request.param.series].result()


def test_every_test_passes(run: Run, record_property: pytest.RecordProperty) -> None:
    passed = sum(case.outcome == "passed" for case in run.cases)
    record_property("summary", f"{run.release}: {passed} of {len(run.cases)} passed in {run.seconds:.0f} s")
    for case in run.cases:
        for used in case.tries:
            record_property(TRIES, used)
    record_property(TRIES, 2 if run.lost else 1)
    if run.lost:
        record_property(LOST, str(run.lost))
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
        for series in runs.keys() & set(skip.series.split())
        for case in runs[series].result().cases
        if case.outcome == "skipped"
    )


def test_the_kernel_complains_of_nothing(run: Run) -> None:
    kernel_log = WAITS_FOR_DISK.sub("", run.kernel_log)
    complaints = [line for line in kernel_log.splitlines() if COMPLAINTS.search(line)]
    assert not complaints, run.kernel_log


def test_a_kernel_that_dies_is_no_lost_machine(run: Run) -> None:
    assert run.death.startswith("KernelPanic: the kernel died:")
    assert "sysrq triggered crash" in run.death


def test_doctor_says_why_not(run: Run) -> None:
    assert run.doctor_code == 0, run.doctor
    rows = matrix.hooks_of(run.doctor)
    assert {row.mechanism for row in rows if row.is_available} >= {"kprobe", "kretprobe", "fentry", "fexit"}
    for row in rows:
        assert row.is_available or len(row.reason.split()) >= 4, row


@pytest.mark.thorough("it is of all kernels")
def test_the_matrix_in_the_readme_is_true(runs: dict[str, Future[Run]]) -> None:
    """The results are those of which tests/vm/matrix.py made the matrix. That file says how."""
    seen = {kernel.series: matrix.of_run(runs[kernel.series].result()) for kernel in KERNELS}
    (BUILD / matrix.RESULTS.name).write_text(json.dumps(seen, indent=2) + "\n")
    assert matrix.without_releases(seen) == matrix.without_releases(matrix.results())
