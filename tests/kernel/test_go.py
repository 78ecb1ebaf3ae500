"""The time that goroutines wait for mutexes agrees with what the program's own runtime/metrics says.

No system call shows these waits.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import need
from tests.support.lockd_process import ROOT, Lockd
from tests.support.workload import NUMBERS, Workload

SOURCE = ROOT / "tests/programs/go_mutex/main.go"
WAITED = "lockd_go_mutex_wait_seconds_total"
NOTICED_SECONDS = 60.0
"""The most seconds until lockd notices a change. It reads the runtime's total every ten seconds. The rest is
for a host that has much else to do."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program, built with the Go of LOCKD_TEST_GO if that is set.

    The runtime of Debian 12's Go does not count these waits yet.
    """
    go = os.environ.get("LOCKD_TEST_GO") or need("go")
    directory = tmp_path_factory.mktemp("go")
    environment = {"GO111MODULE": "off", "GOCACHE": str(directory / "cache"), "GOFLAGS": ""}
    subprocess.run(
        [go, "build", "-o", directory / "go_mutex", SOURCE], env=os.environ | environment, check=True
    )
    yield directory / "go_mutex"


@pytest.fixture
def running(program: Path) -> Iterator[Workload]:
    one = Workload(str(program), comm=f"go{next(NUMBERS)}.{os.getpid():x}")
    yield one
    one.finish()


def until_advised(lockd: Lockd, comm: str) -> None:
    """Wait until lockd has recognised the process as a program in Go."""
    lockd.until(lambda m: m.sum("lockd_advised_processes", comm=comm, advice="go") == 1, NOTICED_SECONDS)


def test_nothing_is_said_where_the_runtime_does_not_count(lockd: Lockd, running: Workload) -> None:
    """There is no series, as the time is not known: a series with the value 0 would be wrong."""
    if running.run()["waited"] is not None:
        pytest.skip("host: Go 1.20 or later, whose runtime counts what goroutines wait for mutexes")
    until_advised(lockd, running.comm)
    time.sleep(12)
    assert not lockd.metrics().labels(WAITED, comm=running.comm)


def test_mutexes_of_go(lockd: Lockd, running: Workload) -> None:
    before, comm = running.run()["waited"], running.comm
    if before is None:
        pytest.skip("host: Go 1.19 or earlier, whose runtime does not count what goroutines wait for mutexes")
    until_advised(lockd, comm)
    read = lockd.until(lambda m: bool(m.labels(WAITED, comm=comm)), NOTICED_SECONDS).sum(WAITED, comm=comm)
    new = running.run()["waited"] - before
    assert new > 1
    metrics = lockd.until(lambda m: m.sum(WAITED, comm=comm) - read > 0.9 * new, NOTICED_SECONDS)
    assert metrics.sum(WAITED, comm=comm) - read == pytest.approx(new, rel=0.001)
