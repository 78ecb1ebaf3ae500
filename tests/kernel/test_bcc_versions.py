"""lockd with the bcc of other releases of Debian, on the running kernel."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.debian import inside, root_of
from tests.needs import need
from tests.support.lockd_process import CHECKOUT, ROOT, Lockd
from tests.support.workload import Start

PYTHON = "/usr/bin/python3"
OLDEST_BCC = {"bookworm": (0, 26), "trixie": (0, 31), "sid": (0, 37)}
"""The version of bcc by release of Debian. sid has the newest one, which is not older than this."""

OWN = platform.freedesktop_os_release().get("VERSION_CODENAME")

pytestmark = [pytest.mark.untimed, pytest.mark.timeout(600)]  # a root directory may have to be made


OTHERS = pytest.mark.thorough("takes a root directory of that release, which the network and minutes go into")
SUITES = [pytest.param(suite, marks=[OTHERS] * (suite != OWN)) for suite in OLDEST_BCC]


@pytest.fixture(scope="module", params=SUITES)
def suite(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def command(suite: str) -> tuple[str | Path, ...]:
    """The words that run a command with the programs of the release; none if it is this host's release."""
    if os.geteuid():
        pytest.skip("host: making a root directory needs root")
    if suite == OWN:
        return ()
    need("mmdebstrap")
    return tuple(inside(root_of(suite)))


def said(command: Sequence[str | Path], *arguments: str) -> str:
    """Return what Python of the release prints. It must end with exit code 0."""
    whole = [*command, PYTHON, *arguments]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def table_of(command: tuple[str | Path, ...], what: str) -> str:
    """Return the table of hooks that `lockd check` or `lockd doctor` prints in the release."""
    return said(command, "-m", "lockd", what).partition("PROGRAM")[2]


def test_it_has_another_bcc(
    command: tuple[str | Path, ...], suite: str, record_property: pytest.RecordProperty
) -> None:
    """The release has the expected bcc. Otherwise the other tests would say nothing about it."""
    version = said(command, "-c", "import bcc; print(bcc.__version__)").strip()
    record_property("bcc", version)
    seen = tuple(int(part) for part in version.split(".")[:2])
    if suite == "sid":
        assert seen >= OLDEST_BCC[suite]
    else:
        assert seen == OLDEST_BCC[suite]


@pytest.mark.parametrize("what", ["check", "doctor"])
def test_the_host_offers_the_same(command: tuple[str | Path, ...], what: str) -> None:
    table, own_table = table_of(command, what), table_of((), what)
    assert "kernel_locks" in own_table
    assert table == own_table


def test_the_kernel_takes_the_programs_of_other_mechanisms_too(command: tuple[str | Path, ...]) -> None:
    loaded = json.loads(said(command, "-m", "tests.kernel.load_probes"))
    for mechanism in ("fentry", "kprobe"):
        functions = {name.split()[0] for name in loaded[mechanism]}
        assert {"futex_entered", "futex_left", "slow_path_left", "lock_released"} <= functions


def test_it_attaches_everything_and_counts_exactly(
    command: tuple[str | Path, ...], lockd: Lockd, workload: Start, tmp_path: Path
) -> None:
    daemon = Lockd(tmp_path, program=[*command, *CHECKOUT])
    try:
        one = workload("mutex_handover", 50, 2000)
        truth = one.run()["futex"]["lock"]
        metrics = daemon.metrics()
        one.finish()
    finally:
        code = daemon.stop()
    assert code == 0, "".join(daemon.log)
    hooks = metrics.samples["lockd_hook_attached"]
    assert hooks == lockd.metrics().samples["lockd_hook_attached"]
    assert {dict(labels)["program"] for labels in hooks} == {"offcpu", "kernel_locks"}

    labels = {"comm": one.comm, "kind": "lock"}
    assert metrics.sum("lockd_futex_blocked_seconds_count", **labels) == truth["blocked"] == 50
    # The workload times the whole call, which takes longer than the blocked time.
    blocked = metrics.sum("lockd_futex_blocked_seconds_sum", **labels)
    assert 50 * 0.002 <= blocked <= (truth["blocked_us"] + truth["blocked"]) / 1e6
    assert metrics.sum("lockd_dropped_events_total", map="futex") == 0
    assert metrics.sum("lockd_offcpu_blocked_seconds_count", comm=one.comm) >= truth["blocked"]
