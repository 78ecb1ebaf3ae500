"""Daemons and workloads for tests against the running kernel."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from lockd.kernel.calls import bpf
from lockd.load.host import ensure_tracefs
from tests.support.checks import beside_another_tool
from tests.support.lock_module import LockModule
from tests.support.lockd_process import CANNOT, IS_IN_MACHINE, ROOT, Lockd
from tests.support.workload import NUMBERS, OURS, Start, Workload

BPF_ENABLE_STATS = 32
CROWD = "mp[0-9]*"
"""Names of processes that a test starts by the thousand. They would leave no series to the other tests."""


def why_not_here() -> str:
    """Why this host cannot run these tests; empty if it can. Fails if `lockd doctor` fails."""
    done = subprocess.run(
        ["/usr/bin/python3", "-m", "lockd", "doctor"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode in (0, CANNOT), f"lockd doctor ended with code {done.returncode}:\n{said}"
    return said if done.returncode else ""


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have daemons keep compiled programs in a directory of this test run, not in the host's cache.

    A test machine has set CACHE_DIRECTORY already.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "CACHE_DIRECTORY" not in os.environ:
            patch.setenv("CACHE_DIRECTORY", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def host(compiled_once: None) -> None:
    """Build the workloads, or skip all tests of this folder on a host where lockd cannot run."""
    reason = why_not_here()
    if reason:
        pytest.skip(f"host: lockd doctor says:\n{reason}")
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)


@pytest.fixture(autouse=True)
def tracefs_for_others(request: pytest.FixtureRequest) -> None:
    """Mount tracefs for tests beside another tool: unlike lockd, other tools do not mount it themselves."""
    if beside_another_tool.mark in request.node.iter_markers():
        ensure_tracefs()


@pytest.fixture(scope="session")
def lockd(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """One daemon for all tests, which must end with exit code 0.

    Its configuration is the default one, except that it ignores CROWD and has room for the series of
    everything that the tests run.
    """
    config = {"filter": {"exclude_comms": [CROWD]}, "series": {"max": 200_000}}
    daemon = Lockd(tmp_path_factory.mktemp("lockd"), config)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


def lifetime(fixture_name: str, config: pytest.Config) -> Literal["session", "module"]:
    """Return the scope of a daemon: one module, as it would take processor time from other tests.

    In an emulated machine all tests share the daemon. There, a start takes a minute, and time is counted in
    instructions.
    """
    return "session" if IS_IN_MACHINE else "module"


@pytest.fixture(scope=lifetime)
def narrow(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon that counts only the workloads of these tests, has series for all their locks, and samples
    many holders."""
    yield from running(tmp_path_factory.mktemp("narrow"), "blocked")


@pytest.fixture(scope=lifetime)
def calls(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon like `narrow`, but in mode `calls`."""
    yield from running(tmp_path_factory.mktemp("calls"), "calls")


def running(path: Path, mode: str) -> Iterator[Lockd]:
    config = {
        "filter": {"comms": [OURS]},
        "series": {"top_locks": 1000, "max": 200_000},  # locks of hundreds of programs, one after another
        "programs": {"futex": {"mode": mode}},
        "profile": {"samples_per_second": 200},
    }
    daemon = Lockd(path, config)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.fixture(params=["blocked", "calls"])
def either(request: pytest.FixtureRequest) -> Lockd:
    """Each test runs with `narrow`, whose mode is `blocked`, and again with `calls`."""
    daemon: Lockd = request.getfixturevalue("narrow" if request.param == "blocked" else "calls")
    return daemon


@pytest.fixture(scope="session")
def module() -> Iterator[LockModule]:
    """The kernel test module, loaded once.

    Every daemon reads all symbols of the kernel anew when a module comes or goes.
    """
    module = LockModule()
    yield module
    module.unload()


@pytest.fixture
def workload() -> Iterator[Start]:
    """Return a function that starts a workload by its name and arguments.

    The default `comm` differs from those of all other processes on this host.
    """
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
def scratch() -> Iterator[Path]:
    """A directory on a disk, which /tmp need not be, for workloads that read and write files."""
    with tempfile.TemporaryDirectory(prefix="lockd-scratch-", dir="/var/tmp") as name:
        yield Path(name)


class EnableStats(ctypes.Structure):
    """The member `enable_stats` of union bpf_attr."""

    _fields_ = (("type", ctypes.c_uint32),)


@pytest.fixture
def kept_times() -> Iterator[None]:
    """Have the kernel measure how long BPF programs run while the test lasts."""
    fd = bpf(BPF_ENABLE_STATS, EnableStats(0))
    assert fd >= 0, os.strerror(ctypes.get_errno())
    yield
    os.close(fd)
