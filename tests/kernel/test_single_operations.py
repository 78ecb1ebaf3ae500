"""lockd where the kernel has no batch operations on maps: it says so, and counts as exactly."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest
from conftest import Start
from lockd_process import CHECKOUT, ROOT, Lockd

ENOTSUPP = 524
WITHOUT = ("/usr/bin/python3", Path(__file__).with_name("without_batches.py"))
WORDS = "this kernel has no batch operations on maps (Linux 5.6 and later have them)"

pytestmark = pytest.mark.parametrize("error", [errno.EINVAL, ENOTSUPP])


def test_doctor_says_so_and_is_content(error: int) -> None:
    command = [*WITHOUT, str(error), *CHECKOUT, "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert WORDS in done.stdout


def test_counts_stay_exact(tmp_path: Path, workload: Start, error: int) -> None:
    daemon = Lockd(tmp_path, program=[*WITHOUT, str(error), *CHECKOUT])
    try:
        runs = [workload("mutex_handover", 200, 1000), workload("cond_pingpong", 5000)]
        for one in runs:
            one.go()
        truths = [one.truth()["futex"] for one in runs]
        metrics = daemon.metrics()
        for one in runs:
            one.finish()
    finally:
        code = daemon.stop()
    assert code == 0, "".join(daemon.log)
    assert sum(WORDS in line for line in daemon.log) == 1
    for one, truth in zip(runs, truths, strict=True):
        for kind, told in truth.items():
            labels = {"comm": one.comm, "kind": kind}
            assert metrics.sum("lockd_futex_waits_total", **labels) == told["waits"]
            assert metrics.sum("lockd_futex_blocked_seconds_count", **labels) == told["blocked"]
            blocked_us = metrics.sum("lockd_futex_blocked_seconds_sum", **labels) * 1e6
            assert 0 < blocked_us <= told["blocked_us"] + told["blocked"]
    assert metrics.sum("lockd_dropped_events_total", map="futex") == 0
