"""Daemons and workloads for tests against the running kernel."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lockd_process import ROOT, Lockd
from workload import Workload

Start = Callable[..., Workload]
NUMBERS = itertools.count()


def why_not_here() -> str:
    """Why this host cannot run these tests; empty if it can."""
    done = subprocess.run(
        ["/usr/bin/python3", "-m", "lockd", "doctor"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="session", autouse=True)
def host() -> None:
    """Skip the tier where no BPF can be had; build the workloads elsewhere."""
    reason = why_not_here()
    if reason:
        pytest.skip(f"host: lockd doctor says:\n{reason}")
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)


@pytest.fixture(scope="session")
def lockd(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """One daemon with the default configuration for all tests; it must end well."""
    daemon = Lockd(tmp_path_factory.mktemp("lockd"))
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.fixture
def workload() -> Iterator[Start]:
    """Start a workload by name and arguments; `comm` tells it from all others on this host."""
    started: list[Workload] = []

    def start(name: str, *arguments: object, comm: str = "") -> Workload:
        one = Workload(name, *arguments, comm=comm or f"{name[:5]}.{os.getpid():x}.{next(NUMBERS)}")
        started.append(one)
        return one

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A directory on a real disk for workloads that read and write files."""
    return tmp_path
